"""Drafters by name."""

import dataclasses

from specjax.decoding.types import DrafterModel, PyTree
from specjax.drafters.draft_model import DraftModel, draft_model, early_exit
from specjax.drafters.none import NoDrafter
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.models.target import Target

__all__ = ["DraftModel", "Drafter", "NoDrafter", "PromptLookup", "load_drafter"]


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


def load_drafter(source: str | Target, target: Target) -> Drafter:
    """A drafter for `target`.

    Args:
      source: "prompt_lookup", "early_exit:N" (the target's own first N layers), or
        another Target of the same vocabulary.
      target: the model whose tokens it drafts.

    Raises:
      ValueError: an unknown name, or one that does not fit the target.
    """
    if isinstance(source, Target):
        return Drafter(*draft_model(source, target), f"draft_model:{source.name}")
    kind, _, argument = source.partition(":")
    if source == "prompt_lookup":
        return Drafter(PromptLookup(), (), source)
    if kind == "early_exit":
        if not argument.isdecimal():
            raise ValueError(f"{source!r} needs a number of layers, as in 'early_exit:8'")
        return Drafter(*early_exit(target, int(argument)), source)
    raise ValueError(
        f"unknown drafter {source!r}: known are 'prompt_lookup', 'early_exit:N' and a Target"
    )
