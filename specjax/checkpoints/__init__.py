"""Checkpoints of other projects as specjax targets."""

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.targets import load_target

__all__ = ["CheckpointError", "load_target"]
