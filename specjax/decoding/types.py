"""The data that decoding is made of, and the contracts that models and drafters meet.

Axis letters are listed in docs/notation.md; the round they belong to is described
in docs/design.md.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
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
    """How each row's tokens are drawn. Processors act alike on p, q and plain decoding,
    in this order: bias, penalties, temperature, top-k, top-p, min-p.

    Every field takes one value for all rows, or an array with one for each.

    Attributes:
      temperature_B: logits are divided by it; 0 is greedy.
      top_k_B: only the k most likely tokens (and those tied with the last); 0 is off.
      top_p_B: only the smallest set of most likely tokens with at least this mass
        (nucleus sampling; Holtzman et al., arXiv 1904.09751); 1 is off.
      min_p_B: only tokens at least this fraction as likely as the likeliest (Nguyen et
        al., arXiv 2407.01082); 0 is off.
      repetition_penalty_B: logits of tokens in prompt or output are divided by it if
        positive, multiplied if negative (Keskar et al., arXiv 1909.05858); 1 is off.
      frequency_penalty_B: subtracted for every occurrence in the output; 0 is off.
      presence_penalty_B: subtracted once for a token in the output; 0 is off.
      logit_bias: {token id: added to its logit} for all rows, or one such for each, or
        an array [B, V]; None is off.
      min_new_tokens_B: no stop token before that many new tokens.
      ignore_eos_B: stop tokens do not end the row.
      seed_B: the row's random seed, 0 to 2**32 - 1. One number s gives row i the
        seed s + i; pass an array to choose each row's own.
    """

    temperature_B: Float[AnyArray, " B"] | float = 0.0
    top_k_B: Int[AnyArray, " B"] | int = 0
    top_p_B: Float[AnyArray, " B"] | float = 1.0
    min_p_B: Float[AnyArray, " B"] | float = 0.0
    repetition_penalty_B: Float[AnyArray, " B"] | float = 1.0
    frequency_penalty_B: Float[AnyArray, " B"] | float = 0.0
    presence_penalty_B: Float[AnyArray, " B"] | float = 0.0
    logit_bias: (
        Float[AnyArray, "B V"] | Mapping[int, float] | Sequence[Mapping[int, float]] | None
    ) = None
    min_new_tokens_B: Int[AnyArray, " B"] | int = 0
    ignore_eos_B: Bool[AnyArray, " B"] | bool = False
    seed_B: Integer[AnyArray, " B"] | int = 0

    def rows(self, batch: int, vocab_size: int) -> "SamplingParams":
        """The same parameters as checked NumPy arrays with one entry a row.

        Raises:
          ValueError: a value out of its range, or an array of the wrong length.
        """
        columns: dict[str, Any] = {
            name: _column(name, getattr(self, name), rule, batch) for name, rule in _RULES.items()
        }
        columns["logit_bias"] = _dense_bias(self.logit_bias, batch, vocab_size)
        return SamplingParams(**columns)

    @property
    def penalised_B(self) -> Bool[AnyArray, " B"]:
        """Rows whose logits depend on the tokens before."""
        rows: Any = self  # of arrays
        repeated_B, frequent_B = rows.repetition_penalty_B != 1.0, rows.frequency_penalty_B != 0.0
        return repeated_B | frequent_B | (rows.presence_penalty_B != 0.0)


class _Rule(NamedTuple):
    dtype: Any
    valid: Callable[[np.ndarray], np.ndarray]
    range: str


_RULES = {
    "temperature_B": _Rule(np.float32, lambda x: x >= 0, "at least 0"),
    "top_k_B": _Rule(np.int32, lambda x: x >= 0, "at least 0 (0 is off)"),
    "top_p_B": _Rule(np.float32, lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
    "min_p_B": _Rule(np.float32, lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
    "repetition_penalty_B": _Rule(np.float32, lambda x: x > 0, "above 0"),
    "frequency_penalty_B": _Rule(np.float32, np.isfinite, "a finite number"),
    "presence_penalty_B": _Rule(np.float32, np.isfinite, "a finite number"),
    "min_new_tokens_B": _Rule(np.int32, lambda x: x >= 0, "at least 0"),
    "ignore_eos_B": _Rule(np.bool_, lambda x: np.ones_like(x), "True or False"),
    "seed_B": _Rule(np.uint32, lambda x: (x >= 0) & (x < 2**32), "from 0 to 2**32 - 1"),
}


def _column(name: str, value: Any, rule: _Rule, batch: int) -> np.ndarray:
    label, given, value = name.removesuffix("_B"), value, np.asarray(value)
    if name == "seed_B" and value.ndim == 0 and np.issubdtype(value.dtype, np.integer):
        value = value.astype(np.int64) + np.arange(batch)
    if value.shape not in ((), (batch,)):
        raise ValueError(
            f"{label} has shape {value.shape}: give one value, or one for each of the {batch} rows"
        )
    fits = np.can_cast(value.dtype, rule.dtype, "same_kind") or value.dtype.kind in "iu"
    if not fits or not np.all(np.isfinite(value) & rule.valid(value)):
        kind = "whole numbers, " if np.issubdtype(rule.dtype, np.integer) else ""
        raise ValueError(f"{label} must be {kind}{rule.range}, got {given}")
    return np.broadcast_to(value.astype(rule.dtype), batch)


def _dense_bias(bias: Any, batch: int, vocab_size: int) -> np.ndarray | None:
    if bias is None:
        return None
    if isinstance(bias, Mapping):
        bias = [bias] * batch
    if not isinstance(bias, jax.Array | np.ndarray):
        dense = np.zeros((len(bias), vocab_size), np.float32)
        for row, entries in enumerate(bias):
            ids = np.array(list(entries), np.int64)
            if np.any((ids < 0) | (ids >= vocab_size)):
                raise ValueError(f"logit_bias has token ids outside 0..{vocab_size - 1}")
            dense[row, ids] = list(entries.values())
        bias = dense
    bias = np.asarray(bias, np.float32)
    if bias.shape != (batch, vocab_size) or np.any(np.isnan(bias) | (bias == np.inf)):
        raise ValueError(
            f"logit_bias must be {batch} rows of {vocab_size} numbers below infinity, "
            f"got shape {bias.shape}"
        )
    return bias


@struct.dataclass
class SamplingState:
    """What the processors of a row need to know.

    Attributes:
      params: as arrays, one entry a row.
      stop_ids_BE: end-of-sequence ids of the row, padded with -1.
      prompt_len_B: tokens of the prompt.
      prompt_counts_BV: occurrences in the prompt; None unless a row has penalties.
      output_counts_BV: occurrences in the committed output; likewise.
      coupled_vocab: static; for `propose` of coupled rounds, the number of tokens that the
        noise is drawn for, so that each has the noise of the target's own draw.
    """

    params: SamplingParams
    stop_ids_BE: Int[AnyArray, "B E"]
    prompt_len_B: Int[AnyArray, " B"]
    prompt_counts_BV: Int[AnyArray, "B V"] | None = None
    output_counts_BV: Int[AnyArray, "B V"] | None = None
    coupled_vocab: int | None = struct.field(pytree_node=False, default=None)

    @property
    def greedy_B(self) -> Bool[AnyArray, " B"]:
        return jnp.asarray(self.params.temperature_B) == 0


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
      count_B: how many of the tokens are drafts at all; None means all. The rest is
        never verified, and a batch in which no row has any costs a pass of one position.
        It must be known before the drafts are drawn.
      lens: static; the values that `count_B` is likely to take. Each is compiled as a pass
        of its own, and a round takes the shortest that holds the drafts of all rows. Empty
        means 0 and G.
    """

    tokens_BG: Int[AnyArray, "B G"]
    dist: DraftDist
    confidence_BG: Float[AnyArray, "B G"] | None = None
    count_B: Int[AnyArray, " B"] | None = None
    lens: tuple[int, ...] = struct.field(pytree_node=False, default=())


