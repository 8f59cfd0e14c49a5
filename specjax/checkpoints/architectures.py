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
from specjax.models.config import RopeConfig, SlidingConfig, TransformerConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"  # kinds of layer_types
_MAX_LAYERS = 10_000  # what no model has; the number of tensors is checked later


@dataclasses.dataclass(frozen=True)
class Weight:
    """Where a parameter is found in each format; `{i}` stands for the layer.

    Attributes:
      huggingface: name of the tensor in a Hugging Face checkpoint.
      gguf: name of the tensor in a GGUF file.
      gguf_interleaved_heads: the field of `TransformerConfig` that counts the heads,
        if GGUF orders each head's rows in neighbouring rotary pairs (0, H/2, 1, ...).
      huggingface_offset: added to what a Hugging Face checkpoint stores.
    """

    huggingface: str
    gguf: str
    gguf_interleaved_heads: Literal["num_heads", "num_kv_heads"] | None = None
    huggingface_offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model family.

    Attributes:
      name: of transformers' class.
      translate: from config.json; raises CheckpointError for what we do not implement, and
        ValueError for what makes no model.
      weights: tensor names by parameter path.
      ignored: pattern of tensors that carry no parameter.
    """

    name: str
    translate: Callable[[Mapping[str, Any]], TransformerConfig]
    weights: Mapping[str, Weight]
    ignored: re.Pattern[str]

    def config(self, raw: Mapping[str, Any]) -> TransformerConfig:
        """The model that a config.json describes.

        Raises:
          CheckpointError: options that are not supported, or missing or wrong values.
        """
        try:
            return self.translate(raw)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"the configuration makes no model: {error}") from error

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
    if number and not 1e-37 < abs(number) < 1e38:  # would be infinite, or 0, in the model
        raise CheckpointError(f"{key} must be a number that float32 holds, got {value!r}")
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


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """Whether an option is set; one that is missing or null is not."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{key} must be true or false, got {value!r}")
    return bool(value)


def _refuse(config: Mapping[str, Any], implemented: Mapping[str, Any]) -> None:
    """Refuses options set to anything but the one value that we implement."""
    for key, only in implemented.items():
        value = config.get(key)
        if value is not None and value != only:
            raise CheckpointError(f"{key}={value!r} is not supported: only {only!r} is")


def _rope(config: Mapping[str, Any], theta: float = 10_000.0) -> RopeConfig:
    """The rotary embedding of a model that has one; `theta` is its family's default base."""
    # transformers 5 writes everything into rope_parameters; before that the base stood
    # at the top level and rope_scaling ("type" before "rope_type") held the rest.
    given = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    for rope in given:
        if not isinstance(rope, Mapping | None):
            raise CheckpointError(f"rope_parameters must be a mapping, got {rope!r}")
    if all(given) and given[0] != given[1]:
        raise CheckpointError(f"rope_parameters and rope_scaling differ: {given[0]}, {given[1]}")
    rope = given[0] or given[1] or {}
    if {_FULL, _SLIDING} & set(rope):
        raise CheckpointError(f"rope_parameters by kind of layer are not supported here: {rope}")
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    kind = kinds[0] if kinds else "default"
    base = rope if rope.get("rope_theta") is not None else config
    theta = get_number(base, "rope_theta", theta)
    if kind == "proportional":
        rotated = get_number(rope, "partial_rotary_factor", 1.0)
        return RopeConfig(kind, theta, get_number(rope, "factor", 1.0), rotated=rotated)
    _refuse(rope, {"partial_rotary_factor": 1.0})
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, get_number(rope, "factor"))
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=get_number(rope, "factor"),
            low_freq_factor=get_number(rope, "low_freq_factor"),
            high_freq_factor=get_number(rope, "high_freq_factor"),
            original_max_len=get_size(rope, "original_max_position_embeddings"),
        )
    raise CheckpointError(
        f"rope type {kind!r} is not supported: known are default, linear, llama3, proportional"
    )


