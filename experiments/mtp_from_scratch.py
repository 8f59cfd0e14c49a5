r"""Whether MTP modules help the model that they are trained with, and how fast it then decodes.

    python experiments/mtp_from_scratch.py --out=mtp_from_scratch.json --workdir=DIRECTORY

Trains the small model of configs/mtp.py:scratch twice, with modules and without, on the same
rows in the same order from the same weights; interrupted, it goes on where it was. Then the
model drafts for itself: prompts are beginnings of held-out rows. The number of drafts is
chosen on one half of them and the speed-up measured on the other, greedily, one row at a
time, against autoregressive decoding. Prints a table, writes JSON and a PNG beside it.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common import argument_parser, explained, held_out_entries, provenance, save_figure
from drafter_quality import Contender, compare_all
from ml_collections import ConfigDict

import specjax
from specjax.evaluation.comparison import Comparison
from specjax.evaluation.report import format_table, run_entry, speedup
from specjax.files import write_json
from specjax.tasks.common import enable_compilation_cache
from specjax.tasks.plans import make_plan

ROOT = Path(__file__).parents[1]
ALGORITHMS = {"with": "mtp", "without": "none"}
DRAFT_LENS = (1, 2, 3, 4, 5, 6)
PROMPT_TOKENS = 64


def main() -> None:
    """Runs the experiment."""
    parser = argument_parser(__doc__, smoke="a few steps of a tiny model, two prompts")
    parser.add_argument("--workdir", required=True, type=Path, help="of both training runs")
    parser.add_argument("--depth", type=int, default=1, help="modules")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.num_prompts, arguments.max_new_tokens = 2, 8
    if arguments.num_prompts < 2:
        parser.error("--num-prompts must be at least 2: some to choose with, some to measure")
    enable_compilation_cache("auto")
    with explained(parser):
        result = run(arguments)
    write_json(arguments.out, result)
    print(_table(result))
    save_figure(arguments.out.with_suffix(".png"), (15, 4.2), partial(_draw, result))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is written.

    Raises:
      ValueError: fewer held-out rows than prompts, or a workdir of another run.
      CalledProcessError: training failed.
    """
    variant = "smoke" if arguments.smoke else "scratch"
    workdirs = {name: arguments.workdir / name for name in ALGORITHMS}
    options: dict[str, Any] = {"mtp.depth": arguments.depth}
    if arguments.smoke:
        options["training.held_out"] = 12  # some begin with the end of a document: no prompts
    for name, algorithm in ALGORITHMS.items():
        train(f"configs/mtp.py:{variant}", workdirs[name], options | {"algorithm": algorithm})
    reports = {
        name: json.loads((path / "report.json").read_text()) for name, path in workdirs.items()
    }
    target = specjax.load_target(str(workdirs["with"] / "target"))
    drafter = specjax.load_drafter(str(workdirs["with"] / "drafter"), target)
    prompts = held_out_prompts(workdirs["with"], arguments.num_prompts)
    half = len(prompts) // 2
    sets = {"choose": prompts[:half], "measure": prompts[half:]}
    draft_lens = DRAFT_LENS[:2] if arguments.smoke else DRAFT_LENS
    contenders = {str(n): Contender("mtp", drafter, n) for n in draft_lens}
    greedy = {"greedy": 0.0}
    count = arguments.max_new_tokens
    compared = compare_all(target, contenders, sets, count, "float32", greedy)["greedy"]
    best = max(contenders, key=lambda name: _speedup(compared[name][0]))
    measured = compared[best][1]
    held_out = {name: report["held_out"] for name, report in reports.items()}
    return {
        **provenance(),
        "model": dataclasses.asdict(target.model.config),
        "dtype": target.dtype,
        "training": reports["with"]["training"],
        "main_loss_without": held_out["without"]["main"],
        "main_loss_with": held_out["with"]["main"],
        "acceptance_by_depth": held_out["with"]["acceptance_K"],
        "draft_len": int(best),
        "speedup": _speedup(measured),
        "identical": all(c.identical for runs in compared.values() for c in runs),
        "autoregressive": run_entry(measured.autoregressive),
        "by_draft_len": {
            name: {
                "speedup": _speedup(runs[1]),
                "outputs_that_part_as_run": len(runs[1].as_run or ()),
                **run_entry(runs[1].speculative),
            }
            for name, runs in compared.items()
        },
        "learning_curves": {name: learning_curve(path) for name, path in workdirs.items()},
    }


