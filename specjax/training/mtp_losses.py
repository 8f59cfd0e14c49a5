"""Losses of MTP modules (DeepSeek-V3, arXiv 2412.19437, equations 24 and 25)."""

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
    """How the losses add up.

    Attributes:
      main: of the target's own cross-entropy; 0 where the target is frozen.
      modules: λ, of the mean over the modules.
      depth_decay: β; module k counts β^(k-1) in that mean. 1 is DeepSeek-V3's, 0.6 that of
        FastMTP (arXiv 2509.18362).
      distillation: part of a module's loss that is cross-entropy to the target's own
        distribution instead of to the text.
    """

    main: float = 1.0
    modules: float = 0.3
    depth_decay: float = 1.0
    distillation: float = 0.0

    def __post_init__(self) -> None:
        numbers = dataclasses.astuple(self)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"loss weights must be finite and at least 0, got {self}")
        if self.distillation > 1 or not self.main + self.modules:
            raise ValueError(
                f"distillation must be at most 1, and main or modules above 0; got {self}"
            )


class MTPLosses(NamedTuple):
    """Means over the trained positions of a batch; what a step reports.

    Attributes:
      total: what is minimised.
      main: cross-entropy of the target's head, in nats a token; 0 where it has no weight.
      cross_entropy_K: of each module, likewise.
      distillation_K: cross-entropy of each module to the target's distribution.
      acceptance_K: mean chance that the target accepts a draft of each module, given that it
        accepted those before.
      expected_length: mean committed tokens a round of as many drafts as modules.
      weight: positions of the target's head that were counted.
    """

    total: Float[Array, ""]
    main: Float[Array, ""]
    cross_entropy_K: Float[Array, " K"]
    distillation_K: Float[Array, " K"]
    acceptance_K: Float[Array, " K"]
    expected_length: Float[Array, ""]
    weight: Float[Array, ""]


def mtp_losses(
    logits: Sequence[Float[Array, "B T C"]],
    probs_BTC: Float[Array, "B T C"],
    main_BT: Float[Array, "B T"] | None,
    tokens_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    weights: MTPLossWeights,
    draft_ids: Int[Array, " C"] | None = None,
) -> MTPLosses:
    """Main and module losses of a batch.

    At position i the target's head is to predict token i + 1, module k token i + k + 1, all
    of the same segment: nothing is learnt across documents.

    Args:
      logits: of the modules, by depth from 1.
      probs_BTC: the target's probabilities after each position, of the tokens that may be
        drafted. No gradient flows into them.
      main_BT: the target's cross-entropy at each position; None where it has no weight.
      tokens_BT: token ids.
      mask_BT: tokens to be learnt.
      segments_BT: documents of a row; 0 is padding.
      weights: of the losses.
      draft_ids: the trimmed vocabulary in increasing order, if there is one.
    """
    probs_BTC = lax.stop_gradient(probs_BTC)
    first_BT = _counted(mask_BT, segments_BT, 1)
    main = jnp.float32(0.0) if main_BT is None else _mean(main_BT, first_BT)
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
    mixed_K = (1 - weights.distillation) * cross_entropy_K + weights.distillation * distillation_K
    modules = jnp.sum(mixed_K * decays_K) / jnp.sum(decays_K)
    return MTPLosses(
        total=weights.main * main + weights.modules * modules,
        main=main,
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
