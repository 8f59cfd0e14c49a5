"""Text in, text out: `generate` over the pure functions of specjax.decoding."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from specjax.decoding.loop import TokenIds, decode, init_decode_state
from specjax.decoding.schedule import POLICIES
from specjax.decoding.types import DecodeConfig, DecodeState, RoundStats, SamplingParams
from specjax.drafters import Drafter, NoDrafter
from specjax.models.target import Target

Prompt = str | TokenIds | Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What `generate` returns; one entry a prompt, in order.

    Attributes:
      texts: the new text; None without a tokeniser.
      tokens: the new token ids, without prompt and end token.
      finish_reasons: "stop" (an end-of-sequence token) or "length".
      stats: counts of the rounds after the prefill, as NumPy arrays.
      prefill_seconds: wall-clock of prompts and first tokens.
      decode_seconds: wall-clock of the rounds. Either holds the compilation of programs
        that were not used before.
    """

    texts: list[str] | None
    tokens: list[list[int]]
    finish_reasons: list[str]
    stats: RoundStats
    prefill_seconds: float
    decode_seconds: float


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] | np.ndarray = 128,
    sampling: SamplingParams | None = None,
    draft_len: int = 7,
    acceptance: str = "rejection",
    policy: str = "full",
    chat: bool = True,
    stop_ids: Sequence[int] | None = None,
    max_len: int | None = None,
) -> GenerationResult:
    """Decodes a batch of prompts with exactly the target's own output distribution.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`; None decodes autoregressively.
      prompts: strings, lists of chat messages ({"role", "content"}) or lists of token ids.
      max_new_tokens: for all rows, or for each.
      sampling: temperatures and seeds; None is greedy.
      draft_len: γ, tokens drafted a round.
      acceptance: "rejection".
      policy: how many drafts to verify: "full".
      chat: put strings through the target's chat template as a user's message.
      stop_ids: tokens that end a row; None takes the target's own.
      max_len: room of a row, prompt and output together; None takes what is needed.
        Calls with equal `max_len` share compiled programs.

    Raises:
      ValueError: see `init_decode_state`; text without a tokeniser or chat template.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: known are {sorted(POLICIES)}")
    drafter = drafter or Drafter(NoDrafter(), (), "none")
    draft_len = 0 if isinstance(drafter.model, NoDrafter) else draft_len
    config = DecodeConfig(draft_len, POLICIES[policy], acceptance)
    ids = encode_prompts(target, prompts, chat)
    static = {"target": target.model, "drafter": drafter.model, "config": config}

    start = time.perf_counter()
    state = init_decode_state(
        target.params,
        drafter.params,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=target.stop_ids if stop_ids is None else stop_ids,
        max_len=max_len,
        batch=_bucket(len(ids)),
        **static,
    )
    jax.block_until_ready(state)
    prefilled = time.perf_counter()
    state = jax.block_until_ready(decode(target.params, drafter.params, state, **static))
    return _collect(target, state, len(ids), prefilled - start, time.perf_counter() - prefilled)


def encode_prompts(target: Target, prompts: Sequence[Prompt], chat: bool = True) -> list[list[int]]:
    """Token ids of each prompt, as `generate` sees them.

    Raises:
      ValueError: a prompt that is neither text, messages nor ids; text for a target
        without tokeniser, or messages for one without a chat template.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one string: give a list of prompts")
    return [_encode(target, row, prompt, chat) for row, prompt in enumerate(prompts)]


def _encode(target: Target, row: int, prompt: Prompt, chat: bool) -> list[int]:
    messages = _as_messages(row, prompt, chat)
    if messages is None and not isinstance(prompt, str):
        return [int(token) for token in cast(TokenIds, prompt)]
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"{target.name} has no tokeniser: give prompts as lists of token ids")
    if messages is None:
        return list(tokenizer(cast(str, prompt))["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError(f"{target.name} has no chat template: pass chat=False and plain text")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(cast(str, text), add_special_tokens=False)["input_ids"])


def _as_messages(row: int, prompt: Prompt, chat: bool) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if chat else None
    items = list(prompt)
    if items and all(isinstance(item, dict) for item in items):
        return cast(list[dict[str, Any]], items)
    if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items):
        return None
    raise ValueError(f"prompt {row} must be a string, chat messages or token ids: {prompt!r}")


def _collect(
    target: Target, state: DecodeState, rows: int, prefill_seconds: float, decode_seconds: float
) -> GenerationResult:
    host = jax.device_get(dataclasses.replace(state, cache=(), drafter_state=()))
    tokens, reasons = [], []
    for row in range(rows):
        new = host.tokens_BS[row, host.prompt_len_B[row] : host.length_B[row]]
        stopped = new[-1] in host.stop_ids_BE[row]
        tokens.append(new[: len(new) - stopped].tolist())
        reasons.append("stop" if stopped else "length")
    texts = None
    if target.tokenizer is not None:
        texts = [str(target.tokenizer.decode(row, skip_special_tokens=True)) for row in tokens]
    stats = jax.tree.map(lambda counts: counts[:rows], host.stats)
    return GenerationResult(texts, tokens, reasons, stats, prefill_seconds, decode_seconds)


def _bucket(rows: int) -> int:
    """Rows of the compiled program: the next power of two."""
    return 1 << max(rows - 1, 0).bit_length()
