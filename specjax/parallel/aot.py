"""Compiles the step for a TPU topology on a machine that has no TPU.

    python -m specjax.parallel.aot --topology=v5e:2x2 --data=2 --model=2

needs the package `libtpu` beside JAX and prints as JSON what the compiler says of the
program. Only shapes are made, no arrays of the model's size.
"""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from specjax.checkpoints.drafters import load_drafter
from specjax.decoding.loop import allocate
from specjax.decoding.step import speculate_step
from specjax.decoding.types import (
    DecodeConfig,
    DecodeState,
    PyTree,
    RoundOutput,
    SamplingParams,
)
from specjax.drafters import Drafter
from specjax.models.config import RopeConfig, TransformerConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget
from specjax.parallel.sharding import (
    DEFAULT_RULES,
    Rules,
    make_mesh,
    param_shardings,
    shard_state,
    state_shardings,
)

_STOP_IDS = 4  # room for end-of-sequence ids that a decoding state commonly has


def smollm2_config(num_layers: int = 30) -> TransformerConfig:
    """The sizes of SmolLM2-135M (Ben Allal et al., arXiv 2502.02737), of any depth."""
    return TransformerConfig(
        architecture="llama",
        vocab_size=49152,
        width=576,
        mlp_width=1536,
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        max_len=8192,
        rope=RopeConfig(theta=100_000.0),
        tied_head=True,
    )


def topology_devices(topology: str) -> Sequence[Any]:
    """The devices of a TPU topology such as "v5e:2x2"; they can be compiled for, not run on.

    Raises:
      ValueError: an unknown topology, or no `libtpu` to compile with.
    """
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # the plugin's errors share no narrower class
        raise ValueError(
            f"cannot compile for the TPU topology {topology!r}: give one such as v5e:2x2 and "
            f'install libtpu (pip install "jax[tpu]"); JAX says: {error}'
        ) from error


def abstract_target(
    config: TransformerConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES, dtype: Any = jnp.bfloat16
) -> Target:
    """A target whose parameters are shapes with shardings; matrices have the given dtype.

    Raises:
      ValueError: as `param_shardings`.
    """
    model = TransformerTarget(config)

    def abstract(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> Any:
        leaf_dtype = dtype if leaf.ndim > 1 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, leaf_dtype, sharding=sharding)

    shardings = param_shardings(model, mesh, rules)
    params = jax.tree.map(abstract, model.param_shapes(), shardings)
    return Target(model, params, None, (), config.architecture, str(jnp.dtype(dtype)))


def compile_step(
    target: Target,
    drafter: Drafter,
    config: DecodeConfig,
    mesh: Mesh,
    *,
    batch: int,
    slots: int,
    rules: Rules = DEFAULT_RULES,
) -> jax.stages.Compiled:
    """`speculate_step` compiled ahead of time for a state laid out over the mesh.

    The program takes (target_params, drafter_params, jax.tree.leaves(state)), with the
    leaves donated, and returns what the step does, the state laid out as it came.

    Args:
      target: its parameters are arrays or shapes, with shardings on the mesh.
      drafter: likewise.
      config: static choices of the step.
      mesh: what to compile for, the devices of a topology or real ones.
      batch: rows.
      slots: of the cache.
      rules: logical axis to mesh axis.

    Raises:
      ValueError: as `state_shardings`.
    """
    leaves, treedef = _abstract_state(target, drafter, config, mesh, batch, slots, rules)

    def step(
        target_params: PyTree, drafter_params: PyTree, leaves: list[jax.Array]
    ) -> tuple[DecodeState, RoundOutput]:
        state, output = speculate_step(
            target_params,
            drafter_params,
            jax.tree.unflatten(treedef, leaves),
            target=target.model,
            drafter=drafter.model,
            config=config,
        )
        return shard_state(state, mesh, rules), output

    jitted = jax.jit(step, donate_argnames="leaves")
    return jitted.lower(target.params, drafter.params, leaves).compile()


