"""Layers of the target transformers, as Flax Linen modules.

Matrices are stored [out, in] in the weights' dtype; activations are float32 and
every product accumulates in float32. Each parameter is declared once, with its
shape, initialiser and logical axis names. Axis letters: docs/notation.md.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

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


class OwnBlock(NamedTuple):
    """Keys and values of A blocks of G queries, each visible to its own block alone."""

    k_BKAGH: Float[Array, "B K A G H"]
    v_BKAGH: Float[Array, "B K A G H"]


# Of a softmax over keys so far: the largest score, the sum of weights, that of weighted values.
Running = tuple[Array, Array, Array]


def matmul(x: Float[Array, "*rows I"], weight_OI: Float[Array, "O I"]) -> Float[Array, "*rows O"]:
    """`x @ weight.T` in the weight's dtype with float32 accumulation and result.

    So are the products of its gradients, whose operands are rounded to that dtype too.
    """
    out = _product(x.reshape(-1, x.shape[-1]).astype(jnp.float32), weight_OI)
    return out.reshape(*x.shape[:-1], weight_OI.shape[0])


@jax.custom_vjp
def _product(rows_NI: Array, weight_OI: Array) -> Array:
    rows_NI = rows_NI.astype(weight_OI.dtype)
    # XLA's CPU bfloat16 kernels need two rows: one alone is about ten times slower.
    pad = int(rows_NI.shape[0] == 1 and weight_OI.dtype == jnp.bfloat16)
    out = _contract(jnp.pad(rows_NI, ((0, pad), (0, 0))) if pad else rows_NI, weight_OI, 1, 1)
    return out[: rows_NI.shape[0]]


def _contract(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def _product_forward(rows_NI: Array, weight_OI: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(rows_NI, weight_OI), (rows_NI.astype(weight_OI.dtype), weight_OI)


def _product_backward(operands: tuple[Array, Array], grad_NO: Array) -> tuple[Array, Array]:
    rows_NI, weight_OI = operands
    grad_NO = grad_NO.astype(weight_OI.dtype)
    grad_OI = _contract(grad_NO, rows_NI, 0, 0)
    return _contract(grad_NO, weight_OI, 1, 0), grad_OI.astype(weight_OI.dtype)


_product.defvjp(_product_forward, _product_backward)


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
    """Matrix product, plus a bias if asked for; `axes` name the (out, in) axes for sharding."""

    features: int
    axes: tuple[str, str]
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        shape = (self.features, x.shape[-1])
        out = matmul(x, declare(self, "weight", _matrix_init, shape, self.axes))
        if self.use_bias:
            bias_O = declare(self, "bias", nn.initializers.zeros, shape[:1], self.axes[:1])
            out = out + bias_O.reshape((1,) * (out.ndim - 1) + (-1,))
        return out


def root_mean_square_normed(x: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """`x` over the root of its mean square along the last axis."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scale_D = declare(self, "scale", nn.initializers.ones, (x.shape[-1],), ("norm",))
        normed = root_mean_square_normed(x, self.eps)
        return normed * scale_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


