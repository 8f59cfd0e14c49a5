r"""What limits a DSpark drafter: short training runs that differ in one thing each.

    python experiments/drafter_training.py --out=drafter_training.json --cache=CACHE

The cache is the task "cache"'s, of SmolLM2-135M with the taps 1, 10, 19 and 28. Every run
takes as many steps as the others and is judged on the same held-out sequences; what a
variation changes of the base is in VARIATIONS. Learning curves are over wall-clock, without
evaluations and compilation, so a variation with dearer steps has to earn them. Prints a table,
writes JSON and a PNG beside it.
"""

import argparse
import dataclasses
import math
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import argument_parser, provenance, read_log, save_figure

import specjax
from specjax.checkpoints.head import load_head
from specjax.data.target_cache import TargetCache
from specjax.drafters.borrowed import language_model_head
from specjax.drafters.dspark_init import init_dspark
from specjax.evaluation.report import format_table
from specjax.files import write_json
from specjax.tasks.common import enable_compilation_cache
from specjax.tasks.plans import frequent_tokens
from specjax.training.features import CachedStates
from specjax.training.losses import LossWeights
from specjax.training.objectives import DSparkObjective, divide
from specjax.training.trainer import Trainer, Training

DRAFTER: dict[str, Any] = {
    "num_layers": 1,
    "taps": (1, 10, 19, 28),
    "layers_from": (29,),
    "block_size": 5,
    "markov_rank": 64,
    "draft_vocab": 8192,
    "candidates": 64,
}
SOFT = LossWeights(0.0, 0.0, 1.0, soft_cross_entropy=1.0)
TRAINING: dict[str, Any] = {
    "batch_size": 8,
    "max_len": 256,
    "learning_rate": 2e-3,
    "held_out": 128,
}
OBJECTIVE: dict[str, Any] = {"num_anchors": 8, "weights": SOFT}
# Of the drafter and of the rest: what differs from the base.
VARIATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "random layers": ({"layers_from": ()}, {}),
    "paper's losses": ({}, {"weights": LossWeights()}),
    "1 sequence x 64": ({}, {"batch_size": 1, "num_anchors": 64}),
    "8 sequences x 64": ({}, {"num_anchors": 64}),
    "learning rate 5e-4": ({}, {"learning_rate": 5e-4}),
    "learning rate 6e-3": ({}, {"learning_rate": 6e-3}),
    "2 layers": ({"num_layers": 2, "layers_from": (28, 29)}, {}),
    "2 taps": ({"taps": (19, 28)}, {}),
    "1 tap": ({"taps": (28,)}, {}),
    "rank 0 (DFlash)": ({"markov_rank": 0, "confidence_with_markov": False}, {}),
    "rank 256": ({"markov_rank": 256}, {}),
    "block 3": ({"block_size": 3}, {}),
    "block 7": ({"block_size": 7}, {}),
    "vocabulary 4096": ({"draft_vocab": 4096}, {}),
}
# Another question: how fast the prototype's shape is trained, two layers and blocks of 7.
THROUGHPUT = (
    {"num_layers": 2, "layers_from": (28, 29), "block_size": 7},
    {"batch_size": 4, "num_anchors": 128},
)


