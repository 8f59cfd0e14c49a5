"""Random keys and logits processing, the same for p, q and plain decoding."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from specjax.decoding.types import AnyArray, DraftDist, SamplingParams, SamplingState

_DRAFT, _ACCEPT, _NEXT = range(3)
_PIECE = 256  # tokens of the vocabulary that `sample` and `largest` take together at first


class RoundKeys(NamedTuple):
    """Keys of one round: one for each draft, each acceptance, and the target's own token.

    In coupled acceptance the drafts' keys are those of their absolute positions, and
    `position_BT` holds them for every position of the pass; otherwise it is None.
    """

    draft_BG: Key[Array, "B G"]
    accept_BG: Key[Array, "B G"]
    next_B: Key[Array, " B"]
    position_BT: Key[Array, "B T"] | None = None


def round_keys(
    seed_B: Integer[AnyArray, " B"], anchor_position_B: Int[Array, " B"], draft_len: int
) -> RoundKeys:
    """Keys from (row seed, anchor position, purpose, draft offset), for rejection.

    The anchor moves every round, so no noise is used twice. Keys from the absolute
    position alone would be: a discarded position drafted again would meet its old
    noise, and a policy that looks back could see it (invariant I11 of docs/design.md).
    """

    def row_keys(seed: Array, position: Array) -> RoundKeys:
        row = jax.random.fold_in(_key(seed), position)
        draft, accept, following = (
            jax.random.fold_in(row, purpose) for purpose in (_DRAFT, _ACCEPT, _NEXT)
        )
        offsets = jnp.arange(draft_len, dtype=jnp.int32)
        each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return RoundKeys(each(draft, offsets), each(accept, offsets), following)

    return jax.vmap(row_keys)(seed_B, anchor_position_B)


def coupled_keys(
    seed_B: Integer[AnyArray, " B"], anchor_position_B: Int[Array, " B"], draft_len: int
) -> RoundKeys:
    """Keys from (row seed, absolute position), for coupled acceptance.

    The same position meets the same noise in every round, as drafter and target must
    share it; the output is a function of seed and position alone, so nothing leaks.
    """

    def row_keys(seed: Array, position: Array) -> Array:
        positions_T = position + 1 + jnp.arange(draft_len + 1, dtype=jnp.int32)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(_key(seed), positions_T)

    position_BT = jax.vmap(row_keys)(seed_B, anchor_position_B)
    draft_BG = position_BT[:, :draft_len]
    return RoundKeys(draft_BG, draft_BG, position_BT[:, 0], position_BT)


def _key(seed: Array) -> Array:
    # Whatever generator the program has chosen: others draw alike for all rows of a vmap.
    return jax.random.key(seed, impl="threefry2x32")


def adjust_logits(
    logits_BTV: Float[Array, "B T V"],
    sampling: SamplingState,
    length_B: Int[Array, " B"],
    prefix_BJ: Int[Array, "B J"],
    seen_TJ: Bool[Array, "T J"],
    ids_BV: Int[Array, "B V"] | None = None,
) -> Float[Array, "B T V"]:
    """Bias, minimum length and penalties: what changes even a greedy choice.

    Args:
      logits_BTV: raw logits.
      sampling: parameters, and the counts of committed tokens.
      length_B: committed tokens of the row.
      prefix_BJ: tokens drafted after them.
      seen_TJ: which of these come before the token that position t decides.
      ids_BV: token of each logit, where these are not the whole vocabulary in order.

    Work that no row asks for is skipped, for the whole batch.
    """
    params = sampling.params
    if params.logit_bias is not None:
        logits_BTV = logits_BTV + _at_ids(jnp.asarray(params.logit_bias), ids_BV)[:, None]
    new_BT = (length_B - sampling.prompt_len_B)[:, None] + jnp.sum(
        seen_TJ, axis=1, dtype=jnp.int32
    )[None]
    logits_BTV = _apply_if_any(
        _forbid_stops,
        new_BT < jnp.asarray(params.min_new_tokens_B)[:, None],
        logits_BTV,
        (sampling, ids_BV),
    )
    if sampling.output_counts_BV is None:
        return logits_BTV
    return _penalise(logits_BTV, sampling, prefix_BJ, seen_TJ, ids_BV)


def process_logits(
    logits_BTV: Float[Array, "B T V"], params: SamplingParams
) -> Float[Array, "B T V"]:
    """Temperature, top-k, top-p, min-p: logits whose softmax a sampled row draws from.

    The result is 0 at the largest logit and -inf where a token is excluded. Greedy rows
    keep their logits, less the largest.
    """
    temperature_B = jnp.asarray(params.temperature_B)
    # The largest logit moves to 0 first, so that tiny temperatures cannot overflow it.
    shifted_BTV = logits_BTV - jnp.max(logits_BTV, axis=-1, keepdims=True)
    scaled_BTV = shifted_BTV / jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None, None]
    sampled_B = temperature_B > 0
    scaled_BTV = _apply_if_any(_keep_top_k, sampled_B & (params.top_k_B > 0), scaled_BTV, params)
    scaled_BTV = _apply_if_any(_keep_top_p, sampled_B & (params.top_p_B < 1), scaled_BTV, params)
    return _apply_if_any(_keep_min_p, sampled_B & (params.min_p_B > 0), scaled_BTV, params)


def _apply_if_any(process, wanted, logits_BTV, context):
    """`process` where a row (or row and position) wants it; skipped if none does."""
    wanted_BT1 = wanted.reshape(*wanted.shape, *[1] * (3 - wanted.ndim))
    return lax.cond(
        jnp.any(wanted),
        lambda: jnp.where(wanted_BT1, process(logits_BTV, context), logits_BTV),
        lambda: logits_BTV,
    )


def _at_ids(values_BV: Array, ids_BC: Array | None) -> Array:
    return values_BV if ids_BC is None else jnp.take_along_axis(values_BV, ids_BC, axis=1)


def _forbid_stops(logits_BTV: Array, context: tuple[SamplingState, Array | None]) -> Array:
    stop_ids_BE, ids_BV = jnp.asarray(context[0].stop_ids_BE), context[1]
    if ids_BV is not None:
        is_stop_BV = jnp.any(ids_BV[:, :, None] == stop_ids_BE[:, None], axis=-1)
        return jnp.where(is_stop_BV[:, None], -jnp.inf, logits_BTV)
    rows_B1 = jnp.arange(len(stop_ids_BE))[:, None]
    # Padding ids of -1 would count from the end: they are moved out of range and dropped.
    ids_BE = jnp.where(stop_ids_BE < 0, logits_BTV.shape[-1], stop_ids_BE)
    return logits_BTV.at[rows_B1, :, ids_BE].set(-jnp.inf, mode="drop")


def _penalise(
    logits_BTV: Array,
    sampling: SamplingState,
    prefix_BJ: Array,
    seen_TJ: Array,
    ids_BV: Array | None,
) -> Array:
    params = sampling.params

    def penalised() -> Array:
        output_BTV = _at_ids(jnp.asarray(sampling.output_counts_BV), ids_BV)[
            :, None
        ] + _occurrences(prefix_BJ, seen_TJ, logits_BTV.shape, ids_BV)
        in_prompt_BV = _at_ids(jnp.asarray(sampling.prompt_counts_BV), ids_BV) > 0
        present_BTV = (output_BTV > 0) | in_prompt_BV[:, None]
        repetition_B11 = jnp.asarray(params.repetition_penalty_B)[:, None, None]
        frequency_B11 = jnp.asarray(params.frequency_penalty_B)[:, None, None]
        presence_B11 = jnp.asarray(params.presence_penalty_B)[:, None, None]
        factor_BTV = jnp.where(logits_BTV > 0, 1 / repetition_B11, repetition_B11)
        repeated_BTV = jnp.where(present_BTV, logits_BTV * factor_BTV, logits_BTV)
        return (
            repeated_BTV
            - frequency_B11 * output_BTV.astype(jnp.float32)
            - presence_B11 * (output_BTV > 0).astype(jnp.float32)
        )

    return lax.cond(jnp.any(params.penalised_B), penalised, lambda: logits_BTV)


def _occurrences(
    prefix_BJ: Array, seen_TJ: Array, shape: tuple[int, ...], ids_BV: Array | None
) -> Array:
    """How often each token of the logits stands in the drafts seen at each position."""
    seen_TJ = seen_TJ.astype(jnp.int32)
    if ids_BV is not None:
        same_BJV = prefix_BJ[:, :, None] == ids_BV[:, None]
        return jnp.einsum("TJ,BJV->BTV", seen_TJ, same_BJV.astype(jnp.int32))
    rows_B11 = jnp.arange(len(prefix_BJ))[:, None, None]
    positions_1T1 = jnp.arange(seen_TJ.shape[0])[None, :, None]
    return (
        jnp.zeros(shape, jnp.int32)
        .at[rows_B11, positions_1T1, prefix_BJ[:, None, :]]
        .add(seen_TJ[None])
    )


def _keep_top_k(logits_BTV: Array, params: SamplingParams) -> Array:
    ones_BTV = jnp.ones_like(logits_BTV)
    wanted_B = jnp.asarray(params.top_k_B).astype(jnp.float32)
    return _keep_largest(logits_BTV, ones_BTV, wanted_B)


def _keep_top_p(logits_BTV: Array, params: SamplingParams) -> Array:
    return _keep_largest(
        logits_BTV, jax.nn.softmax(logits_BTV, axis=-1), jnp.asarray(params.top_p_B)
    )


def _keep_min_p(logits_BTV: Array, params: SamplingParams) -> Array:
    # The largest logit is 0, so a logit is the log of its ratio to the likeliest.
    floor_B11 = jnp.log(jnp.asarray(params.min_p_B))[:, None, None]
    return jnp.where(logits_BTV >= floor_B11, logits_BTV, -jnp.inf)


def _keep_largest(
    logits_BTV: Float[Array, "B T V"],
    weights_BTV: Float[Array, "B T V"],
    wanted_B: Float[Array, " B"],
) -> Float[Array, "B T V"]:
    """Keeps the largest logits, as few as weigh `wanted` together, and ties of the last.

    The threshold is found by bisection over float32 values, taken as integers in the
    same order: exact after 32 halvings, without sorting.
    """
    bits = lax.bitcast_convert_type(logits_BTV, jnp.int32)
    order_BTV = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    wanted_BT = jnp.broadcast_to(wanted_B[:, None], logits_BTV.shape[:2])

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_BT, high_BT = bounds  # enough weight at or above low, too little at or above high
        middle_BT = (low_BT >> 1) + (high_BT >> 1) + (low_BT & high_BT & 1)
        weight_BT = jnp.sum(weights_BTV, axis=-1, where=order_BTV >= middle_BT[..., None])
        enough_BT = weight_BT >= wanted_BT
        return jnp.where(enough_BT, middle_BT, low_BT), jnp.where(enough_BT, high_BT, middle_BT)

    low_BT = jnp.min(order_BTV, axis=-1)
    high_BT = jnp.max(order_BTV, axis=-1) + 1
    threshold_BT, _ = lax.fori_loop(0, 32, halve, (low_BT, high_BT))
    return jnp.where(order_BTV >= threshold_BT[..., None], logits_BTV, -jnp.inf)


def draw_draft(
    logits_BC: Float[Array, "B C"],
    sampling: SamplingState,
    length_B: Int[Array, " B"],
    drafted_BJ: Int[Array, "B J"],
    count: int | Int[Array, ""],
    key_B: Key[Array, " B"],
    ids_BC: Int[Array, "B C"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, "B C"]]:
    """One draft token and the logits it was drawn from, for drafters.

    Args:
      logits_BC: the drafter's raw logits.
      sampling: the rows' processors.
      length_B: committed tokens of the row.
      drafted_BJ: holds this round's drafts so far.
      count: how many of its columns are drafts.
      key_B: this draft's keys.
      ids_BC: distinct token of each logit, if these are candidates (`DraftDist.ids_BGC`);
        None for the whole vocabulary in order.

    Returns:
      token_B, and logits of q, whose softmax is the very distribution of the draw.
    """
    seen_1J = jnp.arange(drafted_BJ.shape[1], dtype=jnp.int32)[None] < count
    logits_B1C = adjust_logits(logits_BC[:, None], sampling, length_B, drafted_BJ, seen_1J, ids_BC)
    if ids_BC is not None:
        # Candidates that are all forbidden still need a q: the target will reject them.
        allowed_B11 = jnp.any(logits_B1C > -jnp.inf, axis=-1, keepdims=True)
        logits_B1C = jnp.where(allowed_B11, logits_B1C, logits_BC[:, None])
    q_logits_BC = process_logits(logits_B1C, sampling.params)[:, 0]
    best_B = largest(q_logits_BC)

    def drawn() -> Array:
        if sampling.coupled_vocab is None:
            return sample(key_B, q_logits_BC)
        noise_BV = gumbel(key_B, sampling.coupled_vocab)
        return largest(q_logits_BC + _at_ids(noise_BV, ids_BC))

    index_B = lax.cond(
        jnp.all(sampling.greedy_B),
        lambda: best_B,
        lambda: jnp.where(sampling.greedy_B, best_B, drawn()),
    )
    token_B = index_B if ids_BC is None else _at_ids(ids_BC, index_B[:, None])[:, 0]
    return token_B, q_logits_BC


def sample(keys: Key[Array, "*rows"], logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """One token from softmax(logits) for each key, by inversion of the cumulative sum.

    First a piece of the vocabulary is drawn and then a token of it, with a uniform number
    for each: no sum is long, and two numbers serve where Gumbel noise would take V.
    """
    uniform_2 = uniform(keys, (2,))
    weights = _pieces(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), fill=0.0)
    piece = _invert(jnp.sum(weights, axis=-1), uniform_2[..., 0])
    return piece * weights.shape[-1] + _invert(_at(weights, piece), uniform_2[..., 1])


def largest(values: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The first index of the largest value, as `jnp.argmax`, which is slow over long rows."""
    pieces = _pieces(values, fill=-jnp.inf)
    piece = jnp.argmax(jnp.max(pieces, axis=-1), axis=-1).astype(jnp.int32)
    return piece * pieces.shape[-1] + jnp.argmax(_at(pieces, piece), axis=-1).astype(jnp.int32)


