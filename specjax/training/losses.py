"""Losses of a DSpark drafter (Cheng et al., 2026, equations 8 to 12)."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.dspark import BlockOutput
from specjax.training.anchors import Blocks

_EPSILON = 1e-6  # in the denominators, as in the released code


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Equation 12, and how much later positions of a block count.

    Attributes:
      cross_entropy: of the text (equation 9).
      soft_cross_entropy: of the target's distribution, whose gradient is that of the
        Kullback-Leibler divergence to it; not in the paper.
      total_variation: of draft and target distributions (equation 10).
      confidence: of the confidence head (equation 11); 0 without one.
      decay: position k, from 0, counts exp(-k / decay).
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    soft_cross_entropy: float = 0.0

    def __post_init__(self) -> None:
        numbers = dataclasses.asdict(self)
        decay = numbers.pop("decay")
        weights = numbers.values()
        finite = all(math.isfinite(number) for number in (*weights, decay))
        if not finite or min(weights) < 0 or not any(weights) or decay <= 0:
            raise ValueError(
                f"loss weights must be at least 0, one of them and the decay above 0; got {self}"
            )


class Losses(NamedTuple):
    """Weighted means over the trained positions of a batch; what a step reports.

    Attributes:
      total: what is minimised.
      cross_entropy: in nats a token.
      soft_cross_entropy: likewise; 0 where it has no weight.
      total_variation: ‖p_draft - p_target‖₁, from 0 to 2 (twice the total variation).
      confidence: binary cross-entropy, in nats; 0 without a confidence head.
      acceptance_G: mean chance that a draft at each position is accepted, over the trained
        positions.
      expected_length: mean committed tokens a round, 1 + the sum over positions of the
        product of the acceptances up to them.
      confidence_error: mean distance of confidence and acceptance; 0 without a head.
      confidence_bias: mean of confidence less acceptance; likewise.
      weight: what the means were divided by.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    soft_cross_entropy: Float[Array, ""]
    total_variation: Float[Array, ""]
    confidence: Float[Array, ""]
    acceptance_G: Float[Array, " G"]
    expected_length: Float[Array, ""]
    confidence_error: Float[Array, ""]
    confidence_bias: Float[Array, ""]
    weight: Float[Array, ""]


def dspark_losses(
    out: BlockOutput,
    blocks: Blocks,
    probs_BAGV: Float[Array, "B A G V"],
    weights: LossWeights,
    draft_ids: Int[Array, " V"] | None = None,
) -> Losses:
    """Cross-entropy, total variation and confidence losses of a batch of blocks.

    Args:
      out: of the drafter.
      blocks: that it was run on.
      probs_BAGV: p of the same tokens, at `blocks.states_BAG`. What it lacks of 1 is the
        target's weight of tokens that the drafter cannot draft, and counts as missed.
      weights: of the losses and positions.
      draft_ids: the trimmed vocabulary in increasing order, if the drafter has one. A label
        that is not among them has no cross-entropy.

    Raises:
      ValueError: a confidence loss without a confidence head.
    """
    if weights.confidence and out.confidence_BAG is None:
        raise ValueError(
            "the drafter has no confidence head: set the weight of its loss to 0, or add one"
        )
    labels_BAG, known_BAG = draft_rows(blocks.labels_BAG, draft_ids)
    known_BAG &= blocks.valid_BAG
    total_BAG = jnp.sum(probs_BAGV, axis=-1)
    normalizer_BAG = jax.nn.logsumexp(out.logits_BAGV, axis=-1)
    label_logit_BAG1 = jnp.take_along_axis(out.logits_BAGV, labels_BAG[..., None], axis=-1)
    entropy_BAG = normalizer_BAG - label_logit_BAG1[..., 0]
    draft_probs_BAGV = jnp.exp(out.logits_BAGV - normalizer_BAG[..., None])
    distance_BAG = jnp.maximum(1.0 - total_BAG, 0.0) + jnp.sum(
        jnp.abs(draft_probs_BAGV - probs_BAGV), axis=-1
    )
    # Equation 8: the very rate at which rejection sampling accepts.
    acceptance_BAG = lax.stop_gradient(jnp.clip(1 - distance_BAG / 2, 0.0, 1.0))

    offsets_G = jnp.arange(labels_BAG.shape[-1], dtype=jnp.float32)
    valid_BAG = blocks.valid_BAG.astype(jnp.float32)
    weight_BAG = valid_BAG * jnp.exp(-offsets_G / weights.decay)[None, None]
    total_weight = jnp.sum(weight_BAG) + _EPSILON

    def mean(values_BAG: Array) -> Array:
        return jnp.sum(values_BAG, where=blocks.valid_BAG) / total_weight

    cross_entropy = mean(weight_BAG * jnp.where(known_BAG, entropy_BAG, 0.0))
    total_variation = mean(weight_BAG * distance_BAG)
    soft_cross_entropy = jnp.float32(0.0)
    if weights.soft_cross_entropy:
        mean_logit_BAG = jnp.sum(probs_BAGV * out.logits_BAGV, axis=-1)
        soft_cross_entropy = mean(weight_BAG * (total_BAG * normalizer_BAG - mean_logit_BAG))
    confidence = error = bias = jnp.float32(0.0)
    if out.confidence_BAG is not None:
        confidence = mean(
            weight_BAG * optax.sigmoid_binary_cross_entropy(out.confidence_BAG, acceptance_BAG)
        )
        difference_BAG = jax.nn.sigmoid(out.confidence_BAG) - acceptance_BAG
        error = mean(weight_BAG * jnp.abs(difference_BAG))
        bias = mean(weight_BAG * difference_BAG)
    reached_BAG = jnp.cumprod(acceptance_BAG * valid_BAG, axis=-1)
    count_G = jnp.maximum(jnp.sum(valid_BAG, axis=(0, 1)), 1.0)
    kept = jnp.maximum(jnp.sum(blocks.keep_BA, dtype=jnp.float32), 1.0)
    parts = (
        (weights.cross_entropy, cross_entropy),
        (weights.soft_cross_entropy, soft_cross_entropy),
        (weights.total_variation, total_variation),
        (weights.confidence, confidence),
    )
    return Losses(
        # A part times 0 would still have its gradient computed.
        total=sum((weight * part for weight, part in parts if weight), jnp.float32(0.0)),
        cross_entropy=cross_entropy,
        soft_cross_entropy=soft_cross_entropy,
        total_variation=total_variation,
        confidence=confidence,
        acceptance_G=jnp.sum(acceptance_BAG * valid_BAG, axis=(0, 1)) / count_G,
        expected_length=1.0 + jnp.sum(reached_BAG) / kept,
        confidence_error=error,
        confidence_bias=bias,
        weight=total_weight,
    )


def draft_rows(
    tokens: Int[Array, "*rows"], draft_ids: Int[Array, " V"] | None
) -> tuple[Int[Array, "*rows"], Bool[Array, "*rows"]]:
    """Rows of a drafter's head that stand for tokens, and which tokens have one."""
    if draft_ids is None:
        return tokens, jnp.ones(tokens.shape, bool)
    rows = jnp.minimum(jnp.searchsorted(draft_ids, tokens), len(draft_ids) - 1).astype(jnp.int32)
    return rows, draft_ids[rows] == tokens