@struct.dataclass
class RoundStats:
    """Counts, never ratios, summed over the rounds of each row.

    Attributes:
      rounds_B: verification passes the row took part in.
      drafted_B: tokens proposed.
      verified_BG: rounds in which draft k was verified. A round that an accepted
        stop token ends counts up to that token.
      reached_BG: rounds in which draft k was verified and all before it were accepted.
      accepted_BG: rounds in which draft k was accepted.
      bonus_B: rounds that ended with a token of the target's own (correction or bonus).
      emitted_B: tokens committed, after the length limit.
    """

    rounds_B: Int[AnyArray, " B"]
    drafted_B: Int[AnyArray, " B"]
    verified_BG: Int[AnyArray, "B G"]
    reached_BG: Int[AnyArray, "B G"]
    accepted_BG: Int[AnyArray, "B G"]
    bonus_B: Int[AnyArray, " B"]
    emitted_B: Int[AnyArray, " B"]

    @classmethod
    def zeros(cls, batch: int, draft_len: int) -> "RoundStats":
        # Arrays of their own: a donated state must not hold one buffer twice.
        row, grid = (batch,), (batch, draft_len)
        shapes = [row, row, grid, grid, grid, row, row]
        return cls(*(jax.device_put(np.zeros(shape, np.int32)) for shape in shapes))


