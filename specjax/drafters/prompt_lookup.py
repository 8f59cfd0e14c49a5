"""Prompt lookup: drafts what followed the row's last n-gram when it occurred before.

Saxena, Prompt Lookup Decoding (2023); the longest n-gram first, the latest occurrence
among equals.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.decoding.types import DraftDist, Proposal, SamplingState


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafter without parameters; its state is the row's committed text.

    Attributes:
      max_ngram: longest suffix of the text that is looked up.
      min_ngram: shortest match that is worth drafting from.
    """

    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram ({self.min_ngram}) must be at least 1 and at most "
                f"max_ngram ({self.max_ngram})"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def init_state(self, batch: int, slots: int) -> Int[Array, "B S"]:
        """Text buffer, tokens at their positions."""
        return jnp.zeros((batch, slots), jnp.int32)

    def propose(
        self,
        params: Any,
        state: Int[Array, "B S"],
        anchor_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
        sampling: SamplingState,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, Int[Array, "B S"]]:
        """Copies from the match, over its own output where it reaches the end of the text.

        A row without a match has no drafts. q is one-hot.
        """
        del params, sampling
        last_B1 = length_B[:, None] - 1
        text_BS = state.at[jnp.arange(len(anchor_B), dtype=jnp.int32), last_B1[:, 0]].set(
            anchor_B, mode="drop"
        )
        match_len_BS = _match_lengths(text_BS, last_B1, self.max_ngram)
        slots, draft_len = text_BS.shape[1], keys_BG.shape[1]
        # The largest of (match length, position): longest first, then latest.
        found_B1 = jnp.max(
            match_len_BS * slots + jnp.arange(slots, dtype=jnp.int32)[None], axis=1, keepdims=True
        )
        matched_B1 = found_B1 >= slots * self.min_ngram
        end_B1 = jnp.where(matched_B1, found_B1 % slots, last_B1 - 1)
        period_B1 = last_B1 - end_B1
        source_BG = end_B1 + 1 + jnp.arange(draft_len, dtype=jnp.int32)[None] % period_B1
        tokens_BG = jnp.take_along_axis(text_BS, source_BG, axis=1)
        one_hot = DraftDist(jnp.zeros((*tokens_BG.shape, 1), jnp.float32), tokens_BG[:, :, None])
        count_B = draft_len * matched_B1[:, 0].astype(jnp.int32)
        return Proposal(tokens_BG, one_hot, count_B=count_B), state

    def observe(
        self,
        params: Any,
        state: Int[Array, "B S"],
        tokens_BT: Int[Array, "B T"],
        taps: Float[Array, "B T M D"] | None,
        hidden: Float[Array, "B T D"],
        start_B: Int[Array, " B"],
        count_B: Int[Array, " B"],
    ) -> Int[Array, "B S"]:
        """Appends the committed tokens to the text."""
        del params, taps, hidden
        offsets_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        slots_BT = jnp.where(
            offsets_1T < count_B[:, None], start_B[:, None] + offsets_1T, state.shape[1]
        )
        return state.at[jnp.arange(len(count_B), dtype=jnp.int32)[:, None], slots_BT].set(
            tokens_BT, mode="drop"
        )


def _match_lengths(
    text_BS: Int[Array, "B S"], last_B1: Int[Array, "B 1"], max_ngram: int
) -> Int[Array, "B S"]:
    """How many tokens up to each earlier position equal the text's last ones (0..max_ngram)."""
    slots = text_BS.shape[1]
    positions_1S = jnp.arange(slots, dtype=jnp.int32)[None]
    alive_BS = positions_1S < last_B1
    length_BS = jnp.zeros_like(text_BS)
    for back in range(max_ngram):
        suffix_B1 = jnp.take_along_axis(text_BS, jnp.maximum(last_B1 - back, 0), axis=1)
        shifted_BS = jnp.pad(text_BS, ((0, 0), (back, 0)))[:, :slots]
        alive_BS &= (shifted_BS == suffix_B1) & (positions_1S >= back)
        length_BS += alive_BS.astype(jnp.int32)
    return length_BS
