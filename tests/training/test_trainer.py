"""Training runs: they learn, they resume bitwise, they refuse what does not fit."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.data.self_generated import Writing, write_answers
from specjax.data.target_cache import CacheWriter, TargetCache
from specjax.drafters import Drafter, init_dspark
from specjax.models.transformer import Head
from specjax.training.features import CachedStates
from specjax.training.trainer import Trainer, Training
from tests.toys import tiny_target

SETTINGS = Training(
    steps=10, batch_size=4, accumulation=2, num_anchors=8, max_len=32, held_out=3,
    learning_rate=3e-3, warmup_ratio=0.2,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes floats with its integer step
        yield


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def cache(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "cache"
    writing = Writing(batch_size=12, answer_tokens=28, temperatures=(0.0,))
    prompts = [[i + 1, 2 * i + 1] for i in range(12)]
    writer = CacheWriter(folder, taps=(-1, 0), width=32, made_with={"target": "tiny"})
    writer.add(write_answers(target, prompts, (-1, 0), writing, 0), 1)
    writer.finish(1)
    return TargetCache(folder)


@functools.cache
def drafter(**options):
    return init_dspark(
        tiny_target(), jax.random.key(0), num_layers=1, taps=(-1, 0), mask_token_id=60,
        markov_rank=4, block_size=4, **options,
    )  # fmt: skip


def trainer(target, cache, settings=SETTINGS, **options):
    model, params = drafter(**options)
    head = Head(target.params["lm_head"]["weight"])
    return Trainer(model, params, head, CachedStates(cache, head, model.taps), settings)


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_ten_steps_equal_five_resumed_and_five_bitwise(target, cache, tmp_path):
    whole = trainer(target, cache)
    whole.run(tmp_path / "whole", eval_every=100, save_every=100)
    half = trainer(target, cache)
    half.run(tmp_path / "halves", until=5, eval_every=2, save_every=3)
    assert int(half.state.step) == 5
    again = trainer(target, cache)
    again.run(tmp_path / "halves", eval_every=3, save_every=100)
    assert int(again.state.step) == 10
    same(again.state, whole.state)


@pytest.mark.slow
def test_interrupted_runs_go_on_where_they_were(target, cache, tmp_path):
    def interrupt(step, log):
        if step == 4:
            raise KeyboardInterrupt

    first = trainer(target, cache)
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path, on_step=interrupt)
    steps = []
    again = trainer(target, cache)
    again.run(tmp_path, on_step=lambda step, log: steps.append(step))
    assert steps == [5, 6, 7, 8, 9, 10]
    whole = trainer(target, cache)
    whole.run(tmp_path / "whole")
    same(again.state, whole.state)


@pytest.mark.slow
def test_training_is_logged_and_improves_held_out_acceptance(target, cache, tmp_path):
    settings = Training(
        steps=120, batch_size=4, num_anchors=16, max_len=32, held_out=3, learning_rate=3e-3
    )
    run = trainer(target, cache, settings)
    before = run.evaluate()
    losses = run.run(tmp_path, eval_every=40, save_every=60)
    assert losses["total"] < float(before.total)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["set"] == "held_out"] == [40, 80, 120]
    train = [line for line in lines if line["set"] == "train"]
    assert [line["step"] for line in train] == list(range(10, 121, 10))
    assert train[-1]["expected_length"] > train[0]["expected_length"] + 0.2
    assert train[-1]["tokens_per_second"] > 0
    assert len(train[-1]["acceptance_G"]) == 4
    assert list((tmp_path / "tensorboard").iterdir())
    steps = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert "120" in steps
    assert len(steps) <= 2
    result = specjax.generate(
        target, Drafter(run._model, run.params, "trained"), [[1, 1]], max_new_tokens=20, draft_len=4
    )
    assert result.tokens == specjax.generate(target, None, [[1, 1]], max_new_tokens=20).tokens


@pytest.mark.slow
def test_frozen_parameters_stay(target, cache, tmp_path):
    run = trainer(target, cache, draft_vocab=range(0, 61, 2))
    before = jax.tree.map(jnp.copy, run.params)
    run.run(tmp_path, until=2)
    for name in ("embed", "lm_head", "draft_ids"):
        same(run.params[name], before[name])
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), run.params["fc"], before["fc"])
    assert all(jax.tree.leaves(moved))


def test_checkpoints_of_other_settings_are_refused(target, cache, tmp_path):
    trainer(target, cache).run(tmp_path, until=1)
    other = Training(**{**vars(SETTINGS), "num_anchors": 9})
    with pytest.raises(ValueError, match=r"settings.num_anchors \(8, now 9\)"):
        trainer(target, cache, other).run(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 12}, "leave none to train on"),
        ({"max_len": 2}, "no sequence has two tokens in a row to learn"),
    ],
)
def test_caches_with_too_little_are_refused(target, cache, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer(target, cache, Training(**{**vars(SETTINGS), **settings}))


def test_caches_of_other_taps_are_refused(target, cache):
    with pytest.raises(ValueError, match=r"holds layers \(-1, 0\)"):
        CachedStates(cache, Head(target.params["lm_head"]["weight"]), (0, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": 3, "accumulation": 2}, "multiple of accumulation"),
        ({"max_len": 1}, "max_len"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Training(**{"steps": 5, **changes})
