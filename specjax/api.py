"""Text in, text out: `generate` and `stream_text` over the functions of specjax.decoding."""

import dataclasses
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Bool, Int

from specjax.decoding.loop import TokenIds, decode, init_decode_state, stream
from specjax.decoding.schedule import Policy, parse_policy
from specjax.decoding.types import DecodeConfig, DecodeState, RoundStats, SamplingParams
from specjax.drafters import MTP, Drafter, DSpark, NoDrafter
from specjax.models.target import Target
from specjax.text import TextRow, decode_text

_DRAFT_LEN, _MTP_DRAFT_LEN = 7, 3  # unless asked for another
Prompt = str | TokenIds | Sequence[dict[str, Any]]


class TokenLogProbs(NamedTuple):
    """Log-probabilities of one output's tokens under the target, token by token.

    Attributes:
      raw: of the model itself.
      processed: of the distribution sampled from; 0 where it is greedy.
    """

    raw: list[float]
    processed: list[float]


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What `generate` returns; one entry an output: n for a prompt, prompt by prompt.

    Attributes:
      texts: the new text, up to a stop string; None without a tokeniser.
      tokens: the new token ids, without prompt and end token. Before a stop string, those
        whose text begins before it; the last may spell part of the stop string too.
      finish_reasons: "stop" (an end-of-sequence token or a stop string) or "length".
      stats: counts of the rounds after the prefill, as NumPy arrays. Tokens that were
        committed and then cut with a stop string are counted.
      prefill_seconds: wall-clock of prompts and first tokens.
      decode_seconds: wall-clock of the rounds. Either holds the compilation of programs
        that were not used before.
      logprobs: of `tokens`; None unless asked for.
    """

    texts: list[str] | None
    tokens: list[list[int]]
    finish_reasons: list[str]
    stats: RoundStats
    prefill_seconds: float
    decode_seconds: float
    logprobs: list[TokenLogProbs] | None = None


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] | np.ndarray = 128,
    sampling: SamplingParams | None = None,
    draft_len: int | None = None,
    acceptance: str = "rejection",
    policy: str | Policy = "full",
    chat: bool = True,
    n: int = 1,
    logprobs: bool = False,
    stop: str | Sequence[str] | None = None,
    stop_ids: Sequence[int] | np.ndarray | None = None,
    max_len: int | None = None,
) -> GenerationResult:
    """Decodes a batch of prompts with exactly the target's own output distribution.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`; None decodes autoregressively.
      prompts: strings, lists of chat messages ({"role", "content"}) or lists of token ids.
      max_new_tokens: for all prompts, or for each. A row also ends at the room it has.
      sampling: temperatures and seeds, for all prompts or for each; None is greedy.
      draft_len: γ, tokens drafted a round; None takes 7, a DSpark drafter's block size if
        that is less, or the number of MTP modules, if more than 3, and else 3.
      acceptance: "rejection" or "coupled".
      policy: how many drafts to verify: "full", "threshold:T" (those before the first of
        confidence below T), or a policy of your own (specjax.decoding.schedule).
      chat: put strings through the target's chat template as a user's message.
      n: outputs for each prompt. Those of prompt i are entries i*n to i*n + n - 1 of the
        result. One seed s gives entry k the seed s + k; seeds given for each prompt give
        output j of prompt i the seed seed_i + j.
      logprobs: return the log-probabilities of the output tokens.
      stop: strings that end a row, one or several. The text ends before the first that is
        complete, wherever it falls in tokens and rounds. Rounds are then driven from
        Python, which reads each round's tokens.
      stop_ids: tokens that end a row; None takes the target's own.
      max_len: room of a row, prompt and output together; None takes what is needed.
        Calls with equal `max_len` share compiled programs.

    Raises:
      ValueError: see `init_decode_state`; text without a tokeniser or chat template;
        n below 1; an empty stop string, or stop strings without a tokeniser.
    """
    stops = _stop_strings(target, stop)
    ids = encode_prompts(target, prompts, chat)
    program = _program(target, drafter, draft_len, acceptance, policy, logprobs)
    rows = [prompt for prompt in ids for _ in range(n)]
    max_new_tokens, sampling = _for_samples(max_new_tokens, sampling, len(ids), n)

    start = time.perf_counter()
    state = program.start(
        rows, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids, max_len=max_len
    )
    jax.block_until_ready(state)
    prefilled = time.perf_counter()
    texts = None
    if stops and target.tokenizer is not None:
        texts = [TextRow(target.tokenizer, stops) for _ in rows]
        state = _exhaust(program.watch(state, texts))
    else:
        state = program.run(state)
    jax.block_until_ready(state)
    seconds = (prefilled - start, time.perf_counter() - prefilled)
    return _collect(target, state, len(rows), texts, *seconds)


def stream_text(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams | None = None,
    draft_len: int | None = None,
    acceptance: str = "rejection",
    policy: str | Policy = "full",
    chat: bool = True,
    stop: str | Sequence[str] | None = None,
    stop_ids: Sequence[int] | np.ndarray | None = None,
    max_len: int | None = None,
) -> Iterator[str]:
    """Yields the text of one prompt's output piece by piece, as rounds commit it.

    The pieces joined are `generate(...).texts[0]` of the same arguments. Held back are the
    bytes of a character until its last has come, and what may be the beginning of a stop
    string until that is decided. The call itself runs the prompt.

    Args:
      target: from `load_target`, with a tokeniser.
      drafter: from `load_drafter`; None decodes autoregressively.
      prompt: a string, a list of chat messages or a list of token ids.
      max_new_tokens: as for `generate`, and so are the rest.
      sampling: temperature and seed; None is greedy.
      draft_len: γ, tokens drafted a round; None takes 7, a DSpark drafter's block size if
        that is less, or the number of MTP modules, if more than 3, and else 3.
      acceptance: "rejection" or "coupled".
      policy: how many drafts to verify: "full", "threshold:T" (those before the first of
        confidence below T), or a policy of your own (specjax.decoding.schedule).
      chat: put a string through the target's chat template as a user's message.
      stop: strings that end the text, one or several.
      stop_ids: tokens that end it; None takes the target's own.
      max_len: room for prompt and output together; None takes what is needed.

    Raises:
      ValueError: more than one prompt, a target without a tokeniser, and as `generate`.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokeniser: use generate or stream for token ids")
    stops = _stop_strings(target, stop)
    ids = _encode_one(target, prompt, chat)
    program = _program(target, drafter, draft_len, acceptance, policy)
    state = program.start(
        [ids], max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids, max_len=max_len
    )
    return _pieces(program, state, TextRow(target.tokenizer, stops))


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
        return [int(token) for token in np.asarray(prompt)] if len(prompt) else []
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"{target.name} has no tokeniser: give prompts as lists of token ids")
    if messages is None:
        return list(tokenizer(cast(str, prompt))["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError(
            f"{target.name} has no chat template: pass plain text and chat=False (config.chat)"
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(cast(str, text), add_special_tokens=False)["input_ids"])


def _as_messages(row: int, prompt: Prompt, chat: bool) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str):
        _check_text(row, prompt)
        return [{"role": "user", "content": prompt}] if chat else None
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        items = list(prompt)
        if items and all(isinstance(item, dict) for item in items):
            for item in cast(list[dict[str, Any]], items):
                _check_text(row, item.get("content"))
            return cast(list[dict[str, Any]], items)
        if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items):
            return None
    elif (
        isinstance(prompt, np.ndarray | jax.Array)
        and prompt.ndim == 1
        and prompt.dtype.kind in "iu"
    ):
        return None
    raise ValueError(f"prompt {row} must be a string, chat messages or token ids: {prompt!r}")


