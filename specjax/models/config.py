"""Static description of a target transformer."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal


def _check_positive(config: Any) -> None:
    numbers = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.type in (int, float, int | None, float | None)
    }
    bad = {
        name: x for name, x in numbers.items() if x is not None and not (math.isfinite(x) and x > 0)
    }
    if bad:
        raise ValueError(
            f"every size must be at least 1 and every other number finite and above 0, got {bad}"
        )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864).

    `kind="linear"` slows all frequencies down by `factor`.

    `kind="llama3"` rescales the frequencies as Llama 3.1 does: wavelengths
    longer than `original_max_len / low_freq_factor` positions are slowed down by
    `factor`, shorter than `original_max_len / high_freq_factor` are left alone,
    and those between are interpolated.

    `kind="proportional"` rotates the first `rotated` of the pairs alone, slowed down by
    `factor`, as Gemma 4's full-attention layers do.
    """

    kind: Literal["default", "linear", "llama3", "proportional"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    rotated: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )
        if self.rotated > 1:
            raise ValueError(f"rotated must be a part of the pairs, at most 1, got {self.rotated}")


@dataclasses.dataclass(frozen=True)
class SlidingConfig:
    """Layers whose attention reaches back less far than that of the others.

    Attributes:
      layers: their indices.
      window: positions that a query sees, its own included.
      num_kv_heads: of these layers.
      head_dim: of these layers.
      rope: of these layers.
    """

    layers: tuple[int, ...]
    window: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a decoder-only transformer; hashable, so jit-static.

    Attributes:
      architecture: family name, for messages ("llama").
      vocab_size: V, rows of the embedding.
      width: D, the residual stream.
      mlp_width: F, the hidden width of the gated MLP.
      num_layers: L.
      num_heads: N query heads.
      num_kv_heads: K key-value heads; query head n reads head n // (N / K).
      head_dim: H; N * H may differ from D.
      norm_eps: epsilon inside every RMSNorm.
      max_len: longest sequence (prompt and output) the model was made for.
      rope: rotary embedding.
      tied_head: logits reuse the embedding matrix.
      qkv_bias: the projections to queries, keys and values add a bias.
      qk_norm: queries and keys are normalised, head by head, before they are rotated.
      value_norm: values are normalised, head by head, without weights.
      values_from_keys: values are the keys' projection, before its norm and rotation.
      attention_scale: of the products of queries and keys; None is 1 / sqrt(H).
      attention_cap: soft cap of these products; None is none.
      logit_cap: soft cap of the logits; None is none.
      activation: of the MLP's gate.
      sandwich_norms: attention and MLP are normalised after as well as before.
      layer_scalar: each layer multiplies the residual stream by a number of its own.
      embed_scale: the embeddings' factor, in the precision of the weights.
      window: positions that a query sees, its own included; None is all before it.
      sliding: the layers for which window, key-value heads, head width and rotary embedding
        are others.
    """

    architecture: str
    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_len: int
    rope: RopeConfig = RopeConfig()
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    values_from_keys: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sandwich_norms: bool = False
    layer_scalar: bool = False
    embed_scale: float = 1.0
    window: int | None = None
    sliding: SlidingConfig | None = None

    def __post_init__(self) -> None:
        _check_positive(self)
        for layer in (self, self.sliding):
            if layer is not None:
                _check_heads(self.num_heads, layer.num_kv_heads, layer.head_dim)

    def layer(self, index: int) -> "TransformerConfig":
        """The options of one layer, which has its own window, heads and rotary embedding."""
        if self.sliding is None or index not in self.sliding.layers:
            return dataclasses.replace(self, sliding=None)
        own = {
            field.name: getattr(self.sliding, field.name)
            for field in dataclasses.fields(self.sliding)
            if field.name != "layers"
        }
        return dataclasses.replace(self, sliding=None, values_from_keys=False, **own)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "TransformerConfig":
        """The inverse of `dataclasses.asdict`, also after JSON.

        Raises:
          TypeError, LookupError, ValueError: values of another kind.
        """
        sliding = values.get("sliding")
        if sliding is not None:
            rope = RopeConfig(**sliding["rope"])
            sliding = SlidingConfig(**{**sliding, "layers": tuple(sliding["layers"]), "rope": rope})
        return cls(**{**values, "rope": RopeConfig(**values["rope"]), "sliding": sliding})


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )
    if head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
