"""What is particular to a model family: its configuration and the names of its weights.

Another family is one function from its config.json to a `TransformerConfig` and one
table of names, entered in `ARCHITECTURES`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from specjax.checkpoints.errors import CheckpointError
from specjax.models.config import RopeConfig, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Weight:
    """Where a parameter is found in each format; `{i}` stands for the layer.

    Attributes:
      huggingface: name of the tensor in a Hugging Face checkpoint.
      gguf: name of the tensor in a GGUF file.
      gguf_interleaved_heads: the field of `TransformerConfig` that counts the heads,
        if GGUF orders each head's rows in neighbouring rotary pairs (0, H/2, 1, ...).
    """

    huggingface: str
    gguf: str
    gguf_interleaved_heads: Literal["num_heads", "num_kv_heads"] | None = None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model family.

    Attributes:
      config: translates config.json; raises CheckpointError for what we do not implement.
      weights: tensor names by parameter path.
      ignored: pattern of tensors that carry no parameter.
    """

    config: Callable[[Mapping[str, Any]], TransformerConfig]
    weights: Mapping[str, Weight]
    ignored: re.Pattern[str]

    def layer_weights(self, num_layers: int) -> dict[str, Weight]:
        """The table with every layer written out."""
        return {
            path.format(i=i): dataclasses.replace(
                weight,
                huggingface=weight.huggingface.format(i=i),
                gguf=weight.gguf.format(i=i),
            )
            for path, weight in self.weights.items()
            for i in (range(num_layers) if "{i}" in path else [0])
        }


