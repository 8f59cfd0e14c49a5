"""Static description of a target transformer."""

import dataclasses
import math
from typing import Any, Literal


def _check_positive(config: Any) -> None:
    numbers = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.type in (int, float)
    }
    bad = {name: x for name, x in numbers.items() if not (math.isfinite(x) and x > 0)}
    if bad:
        raise ValueError(
            f"every size must be at least 1 and every other number finite and above 0, got {bad}"
        )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864).

    `kind="llama3"` rescales the frequencies as Llama 3.1 does: wavelengths
    longer than `original_max_len / low_freq_factor` positions are slowed down by
    `factor`, shorter than `original_max_len / high_freq_factor` are left alone,
    and those between are interpolated.
    """

    kind: Literal["default", "llama3"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )


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
      qk_norm: queries and keys are normalised, head by head, before they are rotated.
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
    qk_norm: bool = False

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
