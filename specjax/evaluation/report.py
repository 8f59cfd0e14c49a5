"""Reports of comparisons: report.json, the environment it was made in, the printed table."""

import dataclasses
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from specjax.evaluation.comparison import Comparison
from specjax.evaluation.metrics import summarize
from specjax.evaluation.runner import Measurement

_PACKAGES = ("specjax", "jax", "jaxlib", "flax", "numpy", "transformers")


def environment() -> dict[str, Any]:
    """What a result depends on besides its config: versions, device and git state."""
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "device": {
            "backend": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "git": _git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of this package's checkout and whether files differ from it, if it is one."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is another project's
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD").strip(), "changed": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return None


def totals(comparisons: Sequence[Comparison]) -> tuple[Measurement, Measurement]:
    """The autoregressive and the speculative measurement over all sets of prompts."""
    return (
        Measurement.join([c.autoregressive for c in comparisons]),
        Measurement.join([c.speculative for c in comparisons]),
    )


def speedup(autoregressive: Measurement, speculative: Measurement) -> float | None:
    """Ratio of the tokens per second."""
    before, after = autoregressive.tokens_per_second, speculative.tokens_per_second
    return after / before if before and after is not None else None


def identical(comparisons: Sequence[Comparison]) -> bool | None:
    """Whether all sets of prompts are identical; None if unknown of one and false of none."""
    verdicts = {c.identical for c in comparisons}
    if False in verdicts:
        return False
    return None if None in verdicts else True


def build_report(
    task: str,
    config: dict[str, Any],
    comparisons: Sequence[Comparison],
    *,
    drafter: str,
    policy: str,
    set_key: str,
) -> dict[str, Any]:
    """The contents of report.json.

    "runs" starts with the autoregressive and the speculative run over all prompts, their
    set being null; the same two runs of each set follow.

    Args:
      task: name of the task.
      config: its configuration.
      comparisons: one for each set of prompts, at least one.
      drafter: name of the drafter.
      policy: name of the policy.
      set_key: the key that names an entry's set of prompts, such as "file".
    """
    runs = []
    for name, (autoregressive, speculative) in [
        (None, totals(comparisons)),
        *((c.name, (c.autoregressive, c.speculative)) for c in comparisons),
    ]:
        labels = {"name": "autoregressive", "drafter": None, "policy": None, set_key: name}
        runs.append(labels | run_entry(autoregressive))
        labels = {"name": "speculative", "drafter": drafter, "policy": policy, set_key: name}
        runs.append(labels | run_entry(speculative))
    sampled = any(c.as_run is None for c in comparisons)
    ties = [
        {set_key: c.name} | dataclasses.asdict(tie) for c in comparisons for tie in c.as_run or ()
    ]
    return {
        "task": task,
        "config": config,
        "environment": environment(),
        "runs": runs,
        "speedup": speedup(*totals(comparisons)),
        "identical": identical(comparisons),
        "as_run": {"identical": None if sampled else not ties, "ties": ties},
        "checks": [{set_key: c.name} | c.check for c in comparisons],
        "completions": [
            {set_key: c.name} | completion for c in comparisons for completion in _completions(c)
        ],
    }


def run_entry(measurement: Measurement) -> dict[str, Any]:
    """What a report says of one measurement: sizes, times and every metric."""
    return {
        "prompts": len(measurement.tokens),
        "tokens": measurement.token_count,
        "seconds": measurement.seconds,
        "prefill_seconds": measurement.prefill_seconds,
        "compile_seconds": measurement.compile_seconds,
        "tokens_per_second": measurement.tokens_per_second,
        **summarize(measurement.stats),
    }


def _completions(comparison: Comparison) -> list[dict[str, Any]]:
    """The speculative run's output, as text or, without a tokeniser, token ids."""
    run = comparison.speculative
    return [
        {
            "prompt": row,
            "tokens": len(run.tokens[row]),
            "finish_reason": run.finish_reasons[row],
            **({"token_ids": run.tokens[row]} if run.texts is None else {"text": run.texts[row]}),
        }
        for row in range(len(run.tokens))
    ]


def summary(comparisons: Sequence[Comparison], set_key: str, dtype: str) -> str:
    """The table, the acceptance by position and the verdicts, for people."""
    autoregressive, speculative = totals(comparisons)
    rows = [_row(c.name, c.autoregressive, c.speculative, _word(c.identical)) for c in comparisons]
    if len(comparisons) > 1:
        rows.append(_row("all", autoregressive, speculative, _word(identical(comparisons))))
    header = [
        set_key.replace("_", " "),
        "prompts",
        "tokens",
        "autoregressive tok/s",
        "speculative tok/s",
        "speedup",
        "mean accepted length",
        "identical",
    ]
    metrics = summarize(speculative.stats)
    lines = [
        format_table(header, rows),
        "",
        format_table(
            ["draft position", *map(str, range(1, len(metrics["survival_by_position"]) + 1))],
            [
                ["accepted (given those before)", *map(_number, metrics["acceptance_by_position"])],
                ["accepted (with those before)", *map(_number, metrics["survival_by_position"])],
            ],
        ),
        "",
        *_verdicts(comparisons, dtype),
        f"Compilation took {autoregressive.compile_seconds + speculative.compile_seconds:.1f} s, "
        "not counted above.",
    ]
    return "\n".join(lines)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns: the first aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, rule, *rows]
    )


def _row(
    name: str, autoregressive: Measurement, speculative: Measurement, verdict: str
) -> list[str]:
    return [
        name,
        str(len(speculative.tokens)),
        str(speculative.token_count),
        _number(autoregressive.tokens_per_second, 1),
        _number(speculative.tokens_per_second, 1),
        _number(speedup(autoregressive, speculative)),
        _number(summarize(speculative.stats)["mean_accepted_length"]),
        verdict,
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _word(verdict: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[verdict]


def _verdicts(comparisons: Sequence[Comparison], dtype: str) -> list[str]:
    """Lines saying what was compared with what."""
    if any(c.as_run is None for c in comparisons):
        return ["Outputs were sampled: equal in distribution, not token for token."]
    verdict = identical(comparisons)
    prompts = sum(len(c.speculative.tokens) for c in comparisons)
    parted = [tie for c in comparisons for tie in c.as_run or ()]
    gaps = [tie.logit_gap for tie in parted if tie.logit_gap is not None]
    lines = []
    if verdict is not None:
        equal = "identical" if verdict else "NOT identical"
        lines.append(f"In float32, speculative and autoregressive output are {equal}.")
    lines.append(
        f"As run in {dtype}, they part in {len(parted)} of {prompts} outputs"
        + (f"; the largest logit gap where they do is {max(gaps):.3g}." if gaps else ".")
    )
    scored = [c.check for c in comparisons if c.check["kind"] == "gap"]
    if scored:
        lines.append(
            f"By the target's own logits {sum(s['positions'] for s in scored)} of "
            f"{sum(s['of'] for s in scored)} tokens are not the first choice; largest gap "
            f"{max(s['largest_gap'] for s in scored):.3g}, tolerance {scored[0]['tolerance']:g}: "
            + ("passed." if all(s["passed"] for s in scored) else "NOT passed.")
        )
    return lines
