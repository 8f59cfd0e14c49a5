"""Targets and drafters in checkpoints: other projects' and specjax's own."""

from specjax.checkpoints.drafters import load_drafter, save_drafter
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.targets import load_target, save_target

__all__ = ["CheckpointError", "load_drafter", "load_target", "save_drafter", "save_target"]
