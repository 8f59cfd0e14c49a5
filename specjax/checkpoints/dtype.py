"""The dtype of weight matrices: as asked for, or the faster one on this device."""

import contextlib
import functools
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.checkpoints.errors import CheckpointError
from specjax.files import cache_folder
from specjax.models.layers import matmul

_DTYPES = ("float32", "bfloat16")
# bfloat16 rounds the weights, so it must win clearly: by a tenth.
_MARGIN = 0.9
# The products of a small model's decoding step; the weights must not fit into caches.
_ROWS, _WIDTH, _MLP_WIDTH, _LAYERS = 8, 576, 1536, 16


def resolve_dtype(dtype: str) -> Literal["float32", "bfloat16"]:
    """The dtype itself, or for "auto" the faster one on the default device.

    "auto" measures both once, remembers the times in the user's cache folder and
    prints what it chose.

    Raises:
      CheckpointError: another dtype.
    """
    if dtype == "float32" or dtype == "bfloat16":
        return dtype
    if dtype != "auto":
        raise CheckpointError(
            f"dtype {dtype!r} is not supported: give 'float32', 'bfloat16' or 'auto'"
        )
    return _faster_dtype()


@functools.cache
def _faster_dtype() -> Literal["float32", "bfloat16"]:
    file, key = cache_folder() / "dtype.json", _device_key()
    known = _read_times(file)
    times = known.get(key)
    origin = f"measured earlier, {file}"
    if times is None:
        times, origin = {dtype: _measure(dtype) for dtype in _DTYPES}, "measured now"
        _write_times(file, known | {key: times})
    chosen = "bfloat16" if times["bfloat16"] < _MARGIN * times["float32"] else "float32"
    print(
        f"dtype=auto: {chosen} on {jax.devices()[0].device_kind}, where a decoding "
        f"step's products take {1e3 * times['float32']:.2f} ms in float32 and "
        f"{1e3 * times['bfloat16']:.2f} ms in bfloat16 ({origin})"
    )
    return chosen


def _measure(dtype: str, repeats: int = 7) -> float:
    """Median seconds of a chain of `matmul`s, as a decoding step makes them."""
    up = [jnp.full((_MLP_WIDTH, _WIDTH), 1 / _WIDTH, dtype) for _ in range(_LAYERS)]
    down = [jnp.full((_WIDTH, _MLP_WIDTH), 1 / _MLP_WIDTH, dtype) for _ in range(_LAYERS)]

    @jax.jit
    def step(x: jax.Array, up: list[jax.Array], down: list[jax.Array]) -> jax.Array:
        for up_FD, down_DF in zip(up, down, strict=True):
            x = matmul(matmul(x, up_FD), down_DF)
        return x

    x = jax.block_until_ready(step(jnp.ones((_ROWS, _WIDTH)), up, down))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(x, up, down))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _device_key() -> str:
    """Everything that the times depend on; XLA's flags select its CPU kernels."""
    kind = jax.devices()[0].device_kind
    host = f"{platform.machine()} with {os.cpu_count()} cores"
    return f"jax {jax.__version__}, {kind}, {host}, flags {os.environ.get('XLA_FLAGS', '')!r}"


def _read_times(file: Path) -> dict[str, dict[str, float]]:
    """The remembered times; entries that this version did not write are left out."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return {
            key: {dtype: float(times[dtype]) for dtype in _DTYPES} for key, times in known.items()
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


def _write_times(file: Path, times: dict[str, dict[str, float]]) -> None:
    with contextlib.suppress(OSError):  # only a cache: measured again where it can't be written
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(times, indent=1), encoding="utf-8")
        part.replace(file)
