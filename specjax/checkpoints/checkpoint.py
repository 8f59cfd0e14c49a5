"""What a file format offers, and the one loop that turns it into parameters."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.architectures import Architecture, Weight, get_size
from specjax.checkpoints.errors import CheckpointError, name_some
from specjax.decoding.types import PyTree
from specjax.models.config import TransformerConfig
from specjax.models.transformer import TransformerTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHECKED = 2**20  # values that are looked at together
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


class StoredTensor(NamedTuple):
    """A tensor that stays on disk until it is read."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of any format.

    Attributes:
      format: whose tensor names and layouts it has.
      architecture: the model family.
      config: in the spelling of Hugging Face's config.json.
      tensors: by the format's own names; matrices are [out, in].
      tokenizer: None if the checkpoint has none.
      stop_ids: end-of-sequence ids.
    """

    format: Literal["huggingface", "gguf"]
    architecture: Architecture
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    tokenizer: "PreTrainedTokenizerBase | None"
    stop_ids: tuple[int, ...]


def load_params(checkpoint: Checkpoint, config: TransformerConfig, dtype: str) -> PyTree:
    """Reads one tensor after the other into its final array.

    MTP layers that the checkpoint has besides (`mtp_layers`) are not read.

    Returns:
      The pytree of `TransformerTarget(config).param_shapes()`: matrices in `dtype`,
      vectors in float32.

    Raises:
      CheckpointError: missing, unexpected, unreadable or wrongly shaped tensors, or
        values that are not finite in float32.
    """
    check_depth(checkpoint.tensors, config.num_layers)
    shapes = TransformerTarget(config).param_shapes()
    weights = checkpoint.architecture.layer_weights(config.num_layers)
    names = {path: getattr(weight, checkpoint.format) for path, weight in weights.items()}
    # A tied head may be stored although it is the embedding.
    ignored = checkpoint.architecture.ignored
    harmless = {names["lm_head/weight"], *filter(ignored.fullmatch, checkpoint.tensors)}
    harmless |= mtp_tensors(checkpoint.tensors, mtp_layers(checkpoint.config)).keys()

    def convert(path: str, array: np.ndarray) -> np.ndarray:
        if checkpoint.format == "gguf":
            return _half_split(array, weights[path], config)
        return add_offset(array, weights[path])

    return read_params(checkpoint.tensors, shapes, names, dtype, harmless, convert)


def mtp_layers(config: Mapping[str, Any]) -> range:
    """Indices of a checkpoint's MTP layers, which follow those of the model (DeepSeek-V3).

    Raises:
      CheckpointError: numbers of layers that are none.
    """
    first = get_size(config, "num_hidden_layers")
    return range(first, first + get_size(config, "num_nextn_predict_layers", 0))


def mtp_tensors(tensors: Mapping[str, StoredTensor], layers: range) -> dict[str, StoredTensor]:
    """Those of the given layers of a Hugging Face checkpoint."""
    indices = {name: _LAYER.match(name) for name in tensors}
    return {name: tensors[name] for name, i in indices.items() if i and int(i[1]) in layers}


def add_offset(array: np.ndarray, weight: Weight) -> np.ndarray:
    """A parameter of what a Hugging Face checkpoint stores."""
    offset = weight.huggingface_offset
    return array.astype(np.float32) + offset if offset else array


def check_depth(tensors: Mapping[str, StoredTensor], num_layers: int) -> None:
    """Refuses a number of layers that would take forever to lay out.

    Raises:
      CheckpointError: fewer tensors than layers.
    """
    if num_layers > len(tensors):
        raise CheckpointError(f"missing tensors: {len(tensors)} cannot make {num_layers} layers")


def read_params(
    tensors: Mapping[str, StoredTensor],
    shapes: PyTree,
    names: Mapping[str, str],
    dtype: str,
    harmless: Collection[str] = (),
    convert: Callable[[str, np.ndarray], np.ndarray] = lambda path, array: array,
) -> PyTree:
    """Parameters of the given shapes, read one by one.

    Args:
      tensors: that the checkpoint has.
      shapes: pytree of `jax.ShapeDtypeStruct`.
      names: tensor of each parameter path ("layer_0/mlp/up_proj/weight").
      dtype: of the matrices; vectors become float32, integers stay.
      harmless: further tensors that may be there.
      convert: applied to each parameter's path and array.

    Raises:
      CheckpointError: as `load_params`.
    """
    flat: dict[str, Any] = {**flax.traverse_util.flatten_dict(shapes, sep="/")}
    expected = {names[path]: leaf.shape for path, leaf in flat.items()}
    _check_tensors(tensors, expected, {*expected, *harmless})

    def read(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = tensors[names[path]].read()
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            if not np.issubdtype(array.dtype, np.integer):
                raise CheckpointError(f"tensor {names[path]} holds {array.dtype}, not integers")
            return jnp.array(array, leaf.dtype)
        _check_finite(array, names[path])
        # One copy at a time beside the stored array, until the parameter is there: large tensors
        # are a large part of memory.
        array = cast(convert(path, array), dtype)
        return jax.block_until_ready(jnp.array(array))

    arrays = {path: read(path, leaf) for path, leaf in flat.items()}
    return flax.traverse_util.unflatten_dict(arrays, sep="/")


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """In the precision of parameters: matrices in `dtype`, vectors in float32."""
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return array.astype(dtype if array.ndim == 2 else np.float32, copy=False)


def _check_tensors(
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    harmless: set[str],
) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise CheckpointError(
            f"missing tensors: {name_some(missing)}; the checkpoint is incomplete or is "
            f"not the model that its configuration describes"
        )
    unexpected = [name for name in tensors if name not in harmless | expected.keys()]
    if unexpected:
        raise CheckpointError(
            f"unexpected tensors: {name_some(unexpected)}; the model has parts that its "
            f"configuration does not tell of or that are not supported"
        )
    wrong = [
        f"{name} has shape {tensors[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"wrong shapes: {name_some(wrong)}; check the configuration's sizes")


def _check_finite(array: np.ndarray, name: str) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise CheckpointError(f"tensor {name} holds {array.dtype} where numbers are expected")
    parts = np.array_split(array.reshape(-1), -(-array.size // _CHECKED) or 1)
    with np.errstate(invalid="ignore", over="ignore"):
        finite = all(np.all(np.isfinite(np.asarray(part, np.float32))) for part in parts)
    if not finite:
        raise CheckpointError(
            f"tensor {name} holds NaN or infinite values: the file is damaged, or was saved from "
            f"a run that had diverged; download or export it again"
        )


def _half_split(array: np.ndarray, weight: Weight, config: TransformerConfig) -> np.ndarray:
    """Undoes llama.cpp's order of rotary rows: (0, H/2, 1, ...) back to (0, 1, ..., H-1)."""
    if weight.gguf_interleaved_heads is None:
        return array
    num_heads = getattr(config, weight.gguf_interleaved_heads)
    pairs = array.reshape(num_heads, -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)