def _check_text(row: int, text: Any) -> None:
    try:
        text.encode("utf-8")
    except AttributeError:
        raise ValueError(f"prompt {row} has a message without text as its content") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt {row} is not valid Unicode text: {error}") from error


def _encode_one(target: Target, prompt: Any, chat: bool) -> list[int]:
    one = isinstance(prompt, str) or all(
        isinstance(item, dict) or (np.ndim(item) == 0 and not isinstance(item, str))
        for item in prompt
    )
    if not one:
        raise ValueError("stream_text takes one prompt: call it for each, or use generate")
    return encode_prompts(target, [prompt], chat)[0]


def _stop_strings(target: Target, stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(stops):
        raise ValueError("a stop string is empty: give at least one character")
    if stops and target.tokenizer is None:
        raise ValueError(
            f"{target.name} has no tokeniser, so stop strings can't be found: pass stop_ids instead"
        )
    return stops


def _for_samples(
    max_new_tokens: Any, sampling: SamplingParams | None, prompts: int, n: int
) -> tuple[Any, SamplingParams | None]:
    """What was given for each prompt, for each of its n samples."""
    if n < 1:
        raise ValueError(f"n must be at least 1 output for each prompt, got {n}")
    if n == 1:
        return max_new_tokens, sampling

    def repeat(name: str, value: Any) -> Any:
        if isinstance(value, Mapping) or np.ndim(value) == 0:
            return value
        if len(value) != prompts:
            raise ValueError(
                f"{name.removesuffix('_B')} has {len(value)} entries: give one value, "
                f"or one for each of the {prompts} prompts"
            )
        if isinstance(value, Sequence):
            return [entry for entry in value for _ in range(n)]
        return np.repeat(np.asarray(value), n, axis=0)

    params = sampling or SamplingParams()
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    fields = {name: repeat(name, value) for name, value in fields.items()}
    if np.ndim(fields["seed_B"]):
        fields["seed_B"] = np.asarray(fields["seed_B"]) + np.tile(np.arange(n), prompts)
    return repeat("max_new_tokens", max_new_tokens), SamplingParams(**fields)


def default_draft_len(drafter: Drafter) -> int:
    """γ that `generate` takes when none is asked for.

    7, or a DSpark drafter's smaller block size; of MTP modules, whose drafts are serial and
    get worse where the last is reused, their number, but at least 3.
    """
    if isinstance(drafter.model, DSpark):
        return min(_DRAFT_LEN, drafter.model.config.block_size)
    if isinstance(drafter.model, MTP):
        return max(_MTP_DRAFT_LEN, drafter.model.config.depth)
    return _DRAFT_LEN


class _Program(NamedTuple):
    """The decoding functions with a target and a drafter put in."""

    target: Target
    drafter: Drafter
    static: dict[str, Any]

    def start(
        self,
        rows: list[list[int]],
        *,
        stop_ids: Sequence[int] | np.ndarray | None,
        **options: Any,
    ) -> DecodeState:
        return init_decode_state(
            self.target.params,
            self.drafter.params,
            rows,
            stop_ids=self.target.stop_ids if stop_ids is None else stop_ids,
            batch=_bucket(len(rows)),
            **options,
            **self.static,
        )

    def run(self, state: DecodeState) -> DecodeState:
        """Decodes on the device until every row has ended."""
        return decode(self.target.params, self.drafter.params, state, **self.static)

    def watch(
        self, state: DecodeState, texts: Sequence[TextRow]
    ) -> Generator[None, None, DecodeState]:
        """Decodes round by round, adds the new tokens to the texts after each (the prefill
        first), and ends the rows whose text has reached a stop string.
        """
        stop_ids_BE = np.array(state.sampling.stop_ids_BE)
        first_B1 = np.take_along_axis(
            np.asarray(state.tokens_BS), np.asarray(state.length_B)[:, None] - 1, axis=1
        )
        ended_B = _add_tokens(texts, first_B1, np.ones(len(first_B1), np.int32), stop_ids_BE)
        yield
        state = dataclasses.replace(state, done_B=state.done_B | ended_B)
        rounds = stream(self.target.params, self.drafter.params, state, **self.static)
        ended_B = None
        while True:
            try:
                output = rounds.send(ended_B)
            except StopIteration as end:
                return end.value
            ended_B = _add_tokens(
                texts, np.asarray(output.tokens_BT), np.asarray(output.count_B), stop_ids_BE
            )
            yield


def _program(
    target: Target,
    drafter: Drafter | None,
    draft_len: int | None,
    acceptance: str,
    policy: str | Policy,
    logprobs: bool = False,
) -> _Program:
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    drafter = drafter or Drafter(NoDrafter(), (), "none")
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter must come from load_drafter or be a specjax.Drafter(model, params, name), "
            f"got {drafter!r}"
        )
    if isinstance(drafter.model, NoDrafter):
        draft_len = 0
    elif draft_len is None:
        draft_len = default_draft_len(drafter)
    config = DecodeConfig(draft_len, policy, acceptance, logprobs)
    static = {"target": target.model, "drafter": drafter.model, "config": config}
    return _Program(target, drafter, static)


