r"""What limits a DSpark drafter: short training runs with one thing changed in each.

    python experiments/drafter_training.py --out=drafter_training.json --cache=CACHE

The cache is the task "cache"'s, of SmolLM2-135M with the taps 1, 10, 19 and 28. Every run
takes as many steps as the others and is judged on the same held-out sequences; what a
variation changes of the base is in VARIATIONS. Learning curves are over wall-clock, without
evaluations and compilation, so a variation with dearer steps has to earn them. Prints a table,
writes JSON and a PNG beside it. Stopped, the same command goes on after the last whole run.
"""

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import argument_parser, explained, provenance, read_log, save_figure
from jaxtyping import Bool, Int
from tqdm import tqdm

import specjax
from specjax.checkpoints.head import load_head
from specjax.data.target_cache import Sample, TargetCache
from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import language_model_head
from specjax.drafters.dspark_init import init_dspark, with_block_size
from specjax.evaluation.report import format_table
from specjax.files import digest, plain, write_json
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


@dataclasses.dataclass(frozen=True)
class Variation:
    """What a run has otherwise than the base.

    Attributes:
      drafter: its options.
      training: of the run and its objective.
      texts: "all", or equally many that are "greedy", "sampled", or "mixed" as in all.
      scale: factor of the random matrices of the backbone at the start.
      then: of the second half of the steps, which goes on with the drafter of the first, with
        a warm-up of its own; its `training` and the size of its blocks count.
    """

    drafter: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    texts: str = "all"
    scale: float = 1.0
    then: "Variation | None" = None


VARIATIONS = {
    "base": Variation(),
    "fewer texts": Variation(texts="mixed"),
    "fewer texts, greedy": Variation(texts="greedy"),
    "fewer texts, sampled": Variation(texts="sampled"),
    "random layers": Variation({"layers_from": ()}),
    "random layers, half the scale": Variation({"layers_from": ()}, scale=0.5),
    "2 layers": Variation({"num_layers": 2, "layers_from": (28, 29)}),
    "2 taps": Variation({"taps": (19, 28)}),
    "1 tap": Variation({"taps": (28,)}),
    "rank 0 (DFlash)": Variation({"markov_rank": 0, "confidence_with_markov": False}),
    "rank 256": Variation({"markov_rank": 256}),
    "block 3": Variation({"block_size": 3}),
    "block 7": Variation({"block_size": 7}),
    "base, then base": Variation(then=Variation()),
    "block 3, then 5": Variation({"block_size": 3}, then=Variation()),
    "vocabulary 4096": Variation({"draft_vocab": 4096}),
    "paper's losses": Variation(training={"weights": LossWeights()}),
    "base, then paper's losses": Variation(then=Variation(training={"weights": LossWeights()})),
    "1 sequence x 64": Variation(training={"batch_size": 1, "num_anchors": 64}),
    "8 sequences x 32": Variation(training={"num_anchors": 32}),
    "learning rate 5e-4": Variation(training={"learning_rate": 5e-4}),
    "learning rate 6e-3": Variation(training={"learning_rate": 6e-3}),
}
# Another question: how fast the prototype's shape is trained, two layers and blocks of 7.
THROUGHPUT = Variation(
    {"num_layers": 2, "layers_from": (28, 29), "block_size": 7},
    {"batch_size": 8, "num_anchors": 64},
)


class Chosen:
    """Some of the sequences of training data, which are as `TrainingData` says."""

    def __init__(self, data: CachedStates, indices: Sequence[int]):
        """Takes the data and which of it, in order."""
        self._data, self._indices = data, indices
        self.texts = [data.texts[i] for i in indices]
        self.identity = {"chosen": digest([*indices]), **data.identity}
        self.complete = data.complete

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Sample:
        return self._data[self._indices[int(index)]]


def main() -> None:
    """Runs the experiment."""
    parser = argument_parser(__doc__, "two steps of each run, to see that all works")
    parser.add_argument("--cache", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=500, help="of each run")
    parser.add_argument("--only", nargs="+", default=list(VARIATIONS), choices=list(VARIATIONS))
    arguments = parser.parse_args()
    enable_compilation_cache("auto")
    with explained(parser):
        result = run(arguments)
    print(_table(result["runs"]))
    save_figure(arguments.out.with_suffix(".png"), (11, 5), partial(_draw, result["runs"]))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is written, after each run.

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
    if len(cache) <= held_out:
        raise ValueError(f"the cache has {len(cache)} sequences, of which {held_out} are held out")
    # Some of the texts are enough to be chosen from.
    looked_at = np.arange(0, len(cache) - held_out, 1 if arguments.smoke else 4)
    greedy = are_greedy(target, cache, looked_at)
    kinds = kinds_of_texts(looked_at, greedy) | {"all": list(range(len(cache) - held_out))}
    if wrong := [name for name in arguments.only if not kinds[VARIATIONS[name].texts]]:
        raise ValueError(f"the cache has no texts of both kinds for {wrong}: name others by --only")
    result = {
        **provenance(),
        "steps": steps,
        "cache": cache.fingerprint,
        "sequences": len(cache),
        "greedy_part": float(np.mean(greedy)),
        "fewer_texts": len(kinds["mixed"]),
    }
    runs = result["runs"] = runs_of(arguments.out, result)
    for name in arguments.only:
        if name not in runs:
            runs[name] = train(target, cache, VARIATIONS[name], kinds, steps, held_out)
            write_json(arguments.out, result)
        print(f"{name}: accepted length {runs[name]['expected_length'][-1]:.3f}", flush=True)
    throughput = train(target, cache, THROUGHPUT, kinds, min(steps, 60), held_out)
    result["anchors_per_second"] = throughput["anchors_per_second"]
    write_json(arguments.out, result)
    return result


