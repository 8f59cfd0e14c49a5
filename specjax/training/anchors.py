"""Anchors, and the blocks of a sequence that a DSpark drafter learns to predict.

A block begins at an anchor, a token to be learnt whose successor is to be learnt too, and
its G positions predict the G tokens after it. Blocks of one row are packed side by side and
masked from each other (Cheng et al., 2026, section 3.3).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.types import AnyArray


class Blocks(NamedTuple):
    """A anchors a row and their blocks of G positions.

    Attributes:
      anchors_BA: position of each anchor; 0 for a block that only fills the row.
      keep_BA: which are not such fillers.
      tokens_BAG: input of the block: the anchor token, then mask tokens.
      previous_BAG: the token before each that is to be predicted.
      labels_BAG: the token to be predicted.
      states_BAG: position of the target's hidden state that predicts the same token.
      valid_BAG: which positions are trained: those the assistant wrote, up to the first
        that it did not.
    """

    anchors_BA: Int[Array, "B A"]
    keep_BA: Bool[Array, "B A"]
    tokens_BAG: Int[Array, "B A G"]
    previous_BAG: Int[Array, "B A G"]
    labels_BAG: Int[Array, "B A G"]
    states_BAG: Int[Array, "B A G"]
    valid_BAG: Bool[Array, "B A G"]


def anchor_candidates(loss_mask_BT: Bool[AnyArray, "B T"]) -> Bool[AnyArray, "B T-1"]:
    """Positions that are supervised and whose successor is."""
    return loss_mask_BT[:, :-1] & loss_mask_BT[:, 1:]


def sample_anchors(
    loss_mask_BT: Bool[Array, "B T"], uniform_BT: Float[Array, "B T-1"], num_anchors: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Up to `num_anchors` of a row's candidates, uniformly without replacement, in order.

    Args:
      loss_mask_BT: tokens to be learnt.
      uniform_BT: independent uniform numbers; the candidates with the smallest are taken.
      num_anchors: A.

    Returns:
      anchors_BA and keep_BA. Where a row has fewer candidates the rest is anchor 0, not
      kept; kept ones come first.

    Raises:
      ValueError: no anchors asked for.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
    candidates_BT = anchor_candidates(loss_mask_BT)
    count = candidates_BT.shape[1]
    chosen_BA = jnp.argsort(jnp.where(candidates_BT, uniform_BT, jnp.inf), axis=1)[:, :num_anchors]
    chosen_BA = jnp.pad(chosen_BA.astype(jnp.int32), ((0, 0), (0, max(num_anchors - count, 0))))
    total_B1 = jnp.sum(candidates_BT, axis=1, keepdims=True)
    keep_BA = jnp.arange(num_anchors)[None] < total_B1
    # Fillers sort behind every position, and become 0 afterwards.
    sorted_BA = jnp.sort(jnp.where(keep_BA, chosen_BA, jnp.int32(count)), axis=1)
    return jnp.where(keep_BA, sorted_BA, 0), keep_BA


def make_blocks(
    tokens_BT: Int[Array, "B T"],
    loss_mask_BT: Bool[Array, "B T"],
    anchors_BA: Int[Array, "B A"],
    keep_BA: Bool[Array, "B A"],
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """The blocks that begin at these anchors; they may run past the end of the row."""
    batch, length = tokens_BT.shape
    blocks = anchors_BA.shape[1]

    def at(values_BT: Array, positions_BAG: Array) -> Array:
        flat_BN = jnp.clip(positions_BAG, 0, length - 1).reshape(batch, -1)
        return jnp.take_along_axis(values_BT, flat_BN, axis=1).reshape(batch, blocks, -1)

    offsets_11G = jnp.arange(block_size, dtype=jnp.int32)[None, None]
    states_BAG = jnp.where(keep_BA[:, :, None], anchors_BA[:, :, None] + offsets_11G, 0)
    label_at_BAG = states_BAG + keep_BA[:, :, None].astype(jnp.int32)
    supervised_BAG = (label_at_BAG < length) & at(loss_mask_BT, label_at_BAG)
    supervised_BAG &= keep_BA[:, :, None]
    anchor_BA1 = at(tokens_BT, anchors_BA[:, :, None])
    labels_BAG = at(tokens_BT, label_at_BAG)
    first_BA1 = jnp.where(keep_BA[:, :, None], anchor_BA1, mask_token_id)
    rest_BAG = jnp.full((batch, blocks, block_size - 1), mask_token_id, jnp.int32)
    return Blocks(
        anchors_BA=anchors_BA,
        keep_BA=keep_BA,
        tokens_BAG=jnp.concatenate([first_BA1, rest_BAG], axis=2),
        previous_BAG=jnp.concatenate([anchor_BA1, labels_BAG[:, :, :-1]], axis=2),
        labels_BAG=labels_BAG,
        states_BAG=jnp.clip(states_BAG, 0, length - 1),
        valid_BAG=jnp.cumprod(supervised_BAG.astype(jnp.int32), axis=2) > 0,
    )