class Embedding(nn.Module):
    """Token table; `attend` is the language-model head that shares its matrix.

    Its rows are multiplied by `scale`, in the precision of the weights; the head's are not.
    """

    vocab_size: int
    width: int
    scale: float = 1.0

    def setup(self) -> None:
        init, shape = nn.initializers.normal(0.02), (self.vocab_size, self.width)
        self.weight = declare(self, "weight", init, shape, ("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        rows = self.weight[tokens].astype(jnp.float32)
        if self.scale == 1.0:
            return rows
        return rows * jnp.asarray(self.scale, self.weight.dtype).astype(jnp.float32)

    def attend(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        return matmul(x, self.weight)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float[Array, " half"]:
    """Radians per position of each of the `head_dim / 2` rotated pairs."""
    freqs = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if rope.kind != "llama3":
        pairs = jnp.arange(head_dim // 2, dtype=jnp.int32)
        return jnp.where(pairs < int(rope.rotated * head_dim / 2), freqs / rope.factor, 0.0)
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
    own: OwnBlock | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    window: int | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal grouped-query attention (Ainslie et al., arXiv 2305.13245), softmax in float32.

    A query sees the keys at or before its position, of these the last `window` if it is
    given. Given `live`, the number of slots that any query may see, only the blocks of slots
    below it (and within reach of a window) are read, with a running softmax (Milakov and
    Gimelshein, arXiv 1805.02867): the cost follows the live length, not the cache's. Given
    `own`, the queries are A blocks of G positions, and each sees all keys of its own block
    besides. Products of queries and keys are multiplied by `scale` (None is 1 / sqrt(H)) and
    then held below the soft cap c as c tanh(x / c) (Gemma 2, arXiv 2408.00118). Given
    `segments_BT`, the keys are those of the queries' own pass, and each sees its segment alone.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads, slots = k_BKSH.shape[1:3]
    groups = num_heads // num_kv_heads
    # One batched product per key-value head over all its queries: no operand is transposed.
    q_BKQH = (
        q_BTNH.reshape(batch, length, num_kv_heads, groups, head_dim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch, num_kv_heads, groups * length, head_dim)
    ) * (head_dim**-0.5 if scale is None else scale)
    q_positions_BQ = jnp.tile(q_positions_BT, (1, groups))
    rows = q_BKQH.shape[:3]

    def scores(k_BKsH: Array, k_positions_Bs: Array) -> Array:
        products_BKQs = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKsH.astype(jnp.float32))
        scores_BKQs = soft_cap(products_BKQs, cap)
        behind_BQs = q_positions_BQ[:, :, None] - k_positions_Bs[:, None, :]
        visible_BQs = behind_BQs >= 0
        if window is not None:
            visible_BQs &= behind_BQs < window
        if segments_BT is not None:
            segments_BQ = jnp.tile(segments_BT, (1, groups))
            visible_BQs &= segments_BQ[:, :, None] == segments_BT[:, None, :]
        return jnp.where(visible_BQs[:, None], scores_BKQs, _MASKED)

    def weigh(weights_BKQs: Array, v_BKsH: Array) -> Array:
        return jnp.einsum("BKQS,BKSH->BKQH", weights_BKQs, v_BKsH.astype(jnp.float32))

    def own_scores(k_BKAGH: Array) -> Array:
        q_BKrAGH = q_BKQH.reshape(*rows[:2], groups, *k_BKAGH.shape[2:])
        scores_BKrAGg = jnp.einsum("BKrAGH,BKAgH->BKrAGg", q_BKrAGH, k_BKAGH)
        return soft_cap(scores_BKrAGg.reshape(*rows, -1), cap)

    def weigh_own(weights_BKQg: Array, v_BKAGH: Array) -> Array:
        weights_BKrAGg = weights_BKQg.reshape(*rows[:2], groups, *v_BKAGH.shape[2:4], -1)
        out_BKrAGH = jnp.einsum("BKrAGg,BKAgH->BKrAGH", weights_BKrAGg, v_BKAGH)
        return out_BKrAGH.reshape(q_BKQH.shape)

    def add(carry: Running, scores_BKQs: Array, weigh: Callable[[Array], Array]) -> Running:
        largest_BKQ1, total_BKQ1, sum_BKQH = carry
        # The result does not depend on what is subtracted.
        new_BKQ1 = lax.stop_gradient(
            jnp.maximum(largest_BKQ1, jnp.max(scores_BKQs, axis=-1, keepdims=True))
        )
        weights_BKQs = jnp.exp(scores_BKQs - new_BKQ1)
        shrink_BKQ1 = jnp.exp(largest_BKQ1 - new_BKQ1)
        total_BKQ1 = total_BKQ1 * shrink_BKQ1 + jnp.sum(weights_BKQs, axis=-1, keepdims=True)
        return new_BKQ1, total_BKQ1, sum_BKQH * shrink_BKQ1 + weigh(weights_BKQs)

    def add_slots(carry: Running, k_BKsH: Array, v_BKsH: Array, k_positions_Bs: Array) -> Running:
        return add(carry, scores(k_BKsH, k_positions_Bs), partial(weigh, v_BKsH=v_BKsH))

    def add_block(i: Array, carry: Running) -> Running:
        arrays = ((k_BKSH, 2), (v_BKSH, 2), (k_positions_BS, 1))
        blocks = (lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis) for x, axis in arrays)
        return add_slots(carry, *blocks)

    row_BKQ1 = jnp.zeros((*rows, 1), jnp.float32)
    carry = (row_BKQ1 + 2 * _MASKED, row_BKQ1, jnp.zeros_like(q_BKQH))
    if own is not None:
        carry = add(carry, own_scores(own.k_BKAGH), partial(weigh_own, v_BKAGH=own.v_BKAGH))
    if live is None or slots % BLOCK or slots == BLOCK:
        carry = add_slots(carry, k_BKSH, v_BKSH, k_positions_BS)
    else:
        blocks = jnp.clip((live + BLOCK - 1) // BLOCK, 1, slots // BLOCK).astype(jnp.int32)
        first = jnp.int32(0)
        if window is not None:
            first = jnp.clip((jnp.min(q_positions_BT) - window + 1) // BLOCK, 0, blocks - 1)
        carry = lax.fori_loop(first, blocks, add_block, carry)
    _, total_BKQ1, sum_BKQH = carry
    out_BKQH = sum_BKQH / total_BKQ1
    return (
        out_BKQH.reshape(batch, num_kv_heads, groups, length, head_dim)
        .transpose(0, 3, 1, 2, 4)
        .reshape(batch, length, num_heads, head_dim)
    )


def soft_cap(x: Float[Array, "*rows"], cap: float | None) -> Float[Array, "*rows"]:
    """Holds values between -cap and cap, smoothly; None leaves them."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Attention(nn.Module):
    """Self-attention, causal over a cache or injected with another model's context."""

    config: TransformerConfig

    def setup(self) -> None:
        c, bias = self.config, self.config.qkv_bias
        self.q_proj = Linear(c.num_heads * c.head_dim, ("heads", "embed"), bias)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, ("kv_heads", "embed"), bias)
        if not c.values_from_keys:
            self.v_proj = Linear(c.num_kv_heads * c.head_dim, ("kv_heads", "embed"), bias)
        self.o_proj = Linear(c.width, ("embed", "heads"))
        if c.qk_norm:
            self.q_norm = RMSNorm(c.norm_eps)
            self.k_norm = RMSNorm(c.norm_eps)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayerCache | None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Causal, over the cache or, without one, over the pass itself (or its segments)."""
        q_BTNH = self._queries(x_BTD, positions_BT)
        k_BTKH, v_BTKH = self.keys_values(x_BTD, positions_BT)
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
        out_BTNH = self._attend(
            q_BTNH, k_BKSH, v_BKSH, positions_BT, slots_BS, live, segments_BT=segments_BT
        )
        return self._output(out_BTNH), cache

    def inject(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        context: LayerCache,
        anchors_BA: Int[Array, "B A"],
        live: Int[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        """A blocks of T / A positions: each sees the context before its anchor, and itself."""
        batch, length, _ = x_BTD.shape
        blocks = anchors_BA.shape[1]

        def split(new_BTKH: Array) -> Array:
            heads = new_BTKH.shape[2:]
            return new_BTKH.reshape(batch, blocks, -1, *heads).transpose(0, 3, 1, 2, 4)

        k_BTKH, v_BTKH = self.keys_values(x_BTD, positions_BT)
        out_BTNH = self._attend(
            self._queries(x_BTD, positions_BT),
            *context,
            jnp.repeat(anchors_BA - 1, length // blocks, axis=1),
            jnp.arange(context.k_BKSH.shape[2], dtype=jnp.int32)[None],
            live,
            OwnBlock(split(k_BTKH), split(v_BTKH)),
        )
        return self._output(out_BTNH)

    def keys_values(
        self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        c = self.config
        k_BTKH = self._heads(self.k_proj(x_BTD))
        v_BTKH = k_BTKH if c.values_from_keys else self._heads(self.v_proj(x_BTD))
        if c.value_norm:
            v_BTKH = root_mean_square_normed(v_BTKH, c.norm_eps)
        if c.qk_norm:
            k_BTKH = self.k_norm(k_BTKH)
        return rotate(k_BTKH, positions_BT, c.rope), v_BTKH

    def _queries(self, x_BTD: Array, positions_BT: Array) -> Array:
        q_BTNH = self._heads(self.q_proj(x_BTD))
        if self.config.qk_norm:
            q_BTNH = self.q_norm(q_BTNH)
        return rotate(q_BTNH, positions_BT, self.config.rope)

    def _attend(self, *args: Any, **options: Any) -> Array:
        c = self.config
        options |= {"scale": c.attention_scale, "cap": c.attention_cap, "window": c.window}
        return attend(*args, **options)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def _output(self, out_BTNH: Array) -> Array:
        return self.o_proj(out_BTNH.reshape(*out_BTNH.shape[:2], -1))


class MLP(nn.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202): down(activation(gate(x)) * up(x))."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = Linear(self.config.mlp_width, ("mlp", "embed"), name="gate_proj")(x_BTD)
        up = Linear(self.config.mlp_width, ("mlp", "embed"), name="up_proj")(x_BTD)
        down = Linear(self.config.width, ("embed", "mlp"), name="down_proj")
        silu = self.config.activation == "silu"
        return down((nn.silu(gate) if silu else nn.gelu(gate, approximate=True)) * up)


class Block(nn.Module):
    """Pre-norm transformer block, with norms after attention and MLP too where asked for."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.attention_norm = RMSNorm(c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.norm_eps)
        self.mlp = MLP(c)
        if c.sandwich_norms:
            self.attention_out_norm = RMSNorm(c.norm_eps)
            self.mlp_out_norm = RMSNorm(c.norm_eps)
        if c.layer_scalar:
            self.scalar = declare(self, "scalar", nn.initializers.ones, (1,), ("scalar",))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayerCache | None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        normed_BTD = self.attention_norm(x_BTD)
        mixed_BTD, cache = self.attention(normed_BTD, positions_BT, cache, segments_BT)
        return self._add(x_BTD, mixed_BTD), cache

    def inject(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        context: LayerCache,
        anchors_BA: Int[Array, "B A"],
        live: Int[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        """With attention over injected context; see `Attention.inject`."""
        normed_BTD = self.attention_norm(x_BTD)
        mixed_BTD = self.attention.inject(normed_BTD, positions_BT, context, anchors_BA, live)
        return self._add(x_BTD, mixed_BTD)

    def _add(self, x_BTD: Array, mixed_BTD: Array) -> Array:
        """The block's output, given what attention says of its input."""
        sandwich = self.config.sandwich_norms
        x_BTD = x_BTD + (self.attention_out_norm(mixed_BTD) if sandwich else mixed_BTD)
        out_BTD = self.mlp(self.mlp_norm(x_BTD))
        x_BTD = x_BTD + (self.mlp_out_norm(out_BTD) if sandwich else out_BTD)
        if not self.config.layer_scalar:
            return x_BTD
        # A buffer of the released models, which training leaves as it is.
        return x_BTD * lax.stop_gradient(self.scalar).reshape(1, 1, 1)
