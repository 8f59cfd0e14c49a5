"""The target transformer: a Linen module, and the static model that decoding calls."""

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decoding.types import TargetOutput
from specjax.models.config import TransformerConfig
from specjax.models.layers import (
    Block,
    Embedding,
    LayerCache,
    Linear,
    RMSNorm,
    matmul,
    soft_cap,
)

Cache = tuple[LayerCache, ...]


class Transformer(nn.Module):
    """Decoder-only transformer returning logits, final hidden state, taps and cache."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: Cache | None = None,
        *,
        taps: tuple[int, ...] = (),
        logits: Literal["all", "last", "none"] = "all",
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> TargetOutput:
        c = self.config
        embed = Embedding(c.vocab_size, c.width, c.embed_scale, name="embed")
        x_BTD = embed(tokens_BT)
        tapped = {-1: x_BTD}
        layers = []
        for i in range(c.num_layers):
            layer = None if cache is None else cache[i]
            block = Block(c.layer(i), name=f"layer_{i}")
            x_BTD, layer = block(x_BTD, positions_BT, layer, segments_BT)
            tapped[i] = x_BTD
            layers.append(layer)
        hidden_BTD = RMSNorm(c.norm_eps, name="final_norm")(x_BTD)
        head = embed.attend
        if not c.tied_head:
            head = Linear(c.vocab_size, ("vocab", "embed"), name="lm_head")
        return TargetOutput(
            logits=_select_logits(head, hidden_BTD, logits, c.logit_cap),
            hidden=hidden_BTD,
            taps=jnp.stack([tapped[i] for i in taps], axis=2) if taps else None,
            cache=None if cache is None else tuple(layers),
        )


class Head(NamedTuple):
    """A language-model head.

    Attributes:
      weight_VD: its matrix.
      cap: soft cap of the logits; None is none.
    """

    weight_VD: Float[Array, "V D"]
    cap: float | None = None

    def logits(
        self, hidden: Float[Array, "*rows D"], ids_C: Int[Array, " C"] | None = None
    ) -> Float[Array, "*rows _"]:
        """Of final hidden states; `ids_C` are the tokens asked for, None is all."""
        weight = self.weight_VD if ids_C is None else self.weight_VD[ids_C]
        return soft_cap(matmul(hidden, weight), self.cap)


def _select_logits(
    head: Any, hidden_BTD: Float[Array, "B T D"], logits: str, cap: float | None
) -> Float[Array, "B _ V"] | None:
    if logits == "none":
        return None
    return soft_cap(head(hidden_BTD if logits == "all" else hidden_BTD[:, -1:]), cap)


@dataclasses.dataclass(frozen=True)
class TransformerTarget:
    """The *target* contract of decoding (docs/design.md) for our transformers.

    Hashable and free of arrays: parameters are passed to every call.
    """

    config: TransformerConfig

    @property
    def layer_config(self) -> TransformerConfig:
        """Sizes of the layers, for sharding."""
        return self.config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_len(self) -> int:
        return self.config.max_len

    def init_params(self, key: jax.Array) -> Any:
        """Random float32 parameters, as boxed pytree with logical axis names."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return Transformer(self.config).init(key, tokens, tokens)["params"]

    def param_shapes(self) -> Any:
        """Pytree of `jax.ShapeDtypeStruct`, without making any array."""
        return nn.unbox(jax.eval_shape(self.init_params, jax.random.key(0)))

    def head(self, params: Any) -> Head:
        """The language-model head; traceable."""
        name = "embed" if self.config.tied_head else "lm_head"
        return Head(params[name]["weight"], self.config.logit_cap)

    def init_cache(self, batch: int, slots: int) -> Cache:
        """Empty cache for `batch` rows of up to `slots` positions."""
        layers = [self.config.layer(i) for i in range(self.config.num_layers)]
        shapes = [(batch, layer.num_kv_heads, slots, layer.head_dim) for layer in layers]
        return tuple(
            LayerCache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
            for shape in shapes
        )

    def apply(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: Cache | None,
        *,
        taps: tuple[int, ...] = (),
        logits: Literal["all", "last", "none"] = "all",
        segments: Int[Array, "B T"] | None = None,
    ) -> TargetOutput:
        """One causal pass over T positions of every row.

        Writes keys and values at `positions` of the cache (out of range: dropped)
        and attends to every slot at or before each query's own position. With
        `cache=None` the pass attends to itself alone. `taps` are layer indices
        whose outputs (before the final norm) are returned; -1 is the embedding. Without a
        cache, `segments` keep documents of a row apart: each position attends to its own.

        Raises:
          ValueError: a tap that is not a layer of this model, or segments with a cache.
        """
        if segments is not None and cache is not None:
            raise ValueError("segments are for passes without a cache")
        wrong = [i for i in taps if not -1 <= i < self.config.num_layers]
        if wrong:
            raise ValueError(
                f"taps {wrong} are not layers of this model: give indices from -1 "
                f"(the embedding) to {self.config.num_layers - 1}"
            )
        out = Transformer(self.config).apply(
            {"params": params},
            tokens,
            positions,
            cache,
            taps=taps,
            logits=logits,
            segments_BT=segments,
        )
        return cast(TargetOutput, out)
