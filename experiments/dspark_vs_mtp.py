r"""DSpark, DFlash, MTP modules and prompt lookup for one target: same data, same training time.

    python experiments/dspark_vs_mtp.py --out=dspark_vs_mtp.json --workdir=DIRECTORY \
        --target=smollm2-135m --cache=CACHE --prompts='prompts/*.jsonl'

    python experiments/dspark_vs_mtp.py --out=dspark_vs_mtp_small.json --workdir=DIRECTORY \
        --target=RUN/target --corpus=stdlib --joint=RUN/drafter

The first trains on a target cache (task "cache"), the second on plain text, with a small model
of configs/mtp.py:scratch, whose modules that learnt with it (--joint) take part. Every drafter is
trained for as many minutes as the others; the number of steps follows from a few steps that are
timed first. Interrupted, it goes on where it was. Then the drafters are measured as in
drafter_quality.py. Without --prompts they are beginnings of held-out rows.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import jax
from common import argument_parser, explained, provenance, read_log, save_figure
from drafter_quality import Contender, draw, load_contender, measure, read_learning_curve, tables
from mtp_from_scratch import held_out_prompts, train

import specjax
from specjax.api import encode_prompts
from specjax.data.prompts import find_prompt_files, read_prompts
from specjax.drafters import MTP, DSpark
from specjax.drafters.borrowed import split_params
from specjax.files import write_json
from specjax.tasks.common import enable_compilation_cache

DSPARK: dict[str, Any] = {
    "drafter.num_layers": 2,
    "drafter.block_size": 5,
    "num_anchors": 8,
    "losses.cross_entropy": 0.0,
    "losses.total_variation": 0.0,
    "losses.soft_cross_entropy": 1.0,
}
FLASH = {"drafter.markov_rank": 0, "drafter.confidence_with_markov": False}
MTP_LOSSES = {"mtp_losses.scale": 1.0, "mtp_losses.distillation": 1.0}
# What each changes of configs/train.py, and how many tokens it drafts.
DRAFTERS: dict[str, tuple[dict[str, Any], int]] = {
    "dspark": (DSPARK, 4),
    "dflash": (DSPARK | FLASH, 4),
    "mtp_1": ({"algorithm": "mtp", "mtp.depth": 1, **MTP_LOSSES}, 3),
    "mtp_3": ({"algorithm": "mtp", "mtp.depth": 3, **MTP_LOSSES}, 3),
}
TRAINING: dict[str, Any] = {
    "training.batch_size": 8,
    "training.max_len": 256,
    "training.learning_rate": 2e-3,
    "training.warmup_ratio": 0.02,
    "training.held_out": 128,
}
PROBE = 60  # steps that are timed; the first are slower, which a median does not mind
CONFIG = "configs/train.py"


def main() -> None:
    """Runs the experiment."""
    parser = argument_parser(__doc__, smoke="a few steps, two prompts, 8 tokens each")
    parser.add_argument("--workdir", required=True, type=Path, help="of all training runs")
    parser.add_argument("--target", required=True, help="as load_target takes it")
    parser.add_argument("--cache", default="", help="of the target, to train on")
    parser.add_argument("--corpus", default="", help="plain text to train on: a glob, or stdlib")
    parser.add_argument("--joint", help="MTP modules that were trained with the target")
    parser.add_argument("--prompts", help="glob of JSON-lines files of prompts")
    parser.add_argument("--num-prompts", type=int, default=20, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="for each prompt")
    parser.add_argument("--minutes", type=float, default=12, help="of training, each drafter")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens drafted; 0 is all")
    parser.add_argument("--train-only", action="store_true", help="do not measure")
    arguments = parser.parse_args()
    if bool(arguments.cache) == bool(arguments.corpus):
        parser.error("give one of --cache and --corpus")
    if arguments.cache and not arguments.prompts:
        parser.error("a cache's texts make no prompts: give --prompts")
    if arguments.joint and not Path(arguments.joint, "config.json").is_file():
        parser.error(f"there is no drafter in {arguments.joint} (--joint)")
    if arguments.smoke:
        arguments.num_prompts, arguments.max_new_tokens, arguments.minutes = 2, 8, 0
    enable_compilation_cache("auto")
    with explained(parser):
        if arguments.prompts:
            find_prompt_files(arguments.prompts)  # before the training
        steps = {name: train_drafter(name, arguments) for name in DRAFTERS}
        if arguments.train_only:
            return
        result = run(arguments, steps)
    write_json(arguments.out, result)
    print(tables(result))
    save_figure(arguments.out.with_suffix(".png"), (15, 12.6), partial(draw, result))


def train_drafter(name: str, arguments: argparse.Namespace) -> int:
    """Trains one for the minutes asked for; the number of steps.

    Raises:
      CalledProcessError: training failed.
    """
    options, _ = DRAFTERS[name]
    kind = "mtp" if name.startswith("mtp") else "drafter"
    given = Path(arguments.target).exists()
    overrides = {
        "target": absolute(arguments.target) if given else arguments.target,
        "cache": arguments.cache and absolute(arguments.cache),
        "corpus": arguments.corpus and absolute(arguments.corpus),
        f"{kind}.draft_vocab": arguments.draft_vocab,
        **TRAINING,
        **options,
    }
    if arguments.smoke:
        overrides |= {"training.held_out": 12, "training.max_len": 32, "num_anchors": 4}
    steps = 3 if arguments.smoke else affordable_steps(name, arguments, overrides)
    every = {"eval_every": max(steps // 8, 1), "save_every": max(steps // 8, 1)}
    train(CONFIG, arguments.workdir / name, overrides | every | {"training.steps": steps})
    return steps


def affordable_steps(name: str, arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    """Steps that fit into the minutes, by the time of a few that are kept for a later call.

    Raises:
      CalledProcessError: training failed.
    """
    path = arguments.workdir / "speed" / f"{name}.json"
    if not path.exists():
        probe = arguments.workdir / "probe" / name
        rare = {"eval_every": 10**6, "save_every": 10**6, "training.steps": PROBE}
        train(CONFIG, probe, overrides | rare)
        log = read_log(probe)
        rates = [entry["steps_per_second"] for entry in log if "steps_per_second" in entry]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"steps_per_second": statistics.median(rates)})
    return round(60 * arguments.minutes * json.loads(path.read_text())["steps_per_second"])


def run(arguments: argparse.Namespace, steps: dict[str, int]) -> dict[str, Any]:
    """Everything that is written.

    Raises:
      ValueError: prompts or drafters that cannot be read.
    """
    target = specjax.load_target(arguments.target)
    count, max_new_tokens = arguments.num_prompts, arguments.max_new_tokens
    if arguments.prompts:
        files = find_prompt_files(arguments.prompts)
        texts = {name: read_prompts(path, count) for name, path in files.items()}
        sets = {name: encode_prompts(target, rows) for name, rows in texts.items()}
    else:
        sets = {"held out": held_out_prompts(arguments.workdir / "mtp_1", count)}
    contenders = {
        name: load_contender(target, str(arguments.workdir / name / "drafter"), draft_len)
        for name, (_, draft_len) in DRAFTERS.items()
    }
    if arguments.joint:
        contenders["mtp_joint"] = load_contender(target, arguments.joint, None)
    contenders["prompt_lookup"] = load_contender(target, "prompt_lookup", None)
    measured = measure(target, contenders, sets, max_new_tokens, check=True, smoke=arguments.smoke)
    for name, contender in contenders.items():
        facts = describe(contender, joint=name == "mtp_joint")
        measured["drafters"][name] |= facts | {"steps": steps.get(name)}
    minutes = arguments.minutes
    curves = {}
    for name in DRAFTERS:
        # Not the expected lengths, which are of unlike numbers of drafts; and over the time of
        # the steps, whatever ran beside them.
        curve = read_learning_curve(arguments.workdir / name)
        curves[name] = {key: curve[key] for key in ("step", "first_acceptance")}
        curves[name]["seconds"] = [60 * minutes * step / steps[name] for step in curve["step"]]
    return {**provenance(), **measured, "minutes": minutes, "learning_curves": curves}


def absolute(path: str) -> str:
    """Of a path or glob; training runs elsewhere."""
    return path if path == "stdlib" else str(Path(path).absolute())


def describe(contender: Contender, *, joint: bool) -> dict[str, Any]:
    """Parameters that a drafter adds to its target, and what it needs; `joint`, its training."""
    params = contender.drafter.params
    own = split_params(params)[0] if params else {}
    model = contender.drafter.model
    return {
        "trained": "with the target" if joint else "afterwards" if own else "never",
        "target_changed": joint,
        "parameters_added": sum(leaf.size for leaf in jax.tree.leaves(own)),
        "target_hidden_states": (
            f"layers {model.taps}" if model.taps else "the last" if own else "none"
        ),
        "passes_a_round": (
            1 if isinstance(model, DSpark) else contender.draft_len if isinstance(model, MTP) else 0
        ),
    }


if __name__ == "__main__":
    main()
