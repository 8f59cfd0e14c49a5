"""Training text that the target writes itself, with the hidden states it had while writing.

User turns are sampled from the chat template with an empty message, or given; the target
answers them. A drafter is judged by how well it predicts the target, so the target's own
answers are the right text to learn from, and no data set is needed.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int, UInt32

from specjax.api import Prompt, encode_prompts
from specjax.data.target_cache import Sample
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.types import DecodeConfig, DrafterModel, Proposal, SamplingParams
from specjax.drafters import NoDrafter
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget


@dataclasses.dataclass(frozen=True)
class Writing:
    """How the target writes; `batch_size` conversations at a time.

    Attributes:
      batch_size: rows decoded together.
      user_tokens: the most tokens of a user turn after its opening.
      answer_tokens: the longest answer.
      user_openings: words that user turns begin with, in turn; "" leaves all to the target.
      user_temperature: of the user turns.
      temperatures: of the answers, in turn.
      top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty: of both;
        see `SamplingParams`.
      min_answer_tokens: shorter answers are dropped.
      seed: of everything drawn.
    """

    batch_size: int = 32
    user_tokens: int = 96
    answer_tokens: int = 256
    user_openings: tuple[str, ...] = ("",)
    user_temperature: float = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.8)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_answer_tokens: int = 14
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch_size, self.user_tokens, self.answer_tokens) < 1 or not (
            self.temperatures and self.user_openings
        ):
            raise ValueError(
                "batch_size, user_tokens and answer_tokens must be at least 1, and temperatures "
                f"and user_openings must hold one; got {self}"
            )
        numbers = len(self.user_openings), len(self.temperatures)
        if math.gcd(*numbers) > 1:
            raise ValueError(
                f"{numbers[0]} user_openings and {numbers[1]} temperatures, taken in turn, would "
                f"meet in some pairs only: give numbers of them without a common divisor"
            )
        if self.min_answer_tokens > self.answer_tokens:
            raise ValueError(
                f"no answer of at most {self.answer_tokens} tokens (answer_tokens) has "
                f"{self.min_answer_tokens} (min_answer_tokens)"
            )
        for temperature in (self.user_temperature, *self.temperatures):
            self.sampling(temperature, 0).rows(1, 1)

    def sampling(
        self, temperature_B: Float[Array, " B"] | float, seed_B: UInt32[Array, " B"] | int
    ) -> SamplingParams:
        """How tokens are drawn at these temperatures."""
        return SamplingParams(
            temperature_B=temperature_B,
            top_k_B=self.top_k,
            top_p_B=self.top_p,
            min_p_B=self.min_p,
            repetition_penalty_B=self.repetition_penalty,
            frequency_penalty_B=self.frequency_penalty,
            presence_penalty_B=self.presence_penalty,
            seed_B=seed_B,
        )

    def seeds(self, batch: int, purpose: int) -> UInt32[Array, " B"]:
        """A seed for each row of a batch; user turns and answers have different ones."""
        text = f"{self.seed} {purpose} {batch}".encode()
        first = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
        seeds = (first + np.arange(self.batch_size)) % 2**32
        return jnp.asarray(seeds.astype(np.uint32))


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Keeps the hidden states that a decode shows to drafters; it proposes nothing.

    Its state holds taps [B, S, M, D] and last hidden states [B, S, D] in bfloat16, at the
    positions of the committed tokens; zero where there are none.
    """

    taps: tuple[int, ...]
    width: int

    def init_state(
        self, batch: int, slots: int
    ) -> tuple[BFloat16[Array, "B S M D"], BFloat16[Array, "B S D"]]:
        shape = (batch, slots, len(self.taps), self.width)
        return (
            jnp.zeros(shape, jnp.bfloat16),
            jnp.zeros((batch, slots, self.width), jnp.bfloat16),
        )

    def propose(self, *args: Any, **kwargs: Any) -> tuple[Proposal, Any]:
        """Raises ValueError: it has no drafts to give."""
        raise ValueError("a recorder goes with draft_len 0")

    def observe(
        self,
        params: Any,
        state: tuple[Array, Array],
        tokens_BT: Int[Array, "B T"],
        taps: Float[Array, "B T M D"] | None,
        hidden: Float[Array, "B T D"],
        start_B: Int[Array, " B"],
        count_B: Int[Array, " B"],
    ) -> tuple[Array, Array]:
        del params
        assert taps is not None  # asked for by `taps`
        offsets_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        slots_BT = jnp.where(
            offsets_1T < count_B[:, None], start_B[:, None] + offsets_1T, state[0].shape[1]
        )
        rows_B1 = jnp.arange(len(count_B), dtype=jnp.int32)[:, None]
        return (
            state[0].at[rows_B1, slots_BT].set(taps.astype(jnp.bfloat16), mode="drop"),
            state[1].at[rows_B1, slots_BT].set(hidden.astype(jnp.bfloat16), mode="drop"),
        )


