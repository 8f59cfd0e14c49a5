import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from specjax.checkpoints.dspark import tensor_names
from specjax.drafters.borrowed import TARGETS_OWN, language_model_head
from specjax.drafters.dspark import BlockOutput
from specjax.drafters.dspark_init import restrict
from specjax.training.anchors import Blocks, make_blocks
from specjax.training.losses import LossWeights, dspark_losses
from specjax.training.optimizer import adamw, warmup_cosine
from tests.drafters.golden import CLOSE, FOLDER, KINDS, golden_drafter, golden_target, recorded
from tests.toys import call

WEIGHTS = {"dflash": LossWeights(1.0, 0.0, 0.0)}


@functools.cache
def batch(kind):
    """Features, blocks and target logits of the recorded training batch, as NumPy arrays."""
    gold, config = recorded(kind, "train"), golden_drafter(kind).model.config
    sizes = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    head = language_model_head(golden_target(kind))

    @jax.jit
    def make(tokens, mask, anchors, keep, states):
        blocks = make_blocks(tokens, mask, anchors, keep, **sizes)
        return blocks, head.logits(states[np.arange(2)[:, None, None], blocks.states_BAG])

    with jax.ensure_compile_time_eval():  # within another program, too
        blocks, logits = jax.device_get(
            make(
                gold["input_ids"], gold["loss_mask"] > 0, gold["anchor_positions"],
                gold["block_keep_mask"], gold["target_last_hidden_states"],
            )
        )  # fmt: skip
    return gold, gold["target_hidden_states"].reshape(2, -1, 2, 32), blocks, logits


def losses_of(kind, params, model=None):
    features, blocks, logits = jax.tree.map(jnp.asarray, batch(kind)[1:])
    model = model or golden_drafter(kind).model
    out = model.forward(params, features, blocks.tokens_BAG, blocks.previous_BAG, blocks.anchors_BA)
    probs, ids = jax.nn.softmax(logits), params.get("draft_ids")
    probs = probs if ids is None else probs[..., ids]
    return dspark_losses(out, blocks, probs, WEIGHTS.get(kind, LossWeights()), ids)


def trainable(params):
    return {name: part for name, part in params.items() if name not in TARGETS_OWN}


