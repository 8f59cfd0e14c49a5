"""`load_drafter`: a drafter by name, by directory, or another target."""

import os
from collections.abc import Sequence
from pathlib import Path

from specjax.checkpoints.dspark import open_dspark
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.targets import HUB_ID, download
from specjax.drafters import Drafter, PromptLookup, draft_model, early_exit
from specjax.drafters.dspark import DSpark
from specjax.drafters.dspark_init import restrict
from specjax.models.target import Target


def load_drafter(
    source: str | os.PathLike[str] | Target,
    target: Target,
    *,
    draft_vocab: Sequence[int] | None = None,
    candidates: int | None = None,
) -> Drafter:
    """A drafter for `target`.

    Args:
      source: "prompt_lookup", "early_exit:N" (the target's own first N layers), another
        Target of the same vocabulary, or a DSpark or DFlash checkpoint in DeepSpec's format
        or in specjax's own: its directory, or a hub id ("owner/name").
      target: the model whose tokens it drafts.
      draft_vocab: token ids that a DSpark drafter may draft; None leaves the checkpoint's
        choice, all of them in DeepSpec's format.
      candidates: its sequential head chooses among that many tokens of each position, the
        likeliest by the backbone; 0 among all, None leaves the checkpoint's choice.

    Raises:
      ValueError: an unknown name, options that the drafter does not have, or a drafter
        that does not fit the target; CheckpointError where a checkpoint cannot be loaded.
    """
    if not isinstance(target, Target):
        raise ValueError(f"target must come from load_target, got {target!r}")
    drafter = _load(source, target)
    if draft_vocab is None and candidates is None:
        return drafter
    if not isinstance(drafter.model, DSpark):
        raise ValueError(f"draft_vocab and candidates are options of DSpark, not of {drafter.name}")
    return Drafter(*restrict(drafter.model, drafter.params, draft_vocab, candidates), drafter.name)


def _load(source: str | os.PathLike[str] | Target, target: Target) -> Drafter:
    if isinstance(source, Target):
        return Drafter(*draft_model(source, target), f"draft_model:{source.name}")
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"a drafter is a name, a path or a Target, got {source!r}")
    name = os.fspath(source)
    kind, _, argument = name.partition(":")
    if name == "prompt_lookup":
        return Drafter(PromptLookup(), (), name)
    if kind == "early_exit":
        if not argument.isdecimal():
            raise ValueError(f"{name!r} needs a number of layers, as in 'early_exit:8'")
        return Drafter(*early_exit(target, int(argument)), name)
    if not os.path.exists(name) and not HUB_ID.fullmatch(name):
        raise ValueError(
            f"unknown drafter {name!r}: known are 'prompt_lookup', 'early_exit:N', a Target, and "
            f"the directory or hub id of a checkpoint"
        )
    try:
        directory = Path(name) if os.path.exists(name) else download(name)
        return Drafter(*open_dspark(directory, target), name)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"cannot load the drafter {name!r}: {error}") from error