def _pieces(values: Float[Array, "*rows V"], fill: float) -> Float[Array, "*rows C I"]:
    size = min(_PIECE, values.shape[-1])
    missing = -values.shape[-1] % size
    if missing:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
        values = jnp.pad(values, padding, constant_values=fill)
    return values.reshape(*values.shape[:-1], -1, size)


def _at(pieces: Float[Array, "*rows C I"], index: Int[Array, "*rows"]) -> Float[Array, "*rows I"]:
    return jnp.take_along_axis(pieces, index[..., None, None], axis=-2)[..., 0, :]


def _invert(
    weights: Float[Array, "*rows C"], uniform: Float[Array, "*rows"]
) -> Int[Array, "*rows"]:
    """The first index at which the weights' running sum exceeds `uniform` of the whole.

    Never one of weight 0, however the sum is rounded.
    """
    sums = jnp.cumsum(weights, axis=-1)
    beyond = sums > uniform[..., None] * sums[..., -1:]
    return jnp.argmax(jnp.where(weights > 0, jnp.where(beyond, 2, 1), 0), axis=-1).astype(jnp.int32)


def gumbel(keys: Key[Array, "*rows"], size: int) -> Float[Array, "*rows V"]:
    """Gumbel noise for each key, of JAX's high precision."""
    draw = partial(jax.random.gumbel, shape=(size,), dtype=jnp.float32, mode="high")
    return jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, size)


def uniform(keys: Key[Array, "*rows"], shape: tuple[int, ...] = ()) -> Float[Array, "*numbers"]:
    """Numbers on [0, 1) of that shape for each key."""
    draw = partial(jax.random.uniform, shape=shape, dtype=jnp.float32)
    return jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, *shape)


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
    # An id that no token has is nobody's; as an index a negative one would count from the end.
    ids_BC = jnp.where(ids_BC < 0, vocab_size, ids_BC)
    rows_B1 = jnp.arange(len(offset_B))[:, None]
    q_BV = jnp.zeros((len(offset_B), vocab_size), q_BC.dtype)
    return q_BV.at[rows_B1, ids_BC].add(q_BC, mode="drop")
