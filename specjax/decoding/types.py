"""The data that decoding is made of, and the contracts that models and drafters meet.

Axis letters are listed in docs/notation.md; the round they belong to is described
in docs/design.md.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from specjax.decoding.schedule import FullPolicy, Policy

PyTree = Any
# States live on the device, results on the host; code that computes sees device arrays.
if TYPE_CHECKING:
    AnyArray = Array
else:
    AnyArray = Array | np.ndarray


@struct.dataclass
class SamplingParams:
    """How each row's tokens are drawn. Processors act alike on p, q and plain decoding.

    Attributes:
      temperature_B: logits are divided by it; 0 is greedy. One number serves all rows.
      seed_B: the row's random seed, 0 to 2**32 - 1. One number s gives row i the
        seed s + i; pass an array to choose each row's own.
    """

    temperature_B: Float[AnyArray, " B"] | float = 0.0
    seed_B: Integer[AnyArray, " B"] | int = 0

    def rows(self, batch: int) -> "SamplingParams":
        """The same parameters as checked arrays with one entry a row.

        Raises:
          ValueError: a negative, infinite or NaN temperature, a seed outside
            0..2**32 - 1, or an array that does not have `batch` entries.
        """
        temperature = np.asarray(self.temperature_B, np.float32)
        seed = np.asarray(self.seed_B)
        if seed.ndim == 0:
            seed = seed + np.arange(batch)
        for name, value in (("temperature", temperature), ("seed", seed)):
            if value.shape not in ((), (batch,)):
                raise ValueError(
                    f"{name} has shape {value.shape}: give one number, "
                    f"or one for each of the {batch} rows"
                )
        if not np.all(np.isfinite(temperature) & (temperature >= 0)):
            raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
        if not np.issubdtype(seed.dtype, np.integer) or np.any((seed < 0) | (seed >= 2**32)):
            raise ValueError(f"seeds must be whole numbers from 0 to 2**32 - 1, got {seed}")
        return type(self)(
            temperature_B=jnp.array(np.broadcast_to(temperature, batch)),
            seed_B=jnp.array(seed.astype(np.uint32)),
        )


@struct.dataclass
class DraftDist:
    """q, the distribution each draft was drawn from, after every processor.

    Attributes:
      logits_BGC: q = softmax over the C candidates; need not be normalised.
      ids_BGC: distinct token id of each candidate, q being 0 elsewhere; None means
        that C is the whole vocabulary in order.
    """

    logits_BGC: Float[AnyArray, "B G C"]
    ids_BGC: Int[AnyArray, "B G C"] | None = None


@struct.dataclass
class Proposal:
    """What a drafter proposes in one round.

    Attributes:
      tokens_BG: the draft tokens x_1..x_G.
      dist: the distribution they were drawn from.
      confidence_BG: the chance that x_k is accepted given that all before it were,
        known before x_k is drawn (it must not depend on x_k); None if the drafter
        has no estimate.
    """

    tokens_BG: Int[AnyArray, "B G"]
    dist: DraftDist
    confidence_BG: Float[AnyArray, "B G"] | None = None


@struct.dataclass
class RoundStats:
    """Counts, never ratios, summed over the rounds of each row.

    Attributes:
      rounds_B: verification passes the row took part in.
      drafted_B: tokens proposed.
      verified_BG: rounds in which draft k was verified. A round that an accepted
        stop token ends counts up to that token.
      accepted_BG: rounds in which draft k was accepted.
      bonus_B: rounds that ended with a token of the target's own (correction or bonus).
      emitted_B: tokens committed, after the length limit.
    """

    rounds_B: Int[AnyArray, " B"]
    drafted_B: Int[AnyArray, " B"]
    verified_BG: Int[AnyArray, "B G"]
    accepted_BG: Int[AnyArray, "B G"]
    bonus_B: Int[AnyArray, " B"]
    emitted_B: Int[AnyArray, " B"]

    @classmethod
    def zeros(cls, batch: int, draft_len: int) -> "RoundStats":
        # Arrays of their own: a donated state must not hold one buffer twice.
        shapes = [(batch,), (batch,), (batch, draft_len), (batch, draft_len), (batch,), (batch,)]
        return cls(*(jnp.zeros(shape, jnp.int32) for shape in shapes))


@struct.dataclass
class DecodeState:
    """Everything a row of decoding needs between rounds.

    Attributes:
      tokens_BS: prompt and output; entries at or past the row's length are stale.
      length_B: committed tokens. The last one is the anchor, the next pass's input;
        every cache is live below length - 1. Changed by commit alone.
      prompt_len_B: how many of them are the prompt.
      limit_B: the length at which the row ends.
      done_B: the row has ended; it commits nothing more.
      stop_ids_BE: end-of-sequence ids of the row, padded with -1.
      sampling: temperature and seed of the row.
      cache: the target's cache.
      drafter_state: the drafter's state, a function of the committed tokens only.
      policy_state: the verification policy's memory.
      stats: counts since the prefill.
    """

    tokens_BS: Int[AnyArray, "B S"]
    length_B: Int[AnyArray, " B"]
    prompt_len_B: Int[AnyArray, " B"]
    limit_B: Int[AnyArray, " B"]
    done_B: Bool[AnyArray, " B"]
    stop_ids_BE: Int[AnyArray, "B E"]
    sampling: SamplingParams
    cache: PyTree
    drafter_state: PyTree
    policy_state: PyTree
    stats: RoundStats


@struct.dataclass
class RoundOutput:
    """What one round committed.

    Attributes:
      tokens_BT: the tokens committed; entries at or past the row's count are filler.
      count_B: how many (0 for a row that had ended).
      verify_len_B: how many drafts were verified.
      accepted_B: how many of them were accepted.
      done_B: the row has ended.
    """

    tokens_BT: Int[AnyArray, "B T"]
    count_B: Int[AnyArray, " B"]
    verify_len_B: Int[AnyArray, " B"]
    accepted_B: Int[AnyArray, " B"]
    done_B: Bool[AnyArray, " B"]


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static choices of a decoding program.

    Attributes:
      draft_len: γ, tokens drafted a round; 0 decodes autoregressively.
      policy: how many drafts to verify (specjax.decoding.schedule).
      acceptance: "rejection" (Leviathan et al., arXiv 2211.17192).
    """

    draft_len: int
    policy: Policy = FullPolicy()
    acceptance: str = "rejection"

    def __post_init__(self) -> None:
        if self.draft_len < 0:
            raise ValueError(f"draft_len must be at least 0, got {self.draft_len}")
        if self.acceptance != "rejection":
            raise ValueError(f"unknown acceptance {self.acceptance!r}: known is 'rejection'")