def write_user_turns(target: Target, writing: Writing, batch: int) -> list[str]:
    """One batch of user turns, sampled from the chat template; empty ones are left out.

    A turn is begun with an opening (`Writing.user_openings`) and is at most `user_tokens` longer.

    Args:
      target: with tokeniser and chat template.
      writing: how.
      batch: which, from 0; the same number gives the same turns.

    Raises:
      ValueError: no tokeniser or chat template, or turns longer than the context.
    """
    prefix = user_prefix(target)
    tokenizer = target.tokenizer
    assert tokenizer is not None  # user_prefix made sure
    openings = [
        prefix + list(tokenizer(opening, add_special_tokens=False)["input_ids"])
        for opening in writing.user_openings
    ]
    longest, room = max(map(len, openings)) + writing.user_tokens, target.model.max_len
    if longest > room:
        raise ValueError(
            f"user turns of up to {longest} tokens, with their opening and template, do not fit "
            f"{target.name}'s context of {room}: reduce user_tokens ({writing.user_tokens})"
        )
    start = batch * writing.batch_size
    sampling = writing.sampling(writing.user_temperature, writing.seeds(batch, purpose=0))
    written = _write(
        target,
        [openings[(start + row) % len(openings)] for row in range(writing.batch_size)],
        NoDrafter(),
        sampling,
        writing.user_tokens,
        max_len=longest,
    )
    turns = [written.tokens(row)[len(prefix) :] for row in range(writing.batch_size)]
    texts = tokenizer.batch_decode(turns, skip_special_tokens=True)
    return [text.strip() for text in texts if text.strip()]


def write_answers(
    target: Target,
    turns: Sequence[Prompt],
    taps: tuple[int, ...],
    writing: Writing,
    batch: int,
) -> list[Sample]:
    """The target's answers, with its hidden states; too short ones are left out.

    Of a sequence's last token there are no hidden states (zeros): no draft needs them.

    Args:
      target: the model.
      turns: at most `batch_size` prompts, in any form that `generate` takes; those as long
        as the model's context are left out.
      taps: layers whose outputs are kept.
      writing: how.
      batch: which, from 0; for seeds and temperatures.

    Raises:
      ValueError: a model that gives no hidden states; prompts as of `encode_prompts`.
    """
    if not isinstance(target.model, TransformerTarget):
        raise ValueError(
            f"{target.name} gives no hidden states: drafters are trained from those of a target "
            f"loaded by specjax"
        )
    room = target.model.max_len
    prompts = [ids for ids in encode_prompts(target, turns) if len(ids) < room]
    if not prompts:
        return []
    start = batch * writing.batch_size
    temperatures = [
        writing.temperatures[(start + row) % len(writing.temperatures)]
        for row in range(len(prompts))
    ]
    sampling = writing.sampling(
        jnp.array(temperatures, jnp.float32), writing.seeds(batch, purpose=1)[: len(prompts)]
    )
    # Prompts of about one length share a program.
    longest = -(-max(map(len, prompts)) // 32) * 32
    written = _write(
        target,
        prompts,
        Recorder(taps, target.model.config.width),
        sampling,
        writing.answer_tokens,
        max_len=min(room, longest + writing.answer_tokens),
        batch=writing.batch_size,
    )
    taps_BSMD, hidden_BSD = written.recorded
    samples = []
    for row, prompt in enumerate(prompts):
        tokens = written.tokens(row)
        length = len(tokens)
        if length - len(prompt) >= writing.min_answer_tokens:
            mask = np.arange(length) >= len(prompt)
            samples.append(Sample(tokens, mask, taps_BSMD[row, :length], hidden_BSD[row, :length]))
    return samples


def check_chat(target: Target) -> None:
    """Makes sure that a target can write conversations.

    Raises:
      ValueError: no tokeniser or chat template.
    """
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise ValueError(
            f"{target.name} has no tokeniser with a chat template to write conversations with: "
            f"give texts (config.texts), or train without a cache from plain text (config.corpus "
            f"of the task train); docs/training.md says how"
        )


def user_prefix(target: Target) -> list[int]:
    """The chat template up to the user's first word, as token ids.

    Raises:
      ValueError: no tokeniser or chat template, or one that does not show the message.
    """
    check_chat(target)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    mark = "\N{SYMBOL FOR UNIT SEPARATOR}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, found, _ = str(text).partition(mark)
    ids = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    if not found or not ids:
        raise ValueError(
            f"in the chat template of {target.name} nothing stands before the user's message to "
            f"write user turns from: give prompts"
        )
    return ids


class _Written(NamedTuple):
    tokens_BS: np.ndarray
    length_B: np.ndarray
    recorded: Any

    def tokens(self, row: int) -> np.ndarray:
        return self.tokens_BS[row, : self.length_B[row]]


def _write(
    target: Target,
    prompts: list[list[int]],
    drafter: DrafterModel,
    sampling: SamplingParams,
    max_new_tokens: int,
    *,
    max_len: int,
    batch: int | None = None,
) -> _Written:
    static: dict[str, Any] = {
        "target": target.model,
        "drafter": drafter,
        "config": DecodeConfig(0),
    }
    state = init_decode_state(
        target.params,
        (),
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=target.stop_ids,
        max_len=max_len,
        batch=batch,
        **static,
    )
    state = decode(target.params, (), state, **static)
    return _Written(*jax.device_get((state.tokens_BS, state.length_B, state.drafter_state)))
