r"""How good drafters are: SmolLM2-135M, accepted length, speed-up and the cost of a round.

    python experiments/drafter_quality.py --out=drafter_quality.json --prompts='prompts/*.jsonl' \
        --drafters dspark=DIRECTORY dflash=DIRECTORY prompt_lookup=prompt_lookup

A drafter is NAME=SOURCE, where `load_drafter` takes the source. The first prompts of each
file of prompts (JSON lines of {"turns": [...]}) are decoded one row at a time, greedily and
at temperature 1. Autoregressive decoding and the drafters take turns at every prompt, so
that a slow moment of the machine hits all; a speed-up is the ratio of tokens per second over
a file's prompts, prefill included, compilation left out. Greedy outputs are compared with
the autoregressive ones in an untimed run in float32. Prints tables, writes JSON and a PNG
beside it, with the learning curves of `--logs NAME=WORKDIR` of the task "train".
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Timed,
    acceptances_of,
    argument_parser,
    held_out_entries,
    observes_of,
    passes_of,
    proposals_of,
    provenance,
    rounds_of,
    save_figure,
    take_turns,
)

import specjax
from specjax.api import default_draft_len, encode_prompts
from specjax.data.prompts import find_prompt_files, read_prompts
from specjax.drafters.composed import Composed
from specjax.evaluation.comparison import Comparison, compare_runs, outputs
from specjax.evaluation.metrics import summarize
from specjax.evaluation.report import format_table, run_entry, speedup, totals
from specjax.evaluation.runner import Settings, measure_each, room
from specjax.files import write_json
from specjax.tasks.common import ProgressBar, enable_compilation_cache

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
METRICS = ("mean_accepted_length", "speedup")
PHASES = ("draft", "verify", "accept_commit", "observe")  # of a round, in milliseconds
CURVES = {
    "expected_length": "expected accepted length, tokens",
    "first_acceptance": "acceptance of the first draft",
}
Values = Mapping[str, Mapping[str, float]]  # of each drafter and file


@dataclasses.dataclass(frozen=True)
class Contender:
    """A drafter and how many tokens it drafts a round."""

    source: str
    drafter: specjax.Drafter
    draft_len: int


@dataclasses.dataclass(frozen=True)
class Claim:
    """Something that may be true of drafters of these names."""

    drafters: tuple[str, ...]
    holds: Callable[[Values], bool]
    metrics: tuple[str, ...] = METRICS


def _dspark_beats_dflash(values: Values) -> bool:
    """On every file."""
    return all(values["dspark"][file] > values["dflash"][file] for file in values["dspark"])


CLAIMS = {
    "dspark_beats_dflash_on_every_file": Claim(("dspark", "dflash"), _dspark_beats_dflash),
    "dspark_beats_dflash_at_later_positions": Claim(
        ("dspark", "dflash"), _dspark_beats_dflash, ("later_acceptance",)
    ),
    "dspark_beats_prompt_lookup_on_average": Claim(
        ("dspark", "prompt_lookup"),
        lambda v: _mean(v["dspark"].values()) > _mean(v["prompt_lookup"].values()),
    ),
    "composed_at_least_the_better_on_every_file": Claim(
        ("composed", "dspark", "prompt_lookup"),
        lambda v: all(
            v["composed"][file] >= max(v["dspark"][file], v["prompt_lookup"][file])
            for file in v["composed"]
        ),
    ),
}


def main() -> None:
    """Runs the experiment."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        result = run(arguments)
    except ValueError as error:
        parser.error(str(error))
    write_json(arguments.out, result)
    print(tables(result))
    for name, claim in result["claims"].items():
        print(f"{name}: {claim['holds']}")
    print(f"mean speed-up, {result['main']}: {result['speedup_mean']:.2f}")
    rows = 3 if result["learning_curves"] else 2
    save_figure(arguments.out.with_suffix(".png"), (15, 4.2 * rows), partial(draw, result))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is written.

    Raises:
      ValueError: unknown names, names given twice, prompts or logs that cannot be read, or
        drafters that cannot be loaded.
    """
    sources = _by_name("--drafters", arguments.drafters)
    draft_lens = _by_name("--draft-len", arguments.draft_len)
    main_drafter = arguments.main or list(sources)[-1]
    _check_known("--draft-len", draft_lens, sources)
    _check_known("--main", [main_drafter], sources)
    curves = {
        name: read_learning_curve(Path(workdir))
        for name, workdir in _by_name("--logs", arguments.logs).items()
    }
    limit, max_new_tokens = arguments.num_prompts, arguments.max_new_tokens
    if arguments.smoke:
        limit, max_new_tokens = min(limit, 2), min(max_new_tokens, 16)
    files = find_prompt_files(arguments.prompts)
    texts = {name: read_prompts(path, limit) for name, path in files.items()}

    enable_compilation_cache("auto")
    target = specjax.load_target("smollm2-135m")
    contenders = {
        name: load_contender(target, source, draft_lens.get(name))
        for name, source in sources.items()
    }
    sets = {name: encode_prompts(target, rows) for name, rows in texts.items()}
    measured = measure(
        target,
        contenders,
        sets,
        max_new_tokens,
        check=not arguments.no_check,
        smoke=arguments.smoke,
    )
    return {
        **provenance(),
        **measured,
        "main": main_drafter,
        "speedup_mean": measured["drafters"][main_drafter]["speedup_mean"],
        "claims": judge_claims(measured["drafters"]),
        "learning_curves": curves,
    }


def measure(
    target: specjax.Target,
    contenders: Mapping[str, Contender],
    sets: Mapping[str, Sequence[Sequence[int]]],
    max_new_tokens: int,
    *,
    check: bool,
    smoke: bool,
) -> dict[str, Any]:
    """Each drafter's results by kind of sampling and file, and what its rounds cost."""
    how = "float32" if check else "none"
    comparisons = compare_all(target, contenders, sets, max_new_tokens, how)
    drafters = {
        name: _drafter_entry(contender, {mode: comparisons[mode][name] for mode in TEMPERATURES})
        for name, contender in contenders.items()
    }
    for name, cost in measure_costs(target, contenders, *((2, 4) if smoke else (7, 40))).items():
        drafters[name]["cost_ms"] = cost
    return {
        "target": target.name,
        "dtype": target.dtype,
        "max_new_tokens": max_new_tokens,
        "autoregressive": {
            mode: {c.name: run_entry(c.autoregressive) for c in next(iter(by_drafter.values()))}
            for mode, by_drafter in comparisons.items()
        },
        "drafters": drafters,
    }


