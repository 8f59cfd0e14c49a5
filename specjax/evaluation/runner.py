"""Decodes prompts autoregressively and speculatively, and times both."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.decoding.types import RoundStats, SamplingParams


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to decode (as in `specjax.generate`), and `batch_size` rows at a time.

    Prompt i of a set draws with seed `seed + i`, whatever the batch size.
    """

    max_new_tokens: int
    draft_len: int
    temperature: float = 0.0
    seed: int = 0
    acceptance: str = "rejection"
    policy: str = "full"
    batch_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.draft_len < 0:
            raise ValueError(f"draft_len must be at least 0, got {self.draft_len}")
        SamplingParams(temperature_B=self.temperature, seed_B=self.seed).rows(1, 1)

    @property
    def greedy(self) -> bool:
        """Whether the output is the same however it is decoded."""
        return self.temperature == 0


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one way of decoding did with some prompts, in the order of the prompts.

    Attributes:
      tokens: output token ids, without prompt and end token.
      texts: the same as text; None if the target has no tokeniser.
      finish_reasons: "stop" (an end token) or "length".
      stats: counts of every row.
      prefill_seconds: wall-clock time of the prompts' passes.
      decode_seconds: wall-clock time of the rest.
      compile_seconds: spent on tracing and compilation before; in neither of those.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    stats: RoundStats
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock time of prefill and decoding."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def token_count(self) -> int:
        """Output tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens for each second of prefill and decoding."""
        return self.token_count / self.seconds if self.seconds else None

    @classmethod
    def from_result(
        cls, result: specjax.GenerationResult, compile_seconds: float = 0.0
    ) -> "Measurement":
        """The measurement of one batch."""
        return cls(
            tokens=result.tokens,
            texts=result.texts,
            finish_reasons=result.finish_reasons,
            stats=result.stats,
            prefill_seconds=result.prefill_seconds,
            decode_seconds=result.decode_seconds,
            compile_seconds=compile_seconds,
        )

    @classmethod
    def join(cls, parts: "Sequence[Measurement]") -> "Measurement":
        """Several measurements, at least one, as one of all their prompts."""
        with_text = all(part.texts is not None for part in parts)
        return cls(
            tokens=[row for part in parts for row in part.tokens],
            texts=[text for part in parts for text in part.texts or []] if with_text else None,
            finish_reasons=[reason for part in parts for reason in part.finish_reasons],
            stats=jax.tree.map(lambda *x: np.concatenate(x), *(part.stats for part in parts)),
            prefill_seconds=sum(part.prefill_seconds for part in parts),
            decode_seconds=sum(part.decode_seconds for part in parts),
            compile_seconds=sum(part.compile_seconds for part in parts),
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Measurement":
        """Inverse of `dataclasses.asdict` and JSON, with arrays as lists."""
        counts: dict[str, Any] = {
            name: np.asarray(count, np.int32) for name, count in fields["stats"].items()
        }
        return cls(**{**fields, "stats": RoundStats(**counts)})


def room(
    target: specjax.Target, name: str, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> int:
    """Positions that the longest of a set's prompts and its output need.

    Raises:
      ValueError: more than the target's context length.
    """
    longest = max(map(len, prompts))
    if longest + max_new_tokens > target.model.max_len:
        row = [len(prompt) for prompt in prompts].index(longest)
        raise ValueError(
            f"{name}: prompt {row} has {longest} tokens; with max_new_tokens={max_new_tokens} "
            f"that exceeds the target's context of {target.model.max_len}; shorten the prompt or "
            "lower max_new_tokens"
        )
    return longest + max_new_tokens


def decode(
    target: specjax.Target,
    drafter: specjax.Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    max_len: int,
    first_row: int = 0,
    max_new_tokens: int | None = None,
) -> specjax.GenerationResult:
    """Decodes one batch of token-id prompts; autoregressively if there is no drafter.

    Args:
      target: the model.
      drafter: what proposes tokens, or None.
      prompts: one list of token ids a row.
      settings: how to decode; their batch size is not used here.
      max_len: positions to make room for (see `room`); calls that agree on it share
        one compiled program.
      first_row: index of the batch's first prompt in its set, which seeds it.
      max_new_tokens: instead of the settings' number.
    """
    seeds = (settings.seed + first_row + np.arange(len(prompts))) % 2**32
    return specjax.generate(
        target,
        drafter,
        [list(prompt) for prompt in prompts],
        max_new_tokens=max_new_tokens or settings.max_new_tokens,
        sampling=SamplingParams(
            temperature_B=settings.temperature, seed_B=jnp.asarray(seeds, jnp.uint32)
        ),
        draft_len=settings.draft_len,
        acceptance=settings.acceptance,
        policy=settings.policy,
        max_len=max_len,
    )


def decode_all(
    target: specjax.Target,
    drafter: specjax.Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    max_len: int,
    on_batch: Callable[[int], object] = lambda rows: None,
) -> Measurement:
    """Decodes all prompts, `settings.batch_size` at a time; its times hold compilation."""
    parts = []
    for first, batch in _batches(prompts, settings.batch_size):
        result = decode(target, drafter, batch, settings, max_len=max_len, first_row=first)
        parts.append(Measurement.from_result(result))
        on_batch(len(batch))
    return Measurement.join(parts)


def measure(
    target: specjax.Target,
    drafter: specjax.Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    max_len: int,
    on_batch: Callable[[int], object] = lambda rows: None,
) -> tuple[Measurement, Measurement]:
    """Times decoding all prompts autoregressively and speculatively (see `measure_each`).

    Returns:
      The autoregressive and the speculative measurement.
    """
    methods = [(None, 0), (drafter, settings.draft_len)]
    autoregressive, speculative = measure_each(
        target, methods, prompts, settings, max_len, on_batch
    )
    return autoregressive, speculative


def measure_each(
    target: specjax.Target,
    methods: Sequence[tuple[specjax.Drafter | None, int]],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    max_len: int,
    on_batch: Callable[[int], object] = lambda rows: None,
) -> list[Measurement]:
    """Times decoding all prompts in several ways.

    All are compiled and warmed up on a batch before it is timed, and they take turns
    batch by batch, so that a slow moment of the machine hits all alike.

    Args:
      target: the model.
      methods: what proposes tokens, or None, and its draft length.
      prompts: at least one list of token ids.
      settings: how to decode; their draft length is not used here.
      max_len: positions to make room for (see `room`).
      on_batch: called with the number of rows after each batch of each method.

    Returns:
      The measurement of each method.
    """
    ways = [(drafter, dataclasses.replace(settings, draft_len=n)) for drafter, n in methods]
    measured: list[list[Measurement]] = [[] for _ in ways]
    for first, batch in _batches(prompts, settings.batch_size):
        runs = [
            partial(decode, target, drafter, batch, way, max_len=max_len, first_row=first)
            for drafter, way in ways
        ]
        warm_ups = [_compile_seconds(run, settings.max_new_tokens) for run in runs]
        for run, warm_up, parts in zip(runs, warm_ups, measured, strict=True):
            parts.append(_timed(run, warm_up))
            on_batch(len(batch))
    return [Measurement.join(parts) for parts in measured]


def _batches(
    prompts: Sequence[Sequence[int]], size: int
) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
    """Each batch with the index of its first prompt."""
    for first in range(0, len(prompts), size):
        yield first, prompts[first : first + size]


def _compile_seconds(run: Callable[..., specjax.GenerationResult], max_new_tokens: int) -> float:
    # Two tokens: the prefill's own and one round's.
    with _compile_clock() as durations:
        run(max_new_tokens=min(2, max_new_tokens))
    return math.fsum(durations)


def _timed(run: Callable[..., specjax.GenerationResult], compile_seconds: float) -> Measurement:
    with _compile_clock() as durations:
        result = run()
    if durations:  # the warm-up missed a program, so this run's times hold compilation
        result = run()
    return Measurement.from_result(result, compile_seconds + math.fsum(durations))


@contextlib.contextmanager
def _compile_clock() -> Iterator[list[float]]:
    """Collects the seconds of every tracing, lowering and compilation inside it."""
    durations: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event.startswith("/jax/core/compile/"):
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
