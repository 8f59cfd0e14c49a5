"""Ahead-of-time compilation, for two devices here and for a TPU topology elsewhere."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checkpoints import load_drafter
from specjax.decoding.loop import init_decode_state
from specjax.decoding.step import speculate_step
from specjax.decoding.types import DecodeConfig
from specjax.parallel.aot import (
    abstract_target,
    analyse,
    compile_for_topology,
    compile_step,
    smollm2_config,
)
from specjax.parallel.sharding import make_mesh, shard_state, shard_target
from tests.toys import tiny_target

ROOT = Path(__file__).parents[2]
CONFIG = DecodeConfig(3)


def compile_tiny(target, mesh):
    abstract = abstract_target(target.model.config, mesh, dtype="float32")
    drafter = load_drafter("early_exit:1", abstract)
    return compile_step(abstract, drafter, CONFIG, mesh, batch=2, slots=256)


def test_compiled_for_two_devices_runs_as_the_step_does():
    target, mesh = tiny_target(vocab_size=64), make_mesh(model=2)
    compiled = compile_tiny(target, mesh)
    sharded = shard_target(target, mesh)
    drafter = load_drafter("early_exit:1", sharded)
    static = {"target": target.model, "drafter": drafter.model, "config": CONFIG}
    state = init_decode_state(
        sharded.params, drafter.params, [[1, 2, 3], [4]], max_new_tokens=9, **static
    )
    state = shard_state(state, mesh)
    step = jax.jit(speculate_step, static_argnames=tuple(static))
    _, expected = step(sharded.params, drafter.params, state, **static)
    after, output = compiled(sharded.params, drafter.params, jax.tree.leaves(state))
    np.testing.assert_array_equal(output.tokens_BT, expected.tokens_BT)
    np.testing.assert_array_equal(output.count_B, expected.count_B)
    assert not after.cache[0].k_BKSH.sharding.is_fully_replicated


def test_analysis_counts_one_device():
    target = tiny_target(vocab_size=64)
    whole = analyse(compile_tiny(target, make_mesh()))
    half = analyse(compile_tiny(target, make_mesh(model=2)))
    assert 0 < half["flops"] < whole["flops"]
    assert 0 < half["memory_bytes"]["arguments"] < whole["memory_bytes"]["arguments"]
    assert half["memory_bytes"]["peak"] >= half["memory_bytes"]["arguments"]
    # The caches, at least, are written in place.
    assert half["memory_bytes"]["aliased"] > half["memory_bytes"]["outputs"] / 2


def test_abstract_parameters_are_those_of_the_model():
    target = abstract_target(smollm2_config(2), make_mesh(model=2))
    embedding = target.params["embed"]["weight"]
    assert (embedding.shape, embedding.dtype.name) == ((49152, 576), "bfloat16")
    assert embedding.sharding.shard_shape(embedding.shape) == (24576, 576)
    assert target.params["final_norm"]["scale"].dtype == "float32"


def test_unknown_topologies_are_refused():
    with pytest.raises(ValueError, match="cannot compile for the TPU topology 'v0:9'"):
        compile_for_topology("v0:9", smollm2_config(2), CONFIG)


@pytest.fixture(scope="module")
def python_with_libtpu(tmp_path_factory):
    """A virtual environment that sees this one's packages and has libtpu besides."""
    home = tmp_path_factory.mktemp("libtpu")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    [site_packages] = home.glob("lib/python*/site-packages")
    visible = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "outer.pth").write_text("\n".join(visible))
    command = [python, "-m", "pip", "install", f"jax[tpu]=={jax.__version__}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "libtpu" in done.stderr:
        pytest.skip(f"pip cannot get the libtpu that goes with JAX {jax.__version__}")
    assert not done.returncode, done.stderr
    return python


@pytest.mark.slow
def test_step_compiles_for_a_tpu_topology(python_with_libtpu):
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    flags = ["--topology=v5e:2x2", "--data=2", "--model=2", "--drafter=early_exit:1"]
    done = subprocess.run(
        [python_with_libtpu, "-m", "specjax.parallel.aot", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert report["mesh"] == {"data": 2, "model": 2}
    assert "TPU" in report["device_kind"]
    assert report["flops"] > 0
    assert report["bytes_accessed"] > 0
    # At least this device's half of the embedding.
    assert report["memory_bytes"]["arguments"] > 49152 // 2 * 576 * 2
    assert report["memory_bytes"]["peak"] >= report["memory_bytes"]["arguments"]
    assert report["memory_bytes"]["aliased"] > report["memory_bytes"]["outputs"] / 2
