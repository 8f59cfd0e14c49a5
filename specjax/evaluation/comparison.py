"""Whether speculative output is the autoregressive output, and where it is not."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.evaluation.runner import Measurement, Settings, decode_all, measure, room

OnBatch = Callable[[str, int], object]

CHECKS = ("float32", "gap", "none")
# Untimed runs decode this many rows at a time at least.
_CHECK_ROWS = 8
# Teacher-forced sequences are padded to a multiple of this, to share compiled programs.
_FORWARD_BUCKET = 128


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where two greedy outputs of one prompt part.

    Attributes:
      prompt: index of the prompt in its set.
      position: index into the output tokens.
      autoregressive_token: the token there; an end token where the output ended; None
        if it ended for its length.
      speculative_token: likewise.
      logit_gap: how far the two tokens' logits are apart in a forward pass over what
        the outputs have in common; None if a token is.
    """

    prompt: int
    position: int
    autoregressive_token: int | None
    speculative_token: int | None
    logit_gap: float | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both ways of decoding one set of prompts.

    Attributes:
      name: of the set.
      autoregressive: measured without drafter.
      speculative: measured with it.
      as_run: where the measured outputs part; None if they were sampled, and so need
        not be equal.
      identical: greedy outputs are equal in float32 at highest matmul precision; None
        if they were sampled or that was not checked.
      check: what decided `identical`, or else how far the output is from greedy.
    """

    name: str
    autoregressive: Measurement
    speculative: Measurement
    as_run: list[Difference] | None
    identical: bool | None
    check: dict[str, Any]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Comparison":
        """Inverse of `dataclasses.asdict` and JSON, with arrays as lists."""
        as_run = fields["as_run"]
        return cls(
            **{
                **fields,
                "autoregressive": Measurement.from_json(fields["autoregressive"]),
                "speculative": Measurement.from_json(fields["speculative"]),
                "as_run": None if as_run is None else [Difference(**tie) for tie in as_run],
            }
        )


def compare(
    target: specjax.Target,
    drafter: specjax.Drafter,
    sets: Mapping[str, Sequence[Sequence[int]]],
    settings: Settings,
    *,
    check: str,
    gap_tolerance: float,
    on_batch: OnBatch = lambda what, rows: None,
) -> list[Comparison]:
    """Measures both ways of decoding sets of token-id prompts and compares the outputs.

    The sets share compiled programs: every row has the room that the longest needs.

    Args:
      target: the model.
      drafter: what proposes tokens.
      sets: at least one prompt under each name.
      settings: how to decode.
      check: "float32" decodes again with the parameters in float32 at highest matmul
        precision, unless the measured run was so; "gap" scores the speculative output
        with the target; "none" leaves it at the measured run.
      gap_tolerance: the largest logit gap that passes the check "gap".
      on_batch: called after each batch with what it was and its number of rows; the rows
        add up to `outputs(...)`.

    Raises:
      ValueError: an unknown check, a tolerance that is no finite number of at least 0, or
        prompts too long for the target.
    """
    _check_options(check, gap_tolerance)
    max_len = max(room(target, name, rows, settings.max_new_tokens) for name, rows in sets.items())
    runs = {
        name: measure(target, drafter, rows, settings, max_len, partial(on_batch, name))
        for name, rows in sets.items()
    }
    return compare_runs(
        target,
        drafter,
        sets,
        runs,
        settings,
        max_len,
        check=check,
        gap_tolerance=gap_tolerance,
        on_batch=on_batch,
    )


def compare_runs(
    target: specjax.Target,
    drafter: specjax.Drafter,
    sets: Mapping[str, Sequence[Sequence[int]]],
    runs: Mapping[str, tuple[Measurement, Measurement]],
    settings: Settings,
    max_len: int,
    *,
    check: str,
    gap_tolerance: float = 0.0,
    on_batch: OnBatch = lambda what, rows: None,
) -> list[Comparison]:
    """Compares the outputs of both ways of decoding, measured before.

    Args:
      target: the model.
      drafter: what proposed tokens.
      sets: the prompts under each name.
      runs: each set's autoregressive and speculative measurement.
      settings: how these were decoded.
      max_len: the room that they had.
      check: as in `compare`, and so are the rest.
      gap_tolerance: the largest logit gap that passes the check "gap".
      on_batch: called after each batch of a check.

    Raises:
      ValueError: an unknown check, or a tolerance that is no finite number of at least 0.
    """
    _check_options(check, gap_tolerance)
    if not settings.greedy:
        nothing = (None, None, {"kind": "none"})
        return [Comparison(name, *pair, *nothing) for name, pair in runs.items()]
    as_run = {name: differences(target, sets[name], *pair) for name, pair in runs.items()}
    checks: dict[str, dict[str, Any]] = {name: {"kind": "none"} for name in sets}
    verdicts = {name: not as_run[name] if _runs_exactly(target) else None for name in sets}
    if check == "gap":
        for name, (_, speculative) in runs.items():
            checks[name] = score_gaps(target, sets[name], speculative, gap_tolerance)
    elif _needs_float32_run(target, settings, check):
        parted = check_in_float32(target, drafter, sets, settings, max_len, on_batch)
        verdicts = {name: not parted[name] for name in sets}
        checks = {
            name: {"kind": "float32", "differences": [dataclasses.asdict(d) for d in parted[name]]}
            for name in sets
        }
    return [
        Comparison(name, *pair, as_run[name], verdicts[name], checks[name])
        for name, pair in runs.items()
    ]


def _check_options(check: str, gap_tolerance: float) -> None:
    if check not in CHECKS:
        raise ValueError(f"unknown check {check!r}: known are {', '.join(CHECKS)}")
    if not (math.isfinite(gap_tolerance) and gap_tolerance >= 0):
        raise ValueError(f"gap_tolerance must be finite and at least 0, got {gap_tolerance}")


def outputs(target: specjax.Target, prompts: int, settings: Settings, check: str) -> int:
    """How many rows `compare` decodes for that many prompts; a measure of progress."""
    return prompts * (4 if _needs_float32_run(target, settings, check) else 2)


def _needs_float32_run(target: specjax.Target, settings: Settings, check: str) -> bool:
    return check == "float32" and settings.greedy and not _runs_exactly(target)


def check_in_float32(
    target: specjax.Target,
    drafter: specjax.Drafter,
    sets: Mapping[str, Sequence[Sequence[int]]],
    settings: Settings,
    max_len: int,
    on_batch: OnBatch = lambda what, rows: None,
) -> dict[str, list[Difference]]:
    """Where greedy outputs part in float32 at highest matmul precision, for each set.

    Untimed, so all sets go through together, in larger batches than the settings'.
    """
    params = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)
    exact = dataclasses.replace(target, params=params, dtype="float32")
    batch_size = max(settings.batch_size, _CHECK_ROWS)
    settings = dataclasses.replace(settings, batch_size=batch_size)
    prompts = [prompt for rows in sets.values() for prompt in rows]
    owners = [(name, row) for name, rows in sets.items() for row in range(len(rows))]
    parted: dict[str, list[Difference]] = {name: [] for name in sets}
    with jax.default_matmul_precision("highest"):
        tell = partial(on_batch, "check in float32")
        runs = [
            decode_all(exact, method, prompts, settings, max_len, tell)
            for method in (None, drafter)
        ]
        for difference in differences(exact, prompts, *runs):
            name, row = owners[difference.prompt]
            parted[name].append(dataclasses.replace(difference, prompt=row))
    return parted


def differences(
    target: specjax.Target,
    prompts: Sequence[Sequence[int]],
    autoregressive: Measurement,
    speculative: Measurement,
) -> list[Difference]:
    """The first place, if any, where the two outputs of each prompt part."""
    return [
        _difference(target, row, list(prompts[row]), autoregressive, speculative)
        for row in range(len(prompts))
        if autoregressive.tokens[row] != speculative.tokens[row]
        or autoregressive.finish_reasons[row] != speculative.finish_reasons[row]
    ]


def _difference(
    target: specjax.Target,
    row: int,
    prompt: list[int],
    autoregressive: Measurement,
    speculative: Measurement,
) -> Difference:
    first, second = autoregressive.tokens[row], speculative.tokens[row]
    pairs = enumerate(zip(first, second, strict=False))
    parted = (position for position, (a, b) in pairs if a != b)
    position = next(parted, min(len(first), len(second)))
    logits_V = np.asarray(_logits(target, prompt + first[:position])[-1])
    tokens = [
        _token_at(target, run, row, position, logits_V) for run in (autoregressive, speculative)
    ]
    known = [logits_V[token] for token in tokens if token is not None]
    gap = float(abs(known[0] - known[1])) if len(known) == 2 else None
    return Difference(row, position, *tokens, logit_gap=gap)


def _token_at(
    target: specjax.Target, run: Measurement, row: int, position: int, logits_V: np.ndarray
) -> int | None:
    if position < len(run.tokens[row]):
        return run.tokens[row][position]
    if run.finish_reasons[row] == "length":
        return None
    # Results leave the end token out: greedy decoding took the likeliest of them.
    return max(target.stop_ids, key=lambda token: logits_V[token])


def score_gaps(
    target: specjax.Target,
    prompts: Sequence[Sequence[int]],
    measurement: Measurement,
    tolerance: float,
) -> dict[str, Any]:
    """How far greedy output is from greedy by the target's own logits.

    The output is teacher-forced through the target in one pass a prompt. At each
    position the gap is the largest logit less the logit of the token that was taken.

    Returns:
      "kind": "gap", "largest_gap", "positions" with a gap above 0, "of" how many, "tolerance" and
      "passed": no gap exceeds the tolerance.
    """
    gaps = np.concatenate(
        [
            _gaps(target, list(prompt), tokens, reason)
            for prompt, tokens, reason in zip(
                prompts, measurement.tokens, measurement.finish_reasons, strict=True
            )
        ]
    )
    largest = float(np.max(gaps, initial=0.0))
    return {
        "kind": "gap",
        "largest_gap": largest,
        "positions": int(np.sum(gaps > 0)),
        "of": int(gaps.size),
        "tolerance": tolerance,
        "passed": largest <= tolerance,
    }


def _gaps(target: specjax.Target, prompt: list[int], tokens: list[int], reason: str) -> np.ndarray:
    logits = _logits(target, prompt + tokens)[len(prompt) - 1 :]
    taken = jnp.take_along_axis(logits[:-1], jnp.asarray(tokens, jnp.int32)[:, None], 1)[:, 0]
    if reason == "stop":
        stop_ids = jnp.asarray(target.stop_ids, jnp.int32)
        taken = jnp.append(taken, jnp.max(logits[-1, stop_ids]))
    return np.asarray(jnp.max(logits, axis=1)[: taken.size] - taken)


def _logits(target: specjax.Target, tokens: list[int]) -> jax.Array:
    """Logits after each token, [T, V]; padding behind them cannot change them."""
    padded = -(-len(tokens) // _FORWARD_BUCKET) * _FORWARD_BUCKET
    width = min(padded, target.model.max_len)
    row = np.zeros((1, width), np.int32)
    row[0, : len(tokens)] = tokens
    logits = target.forward(jnp.asarray(row)).logits
    assert logits is not None  # a forward pass returns all of them
    return logits[0, : len(tokens)]


def _runs_exactly(target: specjax.Target) -> bool:
    """Whether the target's own passes are float32 at highest matmul precision."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    full = jax.default_backend() == "cpu" or precision in ("highest", "float32")
    return target.dtype == "float32" and full
