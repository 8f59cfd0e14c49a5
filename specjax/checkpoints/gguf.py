"""GGUF files, of any quantisation that the `gguf` package can undo.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor, dequantize

from specjax.checkpoints.architectures import get_architecture, get_number, get_size
from specjax.checkpoints.checkpoint import Checkpoint, StoredTensor
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_tokenizer import build_tokenizer
from specjax.checkpoints.raw_config import raw_rope
from specjax.models.config import RopeConfig
from specjax.models.layers import rope_frequencies

# model_type of config.json by general.architecture, for the families that are translated.
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
# Keys of GGUF's metadata, without the architecture's prefix, by those of config.json.
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
# Options that GGUF files of a supported architecture may carry, with the only value
# that leaves the model as it is.
_NEUTRAL = {
    "expert_count": 0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.local.freq_base": 10_000.0,
}
# Those that Gemma 3 may have.
_NEUTRAL_BUT_IN_GEMMA = {"attention.sliding_window": 0, "final_logit_softcapping": 0.0}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Gemma ends a text with the first and a turn with the second; files name one of them alone.
_GEMMA_STOPS = ("<eos>", "<end_of_turn>")


class _Reader(GGUFReader):
    """Reads arrays in one go.

    The package makes several NumPy views of every element, which takes seconds for a
    vocabulary and its merges.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: Any) -> tuple[int, list, list, list]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        view, offset = self.data.data, orig_offs + 12
        kind, count = struct.unpack_from("<IQ", view, orig_offs)
        kind = GGUFValueType(kind)
        if kind in self.gguf_scalar_to_np:
            parts = [self._get(offset, self.gguf_scalar_to_np[kind], count)]
            offset += parts[0].nbytes
        elif kind == GGUFValueType.STRING:
            parts = []
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", view, offset)
                parts.append(view[offset + 8 : offset + 8 + length])
                offset += 8 + length
        else:
            raise ValueError(f"arrays of {kind.name} are not supported")
        return offset - orig_offs, parts, list(range(len(parts))), [GGUFValueType.ARRAY, kind]


def open_gguf(path: Path) -> Checkpoint:
    """Opens a .gguf file.

    Raises:
      CheckpointError: a damaged file, or an option that is not supported.
    """
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, ArithmeticError, OSError, struct.error) as error:
        raise CheckpointError(
            f"{path} is not a whole GGUF file (truncated, damaged or of a newer kind): {error}"
        ) from error
    family = metadata.get("general.architecture")
    if not isinstance(family, str) or family not in _MODEL_TYPES:
        raise CheckpointError(
            f"architecture {family!r} (general.architecture) is not supported in GGUF files: "
            f"known are {', '.join(_MODEL_TYPES)}"
        )
    parts = get_size(metadata, "split.count", 1)
    if parts > 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts: join them with `llama-gguf-split --merge`"
        )
    tensors = {tensor.name: _stored_tensor(tensor) for tensor in reader.tensors}
    return Checkpoint(
        format="gguf",
        architecture=get_architecture({"model_type": _MODEL_TYPES[family]}),
        config=_config(metadata, tensors),
        tensors=tensors,
        tokenizer=build_tokenizer(metadata),
        stop_ids=_stop_ids(metadata),
    )


