"""MTP modules: specjax's own format, and MTP layers in a model's directory.

specjax's own leaves out the embedding and the head, which are the target's, whose fingerprint
it records. A Hugging Face directory in DeepSeek-V3's layout holds the modules as layers that
follow those of the model (`num_nextn_predict_layers` of config.json); `load_target` leaves
them alone.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import numpy as np

from specjax.checkpoints.architectures import Architecture, Weight, get_architecture
from specjax.checkpoints.checkpoint import (
    StoredTensor,
    add_offset,
    cast,
    check_depth,
    mtp_layers,
    mtp_tensors,
)
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import (
    OWN_MTP,
    check_target,
    drafter_kind,
    read_config,
    read_drafter,
    target_record,
)
from specjax.checkpoints.huggingface import language_model, open_weights
from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import attach_target, check_draft_vocab, drafters_own
from specjax.drafters.mtp import MTP, MTPConfig
from specjax.files import changes
from specjax.models.config import TransformerConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget

# What config.json holds besides the fields of `MTPConfig`.
_ABOUT = {"architectures", "target_name", "target_fingerprint"}
# Tensors of an MTP layer by the parameters of a module; its block's are the family's.
_NEXTN = {
    "embedding_norm/scale": "enorm.weight",
    "hidden_norm/scale": "hnorm.weight",
    "projection/weight": "eh_proj.weight",
    "final_norm/scale": "shared_head.norm.weight",
}
_COPIES = {"embed": "embed_tokens.weight", "lm_head": "shared_head.head.weight"}
# What the blocks of other models may have.
_UNSUPPORTED = {
    "multi-head latent attention (MLA)": re.compile(r".*\.self_attn\.(q|kv)_[ab]_\w+\..*"),
    "experts": re.compile(r".*\.mlp\.(experts|shared_experts|shared_expert|gate)\..*"),
}


def mtp_record(model: MTP, target: Target) -> tuple[dict[str, Any], dict[str, str]]:
    """config.json of specjax's own format, and the tensor of each parameter path.

    Raises:
      CheckpointError: modules that do not fit the target.
    """
    _check_fits(model, target)
    raw = {"architectures": [OWN_MTP], **dataclasses.asdict(model.config), **target_record(target)}
    return raw, _names(model.param_shapes())


def open_mtp(directory: Path, target: Target, *, any_target: bool = False) -> tuple[MTP, PyTree]:
    """MTP modules in specjax's own format and their parameters, matrices in the target's dtype.

    Args:
      directory: of the checkpoint.
      target: that they extend.
      any_target: they may have been trained for another target.

    Raises:
      CheckpointError: files that are missing, damaged or of another kind; options that are
        unknown or wrong; or modules that do not fit the target or were trained for another.
    """
    raw = read_config(directory)
    if drafter_kind(raw) != OWN_MTP:
        raise CheckpointError(
            f"architectures names {drafter_kind(raw)!r}, expected {OWN_MTP}: load it with "
            f"load_drafter"
        )
    model = MTP(_config(raw))
    if not any_target:
        check_target(raw, target)
    _check_fits(model, target)
    tensors = open_weights(directory)
    check_depth(tensors, 1 if model.config.shared_module else model.config.depth)
    shapes = drafters_own(model.param_shapes())
    params = read_drafter(tensors, shapes, _names(shapes), target)
    return model, attach_target(params, target)


def open_mtp_layers(
    directory: Path, target: Target, *, any_target: bool = False
) -> tuple[MTP, PyTree]:
    """The MTP layers of a model's directory (DeepSeek-AI, arXiv 2412.19437), as modules.

    Layer L + j of a model of L layers is module j + 1. Hidden states are handed on after the
    final norm, from module to module, and follow the embedding in the projection's input.
    The model's embedding, head and last layer, and the modules' copies of the former two,
    must be the target's, which takes their place.

    Args:
      directory: a Hugging Face model's, whose config.json has `num_nextn_predict_layers`.
      target: that they extend: the same model.
      any_target: it may be another that they fit.

    Raises:
      CheckpointError: files that are missing or damaged; layers with parts that are not
        supported; or another model's.
    """
    config, stored = language_model(directory)
    layers = mtp_layers(config)
    tensors = mtp_tensors(stored, layers)
    _check_supported(tensors)
    if not layers or not tensors:
        raise CheckpointError(
            f"{directory} has no MTP layers: config.json tells of {len(layers)} "
            f"(num_nextn_predict_layers), and there are {len(tensors)} tensors of them"
        )
    check_depth(tensors, len(layers))
    architecture = get_architecture(config)
    last = layers.start - 1
    block = dataclasses.replace(architecture.config(config).layer(last), num_layers=1)
    model = MTP(MTPConfig(block, depth=len(layers), tap=last))
    _check_fits(model, target)
    copies = {f"model.layers.{i}.{name}": part for i in layers for part, name in _COPIES.items()}
    if not any_target:
        _check_model(stored, copies, architecture, target)
    weights = _layer_weights(architecture, layers)
    harmless = {*copies, *filter(architecture.ignored.fullmatch, tensors)}
    own = {name: tensor for name, tensor in tensors.items() if name not in harmless}
    params = read_drafter(
        own,
        drafters_own(model.param_shapes()),
        {path: weight.huggingface for path, weight in weights.items()},
        target,
        lambda path, array: add_offset(array, weights[path]),
    )
    return model, attach_target(params, target)


def trim_mtp(
    model: MTP, params: PyTree, draft_vocab: Sequence[int], target: Target
) -> tuple[MTP, PyTree]:
    """The modules with a trimmed vocabulary.

    Args:
      model: the modules.
      params: their parameters.
      draft_vocab: ids of the tokens that may be drafted.
      target: that they extend.

    Raises:
      ValueError: ids outside the vocabulary or named twice, or a vocabulary that is trimmed
        already.
    """
    if model.config.draft_vocab_size is not None:
        raise ValueError("the drafter's vocabulary is trimmed already")
    ids = check_draft_vocab(draft_vocab, model.config.block.vocab_size)
    trimmed = MTP(dataclasses.replace(model.config, draft_vocab_size=len(ids)))
    return trimmed, attach_target({**params, "draft_ids": ids}, target)


def _config(raw: Mapping[str, Any]) -> MTPConfig:
    """The configuration, every option of which must be there, known and of its type."""
    values = {name: value for name, value in raw.items() if name not in _ABOUT}
    mistakes = _mistakes(MTPConfig, values)
    if mistakes:
        raise CheckpointError(
            f"the configuration has {', '.join(mistakes)}: the file is damaged, or of another "
            f"version of specjax"
        )
    try:
        return MTPConfig(**{**values, "block": TransformerConfig.from_plain(values["block"])})
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"the configuration makes no modules: {error}") from error


def _mistakes(kind: Any, values: Any) -> list[str]:
    """Fields of a dataclass that JSON lacks, and values that cannot be such, for messages."""
    if not isinstance(values, Mapping):
        return [f"{values!r} for a mapping"]
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    found = [f"no {name!r}" for name in sorted(fields.keys() - values.keys())]
    for name, value in values.items():
        if name not in fields:
            found.append(f"the unknown {name!r}")
        elif dataclasses.is_dataclass(fields[name]):
            found += _mistakes(fields[name], value)
        elif not _is_of(fields[name], value):
            found.append(f"{name}={value!r}")
    return found


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a JSON value is of the type that a field declares."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return value in parts
    if parts:
        return any(_is_of(part, value) for part in parts)
    if type(value) is int:
        return kind in (int, float) and abs(value) < 2**31
    return type(value) is kind


def _check_fits(model: MTP, target: Target) -> None:
    """Makes sure that modules can draft for a target.

    Raises:
      CheckpointError: another vocabulary, width, scale of the embedding or cap of the logits;
        modules that do not follow the target's last layer; or a target that is not ours.
    """
    config, other = model.config, target.model
    if not isinstance(other, TransformerTarget):
        raise CheckpointError(f"{target.name} was not loaded by specjax, which MTP modules need")
    fields = ("vocab_size", "width", "embed_scale", "logit_cap")
    modules, targets = (
        {name: getattr(part, name) for name in fields} for part in (config.block, other.config)
    )
    modules["tap"], targets["tap"] = config.tap, other.config.num_layers - 1
    if differing := changes(modules, targets):
        raise CheckpointError(
            f"the modules were made for another target than {target.name}: {'; '.join(differing)}"
        )
    if config.block.num_layers != 1:
        raise CheckpointError(f"a module has one layer, got {config.block.num_layers}")
    if config.depth >= other.max_len:
        raise CheckpointError(f"depth {config.depth} exceeds the context of {target.name}")
    if config.draft_vocab_size is not None and not 0 < config.draft_vocab_size <= other.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size must be from 1 to {other.vocab_size}, got {config.draft_vocab_size}"
        )


def _names(params: PyTree) -> dict[str, str]:
    """Tensor by parameter path, in specjax's own format."""
    return {
        path: path.replace("/", ".") for path in flax.traverse_util.flatten_dict(params, sep="/")
    }


