"""Random keys and logits processing, the same for p, q and plain decoding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Key

from specjax.decoding.types import DraftDist, SamplingParams

_DRAFT, _ACCEPT, _NEXT = range(3)


class RoundKeys(NamedTuple):
    """Keys of one round: one for each draft, each acceptance, and the target's own token."""

    draft_BG: Key[Array, "B G"]
    accept_BG: Key[Array, "B G"]
    next_B: Key[Array, " B"]


def round_keys(
    seed_B: Integer[Array, " B"], anchor_position_B: Int[Array, " B"], draft_len: int
) -> RoundKeys:
    """Keys from (row seed, anchor position, purpose, draft offset).

    The anchor moves every round, so no noise is used twice. Keys from the absolute
    position alone would be: a discarded position drafted again would meet its old
    noise, and a policy that looks back could see it (invariant I11 of docs/design.md).
    """

    def row_keys(seed: Array, position: Array) -> RoundKeys:
        row = jax.random.fold_in(jax.random.key(seed), position)
        draft, accept, following = (
            jax.random.fold_in(row, purpose) for purpose in (_DRAFT, _ACCEPT, _NEXT)
        )
        offsets = jnp.arange(draft_len)
        each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return RoundKeys(each(draft, offsets), each(accept, offsets), following)

    return jax.vmap(row_keys)(seed_B, anchor_position_B)


def process_logits(
    logits_BTV: Float[Array, "B T V"], sampling: SamplingParams
) -> Float[Array, "B T V"]:
    """Logits whose softmax is what a row with temperature above 0 samples from.

    Greedy rows keep their logits: they are decided by the largest one.
    """
    temperature_B = jnp.asarray(sampling.temperature_B)
    # The largest logit moves to 0 first, so that tiny temperatures cannot overflow it.
    shifted = logits_BTV - jnp.max(logits_BTV, axis=-1, keepdims=True)
    return shifted / jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None, None]


def sample(keys: Key[Array, "*rows"], logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """One token from softmax(logits) for each key, by the Gumbel-max trick."""
    flat_NV = logits.reshape(-1, logits.shape[-1])
    noise_NV = jax.vmap(
        lambda key: jax.random.gumbel(key, flat_NV.shape[1:], flat_NV.dtype, mode="high")
    )(keys.reshape(-1))
    return jnp.argmax(flat_NV + noise_NV, axis=-1).astype(jnp.int32).reshape(keys.shape)


def uniform(keys: Key[Array, "*rows"]) -> Float[Array, "*rows"]:
    """One number on [0, 1) for each key."""
    return jax.vmap(jax.random.uniform)(keys.reshape(-1)).reshape(keys.shape)


def draft_probs(dist: DraftDist, tokens_BG: Int[Array, "B G"]) -> Float[Array, "B G"]:
    """q_k(x_k) of each draft token."""
    q_BGC = jax.nn.softmax(dist.logits_BGC, axis=-1)
    if dist.ids_BGC is None:
        return jnp.take_along_axis(q_BGC, tokens_BG[:, :, None], axis=-1)[..., 0]
    return jnp.sum(q_BGC, axis=-1, where=dist.ids_BGC == tokens_BG[:, :, None])


def draft_distribution(
    dist: DraftDist, offset_B: Int[Array, " B"], vocab_size: int
) -> Float[Array, "B V"]:
    """The whole of q at one draft offset of each row."""
    index_B11 = offset_B[:, None, None]
    q_BC = jax.nn.softmax(jnp.take_along_axis(dist.logits_BGC, index_B11, axis=1)[:, 0], axis=-1)
    if dist.ids_BGC is None:
        return q_BC
    ids_BC = jnp.take_along_axis(dist.ids_BGC, index_B11, axis=1)[:, 0]
    rows_B1 = jnp.arange(len(offset_B))[:, None]
    return jnp.zeros((len(offset_B), vocab_size)).at[rows_B1, ids_BC].add(q_BC)