def _stored_tensor(tensor: ReaderTensor) -> StoredTensor:
    def read() -> np.ndarray:
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {tensor.name} has the quantisation {tensor.tensor_type.name}, which "
                f"the gguf package cannot undo: use a file of another quantisation (Q8_0, F16)"
            ) from error

    return StoredTensor(tuple(int(size) for size in reversed(tensor.shape)), read)


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The metadata in the spelling of config.json."""
    prefix = metadata["general.architecture"]
    options = {
        name.removeprefix(f"{prefix}."): value
        for name, value in metadata.items()
        if name.startswith(f"{prefix}.")
    }
    neutral = _NEUTRAL if prefix == "gemma3" else _NEUTRAL | _NEUTRAL_BUT_IN_GEMMA
    for name, only in neutral.items():
        if options.get(name, only) != only:
            raise CheckpointError(f"{prefix}.{name}={options[name]!r} is not supported")
    config = {key: options.get(name) for key, name in _CONFIG_KEYS.items()}
    for key in ("rms_norm_eps", "max_position_embeddings"):  # no default in this format
        if config[key] is None:
            raise CheckpointError(f"the metadata lacks {prefix}.{_CONFIG_KEYS[key]}")
    # Stored in float32: 1e-05 comes as 9.99999975e-06.
    config["rms_norm_eps"] = float(f"{get_number(config, 'rms_norm_eps'):.6g}")
    if config["vocab_size"] is None:  # left out by older files
        tokens = metadata.get("tokenizer.ggml.tokens")
        config["vocab_size"] = len(tokens) if isinstance(tokens, list) else None
    if config["head_dim"] is None:
        config["head_dim"] = options.get("rope.dimension_count")
    if config["head_dim"] is None:
        num_heads = get_size(config, "num_attention_heads")
        config["head_dim"] = get_size(config, "hidden_size") // max(num_heads, 1)
    for name in ("rope.dimension_count", "attention.value_length"):
        if options.get(name, config["head_dim"]) != config["head_dim"]:
            raise CheckpointError(
                f"{prefix}.{name}={options[name]} is not supported: only the whole width of a "
                f"head, {config['head_dim']}, is"
            )
    config["model_type"] = _MODEL_TYPES[prefix]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    divisors = tensors.get("rope_freqs.weight")
    config["rope_parameters"] = _rope_parameters(options, config, divisors)
    return config | _gemma3_config(options, config) if prefix == "gemma3" else config


def _gemma3_config(options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has. Files leave most of it out, for which llama.cpp's values stand."""
    window = get_size(options, "attention.sliding_window", 0)
    period = options.get("attention.sliding_window_pattern", 6)  # of layers without a window
    if get_size(config, "num_hidden_layers") == 62:  # the model of 27 billion parameters
        num_heads = get_size(config, "num_attention_heads")
        scaled_width = get_size(config, "hidden_size") // max(num_heads, 1)
    else:
        scaled_width = config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_width,
        "rope_local_base_freq": get_number(options, "rope.freq_base_swa", 10_000.0),
        "sliding_window": window or None,
        "sliding_window_pattern": period if window else 1,
        "final_logit_softcapping": options.get("final_logit_softcapping") or None,
    }


def _rope_parameters(
    options: Mapping[str, Any], config: Mapping[str, Any], divisors: StoredTensor | None
) -> dict[str, float | int | str]:
    """Rotary embedding; Llama 3's rescaling is stored as divisors of the frequencies."""
    kind = options.get("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if "rope.scaling.factor" in options else "rope.scale_linear"
    factor = 1.0 if kind == "none" else get_number(options, key, 1.0) or 1.0
    if kind not in ("none", "linear") or (factor != 1.0 and divisors is not None):
        raise CheckpointError(f"rope scaling {kind!r} by {factor} is not supported in GGUF files")
    theta = get_number(options, "rope.freq_base", 10_000.0)
    if divisors is None:
        rope = {"rope_type": "default", "rope_theta": theta}
        return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}
    head_dim = get_size(config, "head_dim")
    if head_dim % 2 or divisors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"rope_freqs.weight has shape {divisors.shape}, which does not fit heads of {head_dim}"
        )
    # The file does not say how the divisors were made: they must be those of Llama 3.
    stored = np.asarray(divisors.read(), np.float32)
    try:
        rope = RopeConfig(
            kind="llama3",
            theta=theta,
            factor=round(float(stored.max()), 3),
            original_max_len=get_size(options, "rope.scaling.original_context_length", 8192),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"the rotary embedding is damaged: {error}") from error
    plain = np.asarray(rope_frequencies(RopeConfig(theta=theta), head_dim))
    scaled = np.asarray(rope_frequencies(rope, head_dim))
    if not np.allclose(scaled * stored, plain, rtol=1e-3, atol=0.0):
        raise CheckpointError(
            f"rope_freqs.weight is not Llama 3's rescaling (low_freq_factor 1, "
            f"high_freq_factor 4, {rope.original_max_len} original positions), the only one "
            f"supported in GGUF files: load the model from its Hugging Face directory"
        )
    return raw_rope(rope)


def _stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{key}" for key in _STOP_KEYS]
    ids = [get_size(metadata, key) for key in keys if key in metadata]
    if metadata["general.architecture"] == "gemma3":
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        ids += [tokens.index(token) for token in _GEMMA_STOPS if token in tokens]
    return tuple(dict.fromkeys(ids))
