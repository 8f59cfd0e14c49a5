"""DSpark and DFlash checkpoints: DeepSpec's format, and specjax's own, which is like it.

specjax's own leaves out the embedding and the head, which are the target's, and can hold
a trimmed vocabulary; it has another name under `architectures`. Both record the target's
fingerprint when specjax writes them. An exported DeepSpec checkpoint is whole, and says under
"specjax", which other engines ignore, what specjax is to restrict the drafter to.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import numpy as np
import safetensors.numpy

from specjax.checkpoints.architectures import get_architecture, get_size, raw_rope
from specjax.checkpoints.checkpoint import check_depth, read_params
from specjax.checkpoints.errors import CheckpointError, name_some
from specjax.checkpoints.huggingface import open_weights, read_json
from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import TARGETS_OWN, attach_target, check_targets_own
from specjax.drafters.dspark import DSpark, DSparkConfig
from specjax.drafters.dspark_init import check_fits, expand, restrict
from specjax.files import changes
from specjax.models.config import TransformerConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget

# DeepSpec's class by the family of the draft layers; and specjax's own format.
_DEEPSPEC = {"qwen3": "Qwen3DSparkModel", "gemma4_text": "Gemma4DSparkModel"}
_OWN = "SpecjaxDSparkModel"
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
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} is not a folder with a config.json")
    raw = read_json(directory / "config.json")
    kind = _kind(raw)
    try:
        model = DSpark(_config(raw))
        if not any_target:
            _check_target(raw, target)
        check_fits(model, target)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    tensors = open_weights(directory)
    check_depth(tensors, model.config.backbone.num_layers)
    shapes = model.param_shapes()
    if kind == _OWN:
        shapes = {name: part for name, part in shapes.items() if name not in TARGETS_OWN}
    names = tensor_names(model.config)
    params = read_params(tensors, shapes, names, target.dtype)
    if "draft_ids" in params:
        _check_draft_ids(np.asarray(params["draft_ids"]), model.config.backbone.vocab_size)
    if kind == _OWN:
        return model, attach_target(params, target)
    return _restrict(model, params, raw)


def save_dspark(
    directory: str | os.PathLike[str],
    model: DSpark,
    params: PyTree,
    target: Target,
    *,
    dtype: str = "bfloat16",
    replace: bool = False,
) -> None:
    """Writes a drafter in specjax's own format, all of it or nothing.

    Args:
      directory: of the checkpoint.
      model: the drafter.
      params: its parameters; those that are the target's are left out.
      target: of the drafter.
      dtype: of the matrices in the file.
      replace: a drafter that is there already makes place.

    Raises:
      ValueError: the directory exists, and is not to be replaced; options that the format
        does not have; or the embedding or the head is not the target's, which the checkpoint
        would not hold.
    """
    check_targets_own(params, target)
    own = {name: part for name, part in params.items() if name not in TARGETS_OWN}
    raw = {
        "architectures": [_OWN],
        **_raw_config(model.config, target),
        "draft_vocab_size": model.config.draft_vocab_size,
        "candidates": model.config.candidates,
    }
    _write(Path(directory), model.config, raw, own, dtype, replace)


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
        "architectures": [_DEEPSPEC.get(whole.config.backbone.architecture)],
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
    _write(Path(directory), whole.config, raw, whole_params, dtype, replace)


def _write(
    directory: Path,
    config: DSparkConfig,
    raw: Mapping[str, Any],
    params: PyTree,
    dtype: str,
    replace: bool,
) -> None:
    """Writes one checkpoint; vectors stay in float32.

    Raises:
      ValueError: the directory exists, and is not to be replaced; an unknown dtype; draft
        layers with options that config.json does not tell of; or values that are not finite.
    """
    check_place(directory, replace=replace)
    directory = directory.resolve()
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}")
    _check_layers(_config(raw).backbone, config.backbone)
    flat: dict[str, Any] = {**flax.traverse_util.flatten_dict(params, sep="/")}
    names = tensor_names(config)
    tensors = {
        names[path]: np.asarray(leaf.astype(dtype) if leaf.ndim == 2 else leaf)
        for path, leaf in flat.items()
    }
    broken = [name for name, array in tensors.items() if not np.all(np.isfinite(array))]
    if broken:
        raise ValueError(f"{name_some(broken)} hold NaN or infinite values: training diverged")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    partial, old = scratch / "new", scratch / "old"
    try:
        partial.mkdir()
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in raw.items())
        (partial / "config.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        # transformers reads files that name the framework whose layout they have.
        safetensors.numpy.save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # readable by others, as plain files are
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
    finally:
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(scratch, ignore_errors=True)


def check_place(directory: Path, *, replace: bool) -> None:
    """Makes sure that a checkpoint can be written there without loss of anything else.

    Raises:
      ValueError: something is there, and is no drafter, or is not to be replaced.
    """
    if not os.path.lexists(directory):
        return
    if not _holds_drafter(directory):
        raise ValueError(f"{directory} exists and is no drafter's folder: give another folder")
    if not replace:
        raise ValueError(
            f"{directory} exists: remove it, give another folder, or have its drafter replaced "
            f"(replace=True)"
        )


def _holds_drafter(directory: Path) -> bool:
    """Whether a folder holds a drafter's checkpoint and nothing else."""
    try:
        _kind(read_json(directory / "config.json"))
        return {path.name for path in directory.iterdir()} <= {"config.json", "model.safetensors"}
    except (CheckpointError, OSError):
        return False


