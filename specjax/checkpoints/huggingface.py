"""Hugging Face directories: config.json, safetensors weights and tokeniser files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.architectures import get_architecture
from specjax.checkpoints.checkpoint import Checkpoint, StoredTensor
from specjax.checkpoints.errors import CheckpointError, name_some

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LANGUAGE_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_DRAFTERS = ("DSparkModel", "Eagle3Model", "MTPModel")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_KINDS = ("F64", "F32", "F16", "BF16", "I32")


def open_huggingface(directory: Path) -> Checkpoint:
    """Opens a directory as `save_pretrained` writes it, or as the hub holds it.

    Raises:
      CheckpointError: files that are missing, damaged or of an unsupported kind.
    """
    if not (directory / "config.json").is_file():
        inside = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f"; to load a GGUF file, give its path ({inside[0]})" if inside else ""
        raise CheckpointError(f"the directory {directory} has no config.json{hint}")
    kinds = read_json(directory / "config.json").get("architectures")
    if isinstance(kinds, list) and any(str(kind).endswith(_DRAFTERS) for kind in kinds):
        raise CheckpointError(f"{directory} holds a drafter: load it with load_drafter")
    config, tensors = language_model(directory)
    return Checkpoint(
        format="huggingface",
        architecture=get_architecture(config),
        config=config,
        tensors=tensors,
        tokenizer=_load_tokenizer(directory),
        stop_ids=_stop_ids(directory, config),
    )


def language_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The entries of config.json with those of the language model in a larger one, if any."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    if text.get("eos_token_id") is None:
        text = {**text, "eos_token_id": raw.get("eos_token_id")}
    return {**raw, **text}


def language_model(directory: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Configuration and tensors of a model, or of the language model in a larger one.

    Raises:
      CheckpointError: files that are missing or damaged.
    """
    raw, tensors = read_json(directory / "config.json"), open_weights(directory)
    config = language_config(raw)
    return config, tensors if config is raw else _language_tensors(tensors)


def _language_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Those of a nested language model, under the names that it has alone."""
    if not any(name.startswith(tuple(_LANGUAGE_PREFIXES)) for name in tensors):
        return dict(tensors)
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        for prefix, alone in {**_LANGUAGE_PREFIXES, "lm_head.": "lm_head."}.items():
            new = alone + name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if new in renamed:
                raise CheckpointError(f"the checkpoint has {new} of its language model twice")
            renamed[new] = tensor
    return renamed


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      CheckpointError: not such a file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def open_weights(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory's safetensors file or files, which stay on disk.

    Raises:
      CheckpointError: there are none, or they are damaged.
    """
    if (directory / _WEIGHTS).is_file():
        return open_safetensors(directory / _WEIGHTS)
    if (directory / _INDEX).is_file():
        tensors = {}
        places = _weight_map(directory / _INDEX)
        for shard in sorted(set(places.values())):
            stored = open_safetensors(directory / shard)
            # A file may also hold what the index says is in another.
            tensors |= {n: tensor for n, tensor in stored.items() if places.get(n, shard) == shard}
        return tensors
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise CheckpointError(
            f"{directory} has only pickled weights ({name_some(pickled)}), which can run "
            f"arbitrary code and are never opened: convert them to safetensors"
        )
    if (directory / "target").is_dir():
        raise CheckpointError(f"{directory} is the folder of a run: give {directory / 'target'}")
    raise CheckpointError(f"{directory} has no weights: expected {_WEIGHTS} or {_INDEX}")


def _weight_map(index: Path) -> dict[str, str]:
    """The shard file of each tensor; all of them exist beside the index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' from tensor names to shards")
    places = {name: str(shard) for name, shard in weight_map.items()}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names a shard outside its directory: {shard!r}")
        if not (index.parent / shard).is_file():
            raise CheckpointError(
                f"{index} names the shard {shard!r}, which is missing: download it again"
            )
    return places


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, which stay on disk.

    Raises:
      CheckpointError: not a whole safetensors file.
    """
    try:
        file = safe_open(path, framework="numpy")
        names = file.keys()
        return {name: _stored_tensor(file, name, path) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file (truncated or damaged): {error}"
        ) from error


def _stored_tensor(file: Any, name: str, path: Path) -> StoredTensor:
    stored = file.get_slice(name)
    kind = stored.get_dtype()

    def read() -> np.ndarray:
        if kind not in _KINDS:
            raise CheckpointError(
                f"tensor {name} of {path} is stored as {kind}: only "
                f"{', '.join(_KINDS)} are supported"
            )
        return file.get_tensor(name)

    return StoredTensor(tuple(stored.get_shape()), read)


def _stop_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json has the last word; null there means no stop token."""
    source, name = config, "config.json"
    if (directory / "generation_config.json").is_file():
        generation = read_json(directory / "generation_config.json")
        if "eos_token_id" in generation:
            source, name = generation, "generation_config.json"
    value = source.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(
            f"eos_token_id of {directory / name} must be a token id, a list of them or null, "
            f"got {value!r}"
        )
    return tuple(ids)


def _load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase | None":
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to import: only when there is a tokeniser

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(
            f"the tokeniser files of {directory} are unusable: {error}"
        ) from error
