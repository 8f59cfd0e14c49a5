"""Prompt lookup where the row's own text has a long enough match, DSpark elsewhere."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decoding.types import DraftDist, Proposal, PyTree, SamplingState
from specjax.drafters.dspark import Context, DSpark
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.models.config import TransformerConfig

State = tuple[Int[Array, "B S"], Context]


@dataclasses.dataclass(frozen=True)
class Composed:
    """The *drafter* contract (docs/design.md) for two drafters, chosen by row and round.

    The choice depends on committed text alone, and q is that of the drafter chosen, so the
    output stays exactly the target's. Text that repeats is copied for as many tokens as a
    round may draft; the model's drafts, which are less certain, are fewer and cost a
    shorter pass where no row copies.

    Attributes:
      lookup: for the rows that have a match.
      model: for the others; its parameters are this drafter's.
      model_len: drafts a round of the model.
      lookup_confidence: of a copied token, where the model's confidence is known.
    """

    lookup: PromptLookup
    model: DSpark
    model_len: int
    lookup_confidence: float = 0.9

    def __post_init__(self) -> None:
        block_size = self.model.config.block_size
        if not 1 <= self.model_len <= block_size:
            raise ValueError(
                f"model_len must be from 1 to the model's block size of {block_size}, got "
                f"{self.model_len}"
            )
        if not 0 < self.lookup_confidence <= 1:
            raise ValueError(
                f"lookup_confidence must lie above 0 and at most at 1, got {self.lookup_confidence}"
            )

    @property
    def layer_config(self) -> TransformerConfig:
        """Sizes of the layers, for sharding."""
        return self.model.layer_config

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    def param_shapes(self) -> PyTree:
        """Pytree of `jax.ShapeDtypeStruct`, without making any array."""
        return self.model.param_shapes()

    def init_state(self, batch: int, slots: int) -> State:
        return self.lookup.init_state(batch, slots), self.model.init_state(batch, slots)

    def propose(
        self,
        params: PyTree,
        state: State,
        anchor_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
        sampling: SamplingState,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, State]:
        """Copies in rows with a match, the model's drafts in the others.

        The model is not run where every row has a match.
        """
        text_BS, context = state
        draft_len = keys_BG.shape[1]
        model_len = min(self.model_len, draft_len)
        looked, _ = self.lookup.propose((), text_BS, anchor_B, length_B, sampling, keys_BG)
        assert looked.count_B is not None  # it says which rows have a match
        matched_B = looked.count_B > 0

        def draft() -> tuple[Any, ...]:
            # The model's state stays outside the conditional: a proposal does not change it.
            proposal, _ = self.model.propose(
                params, context, anchor_B, length_B, sampling, keys_BG[:, :model_len]
            )
            dist = proposal.dist
            return proposal.tokens_BG, dist.logits_BGC, dist.ids_BGC, proposal.confidence_BG

        shapes = jax.eval_shape(draft)
        drafted = lax.cond(
            jnp.all(matched_B),
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            draft,
        )
        drafted = jax.tree.map(lambda leaf: _pad(leaf, draft_len), drafted)
        tokens_BG, logits_BGC, ids_BGC, confidence_BG = drafted
        copied = (looked.tokens_BG, *_one_hot(looked.tokens_BG, logits_BGC, ids_BGC))
        tokens_BG, logits_BGC, ids_BGC = jax.tree.map(
            lambda copy, draft: _by_row(matched_B, copy, draft),
            copied,
            (tokens_BG, logits_BGC, ids_BGC),
        )
        if confidence_BG is not None:
            known_BG = jnp.full_like(confidence_BG, self.lookup_confidence)
            confidence_BG = _by_row(matched_B, known_BG, confidence_BG)
        count_B = jnp.where(matched_B, jnp.int32(draft_len), jnp.int32(model_len))
        dist, lens = DraftDist(logits_BGC, ids_BGC), tuple(sorted({model_len, draft_len}))
        return Proposal(tokens_BG, dist, confidence_BG, count_B, lens), state

    def observe(
        self,
        params: PyTree,
        state: State,
        tokens_BT: Int[Array, "B T"],
        taps: Float[Array, "B T M D"] | None,
        hidden: Float[Array, "B T D"],
        start_B: Int[Array, " B"],
        count_B: Int[Array, " B"],
    ) -> State:
        """Both take in the committed positions."""
        seen: tuple[Any, ...] = (tokens_BT, taps, hidden, start_B, count_B)
        return self.lookup.observe((), state[0], *seen), self.model.observe(params, state[1], *seen)


def _one_hot(
    tokens_BG: Int[Array, "B G"],
    logits_BGC: Float[Array, "B G C"],
    ids_BGC: Int[Array, "B G C"] | None,
) -> tuple[Float[Array, "B G C"], Int[Array, "B G C"] | None]:
    """Logits and candidates of q = 1 at each token, in the shapes of another distribution's."""
    index_11C = jnp.arange(logits_BGC.shape[-1], dtype=jnp.int32)[None, None]
    if ids_BGC is None:
        return jnp.where(index_11C == tokens_BG[:, :, None], 0.0, -jnp.inf), None
    # The first candidate; an id of -1 is no token's.
    ids_BGC = jnp.where(index_11C == 0, tokens_BG[:, :, None], -1)
    one_hot_11C = jnp.where(index_11C == 0, 0.0, -jnp.inf)
    return jnp.broadcast_to(one_hot_11C, logits_BGC.shape), ids_BGC


def _by_row(wanted_B: Bool[Array, " B"], left: Array, right: Array) -> Array:
    return jnp.where(wanted_B.reshape(-1, *[1] * (left.ndim - 1)), left, right)


def _pad(leaf_BG: Array, draft_len: int) -> Array:
    """To the length of the longest draft, with what is never verified."""
    missing = draft_len - leaf_BG.shape[1]
    return jnp.pad(leaf_BG, [(0, 0), (0, missing)] + [(0, 0)] * (leaf_BG.ndim - 2))