def load_contender(target: specjax.Target, source: str, draft_len: int | None) -> Contender:
    """The drafter of that source; without a draft length it has what `generate` takes."""
    drafter = specjax.load_drafter(source, target)
    return Contender(source, drafter, draft_len or default_draft_len(drafter))


def compare_all(
    target: specjax.Target,
    contenders: Mapping[str, Contender],
    sets: Mapping[str, Sequence[Sequence[int]]],
    max_new_tokens: int,
    check: str,
    temperatures: Mapping[str, float] = TEMPERATURES,
) -> dict[str, dict[str, list[Comparison]]]:
    """For each kind of sampling and each drafter, the comparisons of all files."""
    prompts = sum(map(len, sets.values()))
    settings = {
        mode: Settings(max_new_tokens, draft_len=0, temperature=temperature)
        for mode, temperature in temperatures.items()
    }
    rows = 0  # that will be decoded
    for kind in settings.values():
        checked = outputs(target, prompts, kind, check) - outputs(target, prompts, kind, "none")
        rows += prompts * (1 + len(contenders)) + checked * len(contenders)
    with ProgressBar(rows) as bar:
        return {
            mode: _compare(target, contenders, sets, kind, check, bar)
            for mode, kind in settings.items()
        }


def _compare(
    target: specjax.Target,
    contenders: Mapping[str, Contender],
    sets: Mapping[str, Sequence[Sequence[int]]],
    settings: Settings,
    check: str,
    bar: ProgressBar,
) -> dict[str, list[Comparison]]:
    max_len = max(room(target, name, rows, settings.max_new_tokens) for name, rows in sets.items())
    methods = [(None, 0), *((c.drafter, c.draft_len) for c in contenders.values())]
    measured = {
        file: measure_each(target, methods, prompts, settings, max_len, partial(bar.tell, file))
        for file, prompts in sets.items()
    }
    return {
        name: compare_runs(
            target,
            contender.drafter,
            sets,
            {file: (runs[0], runs[place]) for file, runs in measured.items()},
            dataclasses.replace(settings, draft_len=contender.draft_len),
            max_len,
            check=check,
            on_batch=bar.tell,
        )
        for place, (name, contender) in enumerate(contenders.items(), start=1)
    }


