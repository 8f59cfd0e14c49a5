"""The recorded target and drafters of the reference implementation."""

import functools
from pathlib import Path

import numpy as np

from specjax.checkpoints import load_drafter, load_target
from specjax.drafters import Drafter
from specjax.models.target import Target

FOLDER = Path(__file__).parents[1] / "data" / "drafters"
KINDS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash", "dspark_gemma4")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@functools.cache
def golden_target(kind: str = "dspark_vanilla") -> Target:
    """The target of a drafter."""
    folder = "gemma4_target" if kind == "dspark_gemma4" else "target"
    return load_target(FOLDER / folder, dtype="float32")


@functools.cache
def golden_drafter(kind: str, **options) -> Drafter:
    return load_drafter(FOLDER / kind, golden_target(kind), **options)


def recorded(kind: str, name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / kind / f"{name}.npz") as arrays:
        return dict(arrays)
