"""`load_drafter`: a drafter by name, by directory, or another target; and `save_drafter`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax.checkpoints.dspark import dspark_record, open_dspark
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import (
    OWN_MTP,
    drafter_kind,
    read_config,
    same_shapes,
    stored_tensors,
    write_checkpoint,
)
from specjax.checkpoints.huggingface import language_config
from specjax.checkpoints.mtp import mtp_record, open_mtp, open_mtp_layers, trim_mtp
from specjax.checkpoints.targets import HUB_ID, download
from specjax.decoding.types import DrafterModel, PyTree
from specjax.drafters import Composed, Drafter, PromptLookup, draft_model, early_exit
from specjax.drafters.borrowed import attach_target, check_targets_own, drafters_own
from specjax.drafters.dspark import DSpark
from specjax.drafters.dspark_init import restrict
from specjax.drafters.mtp import MTP
from specjax.models.target import Target

# Drafters that come with the package, by name: specjax/shipped/NAME.
_SHIPPED = Path(__file__).parent.parent / "shipped"
_COMPOSED = "prompt_lookup+"
# Shorter matches are right less often than a trained drafter; its later drafts seldom are.
_MIN_NGRAM, _MODEL_LEN = 3, 4


def load_drafter(
    source: str | os.PathLike[str] | Target,
    target: Target,
    *,
    draft_vocab: Sequence[int] | None = None,
    candidates: int | None = None,
    any_target: bool = False,
) -> Drafter:
    """A drafter for `target`.

    Args:
      source: "prompt_lookup", "early_exit:N" (the target's own first N layers), another
        Target of the same vocabulary, a shipped drafter ("smollm2-135m-dspark"), or a
        checkpoint: its directory, or a hub id ("owner/name"). It holds a DSpark or DFlash
        drafter in DeepSpec's format or in specjax's own, MTP modules in specjax's own, or a
        model with MTP layers, the target's (`open_mtp_layers`). "prompt_lookup+SOURCE" copies
        from the row's own text where that has a long enough match and drafts with a DSpark
        drafter elsewhere (`Composed`).
      target: the model whose tokens it drafts.
      draft_vocab: token ids that a DSpark drafter or MTP modules may draft; None leaves the
        checkpoint's choice, all of them in other projects' formats.
      candidates: DSpark's sequential head chooses among that many tokens of each position, the
        likeliest by the backbone; 0 among all, None leaves the checkpoint's choice.
      any_target: a checkpoint may have been trained for another target, if it fits this one;
        the output stays the target's, but few drafts may be accepted.

    Raises:
      ValueError: an unknown name, options that the drafter does not have, or a drafter that
        does not fit the target or was trained for another; CheckpointError where a
        checkpoint cannot be loaded.
    """
    if not isinstance(target, Target):
        raise ValueError(f"target must come from load_target, got {target!r}")
    if isinstance(source, str) and source.startswith(_COMPOSED):
        part = load_drafter(
            source.removeprefix(_COMPOSED),
            target,
            draft_vocab=draft_vocab,
            candidates=candidates,
            any_target=any_target,
        )
        if not isinstance(part.model, DSpark):
            raise ValueError(
                f"prompt lookup is composed with DSpark drafters, not with {part.name}"
            )
        model_len = min(_MODEL_LEN, part.model.config.block_size)
        composed = Composed(PromptLookup(min_ngram=_MIN_NGRAM), part.model, model_len)
        return Drafter(composed, part.params, source)
    drafter = _load(source, target, any_target)
    if draft_vocab is None and candidates is None:
        return drafter
    if isinstance(drafter.model, MTP) and candidates is None and draft_vocab is not None:
        trimmed = trim_mtp(drafter.model, drafter.params, draft_vocab, target)
        return Drafter(*trimmed, drafter.name)
    if not isinstance(drafter.model, DSpark):
        raise ValueError(
            f"draft_vocab and candidates are options of DSpark, not of {drafter.name} (MTP modules "
            f"have draft_vocab alone)"
        )
    return Drafter(*restrict(drafter.model, drafter.params, draft_vocab, candidates), drafter.name)


def save_drafter(
    directory: str | os.PathLike[str],
    model: DrafterModel,
    params: PyTree,
    target: Target,
    *,
    dtype: str = "bfloat16",
    replace: bool = False,
) -> None:
    """Writes a DSpark drafter or MTP modules in specjax's own format, all of it or nothing.

    Args:
      directory: of the checkpoint.
      model: the drafter.
      params: its parameters; those that are the target's are left out, and may be missing.
      target: of the drafter.
      dtype: of the matrices in the file; vectors stay in float32.
      replace: a drafter that is there already makes place.

    Raises:
      ValueError: the directory exists, and is not to be replaced; options that the format
        does not have; a drafter that does not fit the target; values that are not finite; or
        the embedding or the head is not the target's, which the checkpoint would not hold.
    """
    if isinstance(model, MTP):
        raw, names = mtp_record(model, target)
    elif isinstance(model, DSpark):
        raw, names = dspark_record(model, target)
    else:
        raise ValueError(f"DSpark drafters and MTP modules can be saved, got {model!r}")
    params = {**attach_target(params, target), **params}
    if not same_shapes(params, model.param_shapes()):
        raise ValueError("the parameters are not those of the drafter's configuration")
    check_targets_own(params, target)
    tensors = stored_tensors(drafters_own(params), names, dtype)
    write_checkpoint(directory, raw, tensors, replace=replace)


def shipped_drafters() -> list[str]:
    """Names of the drafters that come with the package."""
    return sorted(path.parent.name for path in _SHIPPED.glob("*/config.json"))


def _load(source: str | os.PathLike[str] | Target, target: Target, any_target: bool) -> Drafter:
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
    shipped = name in shipped_drafters()
    if not shipped and not os.path.exists(name) and not HUB_ID.fullmatch(name):
        raise ValueError(
            f"unknown drafter {name!r}: known are 'prompt_lookup', 'early_exit:N', "
            f"{', '.join(map(repr, shipped_drafters()))}, a Target, the directory or hub id of a "
            f"checkpoint, and 'prompt_lookup+' before any of the latter"
        )
    try:
        if shipped:
            directory = _SHIPPED / name
        else:
            directory = Path(name) if os.path.exists(name) else download(name)
        return Drafter(*_opener(directory)(directory, target, any_target=any_target), name)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"cannot load the drafter {name!r}: {error}") from error


def _opener(directory: Path) -> Callable[..., tuple[Any, PyTree]]:
    """The function that reads this kind of checkpoint."""
    raw = read_config(directory)
    if drafter_kind(raw) == OWN_MTP:
        return open_mtp
    if drafter_kind(raw) is None and (directory / "drafter").is_dir():
        raise CheckpointError(f"it is the folder of a run: give {directory / 'drafter'}")
    layers = language_config(raw).get("num_nextn_predict_layers")
    return open_mtp_layers if layers else open_dspark
