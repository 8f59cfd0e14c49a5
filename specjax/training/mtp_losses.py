"""Losses of MTP modules and of their target (DeepSeek-V3, arXiv 2412.19437, equations 24, 25)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.training.losses import draft_rows

_EPSILON = 1e-6  # in the denominators


@dataclasses.dataclass(frozen=True)
class MTPLossWeights:
    """How the losses of modules add up.

    Attributes:
      scale: λ, of the mean over the modules.
      late_scale: λ from `late` on; None leaves it. DeepSeek-V3 has 0.3, then 0.1.
      late: part of the run after which it changes.
      depth_decay: β; module k counts β^(k-1) in that mean. 1 is DeepSeek-V3's, 0.6 that of
        FastMTP (arXiv 2509.18362).
      distillation: part of a module's loss that is cross-entropy to the target's own
        distribution instead of to the text.
    """

    scale: float = 0.3
    late_scale: float | None = None
    late: float = 0.67
    depth_decay: float = 1.0
    distillation: float = 0.0

    def __post_init__(self) -> None:
        numbers = [number for number in dataclasses.astuple(self) if number is not None]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"loss weights must be finite and at least 0, got {self}")
        if max(self.distillation, self.late) > 1:
            raise ValueError(f"distillation and late must be at most 1, got {self}")

    @property
    def lambdas(self) -> tuple[float, float]:
        """λ at first, and from `late` on."""
        return self.scale, self.scale if self.late_scale is None else self.late_scale

    def at(self, progress: Float[Array, ""]) -> Float[Array, ""]:
        """λ when that part of the run is done."""
        return jnp.where(progress < self.late, *self.lambdas)


class MTPLosses(NamedTuple):
    """Means over the trained positions of a batch; what a step reports.

    Attributes:
      total: what is minimised.
      cross_entropy_K: of each module, in nats a token.
      distillation_K: cross-entropy of each module to the target's distribution.
      acceptance_K: mean chance that the target accepts a draft of each module, given that it
        accepted those before.
      expected_length: mean committed tokens a round of as many drafts as modules.
      weight: positions of the target's head that were counted.
    """

    total: Float[Array, ""]
    cross_entropy_K: Float[Array, " K"]
    distillation_K: Float[Array, " K"]
    acceptance_K: Float[Array, " K"]
    expected_length: Float[Array, ""]
    weight: Float[Array, ""]


def next_token_loss(
    logits_BTV: Float[Array, "B T V"],
    tokens_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, "B T"]]:
    """Cross-entropy of a target's own head, which predicts token i + 1 at position i.

    Returns:
      The mean over positions that count, how many do, and the log-sum-exp of the logits.
    """
    counted_BT = _counted(mask_BT, segments_BT, 1)
    normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    label_BT1 = jnp.take_along_axis(logits_BTV, _ahead(tokens_BT, 1)[..., None], axis=-1)
    mean = _mean(normalizer_BT - label_BT1[..., 0], counted_BT)
    return mean, jnp.sum(counted_BT, dtype=jnp.float32), normalizer_BT


def mtp_losses(
    logits: Sequence[Float[Array, "B T C"]],
    probs_BTC: Float[Array, "B T C"],
    tokens_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    weights: MTPLossWeights,
    progress: Float[Array, ""],
    draft_ids: Int[Array, " C"] | None = None,
) -> MTPLosses:
    """Losses of the modules on a batch.

    At position i module k is to predict token i + k + 1 of the same segment: nothing is
    learnt across documents.

    Args:
      logits: of the modules, by depth from 1.
      probs_BTC: the target's probabilities after each position, of the tokens that may be
        drafted. No gradient flows into them.
      tokens_BT: token ids.
      mask_BT: tokens to be learnt.
      segments_BT: documents of a row; 0 is padding.
      weights: of the losses.
      progress: part of the run that is done.
      draft_ids: the trimmed vocabulary in increasing order, if there is one.
    """
    probs_BTC = lax.stop_gradient(probs_BTC)
    first_BT = _counted(mask_BT, segments_BT, 1)
    entropies, distillations, acceptances = [], [], []
    reached_BT, all_BT = jnp.ones(tokens_BT.shape, jnp.float32), first_BT
    length_BT = jnp.ones(tokens_BT.shape, jnp.float32)
    for k, logits_BTC in enumerate(logits, start=1):
        counted_BT = _counted(mask_BT, segments_BT, k + 1)
        labels_BT, known_BT = draft_rows(_ahead(tokens_BT, k + 1), draft_ids)
        normalizer_BT = jax.nn.logsumexp(logits_BTC, axis=-1)
        label_BT = jnp.take_along_axis(logits_BTC, labels_BT[..., None], axis=-1)[..., 0]
        entropies.append(_mean(normalizer_BT - label_BT, counted_BT & known_BT))
        # What the target says where the module's prediction is drafted.
        target_BTC = _ahead(probs_BTC, k)
        drawn_BT = jnp.sum(target_BTC * logits_BTC, axis=-1)
        total_BT = jnp.sum(target_BTC, axis=-1)
        distillations.append(_mean(total_BT * normalizer_BT - drawn_BT, counted_BT))
        q_BTC = jnp.exp(logits_BTC - normalizer_BT[..., None])
        accepted_BT = lax.stop_gradient(jnp.sum(jnp.minimum(target_BTC, q_BTC), axis=-1))
        acceptances.append(_mean(accepted_BT, counted_BT))
        all_BT &= counted_BT
        reached_BT = reached_BT * accepted_BT * all_BT.astype(jnp.float32)
        length_BT = length_BT + reached_BT
    cross_entropy_K, distillation_K = jnp.stack(entropies), jnp.stack(distillations)
    decays_K = weights.depth_decay ** jnp.arange(len(logits), dtype=jnp.float32)
    share = weights.distillation
    kinds = ((1 - share, cross_entropy_K), (share, distillation_K))
    mixed_K = sum(part * losses_K for part, losses_K in kinds if part)  # or 0 is differentiated
    modules = jnp.sum(mixed_K * decays_K) / jnp.sum(decays_K)
    return MTPLosses(
        total=weights.at(progress) * modules,
        cross_entropy_K=cross_entropy_K,
        distillation_K=distillation_K,
        acceptance_K=jnp.stack(acceptances),
        expected_length=_mean(length_BT, first_BT),
        weight=jnp.sum(first_BT, dtype=jnp.float32),
    )


def _ahead(values: Array, count: int) -> Array:
    """Along T, what stands `count` positions later; 0 past the end."""
    rest = values[:, count:]
    missing = values.shape[1] - rest.shape[1]
    return jnp.pad(rest, ((0, 0), (0, missing), *((0, 0),) * (values.ndim - 2)))


def _counted(mask_BT: Array, segments_BT: Array, count: int) -> Array:
    """Positions whose token `count` later is to be learnt, in the same segment."""
    later_BT = _ahead(segments_BT, count)
    return _ahead(mask_BT, count) & (later_BT == segments_BT) & (segments_BT > 0)


def _mean(values_BT: Array, counted_BT: Array) -> Array:
    count = jnp.sum(counted_BT, dtype=jnp.float32)
    return jnp.sum(values_BT, where=counted_BT) / (count + _EPSILON)
