"""Layers of the target transformers, as Flax Linen modules.

Matrices are stored [out, in] in the weights' dtype; activations are float32 and
every product accumulates in float32. Each parameter is declared once, with its
shape, initialiser and logical axis names. Axis letters: docs/notation.md.
"""

import math
from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.config import RopeConfig, TransformerConfig

# Finite, so that a query without any visible key gives a uniform softmax, not NaN.
_MASKED = -1e30

# Slots that attention reads at a time; caches whose length is a multiple cost by live length.
BLOCK = 256

_matrix_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2)


class LayerCache(NamedTuple):
    """Keys and values of one layer, indexed by absolute position."""

    k_BKSH: Float[Array, "B K S H"]
    v_BKSH: Float[Array, "B K S H"]


def matmul(x: Float[Array, "*rows I"], weight_OI: Float[Array, "O I"]) -> Float[Array, "*rows O"]:
    """`x @ weight.T` in the weight's dtype with float32 accumulation and result."""
    rows = x.reshape(-1, x.shape[-1]).astype(weight_OI.dtype)
    # XLA's CPU bfloat16 kernels need two rows: one alone is about ten times slower.
    pad = int(rows.shape[0] == 1 and weight_OI.dtype == jnp.bfloat16)
    out = lax.dot_general(
        jnp.pad(rows, ((0, pad), (0, 0))) if pad else rows,
        weight_OI,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return out[: rows.shape[0]].reshape(*x.shape[:-1], weight_OI.shape[0])


def declare(
    module: nn.Module,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> Array:
    """A float32 parameter of the module; `axes` are the logical names of its axes."""
    # Linen unboxes the value that carries the names; its annotation does not say so.
    return cast(Array, module.param(name, nn.with_logical_partitioning(init, axes), shape))


class Linear(nn.Module):
    """Matrix product without bias; `axes` name the (out, in) axes for sharding."""

    features: int
    axes: tuple[str, str]

    @nn.compact
    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        shape = (self.features, x.shape[-1])
        return matmul(x, declare(self, "weight", _matrix_init, shape, self.axes))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scale_D = declare(self, "scale", nn.initializers.ones, (x.shape[-1],), ("norm",))
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normed = x * lax.rsqrt(variance + self.eps)
        return normed * scale_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


class Embedding(nn.Module):
    """Token table; `attend` is the language-model head that shares its matrix."""

    vocab_size: int
    width: int

    def setup(self) -> None:
        init, shape = nn.initializers.normal(0.02), (self.vocab_size, self.width)
        self.weight = declare(self, "weight", init, shape, ("vocab", "embed"))

    def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.weight[tokens_BT].astype(jnp.float32)

    def attend(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return matmul(x_BTD, self.weight)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float[Array, " half"]:
    """Radians per position of each of the `head_dim / 2` rotated pairs."""
    freqs = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if rope.kind == "default":
        return freqs
    turns = rope.original_max_len * freqs / (2 * math.pi)  # within the original context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = jnp.clip(ramp, 0.0, 1.0)
    return keep * freqs + (1 - keep) * freqs / rope.factor


def rotate(
    x_BTNH: Float[Array, "B T N H"], positions_BT: Int[Array, "B T"], rope: RopeConfig
) -> Float[Array, "B T N H"]:
    """Rotates the pairs (j, j + H/2) of every head by their position's angle."""
    freqs = rope_frequencies(rope, x_BTNH.shape[-1])
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * freqs[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def write_cache(
    cache_BKSH: Float[Array, "B K S H"],
    new_BTKH: Float[Array, "B T K H"],
    positions_BT: Int[Array, "B T"],
) -> Float[Array, "B K S H"]:
    """Stores each entry at its own position; positions at or past S are dropped."""
    batch, heads = cache_BKSH.shape[:2]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    return cache_BKSH.at[
        rows, jnp.arange(heads, dtype=jnp.int32)[None, None], positions_BT[:, :, None]
    ].set(new_BTKH.astype(cache_BKSH.dtype), mode="drop", unique_indices=True)


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    q_positions_BT: Int[Array, "B T"],
    k_positions_BS: Int[Array, "B S"] | Int[Array, "1 S"],
    live: Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal grouped-query attention (Ainslie et al., arXiv 2305.13245), softmax in float32.

    A query sees the keys at or before its position. Given `live`, the number of slots
    that any query may see, only the blocks of slots below it are read, with a running
    softmax (Milakov and Gimelshein, arXiv 1805.02867): the cost follows the live length,
    not the cache's.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads, slots = k_BKSH.shape[1:3]
    groups = num_heads // num_kv_heads
    # One batched product per key-value head over all its queries: no operand is transposed.
    q_BKQH = (
        q_BTNH.reshape(batch, length, num_kv_heads, groups, head_dim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch, num_kv_heads, groups * length, head_dim)
    ) * head_dim**-0.5
    q_positions_BQ = jnp.tile(q_positions_BT, (1, groups))

    def scores(k_BKsH: Array, k_positions_Bs: Array) -> Array:
        scores_BKQs = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKsH.astype(jnp.float32))
        visible_BQs = k_positions_Bs[:, None, :] <= q_positions_BQ[:, :, None]
        return jnp.where(visible_BQs[:, None], scores_BKQs, _MASKED)

    def weigh(weights_BKQs: Array, v_BKsH: Array) -> Array:
        return jnp.einsum("BKQS,BKSH->BKQH", weights_BKQs, v_BKsH.astype(jnp.float32))

    def add_block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest_BKQ1, total_BKQ1, sum_BKQH = carry

        def block(array: Array, axis: int) -> Array:
            return lax.dynamic_slice_in_dim(array, i * BLOCK, BLOCK, axis)

        scores_BKQs = scores(block(k_BKSH, 2), block(k_positions_BS, 1))
        new_BKQ1 = jnp.maximum(largest_BKQ1, jnp.max(scores_BKQs, axis=-1, keepdims=True))
        weights_BKQs = jnp.exp(scores_BKQs - new_BKQ1)
        shrink_BKQ1 = jnp.exp(largest_BKQ1 - new_BKQ1)
        total_BKQ1 = total_BKQ1 * shrink_BKQ1 + jnp.sum(weights_BKQs, axis=-1, keepdims=True)
        return new_BKQ1, total_BKQ1, sum_BKQH * shrink_BKQ1 + weigh(weights_BKQs, block(v_BKSH, 2))

    if live is None or slots % BLOCK or slots == BLOCK:
        out_BKQH = weigh(jax.nn.softmax(scores(k_BKSH, k_positions_BS), axis=-1), v_BKSH)
    else:
        row_BKQ1 = jnp.zeros((*q_BKQH.shape[:3], 1), jnp.float32)
        empty = (row_BKQ1 + 2 * _MASKED, row_BKQ1, jnp.zeros_like(q_BKQH))
        blocks = jnp.clip((live + BLOCK - 1) // BLOCK, 1, slots // BLOCK).astype(jnp.int32)
        _, total_BKQ1, sum_BKQH = lax.fori_loop(0, blocks, add_block, empty)
        out_BKQH = sum_BKQH / total_BKQ1
    return (
        out_BKQH.reshape(batch, num_kv_heads, groups, length, head_dim)
        .transpose(0, 3, 1, 2, 4)
        .reshape(batch, length, num_heads, head_dim)
    )


class Attention(nn.Module):
    """Causal self-attention over the cache, or over the pass itself without one."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        c = self.config
        batch, length = positions_BT.shape

        def heads(name: str, count: int, axis: str) -> Array:
            out = Linear(count * c.head_dim, (axis, "embed"), name=name)(x_BTD)
            return out.reshape(batch, length, count, c.head_dim)

        q_BTNH = rotate(heads("q_proj", c.num_heads, "heads"), positions_BT, c.rope)
        k_BTKH = rotate(heads("k_proj", c.num_kv_heads, "kv_heads"), positions_BT, c.rope)
        v_BTKH = heads("v_proj", c.num_kv_heads, "kv_heads")
        if cache is None:
            k_BKSH, v_BKSH = k_BTKH.transpose(0, 2, 1, 3), v_BTKH.transpose(0, 2, 1, 3)
            slots_BS, live = positions_BT, None
        else:
            k_BKSH = write_cache(cache.k_BKSH, k_BTKH, positions_BT)
            v_BKSH = write_cache(cache.v_BKSH, v_BTKH, positions_BT)
            cache = LayerCache(k_BKSH, v_BKSH)
            slots_BS, live = (
                jnp.arange(k_BKSH.shape[2], dtype=jnp.int32)[None],
                jnp.max(positions_BT) + 1,
            )
        out_BTNH = attend(q_BTNH, k_BKSH, v_BKSH, positions_BT, slots_BS, live)
        out = out_BTNH.reshape(batch, length, c.num_heads * c.head_dim)
        return Linear(c.width, ("embed", "heads"), name="o_proj")(out), cache


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = Linear(self.config.mlp_width, ("mlp", "embed"), name="gate_proj")(x_BTD)
        up = Linear(self.config.mlp_width, ("mlp", "embed"), name="up_proj")(x_BTD)
        down = Linear(self.config.width, ("embed", "mlp"), name="down_proj")
        return down(nn.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        eps = self.config.norm_eps
        normed = RMSNorm(eps, name="attention_norm")(x_BTD)
        mixed, cache = Attention(self.config, name="attention")(normed, positions_BT, cache)
        x_BTD = x_BTD + mixed
        normed = RMSNorm(eps, name="mlp_norm")(x_BTD)
        return x_BTD + MLP(self.config, name="mlp")(normed), cache