def _rope_of(config: Mapping[str, Any], kind: str, theta: float) -> RopeConfig:
    """That of one kind of layers, of a model whose kinds have their own (transformers 5)."""
    ropes = config.get("rope_parameters")
    key = "rope_theta" if kind == _FULL else "rope_local_base_freq"
    theta = get_number(config, key, theta)
    if isinstance(ropes, Mapping) and {_FULL, _SLIDING} & set(ropes):
        if not isinstance(ropes.get(kind), Mapping):
            raise CheckpointError(f"rope_parameters lacks {kind}, got {ropes}")
        return _rope({"rope_parameters": ropes[kind]}, theta)
    return _rope(config, theta) if kind == _FULL else RopeConfig(theta=theta)


def _layers_of(config: Mapping[str, Any], sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """Indices of the sliding-window layers; `sliding` decides where the file does not say."""
    count, kinds = get_size(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        return tuple(i for i in range(min(count, _MAX_LAYERS)) if sliding(i))
    known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not known or len(kinds) != count:
        raise CheckpointError(
            f"layer_types must name {count} layers as {_FULL} or {_SLIDING}, got {kinds!r}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == _SLIDING)


def _transformer_config(
    config: Mapping[str, Any],
    *,
    sliding_layers: tuple[int, ...] = (),
    sliding: Mapping[str, Any] | None = None,
    **particular: Any,
) -> TransformerConfig:
    """What the families have in common.

    Args:
      config: with the family's defaults filled in.
      sliding_layers: those that have the window `config["sliding_window"]`.
      sliding: fields of `SlidingConfig` that are not those of the other layers.
      particular: fields of the family's own.
    """
    # Multipliers are of Granite and others, whose files may call themselves Llama's.
    multipliers = ("embedding", "attention", "residual")
    ones = {f"{name}_multiplier": 1.0 for name in multipliers} | {"logits_scaling": 1.0}
    biases = {"attention_bias": False, "mlp_bias": False}
    _refuse(config, ones | biases | {"partial_rotary_factor": 1.0})
    if "activation" not in particular:
        _refuse(config, {"hidden_act": "silu"})
    if config.get("quantization_config"):
        raise CheckpointError(
            "quantization_config: quantised Hugging Face checkpoints are not supported; "
            "give the unquantised model or a .gguf file"
        )
    width = get_size(config, "hidden_size")
    num_heads = get_size(config, "num_attention_heads")
    attention = {
        "num_kv_heads": get_size(config, "num_key_value_heads", num_heads),
        "head_dim": get_size(config, "head_dim", width // max(num_heads, 1)),
        "rope": particular.pop("rope") if "rope" in particular else _rope(config),
    }
    slides = None
    if sliding_layers:
        window = get_size(config, "sliding_window")
        slides = SlidingConfig(sliding_layers, window, **{**attention, **(sliding or {})})
    return TransformerConfig(
        vocab_size=get_size(config, "vocab_size"),
        width=width,
        mlp_width=get_size(config, "intermediate_size"),
        num_layers=get_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        norm_eps=get_number(config, "rms_norm_eps", 1e-6),
        max_len=get_size(config, "max_position_embeddings", 2048),
        tied_head=_flag(config, "tie_word_embeddings"),
        sliding=slides,
        **{**attention, **particular},
    )


def _llama_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Llama 1 to 3 and all that share their architecture (SmolLM2, TinyLlama, ...)."""
    return _transformer_config(config, architecture="llama")


def _mistral_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Mistral: Llama, in the first version with a sliding window in every layer."""
    config = {"sliding_window": 4096, "num_key_value_heads": 8, **config}
    config["layer_types"] = None  # which this family's models do not heed
    layers = () if config["sliding_window"] is None else _layers_of(config, lambda i: True)
    return _transformer_config(config, architecture="mistral", sliding_layers=layers)


def _qwen_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The sliding-window layers of Qwen2 and 3, few of whose checkpoints have any."""
    if not _flag(config, "use_sliding_window") or config["sliding_window"] is None:
        return ()
    first = get_size(config, "max_window_layers", 28)
    return _layers_of(config, lambda i: i >= first)


def _qwen2_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Qwen2 and 2.5: Llama with biases on queries, keys and values."""
    config = {"sliding_window": 4096, **config}
    layers = _qwen_windows(config)
    return _transformer_config(config, architecture="qwen2", sliding_layers=layers, qkv_bias=True)


def _qwen3_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Qwen3, dense: Llama with normalised queries and keys."""
    config = {"sliding_window": 4096, "head_dim": 128, **config}
    layers = _qwen_windows(config)
    return _transformer_config(config, architecture="qwen3", sliding_layers=layers, qk_norm=True)


def _gemma_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2, 3 and 4 have in common."""
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation not in (None, "gelu_pytorch_tanh"):
        raise CheckpointError(
            f"hidden_activation={activation!r} is not supported: only 'gelu_pytorch_tanh' is"
        )
    return {
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "embed_scale": math.sqrt(get_size(config, "hidden_size")),
        "logit_cap": _optional_number(config, "final_logit_softcapping"),
    }


def _optional_number(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else get_number(config, key)


def _attention_scale(config: Mapping[str, Any]) -> float:
    scalar = get_number(config, "query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise CheckpointError(f"query_pre_attn_scalar must be above 0, got {scalar}")
    return scalar**-0.5


def _gemma2_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Gemma 2 (arXiv 2408.00118): soft caps, norms on both sides, a window in every other layer."""
    config = {
        "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True, **config,
    }  # fmt: skip
    return _transformer_config(
        config,
        architecture="gemma2",
        sliding_layers=_layers_of(config, lambda i: i % 2 == 0),
        attention_scale=_attention_scale(config),
        attention_cap=_optional_number(config, "attn_logit_softcapping"),
        **_gemma_options(config),
    )


def _gemma3_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Gemma 3, text (arXiv 2503.19786): Gemma 2 with normalised queries and keys for caps."""
    # What the files of the larger models leave out.
    config = {
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 131_072, "sliding_window": 4096,
        "tie_word_embeddings": True, **config,
    }  # fmt: skip
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention is not supported: decoding is causal")
    keys = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next((get_size(config, key) for key in keys if config.get(key) is not None), 6)
    if not pattern:
        raise CheckpointError("sliding_window_pattern must be at least 1")
    layers = _layers_of(config, lambda i: (i + 1) % pattern != 0)
    return _transformer_config(
        config,
        architecture="gemma3",
        rope=_rope_of(config, _FULL, 1e6),
        sliding_layers=layers,
        sliding={"rope": _rope_of(config, _SLIDING, 1e4)} if layers else None,
        qk_norm=True,
        attention_scale=_attention_scale(config),
        attention_cap=_optional_number(config, "attn_logit_softcapping"),
        **_gemma_options(config),
    )


def _gemma4_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Gemma 4, text, of the dense models without per-layer embeddings."""
    _refuse(
        config,
        {
            "enable_moe_block": False,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "use_bidirectional_attention": False,
        },
    )
    # Where the key is missing, transformers' class of this name takes 256.
    missing = 256 if config.get("model_type") == "gemma4_text" else 0
    per_layer = get_size(config, "hidden_size_per_layer_input", missing)
    if per_layer:
        raise CheckpointError(
            f"hidden_size_per_layer_input={per_layer}: per-layer embeddings are not supported"
        )
    config = {"tie_word_embeddings": True, **config}
    last = get_size(config, "num_hidden_layers") - 1
    layers = _layers_of(config, lambda i: (i + 1) % 6 != 0 and i != last)
    if last in layers:
        raise CheckpointError("the last layer of layer_types must be full_attention")
    rope = _rope_of(config, _FULL, 1e6)
    if rope.kind != "proportional":
        raise CheckpointError(
            f"rope type {rope.kind!r} of full_attention is not supported: only 'proportional' is"
        )
    sizes = {"num_kv_heads": get_size(config, "num_key_value_heads")}
    sizes["head_dim"] = get_size(config, "head_dim")
    from_keys = _flag(config, "attention_k_eq_v")
    if from_keys:
        heads = get_size(config, "num_global_key_value_heads", sizes["num_kv_heads"])
        config["num_key_value_heads"] = heads
    config["head_dim"] = get_size(config, "global_head_dim")
    return _transformer_config(
        config,
        architecture="gemma4_text",
        rope=rope,
        sliding_layers=layers,
        sliding={"rope": _rope_of(config, _SLIDING, 1e4), **sizes} if layers else None,
        qk_norm=True,
        value_norm=True,
        values_from_keys=from_keys,
        attention_scale=1.0,
        layer_scalar=True,
        **_gemma_options(config),
    )


_LLAMA = Architecture(
    name="LlamaForCausalLM",
    translate=_llama_config,
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

# Other families' GGUF files keep the rotary order of Hugging Face.
_UNORDERED = {
    path: dataclasses.replace(weight, gguf_interleaved_heads=None)
    for path, weight in _LLAMA.weights.items()
}
_BIASES = {
    f"layer_{{i}}/attention/{x}_proj/bias": Weight(
        f"model.layers.{{i}}.self_attn.{x}_proj.bias", f"blk.{{i}}.attn_{x}.bias"
    )
    for x in "qkv"
}
_QK_NORMS = {
    f"layer_{{i}}/attention/{x}_norm/scale": Weight(
        f"model.layers.{{i}}.self_attn.{x}_norm.weight", f"blk.{{i}}.attn_{x}_norm.weight"
    )
    for x in "qk"
}
_SANDWICH_NORMS = {
    "layer_{i}/attention_out_norm/scale": Weight(
        "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.post_attention_norm.weight"
    ),
    "layer_{i}/mlp_norm/scale": Weight(
        "model.layers.{i}.pre_feedforward_layernorm.weight", "blk.{i}.ffn_norm.weight"
    ),
    "layer_{i}/mlp_out_norm/scale": Weight(
        "model.layers.{i}.post_feedforward_layernorm.weight", "blk.{i}.post_ffw_norm.weight"
    ),
}
_SCALAR = {
    "layer_{i}/scalar": Weight("model.layers.{i}.layer_scalar", "blk.{i}.layer_output_scale.weight")
}


def _one_more(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """With norms of which Hugging Face stores what they are more than 1."""
    return {
        path: dataclasses.replace(weight, huggingface_offset=1.0) if "norm" in path else weight
        for path, weight in weights.items()
    }


_GEMMA2_WEIGHTS = _one_more(_UNORDERED | _SANDWICH_NORMS)
_GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    _gemma3_config,
    _one_more(_UNORDERED | _SANDWICH_NORMS | _QK_NORMS),
    _LLAMA.ignored,
)
_GEMMA4 = Architecture(
    "Gemma4ForCausalLM",
    _gemma4_config,
    _UNORDERED | _SANDWICH_NORMS | _QK_NORMS | _SCALAR,
    _LLAMA.ignored,
)

# By model_type of config.json.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": Architecture("MistralForCausalLM", _mistral_config, _LLAMA.weights, _LLAMA.ignored),
    "qwen2": Architecture("Qwen2ForCausalLM", _qwen2_config, _UNORDERED | _BIASES, _LLAMA.ignored),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", _qwen3_config, _UNORDERED | _QK_NORMS, _LLAMA.ignored
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2_config, _GEMMA2_WEIGHTS, _LLAMA.ignored),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
}
