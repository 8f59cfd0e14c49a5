"""One round of speculative decoding: draft, schedule, verify, accept, commit, observe."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.decoding.accept import Verdict, accept
from specjax.decoding.sampling import round_keys
from specjax.decoding.types import (
    DecodeConfig,
    DecodeState,
    DraftDist,
    DrafterModel,
    Proposal,
    PyTree,
    RoundOutput,
    RoundStats,
    TargetModel,
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
    keys = round_keys(jnp.asarray(state.sampling.seed_B), length_B - 1, config.draft_len)

    with jax.named_scope("draft"):
        proposal, drafter_state = _empty_proposal(len(length_B)), state.drafter_state
        if config.draft_len:
            proposal, drafter_state = drafter.propose(
                drafter_params, drafter_state, anchor_B, length_B, state.sampling, keys.draft_BG
            )
    with jax.named_scope("schedule"):
        verify_len_B, policy_state = config.policy.choose(
            state.policy_state, proposal.confidence_BG, state.done_B, config.draft_len
        )
    with jax.named_scope("verify"):
        inputs_BT = jnp.concatenate([anchor_B[:, None], proposal.tokens_BG], axis=1)
        positions_BT = length_B[:, None] - 1 + jnp.arange(inputs_BT.shape[1])[None]
        out = target.apply(target_params, inputs_BT, positions_BT, state.cache, taps=drafter.taps)
    with jax.named_scope("accept"):
        assert out.logits is not None
        verdict = accept(out.logits, proposal, verify_len_B, state.sampling, keys)
    with jax.named_scope("commit"):
        state, output = commit(state, proposal.tokens_BG, verify_len_B, verdict)
    with jax.named_scope("observe"):
        # One input for each token committed: the anchor, and all drafts kept but for
        # the one that now is the anchor.
        drafter_state = drafter.observe(
            drafter_params,
            drafter_state,
            inputs_BT,
            out.taps,
            out.hidden,
            start_B=length_B - 1,
            count_B=output.count_B,
        )
    return (
        dataclasses.replace(
            state, cache=out.cache, drafter_state=drafter_state, policy_state=policy_state
        ),
        output,
    )


def commit(
    state: DecodeState,
    drafts_BG: Int[Array, "B G"],
    verify_len_B: Int[Array, " B"],
    verdict: Verdict,
) -> tuple[DecodeState, RoundOutput]:
    """Appends the kept drafts and the target's token, up to a stop token or the limit."""
    tokens_BT = jnp.pad(drafts_BG, ((0, 0), (0, 1)))
    offsets_1T = jnp.arange(tokens_BT.shape[1])[None]
    accepted_B = verdict.accepted_B
    tokens_BT = jnp.where(offsets_1T < accepted_B[:, None], tokens_BT, verdict.next_B[:, None])

    is_stop_BT = jnp.any(tokens_BT[:, :, None] == state.stop_ids_BE[:, None, :], axis=-1)
    stop_at_B = jnp.min(jnp.where(is_stop_BT, offsets_1T, offsets_1T.shape[1]), axis=1).astype(
        jnp.int32
    )
    whole_B = jnp.minimum(accepted_B, stop_at_B) + 1
    count_B = jnp.minimum(whole_B, state.limit_B - state.length_B)
    count_B = jnp.where(state.done_B, 0, count_B)
    length_B = state.length_B + count_B
    done_B = state.done_B | (stop_at_B < count_B) | (length_B >= state.limit_B)

    slots_BT = jnp.where(
        offsets_1T < count_B[:, None],
        state.length_B[:, None] + offsets_1T,
        state.tokens_BS.shape[1],
    )
    rows_B1 = jnp.arange(len(count_B))[:, None]
    ended_by_draft_B = stop_at_B < accepted_B
    stats = _count_round(
        state.stats,
        active_B=~state.done_B,
        draft_len=drafts_BG.shape[1],
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
        done_B=done_B,
    )
    tokens_BS = state.tokens_BS.at[rows_B1, slots_BT].set(tokens_BT, mode="drop")
    state = dataclasses.replace(
        state, tokens_BS=tokens_BS, length_B=length_B, done_B=done_B, stats=stats
    )
    return state, output


def _count_round(
    stats: RoundStats,
    *,
    active_B: Array,
    draft_len: int,
    verified_B: Array,
    accepted_B: Array,
    bonus_B: Array,
    emitted_B: Array,
) -> RoundStats:
    offsets_1G = jnp.arange(stats.verified_BG.shape[1])[None]
    active_B1 = active_B[:, None]

    def reached(length_B: Array) -> Array:
        return ((offsets_1G < length_B[:, None]) & active_B1).astype(jnp.int32)

    active = active_B.astype(jnp.int32)
    return RoundStats(
        rounds_B=stats.rounds_B + active,
        drafted_B=stats.drafted_B + active * draft_len,
        verified_BG=stats.verified_BG + reached(verified_B),
        accepted_BG=stats.accepted_BG + reached(accepted_B),
        bonus_B=stats.bonus_B + active * bonus_B.astype(jnp.int32),
        emitted_B=stats.emitted_B + emitted_B,
    )


def _empty_proposal(batch: int) -> Proposal:
    return Proposal(
        tokens_BG=jnp.zeros((batch, 0), jnp.int32),
        dist=DraftDist(jnp.zeros((batch, 0, 1)), jnp.zeros((batch, 0, 1), jnp.int32)),
    )