def _layer_weights(architecture: Architecture, layers: range) -> dict[str, Weight]:
    """Where each parameter of the modules is found in a family's checkpoint."""
    norm = architecture.weights["final_norm/scale"]
    weights = {}
    for j, i in enumerate(layers):
        for path, name in _NEXTN.items():
            offset = norm.huggingface_offset if "norm" in path else 0.0
            weights[f"module_{j}/{path}"] = Weight(
                f"model.layers.{i}.{name}", "", huggingface_offset=offset
            )
        for path, weight in architecture.weights.items():
            if path.startswith("layer_{i}/"):
                weights[path.replace("layer_{i}", f"module_{j}/block")] = dataclasses.replace(
                    weight, huggingface=weight.huggingface.format(i=i)
                )
    return weights


def _check_supported(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuses layers with parts that our blocks do not have, by the names of their tensors."""
    for what, pattern in _UNSUPPORTED.items():
        found = next(filter(pattern.fullmatch, tensors), None)
        if found is not None:
            raise CheckpointError(
                f"the MTP layers have {what} ({found}), which specjax's models do not: only "
                f"layers of the dense families that load_target knows can be loaded"
            )


def _check_model(
    stored: Mapping[str, StoredTensor],
    copies: Mapping[str, str],
    architecture: Architecture,
    target: Target,
) -> None:
    """Makes sure that a directory's model is the target, by some of its matrices.

    Args:
      stored: the tensors of the directory.
      copies: which of them are the embedding or the head again.
      architecture: of the model.
      target: what it should be.
    """
    shared = attach_target({}, target)
    matrices = {name: shared[part]["weight"] for name, part in copies.items()}
    own: dict[str, Any] = {**flax.traverse_util.flatten_dict(target.params, sep="/")}
    last = target.model.config.num_layers - 1  # type: ignore[attr-defined]
    for path, weight in architecture.layer_weights(last + 1).items():
        compared = path.startswith(("embed/", "lm_head/", f"layer_{last}/"))
        if compared and path in own and own[path].ndim == 2:
            matrices[weight.huggingface] = own[path]
    for name, matrix in matrices.items():
        if name not in stored:
            continue
        if not np.array_equal(cast(stored[name].read(), target.dtype), np.asarray(matrix)):
            raise CheckpointError(
                f"{name} is not {target.name}'s, which would take its place: load the target "
                f"from the same checkpoint, or give any_target=True (config.any_target), with "
                f"which few drafts may be accepted"
            )
