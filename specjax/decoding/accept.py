"""Which drafts are kept, and the token that follows them.

Rejection sampling of Leviathan et al. (arXiv 2211.17192, Algorithm 1) and Chen et al.
(arXiv 2302.01318, Algorithm 1); docs/losslessness.md proves it for this code.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.sampling import (
    RoundKeys,
    draft_distribution,
    draft_probs,
    gumbel,
    largest,
    process_logits,
    sample,
    uniform,
)
from specjax.decoding.types import Proposal, SamplingState


class Verdict(NamedTuple):
    """Outcome of a verification.

    Attributes:
      accepted_B: n, how many drafts each row keeps.
      next_B: the target's own token at offset n, correction or bonus.
    """

    accepted_B: Int[Array, " B"]
    next_B: Int[Array, " B"]


def accept(
    logits_BTV: Float[Array, "B T V"],
    proposal: Proposal,
    verify_len_B: Int[Array, " B"],
    sampling: SamplingState,
    keys: RoundKeys,
) -> Verdict:
    """Keeps the longest valid prefix of the first `verify_len` drafts of each row.

    Args:
      logits_BTV: target logits after the anchor and after each draft, T = G + 1, with
        bias and penalties (`adjust_logits`).
      proposal: the drafts and the distribution they were drawn from.
      verify_len_B: ℓ, drafts that were verified; later ones are ignored.
      sampling: rows with temperature 0 keep a draft iff it is the target's arg-max.
      keys: of this round; keys by position make acceptance coupled.
    """
    best_BT = largest(logits_BTV)
    greedy = accept_equal(best_BT, proposal.tokens_BG, verify_len_B)

    def sampled() -> Verdict:
        target_logits_BTV = process_logits(logits_BTV, sampling.params)
        if keys.position_BT is not None:
            noise_BTV = gumbel(keys.position_BT, target_logits_BTV.shape[-1])
            tokens_BT = largest(target_logits_BTV + noise_BTV)
            return accept_equal(tokens_BT, proposal.tokens_BG, verify_len_B)
        accepted_B, next_logits_BV = accept_rejection(
            target_logits_BTV, proposal, verify_len_B, uniform(keys.accept_BG)
        )
        return Verdict(accepted_B, sample(keys.next_B, next_logits_BV))

    def mixed() -> Verdict:
        choose = partial(jnp.where, sampling.greedy_B)
        return jax.tree.map(choose, greedy, sampled())

    return lax.cond(jnp.all(sampling.greedy_B), lambda: greedy, mixed)


def accept_equal(
    chosen_BT: Int[Array, "B T"],
    tokens_BG: Int[Array, "B G"],
    verify_len_B: Int[Array, " B"],
) -> Verdict:
    """Keeps drafts while they equal the tokens that the target itself would emit.

    These are its arg-max, where both distributions are one-hot, or in coupled acceptance
    its draws with noise that depends on the position alone: by induction the output is
    what the target would have emitted on its own.
    """
    accepted_B = _prefix_length(tokens_BG == chosen_BT[:, :-1], verify_len_B)
    return Verdict(accepted_B, jnp.take_along_axis(chosen_BT, accepted_B[:, None], axis=1)[:, 0])


def accept_rejection(
    logits_BTV: Float[Array, "B T V"],
    proposal: Proposal,
    verify_len_B: Int[Array, " B"],
    uniform_BG: Float[Array, "B G"],
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """Draft k is kept while u_k q_k(x_k) < p_k(x_k), strictly.

    Args:
      logits_BTV: processed target logits; p = softmax.
      proposal: drafts with q.
      verify_len_B: ℓ.
      uniform_BG: u, uniform on [0, 1).

    Returns:
      n_B, the number kept, and the logits of the next token's distribution:
      norm(max(p - q, 0)) at offset n where draft n was rejected (p itself if nothing
      remains), p where all ℓ were kept.
    """
    draft_len = proposal.tokens_BG.shape[1]
    if draft_len == 0:
        return jnp.zeros_like(verify_len_B), logits_BTV[:, 0]
    tokens_BG, logits_BGV = proposal.tokens_BG, logits_BTV[:, :-1]
    logit_BG = jnp.take_along_axis(logits_BGV, tokens_BG[:, :, None], axis=2)[..., 0]
    p_BG = jnp.exp(logit_BG - jax.nn.logsumexp(logits_BGV, axis=-1))
    # An id that no token has is impossible; as an index it would count from the end.
    p_BG = jnp.where((tokens_BG >= 0) & (tokens_BG < logits_BGV.shape[-1]), p_BG, 0.0)
    q_BG = draft_probs(proposal.dist, tokens_BG)
    accepted_B = _prefix_length(uniform_BG * q_BG < p_BG, verify_len_B)

    next_logits_BV = jnp.take_along_axis(logits_BTV, accepted_B[:, None, None], axis=1)[:, 0]
    p_BV = jax.nn.softmax(next_logits_BV, axis=-1)
    rejected_at_B = jnp.minimum(accepted_B, draft_len - 1)
    q_BV = draft_distribution(proposal.dist, rejected_at_B, p_BV.shape[-1])
    residual_BV = jnp.maximum(p_BV - q_BV, 0.0)
    rejected_B = (accepted_B < verify_len_B) & (jnp.sum(residual_BV, axis=-1) > 0)
    return accepted_B, jnp.where(rejected_B[:, None], jnp.log(residual_BV), next_logits_BV)


def _prefix_length(kept_BG: Bool[Array, "B G"], limit_B: Int[Array, " B"]) -> Int[Array, " B"]:
    offsets_G = jnp.arange(kept_BG.shape[1], dtype=jnp.int32)
    kept_BG = kept_BG & (offsets_G[None] < limit_B[:, None])
    return jnp.sum(jnp.cumprod(kept_BG.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