class LogProbs(NamedTuple):
    """Log-probabilities of tokens under the target, by slot or by round position.

    Attributes:
      raw: of the model itself.
      processed: of the distribution sampled from (0 where the row is greedy).
    """

    raw: Float[AnyArray, "B T"]
    processed: Float[AnyArray, "B T"]


@struct.dataclass
class DecodeState:
    """Everything a row of decoding needs between rounds.

    Attributes:
      tokens_BS: prompt and output; entries at or past the row's length are stale.
      length_B: committed tokens. The last one is the anchor, the next pass's input;
        every cache is live below length - 1. Changed by commit alone.
      limit_B: the length at which the row ends.
      done_B: the row has ended; it commits nothing more.
      sampling: how the row's tokens are drawn.
      cache: the target's cache.
      drafter_state: the drafter's state, a function of the committed tokens only.
      policy_state: the verification policy's memory.
      stats: counts since the prefill.
      logprobs: by slot, of the output tokens; None unless asked for.
    """

    tokens_BS: Int[AnyArray, "B S"]
    length_B: Int[AnyArray, " B"]
    limit_B: Int[AnyArray, " B"]
    done_B: Bool[AnyArray, " B"]
    sampling: SamplingState
    cache: PyTree
    drafter_state: PyTree
    policy_state: PyTree
    stats: RoundStats
    logprobs: LogProbs | None = None


@struct.dataclass
class RoundOutput:
    """What one round committed.

    Attributes:
      tokens_BT: the tokens committed; entries at or past the row's count are filler.
      count_B: how many (0 for a row that had ended).
      verify_len_B: how many drafts were verified.
      accepted_B: how many of them were accepted.
      done_B: the row has ended.
      logprobs: of the tokens; None unless asked for.
    """

    tokens_BT: Int[AnyArray, "B T"]
    count_B: Int[AnyArray, " B"]
    verify_len_B: Int[AnyArray, " B"]
    accepted_B: Int[AnyArray, " B"]
    done_B: Bool[AnyArray, " B"]
    logprobs: LogProbs | None = None


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static choices of a decoding program.

    Attributes:
      draft_len: γ, tokens drafted a round; 0 decodes autoregressively.
      policy: how many drafts to verify (specjax.decoding.schedule).
      acceptance: "rejection" (Leviathan et al., arXiv 2211.17192) accepts most;
        "coupled" draws target and drafts with noise of the absolute position, so that
        sampled output equals autoregressive output of the same seed token for token.
      logprobs: keep log-probabilities of the output.
    """

    draft_len: int
    policy: Policy = FullPolicy()
    acceptance: str = "rejection"
    logprobs: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.draft_len, int) or self.draft_len < 0:
            raise ValueError(
                f"draft_len must be a whole number of at least 0, got {self.draft_len!r}"
            )
        if self.acceptance not in ("rejection", "coupled"):
            raise ValueError(
                f"unknown acceptance {self.acceptance!r}: known are 'rejection' and 'coupled'"
            )


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
        sampling: SamplingState,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, PyTree]:
        """Drafts one token per key after the anchor, which stands at length - 1.

        `specjax.decoding.sampling.draw_draft` draws a token from logits with the row's
        processors and says what it was drawn from.
        """
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
