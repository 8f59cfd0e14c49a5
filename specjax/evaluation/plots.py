"""The figure beside a report. matplotlib is needed only here (the "plots" extra)."""

from pathlib import Path
from typing import Any

from specjax.files import replacing

_GREY, _BLUE = "#a8b2bd", "#1f6fb4"


def plot_report(report: dict[str, Any], set_key: str, path: Path) -> None:
    """Draws tokens per second, survival by position and accepted drafts a round as a PNG.

    Args:
      report: contents of report.json (`specjax.evaluation.report.build_report`).
      set_key: the key that names a run's set of prompts, as given there.
      path: the file to write.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib

    # Names of files and models are text, not formulas.
    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):
        _draw(report, set_key, path)


def _draw(report: dict[str, Any], set_key: str, path: Path) -> None:
    from matplotlib.figure import Figure

    overall, *sets = zip(report["runs"][::2], report["runs"][1::2], strict=True)
    figure = Figure(figsize=(13, 4), layout="constrained")
    speed, survival, histogram = figure.subplots(1, 3)
    _plot_speed(speed, [(runs[0][set_key], *runs) for runs in sets])
    _plot_survival(survival, {runs[1][set_key]: runs[1] for runs in sets}, overall[1])
    _plot_histogram(histogram, overall[1])
    config = report["config"]
    figure.suptitle(
        f"{config['target']}, drafter {config['drafter']}, draft length {config['draft_len']}, "
        f"temperature {config['temperature']:g}"
    )
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def _plot_speed(axes: Any, sets: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    names, *runs = zip(*sets, strict=True)
    for offset, color, group, label in (
        (-0.2, _GREY, runs[0], "autoregressive"),
        (0.2, _BLUE, runs[1], "speculative"),
    ):
        speeds = [run["tokens_per_second"] or 0 for run in group]
        places = [i + offset for i in range(len(sets))]
        axes.bar(places, speeds, width=0.38, color=color, label=label)
    for i, (before, after) in enumerate(zip(*runs, strict=True)):
        speeds = (before["tokens_per_second"], after["tokens_per_second"])
        if all(speeds):
            label, place = f"{speeds[1] / speeds[0]:.2f}×", (i, max(speeds))
            axes.annotate(label, place, (0, 2), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(sets)), names)
    axes.margins(y=0.25)  # room for the legend
    axes.set(title="Speed (prefill included)", ylabel="tokens per second")
    axes.legend(frameon=False, loc="upper left", ncols=2)
    _declutter(axes)


def _plot_survival(axes: Any, sets: dict[str, dict[str, Any]], overall: dict[str, Any]) -> None:
    for name, run in sets.items():
        _plot_line(axes, run, label=name, marker="o", markersize=4, linewidth=1.3)
    if len(sets) > 1:
        _plot_line(axes, overall, label="all", color="black", linewidth=2.5)
    axes.set(
        title="Survival: accepted with all before it",
        xlabel="draft position",
        ylabel="share of rounds that verified it",
        ylim=(0, 1.02),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    _declutter(axes)


def _plot_line(axes: Any, run: dict[str, Any], **style: Any) -> None:
    shares = [float("nan") if x is None else x for x in run["survival_by_position"]]
    axes.plot(range(1, len(shares) + 1), shares, **style)


def _plot_histogram(axes: Any, run: dict[str, Any]) -> None:
    rounds = run["rounds_by_accepted"]
    shares = [count / max(run["rounds"], 1) for count in rounds]
    bars = axes.bar(range(len(shares)), shares, color=_BLUE)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=9)
    axes.margins(y=0.12)
    if run["mean_accepted_length"] is not None:
        mean = f"mean accepted length {run['mean_accepted_length']:.2f},"
        text = f"{mean}\ntarget's own token included"
        axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top")
    axes.set(
        title="Accepted drafts, every round",
        xlabel="accepted drafts (0 in rounds without any)",
        ylabel="share of rounds",
        xticks=range(len(shares)),
    )
    _declutter(axes)


def _declutter(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
