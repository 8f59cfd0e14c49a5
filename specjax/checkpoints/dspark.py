"""DSpark and DFlash checkpoints: DeepSpec's format, and specjax's own, which is like it.

specjax's own leaves out the embedding and the head, which are the target's, and can hold
a trimmed vocabulary; it has another name under `architectures`. Both record the target's
fingerprint when specjax writes them. An exported DeepSpec checkpoint is whole, and says under
"specjax", which other engines ignore, what specjax is to restrict the drafter to.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.architectures import get_architecture, get_size
from specjax.checkpoints.checkpoint import check_depth
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import (
    DEEPSPEC,
    OWN_DSPARK,
    OWN_MTP,
    check_target,
    drafter_kind,
    read_config,
    read_drafter,
    stored_tensors,
    target_record,
    write_checkpoint,
)
from specjax.checkpoints.huggingface import open_weights
from specjax.checkpoints.raw_config import lost, raw_config
from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import attach_target, drafters_own
from specjax.drafters.dspark import DSpark, DSparkConfig
from specjax.drafters.dspark_init import check_fits, expand, restrict
from specjax.models.config import TransformerConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget

# What DeepSpec's class asks for besides, of use in its training alone: its own value.
_NUM_ANCHORS = 512

_NAMES = {
    "embed/weight": "embed_tokens.weight",
    "lm_head/weight": "lm_head.weight",
    "draft_ids": "draft_ids",
    "fc/weight": "fc.weight",
    "hidden_norm/scale": "hidden_norm.weight",
    "final_norm/scale": "norm.weight",
    "markov/w1/weight": "markov_head.markov_w1.weight",
    "markov/w2/weight": "markov_head.markov_w2.weight",
    "markov/gate_proj/weight": "markov_head.gate_proj.weight",
    "markov/gate_proj/bias": "markov_head.gate_proj.bias",
    "markov/joint_proj/weight": "markov_head.joint_proj.weight",
    "markov/joint_proj/bias": "markov_head.joint_proj.bias",
    "confidence/proj/weight": "confidence_head.proj.weight",
    "confidence/proj/bias": "confidence_head.proj.bias",
}


def open_dspark(
    directory: Path, target: Target, *, any_target: bool = False
) -> tuple[DSpark, PyTree]:
    """A DSpark or DFlash drafter and its parameters, matrices in the target's dtype.

    Args:
      directory: of the checkpoint.
      target: that it is to draft for.
      any_target: it may have been trained for another target.

    Raises:
      CheckpointError: files that are missing, damaged or of another kind; options that are
        not supported; or a drafter that does not fit the target or was trained for another.
    """
    raw = read_config(directory)
    kind = _kind(raw)
    try:
        model = DSpark(_config(raw))
        if not any_target:
            check_target(raw, target)
        check_fits(model, target)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    tensors = open_weights(directory)
    check_depth(tensors, model.config.backbone.num_layers)
    shapes = model.param_shapes()
    if kind == OWN_DSPARK:
        shapes = drafters_own(shapes)
    params = read_drafter(tensors, shapes, tensor_names(model.config), target)
    if kind == OWN_DSPARK:
        return model, attach_target(params, target)
    return _restrict(model, params, raw)


def dspark_record(model: DSpark, target: Target) -> tuple[dict[str, Any], dict[str, str]]:
    """config.json of specjax's own format, and the tensor of each parameter path.

    Raises:
      ValueError: a drafter that does not fit the target, or options that the format does not
        have.
    """
    check_fits(model, target)
    raw = {
        "architectures": [OWN_DSPARK],
        **_raw_config(model.config, target),
        "draft_vocab_size": model.config.draft_vocab_size,
        "candidates": model.config.candidates,
    }
    _check_layers(raw, model.config.backbone)
    return raw, tensor_names(model.config)


def export_dspark(
    directory: str | os.PathLike[str],
    model: DSpark,
    params: PyTree,
    target: Target,
    *,
    dtype: str = "bfloat16",
    replace: bool = False,
) -> None:
    """Writes a drafter as a DeepSpec checkpoint, all of it or nothing.

    It drafts from the whole vocabulary (`expand`), but for specjax, which restricts it to
    the tokens and candidates that it had. With these, and in the dtype that the parameters
    have, what `open_dspark` gives back is the same drafter.

    Args:
      directory: of the checkpoint.
      model: the drafter.
      params: its parameters.
      target: of the drafter.
      dtype: of the matrices in the file.
      replace: a drafter that is there already makes place.

    Raises:
      ValueError: the directory exists, and is not to be replaced; options that the format
        does not have; a drafter that does not fit the target; or a trimmed one whose
        embedding or head is not the target's.
    """
    check_fits(model, target)
    if not isinstance(target.model, TransformerTarget):
        raise ValueError(f"{target.name} was not loaded by specjax, so its depth is not known")
    whole, whole_params = expand(model, params, target)
    raw = {
        "architectures": [DEEPSPEC.get(whole.config.backbone.architecture)],
        **_raw_config(whole.config, target),
        "attention_bias": False,
        "num_target_layers": target.model.config.num_layers,
        "num_anchors": _NUM_ANCHORS,
        "dtype": dtype,
    }
    ids = params.get("draft_ids")
    if whole != model:
        raw["specjax"] = {
            "draft_vocab": None if ids is None else np.asarray(ids).tolist(),
            "candidates": model.config.candidates,
        }
    _check_layers(raw, whole.config.backbone)
    tensors = stored_tensors(whole_params, tensor_names(whole.config), dtype)
    write_checkpoint(directory, raw, tensors, replace=replace)


def _check_layers(raw: Mapping[str, Any], backbone: TransformerConfig) -> None:
    """Refuses draft layers that would be others when they are read again."""
    if changed := lost(raw, backbone):
        raise ValueError(
            f"the format holds layers of Qwen3 and Gemma 4, and the drafter's have another "
            f"{'; '.join(changed)}"
        )


def _restrict(model: DSpark, params: PyTree, raw: Mapping[str, Any]) -> tuple[DSpark, PyTree]:
    """The drafter with the restrictions that an exported checkpoint had, if any."""
    given = raw.get("specjax", {})
    if not isinstance(given, Mapping):
        raise CheckpointError(f"specjax must be a mapping, got {given!r}")
    ids, candidates = given.get("draft_vocab"), _get_optional_size(given, "candidates")
    if not isinstance(ids, list | None) or any(type(index) is not int for index in ids or ()):
        raise CheckpointError(f"draft_vocab must be a list of token ids, got {ids!r}")
    try:
        return restrict(model, params, ids, candidates)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _kind(raw: Mapping[str, Any]) -> str:
    kind = drafter_kind(raw)
    if kind not in (*DEEPSPEC.values(), OWN_DSPARK):
        raise CheckpointError(
            f"architectures names {kind!r}, which is not a drafter that can be loaded: known are "
            f"{', '.join(DEEPSPEC.values())} (DSpark and DFlash of DeepSpec), {OWN_DSPARK} and "
            f"{OWN_MTP}, and models with MTP layers (num_nextn_predict_layers)"
        )
    return kind


def _config(raw: Mapping[str, Any]) -> DSparkConfig:
    """The configuration; what DeepSpec's model class has no default for must be there.

    Raises:
      ValueError: missing or wrong values.
    """
    taps = raw.get("target_layer_ids")
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise CheckpointError(f"target_layer_ids must be a list of layer indices, got {taps!r}")
    rank = get_size(raw, "markov_rank")
    confidence_head = _get_bool(raw, "enable_confidence_head")
    # DeepSpec leaves these two out where the head they describe is off.
    kind = raw.get("markov_head_type")
    if rank and not isinstance(kind, str):
        raise CheckpointError("the configuration lacks 'markov_head_type'")
    return DSparkConfig(
        backbone=get_architecture(raw).config(raw),
        taps=tuple(taps),
        block_size=get_size(raw, "block_size"),
        mask_token_id=get_size(raw, "mask_token_id"),
        markov_rank=rank,
        markov_head=str(kind) if rank else "vanilla",
        confidence_head=confidence_head,
        confidence_with_markov=confidence_head and _get_bool(raw, "confidence_head_with_markov"),
        draft_vocab_size=_get_optional_size(raw, "draft_vocab_size"),
        candidates=_get_optional_size(raw, "candidates"),
    )


def _raw_config(config: DSparkConfig, target: Target) -> dict[str, Any]:
    """What both formats have; keys of a head that is off are left out, as DeepSpec does."""
    family = config.backbone.architecture
    layers = dataclasses.replace(
        config.backbone,
        architecture=family if family in DEEPSPEC else "qwen3",
        sliding=None,
        tied_head=False,
    )
    raw = {
        **raw_config(layers),
        "target_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence_head,
        **target_record(target),
    }
    if config.markov_rank:
        raw["markov_head_type"] = config.markov_head
    if config.confidence_head:
        raw["confidence_head_with_markov"] = config.confidence_with_markov
    return raw


def _get_bool(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} must be true or false, got {value!r}")
    return value


def _get_optional_size(raw: Mapping[str, Any], key: str) -> int | None:
    return None if raw.get(key) is None else get_size(raw, key)


def tensor_names(config: DSparkConfig) -> dict[str, str]:
    """Tensor by parameter path; a draft layer's are called as in the target's format."""
    architecture = get_architecture({"model_type": config.backbone.architecture})
    weights = architecture.layer_weights(config.backbone.num_layers)
    layers = {
        path: weight.huggingface.removeprefix("model.")
        for path, weight in weights.items()
        if path.startswith("layer_")
    }
    return {**_NAMES, **layers}
