"""Writes GGUF files as llama.cpp's converter does, from Hugging Face tensors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
# All values that a byte-level vocabulary needs, and the control tokens of a chat.
BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    original_max_len: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `tensors` (by Hugging Face name) with the sizes in `config`.

    Vectors stay in float32. `original_max_len` adds Llama 3's rotary divisors of that
    context; `extra` holds further metadata (numbers, strings, lists).
    """
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config["vocab_size"])
    for key, value in (extra or {}).items():
        _add(writer, key, value)
    if original_max_len is not None:
        divisors = llama3_divisors(config["head_dim"], rope)
        writer.add_tensor("rope_freqs.weight", divisors)
        if original_max_len != 8192:
            writer.add_rope_scaling_orig_ctx_len(original_max_len)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], config["num_hidden_layers"])
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        to = f"{names.get_name(stem) or stem}.{suffix}"
        if architecture == "llama" and name.endswith("q_proj.weight"):
            tensor = permute(tensor, config["num_attention_heads"])
        if architecture == "llama" and name.endswith("k_proj.weight"):
            tensor = permute(tensor, config["num_key_value_heads"])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        kind = quantization if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(to, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def llama3_divisors(head_dim: int, rope: Mapping[str, Any]) -> np.ndarray:
    """LlamaModel.generate_extra_tensors of llama.cpp's convert_hf_to_gguf.py."""
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.asarray(divisors, np.float32)
