"""One round of speculative decoding: draft, schedule, verify, accept, commit, observe."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.accept import Verdict, accept
from specjax.decoding.sampling import (
    RoundKeys,
    adjust_logits,
    coupled_keys,
    process_logits,
    round_keys,
)
from specjax.decoding.types import (
    DecodeConfig,
    DecodeState,
    DraftDist,
    DrafterModel,
    LogProbs,
    Proposal,
    PyTree,
    RoundOutput,
    RoundStats,
    SamplingState,
    TargetModel,
    TargetOutput,
)


def speculate_step(
    target_params: PyTree,
    drafter_params: PyTree,
    state: DecodeState,
    *,
    target: TargetModel,
    drafter: DrafterModel,
    config: DecodeConfig,
) -> tuple[DecodeState, RoundOutput]:
    """Drafts G tokens a row, verifies them in one pass of the target, commits a prefix.

    Pure and unjitted: trace it inside your own program, or use `decode` and `stream`.
    Every row that has not ended commits between 1 and G + 1 tokens, distributed exactly
    as if the target had drawn them one by one; a row that has ended commits none.

    Args:
      target_params: parameters of the target.
      drafter_params: parameters of the drafter.
      state: from `init_decode_state` or an earlier step.
      target: static description of the target.
      drafter: static description of the drafter.
      config: static choices; draft_len 0 decodes autoregressively.

    Returns:
      The state after the round, and what the round committed.
    """
    length_B = state.length_B
    anchor_B = jnp.take_along_axis(state.tokens_BS, length_B[:, None] - 1, axis=1)[:, 0]
    coupled = config.acceptance == "coupled"
    make_keys = coupled_keys if coupled else round_keys
    keys = make_keys(jnp.asarray(state.sampling.params.seed_B), length_B - 1, config.draft_len)

    with jax.named_scope("draft"):
        proposal, drafter_state = _empty_proposal(len(length_B)), state.drafter_state
        if config.draft_len:
            sampling = dataclasses.replace(
                state.sampling, coupled_vocab=target.vocab_size if coupled else None
            )
            proposal, drafter_state = drafter.propose(
                drafter_params, drafter_state, anchor_B, length_B, sampling, keys.draft_BG
            )
        _check_draft_len(proposal, state, config.draft_len)
    with jax.named_scope("schedule"):
        verify_len_B, policy_state = config.policy.choose(
            state.policy_state, proposal.confidence_BG, state.done_B, config.draft_len
        )
        if proposal.count_B is not None:
            verify_len_B = jnp.minimum(verify_len_B, proposal.count_B)
    inputs_BT = jnp.concatenate([anchor_B[:, None], proposal.tokens_BG], axis=1)

    def verify(cache: PyTree, size: int) -> tuple[PyTree, Verification]:
        """One pass over the anchor and `size` drafts, and what it decides."""
        with jax.named_scope("verify"):
            positions_BT = length_B[:, None] - 1 + jnp.arange(size + 1, dtype=jnp.int32)[None]
            out = target.apply(
                target_params, inputs_BT[:, : size + 1], positions_BT, cache, taps=drafter.taps
            )
        with jax.named_scope("accept"):
            judged = judge(out, _first_drafts(proposal, size), verify_len_B, state, keys, config)
        return out.cache, _pad(judged, config.draft_len - size)

    # Where proposals say how many drafts they hold there are several passes, and the shortest
    # that holds those of all rows is run. What it gives is padded to the longest.
    sizes = [config.draft_len]
    if proposal.count_B is not None:
        sizes = sorted({*(proposal.lens or (0,)), config.draft_len})
    longest = jnp.max(jnp.where(state.done_B, 0, verify_len_B))
    wanted = jnp.sum(longest > jnp.array(sizes[:-1], jnp.int32), dtype=jnp.int32)
    cache, judged = _run_one(verify, sizes, wanted, state.cache)

    with jax.named_scope("commit"):
        state, output = commit(state, proposal, verify_len_B, judged)
    with jax.named_scope("observe"):
        # One input for each token committed: the anchor, and all drafts kept but for
        # the one that now is the anchor.
        drafter_state = drafter.observe(
            drafter_params,
            drafter_state,
            inputs_BT,
            judged.taps,
            judged.hidden,
            start_B=length_B - 1,
            count_B=output.count_B,
        )
    state = dataclasses.replace(
        state, cache=cache, drafter_state=drafter_state, policy_state=policy_state
    )
    return state, output


def _check_draft_len(proposal: Proposal, state: DecodeState, draft_len: int) -> None:
    if not isinstance(proposal.dist, DraftDist):
        raise ValueError("the drafter's proposal has no DraftDist: say what it drew from")
    drafted, counted = proposal.tokens_BG.shape[1], state.stats.verified_BG.shape[1]
    if drafted != draft_len:
        raise ValueError(f"the drafter proposed {drafted} tokens a row instead of {draft_len}")
    if counted < draft_len:
        raise ValueError(
            f"the state was made for draft_len {counted}: it has no room for {draft_len}"
        )


class Verification(NamedTuple):
    """What one pass of the target gives to the rest of the round."""

    verdict: Verdict
    hidden: Float[Array, "B T D"]
    taps: Float[Array, "B T M D"] | None
    logprobs: LogProbs | None


def judge(
    out: TargetOutput,
    proposal: Proposal,
    verify_len_B: Int[Array, " B"],
    state: DecodeState,
    keys: RoundKeys,
    config: DecodeConfig,
) -> Verification:
    """Accepts drafts by the target's logits after the anchor and after each draft."""
    assert out.logits is not None
    draft_len = proposal.tokens_BG.shape[1]
    # Penalties count the drafts before each position, besides the committed tokens.
    earlier_TJ = jnp.arange(draft_len)[None] < jnp.arange(draft_len + 1)[:, None]
    logits_BTV = adjust_logits(
        out.logits, state.sampling, state.length_B, proposal.tokens_BG, earlier_TJ
    )
    if keys.position_BT is not None:
        keys = keys._replace(position_BT=keys.position_BT[:, : draft_len + 1])
    keys = keys._replace(accept_BG=keys.accept_BG[:, :draft_len])
    verdict = accept(logits_BTV, proposal, verify_len_B, state.sampling, keys)
    logprobs = None
    if config.logprobs:
        tokens_BT = _committed_tokens(proposal.tokens_BG, verdict)
        logprobs = _log_probs(out.logits, logits_BTV, tokens_BT, state.sampling)
    return Verification(verdict, out.hidden, out.taps, logprobs)


