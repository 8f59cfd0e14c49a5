"""Prompt lookup: drafts what followed the row's last n-gram when it occurred before.

Saxena, Prompt Lookup Decoding (2023); the longest n-gram first, the latest occurrence
among equals.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.decoding.types import DraftDist, Proposal, SamplingParams


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafter without parameters; its state is the row's committed text.

    Attributes:
      max_ngram: longest suffix of the text that is looked up.
    """

    max_ngram: int = 4

    def __post_init__(self) -> None:
        if self.max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, got {self.max_ngram}")

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
        sampling: SamplingParams,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, Int[Array, "B S"]]:
        """Copies from the match, over its own output where it reaches the end of the text.

        A row without a match repeats its anchor. q is one-hot.
        """
        del params, sampling
        last_B1 = length_B[:, None] - 1
        text_BS = state.at[jnp.arange(len(anchor_B)), last_B1[:, 0]].set(anchor_B, mode="drop")
        match_len_BS = _match_lengths(text_BS, last_B1, self.max_ngram)
        slots = text_BS.shape[1]
        # The largest of (match length, position): longest first, then latest.
        found_B1 = jnp.max(match_len_BS * slots + jnp.arange(slots)[None], axis=1, keepdims=True)
        end_B1 = jnp.where(found_B1 >= slots, found_B1 % slots, last_B1 - 1)
        period_B1 = last_B1 - end_B1
        offsets_1G = jnp.arange(keys_BG.shape[1])[None]
        source_BG = end_B1 + 1 + offsets_1G % period_B1
        tokens_BG = jnp.take_along_axis(text_BS, source_BG, axis=1)
        one_hot = DraftDist(jnp.zeros((*tokens_BG.shape, 1)), tokens_BG[:, :, None])
        return Proposal(tokens_BG, one_hot), state

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
        offsets_1T = jnp.arange(tokens_BT.shape[1])[None]
        slots_BT = jnp.where(
            offsets_1T < count_B[:, None], start_B[:, None] + offsets_1T, state.shape[1]
        )
        return state.at[jnp.arange(len(count_B))[:, None], slots_BT].set(tokens_BT, mode="drop")


def _match_lengths(
    text_BS: Int[Array, "B S"], last_B1: Int[Array, "B 1"], max_ngram: int
) -> Int[Array, "B S"]:
    """How many tokens up to each earlier position equal the text's last ones (0..max_ngram)."""
    slots = text_BS.shape[1]
    positions_1S = jnp.arange(slots)[None]
    alive_BS = positions_1S < last_B1
    length_BS = jnp.zeros_like(text_BS)
    for back in range(max_ngram):
        suffix_B1 = jnp.take_along_axis(text_BS, jnp.maximum(last_B1 - back, 0), axis=1)
        shifted_BS = jnp.pad(text_BS, ((0, 0), (back, 0)))[:, :slots]
        alive_BS &= (shifted_BS == suffix_B1) & (positions_1S >= back)
        length_BS += alive_BS.astype(jnp.int32)
    return length_BS
