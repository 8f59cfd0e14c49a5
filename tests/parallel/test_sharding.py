"""Sharded over two devices, decoding gives the tokens that one device gives."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from specjax.checkpoints import load_drafter
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.types import DecodeConfig, SamplingParams
from specjax.drafters import Drafter, NoDrafter, init_dspark, init_mtp
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget
from specjax.parallel.sharding import (
    DEFAULT_RULES,
    make_mesh,
    param_shardings,
    partition_spec,
    shard_params,
    shard_state,
    shard_target,
    state_shardings,
)
from tests.toys import MarkovTarget, jitted_step, new_tokens, tiny_target

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8], [4] * 20]
# Every prompt once greedy and once sampled.
SAMPLING = SamplingParams(temperature_B=np.repeat(np.float32([0, 0.8]), len(PROMPTS)), seed_B=5)
CONFIG = DecodeConfig(3, acceptance="coupled")
DRAFTERS = ["prompt_lookup", "early_exit:1", "dspark"]
MESHES = [{"data": 2, "model": 1}, {"data": 1, "model": 2}]


class Decoding(NamedTuple):
    """What a decoding program takes: positional arguments, and static ones."""

    arguments: tuple
    static: dict


def make_drafter(target, name):
    if name is None:
        return Drafter(NoDrafter(), (), "none")
    if name == "dspark":
        options = {"num_layers": 1, "mask_token_id": 63, "draft_vocab": range(0, 64, 2)}
        return Drafter(*init_dspark(target, jax.random.key(2), **options), name)
    if name == "mtp":
        return Drafter(*init_mtp(target, jax.random.key(2), depth=2), name)
    return load_drafter(name, target)


def start(target, drafter_name, mesh=None):
    drafter = make_drafter(target, drafter_name)
    if mesh is not None and drafter_name in ("dspark", "mtp"):
        params = shard_params(drafter.params, drafter.model, mesh)
        drafter = dataclasses.replace(drafter, params=params)
    config = DecodeConfig(0, acceptance="coupled") if drafter_name is None else CONFIG
    static = {"target": target.model, "drafter": drafter.model, "config": config}
    state = init_decode_state(
        target.params, drafter.params, PROMPTS * 2, max_new_tokens=24, sampling=SAMPLING, **static
    )
    return Decoding((target.params, drafter.params, state), static)


def start_sharded(target, drafter_name, mesh):
    decoding = start(shard_target(target, mesh), drafter_name, mesh)
    *params, state = decoding.arguments
    return decoding._replace(arguments=(*params, shard_state(state, mesh)))


def decode_by_steps(target_params, drafter_params, state, **static):
    while not np.all(state.done_B):
        state, _ = jitted_step(target_params, drafter_params, state, **static)
    return state


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=64)


@pytest.fixture(scope="module")
def expected(target):
    """Tokens of each row on one device, by drafter."""

    def run(name):
        decoding = start(target, name)
        return new_tokens(decode(*decoding.arguments, **decoding.static))

    return {name: run(name) for name in DRAFTERS}


def assert_placed(tree, shardings):
    """Each array lies as its sharding says."""
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.sharding, sharding)


def assert_halved(array, axis):
    """Each of the two devices holds another half of the axis."""
    half = list(array.shape)
    half[axis] //= 2
    assert [shard.data.shape for shard in array.addressable_shards] == [tuple(half)] * 2
    assert len({shard.device for shard in array.addressable_shards}) == 2
    assert len({shard.index[axis].start or 0 for shard in array.addressable_shards}) == 2


@pytest.mark.parametrize(
    ("sizes", "drafter"),
    [
        (MESHES[0], "early_exit:1"),
        (MESHES[1], "prompt_lookup"),
        (MESHES[1], "dspark"),
        pytest.param(MESHES[0], "mtp", marks=pytest.mark.slow),
        pytest.param(MESHES[1], "mtp", marks=pytest.mark.slow),
        pytest.param(MESHES[0], "dspark", marks=pytest.mark.slow),
        pytest.param(MESHES[0], "prompt_lookup", marks=pytest.mark.slow),
        pytest.param(MESHES[1], "early_exit:1", marks=pytest.mark.slow),
    ],
)
def test_tokens_equal_those_of_one_device(target, expected, sizes, drafter):
    mesh = make_mesh(**sizes)
    decoding = start_sharded(target, drafter, mesh)
    by_steps = decode_by_steps(*decoding.arguments, **decoding.static)
    state = decode(*decoding.arguments, **decoding.static)

    # Coupled acceptance: all drafters give the same.
    tokens = expected.get(drafter, expected["dspark"])
    assert new_tokens(state) == tokens
    assert new_tokens(by_steps) == tokens
    for final in (state, by_steps):
        assert_placed(jax.tree.leaves(final), state_shardings(final, mesh))
        cache_axis = 0 if sizes["data"] == 2 else 1
        assert_halved(final.cache[0].k_BKSH, cache_axis)
        if drafter != "prompt_lookup":
            caches = {"dspark": lambda state: state, "mtp": lambda state: state.caches}
            cache = caches.get(drafter, lambda state: state.cache)(final.drafter_state)
            assert_halved(cache[0].v_BKSH, cache_axis)


def test_expected_rows_differ(expected):
    """Otherwise equality would show little."""
    rows = expected["prompt_lookup"]
    assert rows == expected["early_exit:1"]
    assert len({tuple(row) for row in rows}) == len(rows)


def test_parameters_lie_half_on_each_device(target):
    mesh = make_mesh(model=2)
    sharded = shard_target(target, mesh)
    assert_placed(sharded.params, param_shardings(target.model, mesh))
    layer = sharded.params["layer_0"]
    assert_halved(sharded.params["embed"]["weight"], 0)
    assert_halved(layer["attention"]["q_proj"]["weight"], 0)
    assert_halved(layer["attention"]["k_proj"]["weight"], 0)
    assert_halved(layer["attention"]["o_proj"]["weight"], 1)
    assert_halved(layer["mlp"]["down_proj"]["weight"], 1)
    assert layer["mlp_norm"]["scale"].sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, sharded.params, target.params)


def test_early_exit_shares_the_sharded_arrays(target):
    sharded = shard_target(target, make_mesh(model=2))
    drafter = load_drafter("early_exit:1", sharded)
    assert drafter.params["embed"]["weight"] is sharded.params["embed"]["weight"]


def test_heads_are_never_torn_apart():
    """Three key-value heads of width 8 stay whole on two devices, though 24 is even."""
    model = tiny_target(vocab_size=64).model
    config = dataclasses.replace(model.config, num_heads=6, num_kv_heads=3)
    model = TransformerTarget(config)
    params = jax.jit(lambda key: nn.unbox(model.init_params(key)))(jax.random.key(1))
    target = Target(model, jax.tree.map(lambda x: x * 2.0, params), None, (), "odd", "float32")
    mesh = make_mesh(model=2)

    specs = jax.tree.map(lambda sharding: sharding.spec, param_shardings(model, mesh))
    attention = specs["layer_0"]["attention"]
    assert attention["q_proj"]["weight"] == P("model", None)
    assert attention["k_proj"]["weight"] == P(None, None)

    # The prompts' pass and a first step.
    state = start_sharded(target, None, mesh).arguments[2]
    alone = start(target, None).arguments[2]
    assert new_tokens(state) == new_tokens(alone)
    cache_BKSH = state.cache[1].k_BKSH
    assert cache_BKSH.sharding.is_fully_replicated
    np.testing.assert_allclose(cache_BKSH, alone.cache[1].k_BKSH, atol=1e-4)


def test_axes_that_cannot_be_divided_are_replicated():
    mesh = make_mesh(model=2)
    assert partition_spec(("vocab", "embed"), (61, 32), mesh) == P(None, None)
    assert partition_spec(("vocab", "embed"), (62, 32), mesh) == P("model", None)
    assert partition_spec((None, "mlp"), (3, 4), mesh) == P(None, "model")


def test_two_axes_on_one_mesh_axis_are_refused(target):
    rules = {**DEFAULT_RULES, "embed": "model"}
    with pytest.raises(ValueError, match=r"embed/weight: .*'vocab' and 'embed' are both mapped"):
        param_shardings(target.model, make_mesh(model=2), rules)


def test_collisions_are_refused_whatever_the_sizes():
    rules = {**DEFAULT_RULES, "embed": "model"}
    with pytest.raises(ValueError, match="both mapped to mesh axis 'model'"):
        partition_spec(("vocab", "embed"), (61, 32), make_mesh(model=2), rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"vocab": "model"}, "no rule for logical axis 'embed'"),
        ({"vocab": "modle", "embed": None}, "names mesh axis 'modle', but the mesh has"),
    ],
)
def test_unknown_axes_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        partition_spec(("vocab", "embed"), (64, 32), make_mesh(model=2), rules)


def test_rows_that_cannot_be_divided_are_refused(target):
    state = start(target, "prompt_lookup").arguments[2]
    odd = jax.tree.map(lambda leaf: leaf[:3], state)
    with pytest.raises(ValueError, match=r"3 rows .* over 2 devices: pass batch=4 "):
        state_shardings(odd, make_mesh(data=2))
    state_shardings(odd, make_mesh(model=2))


@pytest.mark.parametrize("sizes", [{"data": 2, "model": 2}, {"data": 0}])
def test_meshes_of_the_wrong_size_are_refused(sizes):
    with pytest.raises(ValueError, match="a mesh of data="):
        make_mesh(**sizes, devices=jax.devices()[:2])


def test_parameters_of_another_model_are_refused(target):
    params = {**target.params, "lm_head": {"weight": jnp.zeros((64, 32))}, "extra": jnp.zeros(1)}
    with pytest.raises(ValueError, match="not the model's"):
        shard_params(params, target.model, make_mesh(model=2))


def test_foreign_targets_are_refused():
    foreign = Target(MarkovTarget(5), jnp.zeros((5, 5)), None, (), "markov", "float32")
    with pytest.raises(ValueError, match="loaded by specjax"):
        shard_target(foreign, make_mesh(model=2))