def _log_probs(
    raw_BTV: Array, adjusted_BTV: Array, tokens_BT: Array, sampling: SamplingState
) -> LogProbs:
    def chosen(logits_BTV: Array) -> Array:
        token_BT1 = jnp.take_along_axis(logits_BTV, tokens_BT[:, :, None], axis=2)
        return token_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)

    processed_BT = chosen(process_logits(adjusted_BTV, sampling.params))
    return LogProbs(chosen(raw_BTV), jnp.where(sampling.greedy_B[:, None], 0.0, processed_BT))


def _run_one(
    run: Callable[[PyTree, int], tuple[PyTree, PyTree]],
    sizes: Sequence[int],
    index: Int[Array, ""],
    cache: PyTree,
) -> tuple[PyTree, PyTree]:
    """`lax.switch` over run(cache, size) that updates the cache in place.

    Some versions of XLA copy what a conditional's branches change. A loop changes it in
    place; the one of size `index` takes one turn, the others none.
    """
    if len(sizes) == 1:
        return run(cache, sizes[0])
    shapes = jax.eval_shape(lambda cache: run(cache, sizes[-1])[1], cache)
    result = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    carry = (cache, result)
    for i, size in enumerate(sizes):

        def once(turn: tuple[Array, PyTree], size: int = size) -> tuple[Array, PyTree]:
            return jnp.array(False), run(turn[1][0], size)

        _, carry = lax.while_loop(lambda turn: turn[0], once, (index == i, carry))
    return carry


def _first_drafts(proposal: Proposal, size: int) -> Proposal:
    return jax.tree.map(lambda leaf: leaf[:, :size] if leaf.ndim > 1 else leaf, proposal)


def _pad(judged: Verification, missing: int) -> Verification:
    """Fills up what has an entry for each position of the pass."""
    if not missing:
        return judged
    grown = jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, 0), (0, missing)] + [(0, 0)] * (leaf.ndim - 2)),
        judged[1:],
    )
    return Verification(judged.verdict, *grown)


def _committed_tokens(drafts_BG: Int[Array, "B G"], verdict: Verdict) -> Int[Array, "B T"]:
    """The drafts kept, and the target's token from there on."""
    tokens_BT = jnp.pad(drafts_BG, ((0, 0), (0, 1)))
    offsets_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    kept_BT = offsets_1T < verdict.accepted_B[:, None]
    return jnp.where(kept_BT, tokens_BT, verdict.next_B[:, None])