def _check_layers(stored: TransformerConfig, backbone: TransformerConfig) -> None:
    """Refuses draft layers that would be others when they are read again."""
    lost = changes(dataclasses.asdict(stored), dataclasses.asdict(backbone))
    if lost:
        raise ValueError(
            f"the format holds layers of Qwen3 and Gemma 4, and the drafter's have another "
            f"{'; '.join(lost)}"
        )


def _check_target(raw: Mapping[str, Any], target: Target) -> None:
    """Refuses another target than the checkpoint names; one that names none fits any."""
    recorded = raw.get("target_fingerprint")
    if recorded is None:
        return
    found = target.fingerprint()
    if recorded != found:
        raise CheckpointError(
            f"it was trained for the target {raw.get('target_name')!r} (fingerprint "
            f"{str(recorded)[:12]}), and {target.name!r} ({found[:12]}) has other weights: load "
            f"it for its own target (config.target), or with any_target=True (config.any_target), "
            f"with which few drafts may be accepted"
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


def _check_draft_ids(ids: np.ndarray, vocab_size: int) -> None:
    if ids[0] < 0 or ids[-1] >= vocab_size or np.any(np.diff(ids) < 1):
        raise CheckpointError(
            f"draft_ids must be increasing token ids from 0 to {vocab_size - 1}: "
            f"the file is damaged"
        )


def _kind(raw: Mapping[str, Any]) -> str:
    kinds = raw.get("architectures")
    kind = kinds[0] if isinstance(kinds, list) and kinds else None
    if kind not in (*_DEEPSPEC.values(), _OWN):
        raise CheckpointError(
            f"architectures names {kind!r}, which is not a drafter that can be loaded: known are "
            f"{', '.join(_DEEPSPEC.values())} (DSpark and DFlash of DeepSpec) and {_OWN}"
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
    backbone = config.backbone
    raw = {
        **_raw_layers(backbone),
        "vocab_size": backbone.vocab_size,
        "hidden_size": backbone.width,
        "intermediate_size": backbone.mlp_width,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.num_kv_heads,
        "head_dim": backbone.head_dim,
        "layer_types": ["full_attention"] * backbone.num_layers,
        "rms_norm_eps": backbone.norm_eps,
        "max_position_embeddings": backbone.max_len,
        "tie_word_embeddings": False,
        "target_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence_head,
        "target_name": target.name,
        "target_fingerprint": target.fingerprint(),
    }
    if config.markov_rank:
        raw["markov_head_type"] = config.markov_head
    if config.confidence_head:
        raw["confidence_head_with_markov"] = config.confidence_with_markov
    return raw


def _raw_layers(backbone: TransformerConfig) -> dict[str, Any]:
    """What is particular to the family of the draft layers, Qwen3 unless it is Gemma 4."""
    rope = raw_rope(backbone.rope)
    if backbone.architecture != "gemma4_text":
        return {
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rope_parameters": rope,
            "rope_theta": backbone.rope.theta,  # for readers of the older spelling
        }
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": rope},
        "global_head_dim": backbone.head_dim,
        "num_global_key_value_heads": backbone.num_kv_heads,
        "attention_k_eq_v": backbone.values_from_keys,
        "final_logit_softcapping": backbone.logit_cap,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
    }


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
