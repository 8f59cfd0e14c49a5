"""Drafters by name."""

import dataclasses

from specjax.decoding.types import DrafterModel, PyTree
from specjax.drafters.none import NoDrafter
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.models.target import Target

__all__ = ["Drafter", "NoDrafter", "PromptLookup", "load_drafter"]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """What `load_drafter` returns.

    Attributes:
      model: static and hashable; the `drafter` argument of the decoding functions.
      params: its parameters; their `drafter_params` argument.
      name: for reports.
    """

    model: DrafterModel
    params: PyTree
    name: str


def load_drafter(source: str, target: Target) -> Drafter:
    """A drafter for `target`: "prompt_lookup".

    Raises:
      ValueError: an unknown name.
    """
    del target  # prompt lookup serves any
    if source != "prompt_lookup":
        raise ValueError(f"unknown drafter {source!r}: known is 'prompt_lookup'")
    return Drafter(PromptLookup(), (), source)