def commit(
    state: DecodeState,
    proposal: Proposal,
    verify_len_B: Int[Array, " B"],
    judged: Verification,
) -> tuple[DecodeState, RoundOutput]:
    """Appends the kept drafts and the target's token, up to a stop token or the limit."""
    accepted_B = judged.verdict.accepted_B
    tokens_BT = _committed_tokens(proposal.tokens_BG, judged.verdict)
    offsets_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    stop_ids_BE = jnp.asarray(state.sampling.stop_ids_BE)
    is_stop_BT = jnp.any(tokens_BT[:, :, None] == stop_ids_BE[:, None, :], axis=-1)
    stop_at_B = jnp.min(
        jnp.where(is_stop_BT, offsets_1T, jnp.int32(offsets_1T.shape[1])), axis=1
    ).astype(jnp.int32)
    whole_B = jnp.minimum(accepted_B, stop_at_B) + 1
    count_B = jnp.minimum(whole_B, state.limit_B - state.length_B)
    count_B = jnp.where(state.done_B, 0, count_B)
    length_B = state.length_B + count_B
    done_B = state.done_B | (stop_at_B < count_B) | (length_B >= state.limit_B)

    rows_B1 = jnp.arange(len(count_B))[:, None]
    committed_BT = offsets_1T < count_B[:, None]
    slots_BT = jnp.where(
        committed_BT, state.length_B[:, None] + offsets_1T, state.tokens_BS.shape[1]
    )

    def write(buffer_BS: Array, new_BT: Array) -> Array:
        return buffer_BS.at[rows_B1, slots_BT].set(new_BT, mode="drop")

    # A round that an accepted stop token ends has no token of the target's own, and what was
    # drafted after that token does not count as verified.
    ended_by_draft_B = stop_at_B < accepted_B
    drafted_B = jnp.full_like(count_B, proposal.tokens_BG.shape[1])
    stats = _count_round(
        state.stats,
        active_B=~state.done_B,
        drafted_B=drafted_B if proposal.count_B is None else proposal.count_B,
        verified_B=jnp.where(ended_by_draft_B, stop_at_B + 1, verify_len_B),
        accepted_B=jnp.where(ended_by_draft_B, stop_at_B + 1, accepted_B),
        bonus_B=~ended_by_draft_B,
        emitted_B=count_B,
    )
    output = RoundOutput(
        tokens_BT=tokens_BT,
        count_B=count_B,
        verify_len_B=jnp.where(state.done_B, 0, verify_len_B),
        accepted_B=jnp.where(state.done_B, 0, accepted_B),
        done_B=jnp.copy(done_B),  # not the state's own array, which may be donated
        logprobs=judged.logprobs,
    )
    state = dataclasses.replace(
        state,
        tokens_BS=write(state.tokens_BS, tokens_BT),
        length_B=length_B,
        done_B=done_B,
        sampling=_count_tokens(state.sampling, tokens_BT, committed_BT),
        stats=stats,
        logprobs=jax.tree.map(write, state.logprobs, judged.logprobs),
    )
    return state, output


def _count_tokens(
    sampling: SamplingState, tokens_BT: Int[Array, "B T"], committed_BT: Bool[Array, "B T"]
) -> SamplingState:
    if sampling.output_counts_BV is None:
        return sampling
    rows_B1 = jnp.arange(len(tokens_BT))[:, None]
    counts_BV = sampling.output_counts_BV.at[rows_B1, tokens_BT].add(committed_BT.astype(jnp.int32))
    return dataclasses.replace(sampling, output_counts_BV=counts_BV)


def _count_round(
    stats: RoundStats,
    *,
    active_B: Array,
    drafted_B: Array,
    verified_B: Array,
    accepted_B: Array,
    bonus_B: Array,
    emitted_B: Array,
) -> RoundStats:
    offsets_1G = jnp.arange(stats.verified_BG.shape[1], dtype=jnp.int32)[None]
    active_B1 = active_B[:, None]

    def below(length_B: Array) -> Array:
        return ((offsets_1G < length_B[:, None]) & active_B1).astype(jnp.int32)

    active = active_B.astype(jnp.int32)
    return RoundStats(
        rounds_B=stats.rounds_B + active,
        drafted_B=stats.drafted_B + active * drafted_B,
        verified_BG=stats.verified_BG + below(verified_B),
        reached_BG=stats.reached_BG + below(jnp.minimum(verified_B, accepted_B + 1)),
        accepted_BG=stats.accepted_BG + below(accepted_B),
        bonus_B=stats.bonus_B + active * bonus_B.astype(jnp.int32),
        emitted_B=stats.emitted_B + emitted_B,
    )


def _empty_proposal(batch: int) -> Proposal:
    return Proposal(
        tokens_BG=jnp.zeros((batch, 0), jnp.int32),
        dist=DraftDist(jnp.zeros((batch, 0, 1), jnp.float32), jnp.zeros((batch, 0, 1), jnp.int32)),
    )
