"""Checkpoint folders: written whole or not at all, and what those of all drafters record."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from specjax.checkpoints.checkpoint import StoredTensor, read_params
from specjax.checkpoints.errors import CheckpointError, name_some
from specjax.checkpoints.huggingface import read_json
from specjax.decoding.types import PyTree
from specjax.models.target import Target

# Names of drafters under `architectures`: specjax's own formats, and DeepSpec's classes by the
# family of the draft layers.
OWN_DSPARK, OWN_MTP = "SpecjaxDSparkModel", "SpecjaxMTPModel"
DEEPSPEC = {"qwen3": "Qwen3DSparkModel", "gemma4_text": "Gemma4DSparkModel"}

# An entry of config.json that marks a target as written by specjax.
OWN_TARGET = {"written_by": "specjax"}

Kind = Literal["drafter", "target"]
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_TOKENIZER = {
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "additional_chat_templates"),
}


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    replace: bool,
    kind: Kind = "drafter",
    add: Callable[[Path], object] | None = None,
) -> None:
    """Writes a folder of config.json and model.safetensors, all of it or nothing.

    Args:
      directory: of the checkpoint; folders above it are made.
      config: of JSON values.
      tensors: by name.
      replace: a checkpoint of this kind that is there already makes place.
      kind: of the checkpoint.
      add: writes further files into the folder that it is given.

    Raises:
      ValueError: as `check_place`, or values that are not finite.
    """
    directory = Path(directory)
    check_place(directory, replace=replace, kind=kind)
    directory = directory.resolve()
    broken = [name for name, array in tensors.items() if not np.all(np.isfinite(array))]
    if broken:
        raise ValueError(f"{name_some(broken)} hold NaN or infinite values: training diverged")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    partial, old = scratch / "new", scratch / "old"
    try:
        partial.mkdir()
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items())
        (partial / _CONFIG).write_text("{\n" + ",\n".join(lines) + "\n}\n")
        # transformers reads files that name the framework whose layout they have.
        safetensors.numpy.save_file(dict(tensors), partial / _WEIGHTS, {"format": "pt"})
        (partial / _WEIGHTS).chmod(0o644)  # readable by others, as plain files are
        if add is not None:
            add(partial)
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
    finally:
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(scratch, ignore_errors=True)


def check_place(directory: Path, *, replace: bool, kind: Kind = "drafter") -> None:
    """Makes sure that a checkpoint can be written there without loss of anything else.

    Raises:
      ValueError: something is there, and is no checkpoint of this kind (of targets: none that
        specjax wrote), or is not to be replaced.
    """
    if not os.path.lexists(directory):
        return
    if not _holds(directory, kind):
        what = "no drafter's folder" if kind == "drafter" else "no target that specjax wrote"
        raise ValueError(f"{directory} exists and is {what}: give another folder")
    if not replace:
        raise ValueError(
            f"{directory} exists: remove it, give another folder, or have its {kind} replaced "
            f"(replace=True)"
        )


def _holds(directory: Path, kind: Kind) -> bool:
    """Whether a folder holds a checkpoint of this kind and nothing else."""
    try:
        raw = read_json(directory / _CONFIG)
        inside = {path.name for path in directory.iterdir()}
    except (CheckpointError, OSError):
        return False
    if kind == "target":
        own = OWN_TARGET.items() <= raw.items()
        return own and inside <= {_CONFIG, _WEIGHTS, *_TOKENIZER}
    known = drafter_kind(raw) in (OWN_DSPARK, OWN_MTP, *DEEPSPEC.values())
    return known and inside <= {_CONFIG, _WEIGHTS}


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a drafter's folder.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    if not (directory / _CONFIG).is_file():
        raise CheckpointError(f"{directory} is not a folder with a {_CONFIG}")
    return read_json(directory / _CONFIG)


def drafter_kind(raw: Mapping[str, Any]) -> Any:
    """What config.json names first under `architectures`; None where there is nothing."""
    kinds = raw.get("architectures")
    return kinds[0] if isinstance(kinds, list) and kinds else None


def stored_tensors(params: PyTree, names: Mapping[str, str], dtype: str) -> dict[str, np.ndarray]:
    """Parameters as a file holds them: matrices in `dtype`, vectors as they are.

    Args:
      params: pytree of arrays.
      names: tensor of each parameter path ("layer_0/mlp/up_proj/weight").
      dtype: of the matrices.

    Raises:
      ValueError: an unknown dtype.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}")
    flat: dict[str, Any] = {**flax.traverse_util.flatten_dict(params, sep="/")}
    return {
        names[path]: np.asarray(leaf.astype(dtype) if leaf.ndim == 2 else leaf)
        for path, leaf in flat.items()
    }


def same_shapes(params: PyTree, shapes: PyTree) -> bool:
    """Whether parameters have the structure and the shapes of a model's."""
    return jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)


def read_drafter(
    tensors: Mapping[str, StoredTensor],
    shapes: PyTree,
    names: Mapping[str, str],
    target: Target,
    convert: Callable[[str, np.ndarray], np.ndarray] = lambda path, array: array,
) -> PyTree:
    """Parameters of a drafter, matrices in the target's dtype; see `read_params`.

    Raises:
      CheckpointError: as `read_params`, or ids of a trimmed vocabulary that are none.
    """
    params = read_params(tensors, shapes, names, target.dtype, convert=convert)
    if "draft_ids" in params:
        ids, vocab_size = np.asarray(params["draft_ids"]), target.model.vocab_size
        if ids[0] < 0 or ids[-1] >= vocab_size or np.any(np.diff(ids) < 1):
            raise CheckpointError(
                f"draft_ids must be increasing token ids from 0 to {vocab_size - 1}: "
                f"the file is damaged"
            )
    return params


def target_record(target: Target) -> dict[str, str]:
    """What a drafter's config.json says of its target."""
    return {"target_name": target.name, "target_fingerprint": target.fingerprint()}


def check_target(raw: Mapping[str, Any], target: Target) -> None:
    """Refuses another target than the checkpoint names; of DeepSpec's, that names none, any fits.

    Raises:
      CheckpointError: it has other weights; or specjax's own format, which names one, does not.
    """
    recorded = raw.get("target_fingerprint")
    if recorded is None:
        if drafter_kind(raw) in (OWN_DSPARK, OWN_MTP):
            raise CheckpointError("config.json has no target_fingerprint: the file is damaged")
        return
    found = target.fingerprint()
    if recorded != found:
        raise CheckpointError(
            f"it was trained for the target {raw.get('target_name')!r} (fingerprint "
            f"{str(recorded)[:12]}), and {target.name!r} ({found[:12]}) has other weights: load "
            f"it for its own target (config.target), or with any_target=True (config.any_target), "
            f"with which few drafts may be accepted"
        )