def _abstract_state(
    target: Target,
    drafter: Drafter,
    config: DecodeConfig,
    mesh: Mesh,
    batch: int,
    slots: int,
    rules: Rules,
) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    """Shapes with shardings of the state's leaves, and the structure to put them in."""
    found = []

    def leaves_of_state() -> list[jax.Array]:
        ids_B = jnp.zeros(batch, jnp.int32)
        state = allocate(
            jnp.zeros((batch, slots), jnp.int32),
            ids_B,
            ids_B,
            jnp.zeros(_STOP_IDS, jnp.int32),
            SamplingParams().rows(batch, target.model.vocab_size),
            jnp.array(slots, jnp.int32),
            penalised=False,
            slots=slots,
            target=target.model,
            drafter=drafter.model,
            config=config,
        )
        found.append((jax.tree.structure(state), state_shardings(state, mesh, rules)))
        return jax.tree.leaves(state)

    shapes = jax.eval_shape(leaves_of_state)
    [(treedef, shardings)] = found
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(shapes, shardings, strict=True)
    ]
    return leaves, treedef


def analyse(compiled: jax.stages.Compiled) -> dict[str, PyTree]:
    """What the compiler says of a program, for one device.

    Returns:
      flops and bytes_accessed of one call (the body of a loop counted once), and in bytes
      what arguments, outputs, outputs that reuse arguments, temporaries, the code and the
      whole at its peak take of the device's memory.
    """
    cost: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    return {
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "memory_bytes": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
        },
    }


def compile_for_topology(
    topology: str,
    model: TransformerConfig,
    config: DecodeConfig,
    *,
    drafter: str = "prompt_lookup",
    data_parts: int = 1,
    model_parts: int = 1,
    batch: int = 8,
    slots: int = 512,
    rules: Rules = DEFAULT_RULES,
) -> dict[str, PyTree]:
    """Compiles the step with bfloat16 matrices for a TPU topology, from shapes alone.

    Args:
      topology: such as "v5e:2x2", data_parts * model_parts devices.
      model: sizes of the target.
      config: static choices of the step.
      drafter: as for `specjax.load_drafter`.
      data_parts: devices that the rows are split over.
      model_parts: devices that the parameters are split over.
      batch: rows.
      slots: of the cache.
      rules: logical axis to mesh axis.

    Returns:
      What was compiled and `analyse` of it; plain values.

    Raises:
      ValueError: no libtpu, a topology that is unknown or of another size, and as
        `param_shardings`, `state_shardings` and `load_drafter`.
    """
    devices = topology_devices(topology)
    mesh = make_mesh(data_parts, model_parts, devices)
    target = abstract_target(model, mesh, rules)
    # Shapes have no fingerprint.
    loaded = load_drafter(drafter, target, any_target=True)
    compiled = compile_step(target, loaded, config, mesh, batch=batch, slots=slots, rules=rules)
    return {
        "topology": topology,
        "device_kind": devices[0].device_kind,
        "mesh": dict(mesh.shape),
        "layers": model.num_layers,
        "drafter": drafter,
        "draft_len": config.draft_len,
        "batch": batch,
        "slots": slots,
        "jax": jax.__version__,
        **analyse(compiled),
    }


def main() -> None:
    """Compiles a SmolLM2-shaped step as the flags say and prints the analysis."""
    parser = argparse.ArgumentParser(prog="python -m specjax.parallel.aot", description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2", help="TPU generation and grid")
    parser.add_argument("--data", type=int, default=2, help="devices to split the rows over")
    parser.add_argument("--model", type=int, default=2, help="devices to split parameters over")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--drafter", default="prompt_lookup")
    parser.add_argument("--draft_len", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="rows")
    parser.add_argument("--slots", type=int, default=512, help="positions of the cache")
    flags = parser.parse_args()
    # There is no TPU whose metadata libtpu could ask for, nor one for JAX to wait for.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    jax.config.update("jax_platforms", "cpu")
    try:
        report = compile_for_topology(
            flags.topology,
            smollm2_config(flags.layers),
            DecodeConfig(flags.draft_len),
            drafter=flags.drafter,
            data_parts=flags.data,
            model_parts=flags.model,
            batch=flags.batch,
            slots=flags.slots,
        )
    except ValueError as error:
        parser.error(str(error))  # exits with 2
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