def flat_names(kind, tree):
    """Arrays by the reference's names."""
    names = tensor_names(golden_drafter(kind).model.config)
    return {names[path]: leaf for path, leaf in flatten_dict(tree, sep="/").items()}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_the_reference(kind):
    gold, _, blocks, logits = batch(kind)
    np.testing.assert_array_equal(blocks.previous_BAG, gold["prev_token_ids"])
    np.testing.assert_array_equal(blocks.labels_BAG, gold["target_ids"])
    np.testing.assert_array_equal(blocks.valid_BAG, gold["eval_mask"])
    valid = gold["eval_mask"]
    np.testing.assert_allclose(logits[valid], gold["aligned_target_logits"][valid], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_metrics_equal_the_reference(kind):
    losses = jax.jit(lambda params: losses_of(kind, params))(golden_drafter(kind).params)
    expected = json.loads((FOLDER / kind / "loss.json").read_text())
    metrics = {name.removeprefix("train/"): x for name, x in expected["metrics"].items()}
    got = {
        "loss": losses.total,
        "ce_loss": losses.cross_entropy,
        "tau_probabilistic": losses.expected_length,
        **{f"accept_rate@{k}": x for k, x in enumerate(losses.acceptance_G)},
    }
    if kind != "dflash":
        got |= {
            "l1_loss": losses.total_variation,
            "confidence_loss": losses.confidence,
            "confidence_abs_error": losses.confidence_error,
            "confidence_bias": losses.confidence_bias,
        }
    for name, value in got.items():
        np.testing.assert_allclose(value, metrics[name], err_msg=name, **CLOSE)
    assert set(metrics) - set(got) <= {"confidence_cumprod_bias"}
    np.testing.assert_allclose(losses.weight, expected["ce_loss_den"], **CLOSE)


@pytest.mark.parametrize("kind", ["dspark_vanilla", "dspark_rnn", "dspark_gemma4"])
def test_gradients_equal_the_reference(kind):
    params = golden_drafter(kind).params
    frozen = {name: params[name] for name in TARGETS_OWN}
    grads = jax.jit(jax.grad(lambda part: losses_of(kind, {**part, **frozen}).total))(
        trainable(params)
    )
    gold = recorded(kind, "grads")
    got = flat_names(kind, grads)
    fixed = {name for name in got if name.endswith("layer_scalar")}
    assert set(got) - fixed == set(gold)
    assert not any(got[name] for name in fixed)
    for name, value in gold.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@jax.numpy_dtype_promotion("standard")  # optax mixes floats with its integer step
def test_six_optimiser_steps_equal_the_reference():
    with np.load(FOLDER / "train_steps.npz") as arrays:
        gold = dict(arrays)
    schedule = warmup_cosine(
        float(gold["base_lr"]), int(gold["total_steps"]), float(gold["warmup_ratio"])
    )
    optimizer = adamw(
        schedule,
        weight_decay=float(gold["weight_decay"]),
        max_grad_norm=float(gold["max_grad_norm"]),
    )
    params = golden_drafter("dspark_vanilla").params
    frozen = {name: params[name] for name in TARGETS_OWN}
    params = trainable(params)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(
            lambda part: losses_of("dspark_vanilla", {**part, **frozen}).total
        )(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    for k in range(6):
        params, state, loss, norm = step(params, state)
        np.testing.assert_allclose(loss, gold["losses"][k], rtol=1e-3)
        np.testing.assert_allclose(norm, gold["grad_norms"][k], rtol=1e-3)
        np.testing.assert_allclose(schedule(k), gold["lr_used"][k], rtol=1e-5)
    got = flat_names("dspark_vanilla", params)
    final = {name.removeprefix("final__"): x for name, x in gold.items() if "final__" in name}
    assert len(final) == 6
    for name, value in final.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_learning_rates_equal_the_reference(data_dir):
    with np.load(data_dir / "misc" / "lr_schedule.npz") as arrays:
        for name, expected in arrays.items():
            total, ratio, peak = (
                float(part.removeprefix(key))
                for part, key in zip(name.split("_")[1:], ("total", "warm", "base"), strict=True)
            )
            schedule = warmup_cosine(peak, int(total), ratio)
            got = [float(schedule(s)) for s in range(int(total))]
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "arguments", [(1e-3, 0, 0.1), (1e-3, 10, 1.0), (1e-3, 10, -0.1), (float("nan"), 10, 0.1)]
)
def test_impossible_schedules_are_refused(arguments):
    with pytest.raises(ValueError, match="total_steps must be at least 1 and warmup_ratio"):
        warmup_cosine(*arguments)


def test_trimmed_vocabulary_counts_what_it_misses():
    """The distance to the target is that of the same q written over the whole vocabulary."""
    drafter = golden_drafter("dspark_vanilla")
    ids = np.arange(0, 97, 3)
    model, params = restrict(drafter.model, drafter.params, ids.tolist(), None)
    got = jax.jit(lambda params: losses_of("dspark_vanilla", params, model))(params)
    _, features, blocks, logits = batch("dspark_vanilla")
    out = call(
        model, "forward", params, features, blocks.tokens_BAG, blocks.previous_BAG,
        blocks.anchors_BA,
    )  # fmt: skip
    wide = np.full((*out.logits_BAGV.shape[:3], 97), -1e9, np.float32)
    wide[..., ids] = out.logits_BAGV
    out = out._replace(logits_BAGV=wide)
    same = jax.jit(dspark_losses, static_argnums=3)(
        out, blocks, jax.nn.softmax(logits), LossWeights()
    )
    np.testing.assert_allclose(got.total_variation, same.total_variation, rtol=1e-5)
    np.testing.assert_allclose(got.acceptance_G, same.acceptance_G, rtol=1e-5)
    inside = np.isin(blocks.labels_BAG, ids) & blocks.valid_BAG
    assert 0 < inside.sum() < blocks.valid_BAG.sum()
    entropy = -np.asarray(jax.nn.log_softmax(wide))
    entropy = np.take_along_axis(entropy, blocks.labels_BAG[..., None], -1)
    weight = inside * np.exp(-np.arange(5) / 4.0)
    expected = (entropy[..., 0] * weight).sum() / float(got.weight)
    np.testing.assert_allclose(got.cross_entropy, expected, rtol=1e-5)


def test_loss_of_a_drafter_that_is_the_target_is_zero():
    """Every draft is accepted: three and the target's own."""
    shape = (1, 2, 3)
    grid = jnp.zeros(shape, jnp.int32)
    blocks = Blocks(grid[:, :, 0], grid[:, :, 0] == 0, *([grid] * 4), grid == 0)
    logits = jax.random.normal(jax.random.key(0), (*shape, 7))
    losses = jax.jit(dspark_losses, static_argnums=3)(
        BlockOutput(logits, logits, logits, None),
        blocks,
        jax.nn.softmax(logits),
        LossWeights(0.0, 1.0, 0.0),
    )
    np.testing.assert_allclose(losses.total, 0, atol=1e-6)
    np.testing.assert_allclose(losses.acceptance_G, 1, atol=1e-6)
    np.testing.assert_allclose(losses.expected_length, 4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cross_entropy": -1.0}, "at least 0"),
        ({"cross_entropy": 0.0, "total_variation": 0.0, "confidence": 0.0}, "one of them"),
        ({"decay": 0.0}, "decay above 0"),
        ({"decay": float("nan")}, "decay above 0"),
        ({"cross_entropy": float("nan")}, "at least 0"),
    ],
)
def test_wrong_weights_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LossWeights(**arguments)


def test_confidence_loss_needs_a_confidence_head():
    _, features, blocks, logits = batch("dflash")
    drafter = golden_drafter("dflash")
    out = call(
        drafter.model, "forward", drafter.params, features, blocks.tokens_BAG,
        blocks.previous_BAG, blocks.anchors_BA,
    )  # fmt: skip
    with pytest.raises(ValueError, match="has no confidence head"):
        jax.jit(dspark_losses, static_argnums=3)(out, blocks, logits, LossWeights())


def test_layers_scalars_do_not_decay():
    """No gradient flows through them: they are buffers."""
    params = {"layer": {"scalar": jnp.ones(1), "weight": jnp.ones((2, 2))}}
    optimizer = adamw(warmup_cosine(0.1, 4, 0.0), weight_decay=0.5)
    grads = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["layer"]["scalar"], 0)
    assert np.all(np.asarray(updates["layer"]["weight"]) < 0)