class TargetOutput(NamedTuple):
    """What a target's pass returns.

    Attributes:
      logits: [B, T, V], [B, 1, V] or None, as asked for; float32.
      hidden: [B, T, D], the input of the language-model head (after the final norm).
      taps: [B, T, M, D], the outputs of the M layers asked for, or None.
      cache: the cache with this pass's keys and values written, or None.
    """

    logits: Float[Array, "B T V"] | None
    hidden: Float[Array, "B T D"]
    taps: Float[Array, "B T M D"] | None
    cache: PyTree


@runtime_checkable
class TargetModel(Protocol):
    """The model whose distribution is decoded. Hashable; holds no arrays."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and output together."""
        ...

    def init_cache(self, batch: int, slots: int) -> PyTree: ...

    def apply(
        self,
        params: PyTree,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: PyTree,
        *,
        taps: tuple[int, ...] = (),
        logits: Literal["all", "last", "none"] = "all",
    ) -> TargetOutput:
        """One causal pass. Keys and values are written at `positions`, dropped where
        those are out of range, and a query sees the slots at or before its position.
        """
        ...


@runtime_checkable
class DrafterModel(Protocol):
    """Proposes tokens for the target to verify. Hashable; holds no arrays.

    Its state must depend on committed tokens only: whatever `propose` writes from its
    own guesses is overwritten by `observe` before it can be read.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `observe` needs."""
        ...

    def init_state(self, batch: int, slots: int) -> PyTree: ...

    def propose(
        self,
        params: PyTree,
        state: PyTree,
        anchor_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
        sampling: SamplingParams,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, PyTree]:
        """Drafts one token per key after the anchor, which stands at length - 1."""
        ...

    def observe(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BT: Int[Array, "B T"],
        taps: Float[Array, "B T M D"] | None,
        hidden: Float[Array, "B T D"],
        start_B: Int[Array, " B"],
        count_B: Int[Array, " B"],
    ) -> PyTree:
        """Takes in the first `count_B` of T tokens that the target was run on, row b's
        at positions start_B[b]..., with the target's hidden states there. Serves
        prompts and rounds alike.
        """
        ...