def get_architecture(config: Mapping[str, Any]) -> Architecture:
    """The family that `config["model_type"]` names.

    Raises:
      CheckpointError: a family we do not implement.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {kind!r} (model_type) is not supported: "
            f"known are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[kind]


def get_number(config: Mapping[str, Any], key: str, default: int | float | None = None) -> float:
    """A number of the configuration; without a default it must be there.

    Raises:
      CheckpointError: it is missing or not a finite number.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the configuration lacks {key!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{key} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise CheckpointError(f"{key} must be a finite number, got {value!r}")
    return number


def get_size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of the configuration, of 32 bits as XLA's indices.

    Raises:
      CheckpointError: it is missing or not such a number.
    """
    value = get_number(config, key, default)
    if not value.is_integer() or not 0 <= value < 2**31:
        raise CheckpointError(f"{key} must be a whole number from 0 to 2**31 - 1, got {value}")
    return int(value)


def _refuse(config: Mapping[str, Any], implemented: Mapping[str, Any]) -> None:
    """Refuses options set to anything but the one value that we implement."""
    for key, only in implemented.items():
        value = config.get(key)
        if value is not None and value != only:
            raise CheckpointError(f"{key}={value!r} is not supported: only {only!r} is")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes everything into rope_parameters; before that the base stood
    # at the top level and rope_scaling ("type" before "rope_type") held the rest.
    given = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    for rope in given:
        if not isinstance(rope, Mapping | None):
            raise CheckpointError(f"rope_parameters must be a mapping, got {rope!r}")
    rope = given[0] or given[1] or {}
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    kind = kinds[0] if kinds else "default"
    base = rope if rope.get("rope_theta") is not None else config
    theta = get_number(base, "rope_theta", 10_000.0)
    _refuse(rope, {"partial_rotary_factor": 1.0})
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=get_number(rope, "factor"),
            low_freq_factor=get_number(rope, "low_freq_factor"),
            high_freq_factor=get_number(rope, "high_freq_factor"),
            original_max_len=get_size(rope, "original_max_position_embeddings"),
        )
    raise CheckpointError(f"rope type {kind!r} is not supported: known are default, llama3")


def raw_rope(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` of config.json that stand for a rotary embedding."""
    raw: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "llama3":
        raw |= {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_len,
        }
    return raw


def _transformer_config(config: Mapping[str, Any], **particular: Any) -> TransformerConfig:
    """What the families have in common; `particular` are fields of the family's own.

    Raises:
      CheckpointError: options that we do not implement, or missing or wrong values.
    """
    _refuse(
        config,
        {
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "partial_rotary_factor": 1.0,
        },
    )
    if config.get("quantization_config"):
        raise CheckpointError(
            "quantization_config: quantised Hugging Face checkpoints are not supported; "
            "give the unquantised model or a .gguf file"
        )
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool | None):
        raise CheckpointError(f"tie_word_embeddings must be true or false, got {tied!r}")
    width = get_size(config, "hidden_size")
    num_heads = get_size(config, "num_attention_heads")
    try:
        return TransformerConfig(
            vocab_size=get_size(config, "vocab_size"),
            width=width,
            mlp_width=get_size(config, "intermediate_size"),
            num_layers=get_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=get_size(config, "num_key_value_heads", num_heads),
            head_dim=get_size(config, "head_dim", width // max(num_heads, 1)),
            norm_eps=get_number(config, "rms_norm_eps", 1e-6),
            max_len=get_size(config, "max_position_embeddings", 2048),
            rope=_rope(config),
            tied_head=bool(tied),
            **particular,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"the configuration makes no model: {error}") from error


def _llama_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Llama 1 to 3 and all that share their architecture (SmolLM2, TinyLlama, ...)."""
    return _transformer_config(config, architecture="llama")


def _qwen3_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Qwen3, dense: Llama with normalised queries and keys."""
    _refuse(config, {"use_sliding_window": False})
    return _transformer_config({"head_dim": 128, **config}, architecture="qwen3", qk_norm=True)


_LLAMA = Architecture(
    config=_llama_config,
    weights={
        "embed/weight": Weight("model.embed_tokens.weight", "token_embd.weight"),
        "layer_{i}/attention_norm/scale": Weight(
            "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"
        ),
        "layer_{i}/attention/q_proj/weight": Weight(
            "model.layers.{i}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight", "num_heads"
        ),
        "layer_{i}/attention/k_proj/weight": Weight(
            "model.layers.{i}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight", "num_kv_heads"
        ),
        "layer_{i}/attention/v_proj/weight": Weight(
            "model.layers.{i}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight"
        ),
        "layer_{i}/attention/o_proj/weight": Weight(
            "model.layers.{i}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight"
        ),
        "layer_{i}/mlp_norm/scale": Weight(
            "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"
        ),
        "layer_{i}/mlp/gate_proj/weight": Weight(
            "model.layers.{i}.mlp.gate_proj.weight", "blk.{i}.ffn_gate.weight"
        ),
        "layer_{i}/mlp/up_proj/weight": Weight(
            "model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight"
        ),
        "layer_{i}/mlp/down_proj/weight": Weight(
            "model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight"
        ),
        "final_norm/scale": Weight("model.norm.weight", "output_norm.weight"),
        "lm_head/weight": Weight("lm_head.weight", "output.weight"),
    },
    # Rotary frequencies, which follow from the configuration.
    ignored=re.compile(r"(.*\.rotary_emb\.inv_freq|rope_freqs\.weight)"),
)

_QWEN3 = Architecture(
    config=_qwen3_config,
    weights={
        # GGUF keeps the rotary order of Hugging Face for this family.
        **{
            path: dataclasses.replace(weight, gguf_interleaved_heads=None)
            for path, weight in _LLAMA.weights.items()
        },
        "layer_{i}/attention/q_norm/scale": Weight(
            "model.layers.{i}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight"
        ),
        "layer_{i}/attention/k_norm/scale": Weight(
            "model.layers.{i}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight"
        ),
    },
    ignored=_LLAMA.ignored,
)

# By model_type of config.json, which is also general.architecture of GGUF.
ARCHITECTURES: Mapping[str, Architecture] = {"llama": _LLAMA, "qwen3": _QWEN3}
