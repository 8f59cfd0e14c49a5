"""Objectives: what learns, what does not, and what packed documents must not do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.corpus import PackedRow, pack
from specjax.data.target_cache import collate
from specjax.drafters.borrowed import split_params
from specjax.drafters.dspark_init import init_dspark
from specjax.drafters.mtp_init import init_mtp
from specjax.training.features import TextAlone
from specjax.training.mtp_losses import MTPLossWeights
from specjax.training.objectives import DSparkObjective, JointObjective, MTPObjective
from specjax.training.trainer import Trainer, Training
from tests.toys import tiny_target

LENGTH = 16


pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.cache
def joint(kind, compute_dtype="float32", **options):
    """A joint objective with what it trains, and what is fixed."""
    target, key = tiny_target(), jax.random.key(1)
    if kind == "none":
        objective, params = None, {}
    elif kind == "mtp":
        weights = MTPLossWeights(**{"scale": 0.3, **options})
        model, params = init_mtp(target, key, depth=2)
        objective = MTPObjective(model, weights, compute_dtype)
    else:
        model, params = init_dspark(
            target, key, num_layers=1, taps=(-1, 0), mask_token_id=60, markov_rank=4, block_size=3
        )
        objective = DSparkObjective(model, num_anchors=4, compute_dtype=compute_dtype)
    own, _ = split_params(params)
    trained = {"target": target.params, "drafter": own}
    return JointObjective(target.model, objective, compute_dtype), trained


def batch(rows):
    return TextAlone(rows).complete(collate(rows, LENGTH))


@functools.partial(jax.jit, static_argnames="objective")
def losses_of(objective, trained, batch, progress=0.0):
    return objective.losses(trained, {}, batch, jax.random.key(5), jnp.float32(progress))


@functools.partial(jax.jit, static_argnames=("objective", "name"))
def gradient(objective, trained, batch, name):
    def loss(trained):
        return objective.losses(trained, {}, batch, jax.random.key(5), jnp.float32(0))[name].sum()

    return jax.grad(loss)(trained)


def documents(rng, count=6):
    return [rng.integers(1, 60, size=size).tolist() for size in rng.integers(5, 12, size=count)]


@pytest.fixture
def rows(rng):
    return list(pack(documents(rng), 0, LENGTH))


def test_without_weight_the_modules_leave_the_targets_loss_alone(rows):
    plain, trained = joint("none")
    expected = losses_of(plain, trained, batch(rows))
    for scale in (0.0, 0.3):
        objective, trained = joint("mtp", scale=scale)
        got = losses_of(objective, trained, batch(rows))
        np.testing.assert_allclose(got["main"], expected["main"], rtol=1e-6)
        assert got["weight"] == expected["weight"]
        difference = got["total"] - got["main"]
        np.testing.assert_allclose(difference, scale * got["cross_entropy_K"].mean(), rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "loss"), [("mtp", "cross_entropy_K"), ("dspark", "cross_entropy")]
)
def test_modules_shape_the_target_and_a_dspark_drafter_does_not(rows, kind, loss):
    """By the gradient of a loss of the drafter's own."""
    objective, trained = joint(kind)
    grads = gradient(objective, trained, batch(rows), loss)
    largest = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), grads)
    last = largest["drafter"]["module_1" if kind == "mtp" else "layer_0"]
    assert all(value > 0 for value in jax.tree.leaves(last))
    target = {name: largest["target"][name] for name in ("layer_0", "embed", "lm_head")}
    for value in jax.tree.leaves(target):
        assert value > 1e-5 if kind == "mtp" else value == 0


def test_another_document_of_the_row_changes_nothing(rng):
    """Through the whole pass: target and modules."""
    first, second = (rng.integers(1, 60, size=size).tolist() for size in (8, 6))
    objective, trained = joint("mtp")
    alike = []
    for other in (second, [token % 59 + 1 for token in second]):
        (row,) = pack([first, other], 0, LENGTH)
        assert row.segments_T.tolist() == [1] * 9 + [2] * 7
        row = row._replace(loss_mask_T=row.segments_T == 1)
        alike.append(losses_of(objective, trained, batch([row])))
    jax.tree.map(np.testing.assert_array_equal, *alike)
    # And they are those of the document in a row of its own.
    (row,) = pack([first], 0, LENGTH)
    own = losses_of(objective, trained, batch([row]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), alike[0], own)


def counting_rows(rng, count):
    """Documents that count up by one, modulo 60."""
    rows = []
    for start in rng.integers(60, size=count):
        tokens = ((start + np.arange(LENGTH)) % 60).astype(np.int32)
        ones = np.ones(LENGTH, np.int32)
        rows.append(PackedRow(tokens, ones > 0, ones, np.arange(LENGTH, dtype=np.int32)))
    return rows


@pytest.mark.slow
def test_depths_learn_what_is_so_many_steps_ahead(rng, tmp_path):
    """On a counting language; an index slip would leave the acceptance at about none."""
    objective, trained = joint("mtp", scale=1.0)
    settings = Training(steps=150, batch_size=8, max_len=LENGTH, learning_rate=3e-3, held_out=16)
    run = Trainer(objective, trained, {}, TextAlone(counting_rows(rng, 200)), settings)
    held_out = run.run(tmp_path, eval_every=1000, save_every=1000)
    assert held_out["main"] < 0.1
    assert min(held_out["acceptance_K"]) > 0.9
    assert held_out["expected_length"] > 2.6  # the last positions of a row have fewer depths


@pytest.mark.slow
def test_a_dspark_drafter_leaves_the_target_as_it_would_be_alone(rows, tmp_path):
    """Clipping too: each part's gradients are clipped by their own norm."""
    settings = Training(steps=4, batch_size=2, max_len=LENGTH, held_out=1, max_grad_norm=0.1)
    targets = {}
    for kind in ("dspark", "none", "mtp"):
        objective, trained = joint(kind)
        run = Trainer(objective, trained, {}, TextAlone(rows), settings)
        run.run(tmp_path / kind)
        targets[kind] = run.state.params["target"]
    close = {"rtol": 1e-3, "atol": 1e-5}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close),
                 targets["dspark"], targets["none"])  # fmt: skip
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), targets["mtp"], targets["none"])
    assert min(jax.tree.leaves(moved["layer_0"])) > 1e-4


@pytest.mark.slow
def test_a_target_in_training_resumes_bitwise(rows, tmp_path):
    settings = Training(steps=6, batch_size=2, max_len=LENGTH, held_out=1)

    def run(folder, until):
        objective, trained = joint("mtp", late_scale=0.1, late=0.5)
        trainer = Trainer(objective, trained, {}, TextAlone(rows), settings)
        trainer.run(tmp_path / folder, eval_every=2, save_every=100, until=until)
        return trainer.state

    whole = run("whole", 6)
    run("halves", 3)
    jax.tree.map(np.testing.assert_array_equal, run("halves", 6), whole)


@pytest.mark.slow
def test_products_may_be_rounded(rows):
    """In bfloat16 about the same loss, and float32 gradients."""
    exact = losses_of(*joint("mtp"), batch(rows))
    objective, trained = joint("mtp", compute_dtype="bfloat16")
    rounded = losses_of(objective, trained, batch(rows))
    np.testing.assert_allclose(rounded["total"], exact["total"], rtol=0.02)
    assert rounded["total"] != exact["total"]
    grads = gradient(objective, trained, batch(rows), "total")
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