def train(config: str, workdir: Path, overrides: dict[str, Any]) -> None:
    """Runs the task "train" of a config, as the command line does.

    Raises:
      CalledProcessError: it failed; its messages are on the standard error stream.
    """
    options = [f"--config.{name}={value}" for name, value in overrides.items()]
    command = [sys.executable, "-m", "specjax.main", f"--config={config}"]
    process = subprocess.Popen([*command, f"--workdir={workdir.absolute()}", *options], cwd=ROOT)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C reaches it too, and it leaves a checkpoint
        raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def held_out_prompts(workdir: Path, count: int) -> list[list[int]]:
    """Beginnings of rows that a run of the task "train" did not train on: of its last rows.

    Other runs on the same corpus leave these out too, if they hold out as much of it.

    Raises:
      ValueError: it held out fewer of that length.
    """
    config = ConfigDict(json.loads((workdir / "config.json").read_text()))
    rows = make_plan(config, workdir).data.texts[-config.training.held_out :]
    length = min(PROMPT_TOKENS, config.training.max_len // 2)
    # Of one document, the row's first; where it is alone, the mask tells padding.
    segments = [getattr(row, "segments_T", row.loss_mask_T)[:length] for row in rows]
    whole = [(part == 1).all() for part in segments]
    prompts = [row.tokens_T[:length] for row, keep in zip(rows, whole, strict=True) if keep]
    if len(prompts) < count:
        raise ValueError(f"{len(prompts)} held-out rows make no {count} prompts: ask for fewer")
    return [prompt.tolist() for prompt in prompts[len(prompts) - count :]]


def learning_curve(workdir: Path) -> dict[str, list[Any]]:
    """Steps, seconds and losses of the evaluations that the task "train" logged."""
    entries = held_out_entries(workdir)
    names = ("step", "seconds", "main", "acceptance_K")
    return {name: [entry.get(name) for entry in entries] for name in names}


def _speedup(comparison: Comparison) -> float:
    return speedup(comparison.autoregressive, comparison.speculative) or 0.0


def _table(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{entry['mean_accepted_length']:.2f}",
            " ".join(f"{value or 0:.2f}" for value in entry["acceptance_by_position"]),
            f"{entry['speedup']:.2f}",
        ]
        for name, entry in result["by_draft_len"].items()
    ]
    header = ["drafts", "accepted length", "acceptance by position", "speed-up"]
    losses = [
        f"{name}: {result[f'main_loss_{name}']:.4f} nats a token" for name in ("with", "without")
    ]
    return "\n".join(
        [
            format_table(header, rows),
            f"main loss, held out: {', '.join(losses)}",
            f"speed-up {result['speedup']:.2f} at γ = {result['draft_len']}, chosen on "
            f"other prompts; identical: {result['identical']}",
        ]
    )


def _draw(result: dict[str, Any], figure: Any) -> None:
    losses, acceptance, speed = figure.subplots(1, 3)
    for name, curve in result["learning_curves"].items():
        minutes = [seconds / 60 for seconds in curve["seconds"]]
        losses.plot(curve["step"], curve["main"], ".-", label=f"{name} ({minutes[-1]:.0f} min)")
    losses.set(title="Loss of the model, held out", xlabel="steps", ylabel="nats a token")
    losses.legend(frameon=False)
    for name, entry in result["by_draft_len"].items():
        shares = [value or 0 for value in entry["acceptance_by_position"]]
        acceptance.plot(range(1, len(shares) + 1), shares, "o-", label=f"γ = {name}")
    acceptance.set(title="Conditional acceptance, greedy", xlabel="draft position", ylim=(0, 1.02))
    acceptance.legend(frameon=False)
    entries = result["by_draft_len"]
    bars = speed.bar([*entries], [entry["speedup"] for entry in entries.values()], 0.6)
    speed.bar_label(bars, fmt="%.2f")
    speed.axhline(1, color="black", linewidth=0.8, linestyle=":")
    speed.set(
        title="Speed-up, one row, greedy", xlabel="drafts a round, γ", ylabel="× autoregressive"
    )


if __name__ == "__main__":
    main()
