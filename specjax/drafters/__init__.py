"""Drafters: what proposes the tokens that a target verifies."""

import dataclasses

from specjax.decoding.types import DrafterModel, PyTree
from specjax.drafters.borrowed import split_params
from specjax.drafters.composed import Composed
from specjax.drafters.draft_model import DraftModel, draft_model, early_exit
from specjax.drafters.dspark import DSpark, DSparkConfig
from specjax.drafters.dspark_init import init_dspark
from specjax.drafters.mtp import MTP, MTPConfig
from specjax.drafters.mtp_init import init_mtp
from specjax.drafters.none import NoDrafter
from specjax.drafters.prompt_lookup import PromptLookup

__all__ = [
    "MTP",
    "Composed",
    "DSpark",
    "DSparkConfig",
    "DraftModel",
    "Drafter",
    "MTPConfig",
    "NoDrafter",
    "PromptLookup",
    "draft_model",
    "early_exit",
    "init_dspark",
    "init_mtp",
    "split_params",
]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """What `load_drafter` returns, and what wraps a drafter of your own for `generate`.

    Attributes:
      model: static and hashable; the `drafter` argument of the decoding functions.
      params: its parameters; their `drafter_params` argument.
      name: for reports.
    """

    model: DrafterModel
    params: PyTree = dataclasses.field(repr=False)
    name: str