def runs_of(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The runs that an earlier, equal command finished."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found["runs"] if found.items() >= plain(result).items() else {}
    except (OSError, ValueError, LookupError, AttributeError):
        return {}


def are_greedy(
    target: specjax.Target, cache: TargetCache, indices: Int[np.ndarray, " count"]
) -> Bool[np.ndarray, " count"]:
    """Which of these sequences have answers that are the target's arg-max.

    All but 3 % of an answer's tokens: rounding may have changed some.
    """
    head = language_model_head(target)
    best = jax.jit(lambda hidden_TD: head.logits(hidden_TD).argmax(axis=-1))
    greedy = []
    for i in tqdm(indices, desc="which texts are greedy"):
        sample = cache[int(i)]
        hidden_TD = sample.hidden_TD.astype(np.float32)
        padded_TD = np.pad(hidden_TD, ((0, -len(hidden_TD) % 256), (0, 0)))  # few programs
        predicted_T = np.asarray(best(padded_TD))[: len(hidden_TD) - 1]
        learnt_T = sample.loss_mask_T[1:]
        greedy.append(np.mean((predicted_T == sample.tokens_T[1:])[learnt_T]) > 0.97)
    return np.array(greedy)


def kinds_of_texts(
    indices: Int[np.ndarray, " count"], greedy: Bool[np.ndarray, " count"]
) -> dict[str, list[int]]:
    """Equally many of these sequences of each kind that `Variation.texts` names."""
    kinds = {"mixed": indices, "greedy": indices[greedy], "sampled": indices[~greedy]}
    fewer = min(map(len, kinds.values()))
    return {
        name: which[np.linspace(0, len(which) - 1, fewer, dtype=int)].tolist()
        for name, which in kinds.items()
    }


def train(
    target: specjax.Target,
    cache: TargetCache,
    variation: Variation,
    kinds: dict[str, list[int]],
    steps: int,
    held_out: int,
) -> dict[str, Any]:
    """One run: its learning curve on the held-out sequences, and its speed."""
    options = DRAFTER | variation.drafter
    vocabulary = frequent_tokens(cache.texts[:-held_out], options.pop("draft_vocab"), 49152)
    model, params = init_dspark(
        target, jax.random.key(0), draft_vocab=vocabulary, dtype="float32", **options
    )
    if variation.scale != 1:
        params = _scale(params, variation.scale)
    head = language_model_head(target)
    trained, fixed = divide(params, head)
    data = CachedStates(cache, head, model.taps)
    data = Chosen(data, [*kinds[variation.texts], *range(len(cache) - held_out, len(cache))])
    phases = [variation, *([variation.then] if variation.then else [])]
    every = max(steps // 5, 1)
    curve: dict[str, list[float]] = {"steps": [], "seconds": [], "expected_length": []}
    done, seconds = 0, 0.0
    for seed, phase in enumerate(phases):
        model = with_block_size(model, (DRAFTER | phase.drafter)["block_size"])
        chosen = OBJECTIVE | TRAINING | phase.training | {"held_out": held_out}
        objective = DSparkObjective(
            model, **{name: chosen.pop(name) for name in OBJECTIVE}, compute_dtype=target.dtype
        )
        settings = Training(steps=max(steps // len(phases), 1), seed=seed, **chosen)
        trainer = Trainer(objective, trained, fixed, data, settings)
        with tempfile.TemporaryDirectory() as folder:
            trainer.run(Path(folder), eval_every=every, save_every=steps + 1, log_every=10)
            log = read_log(Path(folder))
        rates = {rate: _median(log, rate) for rate in ("steps_per_second", "anchors_per_second")}
        held = [entry for entry in log if entry["set"] == "held_out"]
        for entry in held:
            curve["steps"].append(done + entry["step"])
            curve["seconds"].append(seconds + entry["step"] / rates["steps_per_second"])
            curve["expected_length"].append(entry["expected_length"])
        done, seconds, trained = curve["steps"][-1], curve["seconds"][-1], trainer.state.params
    return {
        "phases": [_plain(phase) for phase in phases],
        "seconds_per_step": seconds / done,
        "anchors_per_second": rates["anchors_per_second"],
        **curve,
        "acceptance_by_position": held[-1]["acceptance_G"],
    }


def _median(log: list[dict[str, Any]], rate: str) -> float:
    return statistics.median([entry[rate] for entry in log if rate in entry] or [math.nan])


def _plain(phase: Variation) -> dict[str, Any]:
    """For JSON, with what it shares with the base and without what comes after."""
    training = {**TRAINING, **OBJECTIVE, **phase.training}
    return {
        "drafter": DRAFTER | phase.drafter,
        "training": training | {"weights": dataclasses.asdict(training["weights"])},
        "texts": phase.texts,
        "scale": phase.scale,
    }


def _scale(params: PyTree, factor: float) -> PyTree:
    """The parameters with smaller or larger matrices in the backbone."""

    def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return leaf * factor if path[0].key.startswith("layer_") and leaf.ndim == 2 else leaf

    return jax.tree_util.tree_map_with_path(scaled, params)


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
        style = ("-", "--", ":")[i // 10 % 3]  # there are ten colours
        axes.plot(run["seconds"], run["expected_length"], style, marker=".", label=name)
    axes.set(xlabel="seconds of training", ylabel="expected accepted length, held out")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


if __name__ == "__main__":
    main()