def measure_costs(
    target: specjax.Target, contenders: Mapping[str, Contender], repeats: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of a greedy round's phases, the whole round and a plain decoding step.

    Of drafters that have parameters and verify as much each round. One row; medians over
    repeats that take turns. Beside the phases a round has keys, schedule and loop.
    """
    costs = {}
    for name, contender in contenders.items():
        if not contender.drafter.params or isinstance(contender.drafter.model, Composed):
            continue
        taps = contender.drafter.model.taps
        how = (target, rounds, contender.drafter, contender.draft_len)
        timed: dict[str, Timed] = {
            "draft": proposals_of(*how),
            "verify": passes_of(target, rounds, contender.draft_len + 1, taps),
            "accept_commit": acceptances_of(*how),
            "observe": observes_of(*how),
            "round": rounds_of(*how),
            "step": rounds_of(target, rounds),
        }
        costs[name] = {
            phase: 1e3 * statistics.median(values)
            for phase, values in take_turns(timed, repeats).items()
        }
    return costs


def judge_claims(drafters: Mapping[str, Any]) -> dict[str, Any]:
    """Which claims hold, of those whose drafters are all there.

    "holds" is by the claim's first metric, greedy; beside it the same for each kind of sampling
    and each metric, with the numbers of each drafter and file.
    """
    judged = {}
    for name, claim in CLAIMS.items():
        if not set(claim.drafters) <= drafters.keys():
            continue
        by_kind: dict[str, Any] = {mode: {} for mode in TEMPERATURES}
        for mode in TEMPERATURES:
            for metric in claim.metrics:
                values = {
                    drafter: {
                        file: _nan(entry[metric]) for file, entry in drafters[drafter][mode].items()
                    }
                    for drafter in claim.drafters
                }
                by_kind[mode][metric] = {"holds": claim.holds(values), "values": values}
        judged[name] = {"holds": by_kind["greedy"][claim.metrics[0]]["holds"], **by_kind}
    return judged


def read_learning_curve(workdir: Path) -> dict[str, list[float] | None]:
    """The evaluations on held-out sequences that the task "train" logged.

    Returns:
      Lists with an entry each: "step", "seconds" of training (None if not logged),
      "expected_length" and "first_acceptance", of the first drafted position.

    Raises:
      ValueError: a log that cannot be read, or holds no such evaluation.
    """
    path = workdir / "log.jsonl"
    try:
        entries = held_out_entries(workdir)
        curve = {
            "step": [entry["step"] for entry in entries],
            "seconds": [entry.get("seconds") for entry in entries],
            "expected_length": [entry["expected_length"] for entry in entries],
            "first_acceptance": [_acceptance(entry)[0] for entry in entries],
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"cannot read the training log {path}: {error!r}") from error
    if not entries:
        raise ValueError(f"the training log {path} has no evaluation on held-out sequences")
    return curve | ({"seconds": None} if None in curve["seconds"] else {})


def _acceptance(entry: dict[str, Any]) -> list[float]:
    """By position of a block, or by depth of MTP modules."""
    return entry["acceptance_G" if "acceptance_G" in entry else "acceptance_K"]


def _drafter_entry(
    contender: Contender, by_mode: Mapping[str, Sequence[Comparison]]
) -> dict[str, Any]:
    entry: dict[str, Any] = {"source": contender.source, "draft_len": contender.draft_len}
    for mode, comparisons in by_mode.items():
        entry[mode] = {c.name: _file_entry(c) for c in comparisons}
    greedy = entry["greedy"].values()
    return entry | {
        **{f"{metric}_mean": _mean(_nan(file[metric]) for file in greedy) for metric in METRICS},
        "all_files": {mode: summarize(totals(runs)[1].stats) for mode, runs in by_mode.items()},
    }


def _file_entry(comparison: Comparison) -> dict[str, Any]:
    ties, stats = comparison.as_run, comparison.speculative.stats
    later, reached = (
        int(np.sum(counts_BG[:, 1:])) for counts_BG in (stats.accepted_BG, stats.reached_BG)
    )
    return {
        **run_entry(comparison.speculative),
        # Of the drafts from the second on, those of rounds that accepted all before.
        "later_acceptance": later / reached if reached else None,
        "speedup": speedup(comparison.autoregressive, comparison.speculative),
        "identical": comparison.identical,
        "as_run": None
        if ties is None
        else {"identical": not ties, "ties": [dataclasses.asdict(tie) for tie in ties]},
    }


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _nan(value: float | None) -> float:
    """A ratio of nothing as a number that nothing compares with."""
    return float("nan") if value is None else value


def tables(result: dict[str, Any]) -> str:
    """Accepted lengths and speed-ups of each drafter and file, and costs of a round."""
    drafters = result["drafters"]
    header = ["drafter", "draft length", "file"]
    header += [
        f"{what}, {mode}" for what in ("accepted length", "speed-up") for mode in TEMPERATURES
    ]
    rows = [row for name, drafter in drafters.items() for row in _drafter_rows(name, drafter)]
    lines = [format_table([*header, "identical"], rows)]
    costs = {name: drafter["cost_ms"] for name, drafter in drafters.items() if "cost_ms" in drafter}
    if costs:
        phases = [*PHASES, "round", "step"]
        cells = [
            [name, *(f"{cost[phase]:.2f}" for phase in phases)] for name, cost in costs.items()
        ]
        lines += ["", format_table(["milliseconds", *phases], cells)]
    return "\n".join(lines)


def _drafter_rows(name: str, drafter: dict[str, Any]) -> list[list[str]]:
    label = [name, str(drafter["draft_len"])]
    columns = [
        [_nan(entry[metric]) for entry in drafter[mode].values()]
        for metric in METRICS
        for mode in TEMPERATURES
    ]
    verdicts = [entry["identical"] for entry in drafter["greedy"].values()]
    rows = [
        [*label, file, *(f"{column[i]:.2f}" for column in columns), _word(verdicts[i])]
        for i, file in enumerate(drafter["greedy"])
    ]
    overall = None if None in verdicts else all(verdicts)
    means = [f"{_mean(column):.2f}" for column in columns]
    return [*rows, [*label, "mean", *means, _word(overall)]]


def _word(verdict: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[verdict]


def draw(result: dict[str, Any], figure: Any) -> None:
    """Accepted lengths, speed-ups, costs and learning curves of a result."""
    drafters, curves = result["drafters"], result["learning_curves"]
    colors = {name: f"C{i}" for i, name in enumerate(drafters)}
    shown = [key for key in CURVES if curves and all(key in curve for curve in curves.values())]
    grid = figure.add_gridspec(3 if shown else 2, 6)
    axes = [figure.add_subplot(grid[i // 3, 2 * (i % 3) : 2 * (i % 3) + 2]) for i in range(6)]
    _draw_bars(axes[0], drafters, "greedy", "mean_accepted_length", colors)
    _draw_bars(axes[1], drafters, "sampled", "mean_accepted_length", colors)
    _draw_acceptance(axes[2], drafters, colors)
    _draw_bars(axes[3], drafters, "greedy", "speedup", colors)
    _draw_bars(axes[4], drafters, "sampled", "speedup", colors)
    _draw_costs(axes[5], drafters)
    for i, key in enumerate(shown):
        width = 6 // len(shown)
        place = figure.add_subplot(grid[2, i * width : (i + 1) * width])
        _draw_curves(place, curves, colors, key)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)


def _draw_bars(
    axes: Any, drafters: dict[str, Any], mode: str, metric: str, colors: dict[str, str]
) -> None:
    """Groups of bars: a file each, and in it a drafter each."""
    width = 0.8 / len(drafters)
    for place, (name, drafter) in enumerate(drafters.items()):
        values = [_nan(entry[metric]) for entry in drafter[mode].values()]
        offset = (place - (len(drafters) - 1) / 2) * width
        bars = axes.bar(
            [i + offset for i in range(len(values))], values, 0.92 * width, color=colors[name]
        )
        bars.set_label(f"{name} (γ = {drafter['draft_len']})")
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    files = list(next(iter(drafters.values()))[mode])
    axes.set_xticks(range(len(files)), files)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")  # autoregressive decoding
    temperature = f"temperature {TEMPERATURES[mode]:g}"
    if metric == "speedup":
        axes.set(title=f"Speed-up, {temperature}", ylabel="× autoregressive tokens per second")
    else:
        axes.set(title=f"Accepted length, {temperature}", ylabel="tokens per round")


def _draw_acceptance(axes: Any, drafters: dict[str, Any], colors: dict[str, str]) -> None:
    """Drafters whose rounds' costs were measured, if there are any: a block each round."""
    shown = {name for name, drafter in drafters.items() if "cost_ms" in drafter} or {*drafters}
    for name in (name for name in drafters if name in shown):
        shares = drafters[name]["all_files"]["greedy"]["acceptance_by_position"]
        axes.plot(range(1, len(shares) + 1), [*map(_nan, shares)], "o-", color=colors[name])
    axes.set(
        title="Conditional acceptance, temperature 0, all files",
        xlabel="draft position",
        ylabel="accepted, of rounds that accepted all before",
        ylim=(0, 1.02),
    )
    axes.set_xticks(range(1, 1 + max(drafters[name]["draft_len"] for name in shown)))


def _draw_costs(axes: Any, drafters: dict[str, Any]) -> None:
    axes.set(title="Cost of a greedy round, one row", ylabel="milliseconds")
    costs = {name: drafter["cost_ms"] for name, drafter in drafters.items() if "cost_ms" in drafter}
    if not costs:
        axes.set_axis_off()
        return
    bottom = [0.0] * len(costs)
    for i, phase in enumerate(PHASES):
        heights = [cost[phase] for cost in costs.values()]
        label = phase.replace("_", " + ")
        axes.bar([*costs], heights, 0.5, bottom=bottom, color=f"C{i + 4}", label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    left, right = ([place + shift for place in range(len(costs))] for shift in (-0.35, 0.35))
    for key, label, style in (("round", "whole round", "-"), ("step", "plain step", ":")):
        heights = [cost[key] for cost in costs.values()]
        axes.hlines(heights, left, right, color="black", linestyle=style, label=label)
    axes.margins(y=0.35)  # room for the legend
    axes.legend(frameon=False, ncols=2, fontsize=8, loc="upper center")


def _draw_curves(axes: Any, curves: dict[str, Any], colors: dict[str, str], key: str) -> None:
    """Over time if all logs have it, else over steps; in the colour of a drafter of that name."""
    timed = all(curve["seconds"] for curve in curves.values())
    for i, (name, curve) in enumerate(curves.items(), start=len(colors)):
        x = [seconds / 60 for seconds in curve["seconds"]] if timed else curve["step"]
        axes.plot(x, curve[key], ".-", label=name, color=colors.get(name, f"C{i}"))
    unit = "minutes" if timed else "steps"
    axes.set(title="Training, held out", xlabel=unit, ylabel=CURVES[key])
    axes.legend(frameon=False)


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__, smoke="2 prompts a file, 16 tokens each, few repeats")
    parser.add_argument("--prompts", required=True, help="glob of JSON-lines files of prompts")
    parser.add_argument(
        "--drafters", required=True, nargs="+", type=_name_and_value, metavar="NAME=SOURCE"
    )
    parser.add_argument(
        "--draft-len",
        default=[],
        nargs="+",
        type=_name_and_count,
        metavar="NAME=TOKENS",
        help="drafted a round; by default what `generate` takes",
    )
    parser.add_argument("--main", help="the drafter of `speedup_mean` (default: the last)")
    parser.add_argument("--num-prompts", type=_count, default=20, help="of each file")
    parser.add_argument("--max-new-tokens", type=_count, default=128, help="for each prompt")
    parser.add_argument(
        "--no-check", action="store_true", help="leave out the comparison in float32"
    )
    parser.add_argument(
        "--logs",
        default=[],
        nargs="+",
        type=_name_and_value,
        metavar="NAME=WORKDIR",
        help="of the task `train`, whose learning curves are drawn",
    )
    return parser


def _name_and_value(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _name_and_count(text: str) -> tuple[str, int]:
    name, value = _name_and_value(text)
    return name, _count(value)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _by_name(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name is given twice in {option}: {[name for name, _ in pairs]}")
    return found


def _check_known(option: str, names: Iterable[str], drafters: Mapping[str, str]) -> None:
    for name in names:
        if name not in drafters:
            raise ValueError(f"unknown drafter {name!r} in {option}: known are {[*drafters]}")


if __name__ == "__main__":
    main()
