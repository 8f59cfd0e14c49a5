"""From a `TransformerConfig` back to config.json: the inverse of architectures.py."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.architectures import get_architecture
from specjax.files import changes
from specjax.models.config import RopeConfig, TransformerConfig

_MODEL_TYPES = {"gemma3": "gemma3_text"}  # where it is not the architecture's name


def raw_config(config: TransformerConfig) -> dict[str, Any]:
    """The entries of config.json that stand for a model; `lost` says what they do not tell."""
    c, family, sliding = config, config.architecture, config.sliding
    raw: dict[str, Any] = {
        "model_type": _MODEL_TYPES.get(family, family),
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_len,
        "tie_word_embeddings": c.tied_head,
    }
    if family not in ("llama", "mistral"):
        layers = () if sliding is None else sliding.layers
        kinds = ("full_attention", "sliding_attention")
        raw["layer_types"] = [kinds[i in layers] for i in range(c.num_layers)]
    if sliding is not None or family == "mistral":
        raw["sliding_window"] = None if sliding is None else sliding.window
    if sliding is not None and family in ("qwen2", "qwen3"):
        raw["use_sliding_window"] = True
    if family in ("gemma3", "gemma4_text"):
        ropes = {"full_attention": raw_rope(c.rope)}
        if sliding is not None:
            ropes["sliding_attention"] = raw_rope(sliding.rope)
        raw["rope_parameters"] = ropes
    else:
        raw["rope_parameters"] = raw_rope(c.rope)
        raw["rope_theta"] = c.rope.theta  # for readers of the older spelling
    if family.startswith("gemma"):
        raw["hidden_activation"] = "gelu_pytorch_tanh"
        raw["final_logit_softcapping"] = c.logit_cap
    else:
        raw["hidden_act"] = "silu"
    if family in ("gemma2", "gemma3"):
        raw["query_pre_attn_scalar"] = _query_scalar(c.attention_scale)
        raw["attn_logit_softcapping"] = c.attention_cap
    if family == "gemma4_text":
        raw |= {
            "num_key_value_heads": c.num_kv_heads if sliding is None else sliding.num_kv_heads,
            "head_dim": c.head_dim if sliding is None else sliding.head_dim,
            "num_global_key_value_heads": c.num_kv_heads,
            "global_head_dim": c.head_dim,
            "attention_k_eq_v": c.values_from_keys,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
        }
    return raw


def lost(raw: Mapping[str, Any], config: TransformerConfig) -> list[str]:
    """What of a model config.json does not tell: "key (what is read, now what it has)".

    Raises:
      CheckpointError: no model is read from it.
    """
    read = get_architecture(raw).config(raw)
    return changes(dataclasses.asdict(read), dataclasses.asdict(config))


def raw_rope(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` of config.json that stand for a rotary embedding."""
    raw: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind in ("linear", "llama3") or rope.factor != 1.0:
        raw["factor"] = rope.factor
    if rope.kind == "proportional":
        raw["partial_rotary_factor"] = rope.rotated
    if rope.kind == "llama3":
        raw |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_len,
        }
    return raw


def _query_scalar(scale: float | None) -> int | None:
    """The number whose power of -1/2 the scale is; transformers takes whole ones alone."""
    return None if scale is None else round(scale**-2)
