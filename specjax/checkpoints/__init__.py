"""Checkpoints of other projects as specjax targets and drafters."""

from specjax.checkpoints.drafters import load_drafter
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.targets import load_target

__all__ = ["CheckpointError", "load_drafter", "load_target"]
