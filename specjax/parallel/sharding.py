"""Which array lies where on a mesh of devices.

Parameters name their axes where they are declared, and one table of rules says which axis
of the mesh each name is split over; the partitioner of XLA does the rest. docs/sharding.md
shows how to decode on several devices.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.decoding.types import DecodeState, PyTree
from specjax.drafters.dspark import DSpark
from specjax.drafters.mtp import MTP
from specjax.models.layers import LayerCache
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget

Rules = Mapping[str, str | None]

# Logical axis -> axis of the mesh; None keeps it whole on every device.
DEFAULT_RULES: Rules = {
    "batch": "data",
    "vocab": "model",
    "mlp": "model",
    "heads": "model",
    "kv_heads": "model",
    "embed": None,
    "norm": None,
    "taps": None,
    "rank": None,
    "scalar": None,
}

_CACHE_AXES = ("batch", "kv_heads", None, None)  # [B, K, S, H]


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data` times `model` devices with axes "data" and "model".

    Args:
      data: parts that the rows are split into.
      model: parts that the parameters are split into.
      devices: exactly data * model `jax.Device`s; None takes the first ones there are.

    Raises:
      ValueError: too few devices, or another number than asked for.
    """
    wanted = data * model
    devices = jax.devices()[:wanted] if devices is None else devices
    if min(data, model) < 1 or len(devices) != wanted:
        raise ValueError(
            f"a mesh of data={data} times model={model} takes {wanted} devices, got {len(devices)}"
        )
    auto = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ("data", "model"), auto, devices=devices)


def partition_spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
    *,
    units: Mapping[str, int] | None = None,
    name: str = "array",
) -> PartitionSpec:
    """How an array with these logical axes is split.

    An axis that cannot be divided evenly is replicated: every device then holds all of it.

    Args:
      axes: logical name of each axis; None for one that is never split.
      shape: of the array.
      mesh: the devices.
      rules: logical axis to mesh axis.
      units: number of parts that may not be torn apart, where it is not the axis' size:
        3 heads of width 64 make an axis of 192 that two devices cannot share.
      name: of the array, for messages.

    Raises:
      ValueError: a logical axis without a rule, a rule that names no axis of the mesh, or
        two axes of the array on one axis of the mesh, whatever their sizes.
    """
    units = units or {}
    placed: dict[str, str] = {}  # mesh axis -> logical axis
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        place = None if axis is None else _place(axis, mesh, rules, name)
        if axis is None or place is None:
            spec.append(None)
            continue
        # Linen's own rules would leave the second of them whole and say nothing.
        if place in placed:
            raise ValueError(
                f"{name}: logical axes {placed[place]!r} and {axis!r} are both mapped to mesh "
                f"axis {place!r}, which can split only one axis of an array; give one of them "
                "another mesh axis or None"
            )
        placed[place] = axis
        spec.append(place if units.get(axis, size) % mesh.shape[place] == 0 else None)
    return PartitionSpec(*spec)


def _place(axis: str, mesh: Mesh, rules: Rules, name: str) -> str | None:
    if axis not in rules:
        raise ValueError(f"{name}: no rule for logical axis {axis!r}; there are {sorted(rules)}")
    place = rules[axis]
    if place is not None and place not in mesh.shape:
        raise ValueError(
            f"{name}: the rule for {axis!r} names mesh axis {place!r}, "
            f"but the mesh has {list(mesh.shape)}"
        )
    return place


def param_shardings(
    model: TransformerTarget | DSpark | MTP, mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> PyTree:
    """The sharding of each parameter, as a pytree like the parameters; makes no array.

    Raises:
      ValueError: as `partition_spec`, naming the parameter.
    """
    config = model.layer_config
    kv_heads = [config.num_kv_heads]
    if config.sliding is not None:
        kv_heads.append(config.sliding.num_kv_heads)
    units = {"heads": config.num_heads, "kv_heads": math.gcd(*kv_heads)}
    boxed = jax.eval_shape(model.init_params, jax.random.key(0))

    def sharding(path: tuple, leaf: jax.ShapeDtypeStruct, axes: PartitionSpec) -> NamedSharding:
        name = "/".join(str(key.key) for key in path)
        # A parameter declared without names has an empty spec and stays whole.
        names = tuple(axes) or (None,) * len(leaf.shape)
        spec = partition_spec(names, leaf.shape, mesh, rules, units=units, name=name)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, nn.unbox(boxed), nn.get_partition_spec(boxed))


def shard_params(
    params: PyTree,
    model: TransformerTarget | DSpark | MTP,
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
) -> PyTree:
    """The parameters of `model`, laid out over the mesh.

    Raises:
      ValueError: as `partition_spec`, or parameters that are not this model's.
    """
    shardings = param_shardings(model, mesh, rules)
    if jax.tree.structure(params) != jax.tree.structure(shardings):
        raise ValueError("the parameters' tree is not the model's: pass the model they belong to")
    return jax.device_put(params, shardings)


def shard_target(target: Target, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Target:
    """The target with its parameters laid out over the mesh.

    `load_drafter` on the result gives an early-exit drafter that shares the same arrays.

    Raises:
      ValueError: as `partition_spec`, or a model that is not ours.
    """
    if not isinstance(target.model, TransformerTarget):
        raise ValueError("sharding by logical axes needs a target loaded by specjax")
    params = shard_params(target.params, target.model, mesh, rules)
    return dataclasses.replace(target, params=params)


def state_shardings(
    state: DecodeState, mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> list[NamedSharding]:
    """The sharding of each array of a decoding state, in the order of `jax.tree.leaves`.

    The rows of every array that has them are split as "batch"; the caches of our
    transformers, the target's and the drafter's, also as "kv_heads". All else is
    replicated. (A list, because the fields of a DecodeState hold arrays only.)

    Raises:
      ValueError: as `partition_spec`, or rows that cannot be divided evenly.
    """
    batch = state.done_B.shape[0]
    parts = mesh.shape.get(rules.get("batch") or "", 1)
    if batch % parts:
        raise ValueError(
            f"{batch} rows cannot be divided evenly over {parts} devices: pass batch="
            f"{-(-batch // parts) * parts} to init_decode_state, which adds rows that have ended"
        )

    def axes(leaf: jax.Array, in_cache: bool) -> tuple[str | None, ...]:
        if in_cache:
            return _CACHE_AXES
        rows = leaf.ndim > 0 and leaf.shape[0] == batch
        return tuple("batch" if rows and i == 0 else None for i in range(leaf.ndim))

    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LayerCache))
    return [
        NamedSharding(
            mesh,
            partition_spec(
                axes(leaf, isinstance(node, LayerCache)), leaf.shape, mesh, rules, name="state"
            ),
        )
        for node in nodes
        for leaf in jax.tree.leaves(node)
    ]


def shard_state(state: DecodeState, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> DecodeState:
    """The state laid out over the mesh, also inside a jitted function.

    `decode` and `stream` keep a state where it lies.

    Raises:
      ValueError: as `state_shardings`.
    """
    leaves, treedef = jax.tree.flatten(state)
    shardings = state_shardings(state, mesh, rules)
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    place = jax.lax.with_sharding_constraint if traced else jax.device_put
    return jax.tree.unflatten(treedef, place(leaves, shardings))