def main() -> None:
    """Runs the experiment."""
    parser = argument_parser(__doc__, "two steps of each run, to see that all works")
    parser.add_argument("--cache", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=500, help="of each run")
    parser.add_argument("--only", nargs="+", default=list(VARIATIONS), choices=list(VARIATIONS))
    arguments = parser.parse_args()
    enable_compilation_cache("auto")
    try:
        result = run(arguments)
    except ValueError as error:
        parser.error(str(error))
    write_json(arguments.out, result)
    print(_table(result["runs"]))
    save_figure(arguments.out.with_suffix(".png"), (11, 5), partial(_draw, result["runs"]))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is written.

    Raises:
      ValueError: a cache that cannot be read, of another target, or too small.
    """
    target = specjax.load_target("smollm2-135m")
    cache = TargetCache(arguments.cache)
    head, _ = load_head(arguments.cache)
    if head.fingerprint() != target.fingerprint():
        raise ValueError(f"the cache {arguments.cache} is of {head.name}, not of {target.name}")
    steps = 2 if arguments.smoke else arguments.steps
    held_out = 2 if arguments.smoke else TRAINING["held_out"]
    runs = {}
    for name in arguments.only:
        runs[name] = train(target, cache, *VARIATIONS[name], steps, held_out)
        print(f"{name}: accepted length {runs[name]['expected_length'][-1]:.3f}", flush=True)
    throughput = train(target, cache, *THROUGHPUT, min(steps, 60), held_out)
    greedy = greedy_sequences(target, cache, 64 if not arguments.smoke else 2)
    return {
        **provenance(),
        "steps": steps,
        "sequences": len(cache),
        "greedy_part": greedy,
        "anchors_per_second": throughput["anchors_per_second"],
        "runs": runs,
    }


def train(
    target: specjax.Target,
    cache: TargetCache,
    drafter: dict[str, Any],
    changes: dict[str, Any],
    steps: int,
    held_out: int,
) -> dict[str, Any]:
    """One run: its learning curve on the held-out sequences, and its speed."""
    options = DRAFTER | drafter
    vocabulary = frequent_tokens(cache.texts[:-held_out], options.pop("draft_vocab"), 49152)
    model, params = init_dspark(
        target, jax.random.key(0), draft_vocab=vocabulary, dtype="float32", **options
    )
    options = OBJECTIVE | {name: value for name, value in changes.items() if name in OBJECTIVE}
    objective = DSparkObjective(model, **options, compute_dtype=target.dtype)
    options = {name: value for name, value in changes.items() if name not in OBJECTIVE}
    settings = Training(steps=steps, **TRAINING | options | {"held_out": held_out})
    head = language_model_head(target)
    data = CachedStates(cache, head, model.taps)
    trainer = Trainer(objective, *divide(params, head), data, settings)
    every = max(steps // 5, 1)
    with tempfile.TemporaryDirectory() as folder:
        trainer.run(Path(folder), eval_every=every, save_every=steps + 1, log_every=10)
        log = read_log(Path(folder))
    steps_per_second, anchors_per_second = (
        statistics.median([entry[rate] for entry in log if rate in entry] or [math.nan])
        for rate in ("steps_per_second", "anchors_per_second")
    )
    held = [entry for entry in log if entry["set"] == "held_out"]
    return {
        "drafter": drafter,
        "training": {name: value for name, value in changes.items() if name != "weights"},
        "losses": dataclasses.asdict(objective.weights),
        "seconds_per_step": 1 / steps_per_second,
        "anchors_per_second": anchors_per_second,
        "steps": [entry["step"] for entry in held],
        "seconds": [entry["step"] / steps_per_second for entry in held],
        "expected_length": [entry["expected_length"] for entry in held],
        "acceptance_by_position": held[-1]["acceptance_G"],
    }


def greedy_sequences(target: specjax.Target, cache: TargetCache, count: int) -> float:
    """The part of the last sequences whose answers are the target's arg-max throughout."""
    head = language_model_head(target)
    best = jax.jit(lambda hidden_TD: head.logits(hidden_TD).argmax(axis=-1))
    greedy = []
    for i in range(len(cache) - min(count, len(cache)), len(cache)):
        sample = cache[i]
        predicted = np.asarray(best(sample.hidden_TD.astype(np.float32)))[:-1]
        learnt = sample.loss_mask_T[1:]
        greedy.append(np.mean((predicted == sample.tokens_T[1:])[learnt]) > 0.97)
    return float(np.mean(greedy))


def _table(runs: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{run['expected_length'][-1]:.3f}",
            " ".join(f"{value:.2f}" for value in run["acceptance_by_position"]),
            f"{1000 * run['seconds_per_step']:.0f}",
            f"{run['anchors_per_second']:.0f}",
        ]
        for name, run in runs.items()
    ]
    header = ["run", "accepted length", "acceptance by position", "ms a step", "anchors/s"]
    return format_table(header, rows)


def _draw(runs: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    for i, (name, run) in enumerate(runs.items()):
        style = "-" if i < 10 else "--"
        axes.plot(run["seconds"], run["expected_length"], style, marker=".", label=name)
    axes.set(xlabel="seconds of training", ylabel="expected accepted length, held out")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


if __name__ == "__main__":
    main()
