"""Task "train": a DSpark drafter from a target cache."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from specjax.checkpoints.dspark import save_dspark
from specjax.checkpoints.head import load_head
from specjax.data.target_cache import TargetCache
from specjax.drafters.dspark_init import init_dspark
from specjax.evaluation.report import environment
from specjax.files import write_json
from specjax.tasks.common import enable_compilation_cache, open_workdir, plain_config
from specjax.training.losses import LossWeights
from specjax.training.trainer import Trainer, Training


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/train.py. Stopped, it goes on from where it was.

    Raises:
      ValueError: bad settings, a cache that is missing, unfinished or damaged, or a workdir
        that holds another run.
    """
    values = plain_config(config)
    open_workdir(workdir)
    enable_compilation_cache(config.compilation_cache)
    cache = TargetCache(Path(config.cache))
    target, mask_token_id = load_head(Path(config.cache))
    drafter = dict(config.drafter)
    count = drafter.pop("draft_vocab")
    model, params = init_dspark(
        target,
        jax.random.key(config.seed),
        taps=cache.taps,
        mask_token_id=mask_token_id,
        draft_vocab=frequent_tokens(cache, count, target.model.vocab_size) if count else None,
        dtype="float32",
        **drafter,
    )
    head = target.params["embed" if "lm_head" not in target.params else "lm_head"]["weight"]
    losses = LossWeights(**config.losses)
    settings = Training(**config.training, losses=losses, seed=config.seed)
    trainer = Trainer(model, params, head, cache, settings)
    with tqdm(total=settings.steps, unit=" steps", dynamic_ncols=True) as bar:

        def show(step: int, log: dict[str, Any]) -> None:
            bar.update(step - bar.n)
            if log:
                bar.set_postfix(
                    loss=f"{log['total']:.3f}", accepted_length=f"{log['expected_length']:.2f}"
                )

        held_out = trainer.run(
            workdir,
            eval_every=config.eval_every,
            save_every=config.save_every,
            on_step=show,
        )
    folder = workdir / "drafter"
    save_dspark(folder, model, trainer.best_params(workdir), target, replace=True)
    size = sum(path.stat().st_size for path in folder.iterdir())
    report = {
        "task": config.task,
        "config": values,
        "environment": environment(),
        "training": dataclasses.asdict(settings),
        "held_out": held_out,
        "drafter_bytes": size,
    }
    write_json(workdir / "report.json", report)
    write_json(workdir / "config.json", values)
    acceptance = ", ".join(f"{value:.2f}" for value in held_out["acceptance_G"])
    print(f"Held out: accepted length {held_out['expected_length']:.2f}, by position {acceptance}")
    print(f"Drafter: {folder} ({size / 1e6:.1f} MB)")


def frequent_tokens(cache: TargetCache, count: int, vocab_size: int) -> list[int]:
    """The tokens that the cache's answers have most of; low ids first among equals.

    Args:
      cache: to count in.
      count: how many tokens.
      vocab_size: V.
    """
    counts = np.zeros(vocab_size, np.int64)
    for i in range(len(cache)):
        sample = cache[i]
        counts += np.bincount(sample.tokens_T[sample.loss_mask_T], minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:count].tolist()