def _add_tokens(
    texts: Sequence[TextRow],
    tokens_BT: Int[np.ndarray, "B T"],
    count_B: Int[np.ndarray, " B"],
    stop_ids_BE: Int[np.ndarray, "B E"],
) -> Bool[np.ndarray, " B"]:
    """Adds each row's new tokens to its text; says which rows have reached a stop string."""
    stopped_B = np.zeros(len(tokens_BT), np.bool_)
    for row, text in enumerate(texts):
        new = tokens_BT[row, : count_B[row]]
        text.add(new[~np.isin(new, stop_ids_BE[row])].tolist())
        stopped_B[row] = text.stopped
    return stopped_B


def _exhaust(rounds: Generator[None, None, DecodeState]) -> DecodeState:
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            return end.value


def _pieces(program: _Program, state: DecodeState, text: TextRow) -> Iterator[str]:
    for _ in program.watch(state, [text]):
        if piece := text.take():
            yield piece
    text.finish()
    if piece := text.take():
        yield piece


def _collect(
    target: Target,
    state: DecodeState,
    rows: int,
    watched: Sequence[TextRow] | None,
    prefill_seconds: float,
    decode_seconds: float,
) -> GenerationResult:
    host = jax.device_get(dataclasses.replace(state, cache=(), drafter_state=()))
    tokens, reasons, logprobs = [], [], []
    for row in range(rows):
        start = host.sampling.prompt_len_B[row]
        new = host.tokens_BS[row, start : host.length_B[row]]
        stopped = bool(new[-1] in host.sampling.stop_ids_BE[row])
        count = len(new) - stopped
        if watched is not None:
            watched[row].finish()
            stopped |= watched[row].stopped
            count = watched[row].token_count
        tokens.append(new[:count].tolist())
        reasons.append("stop" if stopped else "length")
        if host.logprobs is not None:
            kept = slice(start, start + count)
            logprobs.append(
                TokenLogProbs(
                    host.logprobs.raw[row, kept].tolist(),
                    host.logprobs.processed[row, kept].tolist(),
                )
            )
    texts = None
    if watched is not None:
        texts = [row.text for row in watched]
    elif target.tokenizer is not None:
        texts = [decode_text(target.tokenizer, row) for row in tokens]
    return GenerationResult(
        texts=texts,
        tokens=tokens,
        finish_reasons=reasons,
        stats=jax.tree.map(lambda counts: counts[:rows], host.stats),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        logprobs=None if host.logprobs is None else logprobs,
    )


def _bucket(rows: int) -> int:
    """Rows of the compiled program: the next power of two."""
    return 1 << max(rows - 1, 0).bit_length()
