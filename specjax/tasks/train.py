"""Task "train": a DSpark drafter, from a target cache or from texts and the target itself."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

import specjax
from specjax.checkpoints.dspark import check_place, open_dspark, save_dspark
from specjax.checkpoints.dtype import resolve_dtype
from specjax.checkpoints.head import load_head
from specjax.data.target_cache import TargetCache, TokenSequence
from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import attach_target, language_model_head
from specjax.drafters.dspark import DSpark
from specjax.drafters.dspark_init import init_dspark, with_block_size
from specjax.evaluation.report import environment
from specjax.files import write_json
from specjax.tasks.common import (
    enable_compilation_cache,
    given_texts,
    open_workdir,
    plain_config,
)
from specjax.training.features import CachedStates, OnlineStates
from specjax.training.losses import LossWeights
from specjax.training.trainer import Trainer, Training


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/train.py. Stopped, it goes on from where it was.

    Raises:
      ValueError: bad settings, a cache that is missing, unfinished or damaged, texts that
        cannot be read, or a workdir that holds another run.
    """
    values = plain_config(config)
    open_workdir(workdir)
    folder = workdir / "drafter"
    check_place(folder, replace=True)
    enable_compilation_cache(config.compilation_cache)
    losses = LossWeights(**config.losses)
    dtype = resolve_dtype(config.training.compute_dtype)
    training = {**config.training, "compute_dtype": dtype, "losses": losses, "seed": config.seed}
    settings = Training(**training)
    cache = TargetCache(Path(config.cache)) if config.cache else None
    if cache is not None:
        target, mask_token_id = load_head(cache.directory)
        texts, taps = cache.texts, cache.taps
    else:
        target, mask_token_id = specjax.load_target(config.target, dtype=config.dtype), None
        texts, taps = _given(config, target), None
    if config.mask_token_id is not None:
        mask_token_id = config.mask_token_id
    model, params = _drafter(config, target, mask_token_id, texts, taps)
    head = language_model_head(target)
    if cache is not None:
        with tqdm(total=sum(cache.lengths), unit=" normalizers", dynamic_ncols=True) as bar:
            data = CachedStates(cache, head, model.taps, bar.update)
    else:
        data = OnlineStates(texts, target, model.taps)
    trainer = Trainer(model, params, head, data, settings)
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


def _given(config: ConfigDict, target: specjax.Target) -> list[TokenSequence]:
    """The texts to train on without a cache."""
    named = config.texts or config.prompts or config.dataset
    texts = given_texts(config, target) if named else None
    if texts is None:
        raise ValueError(
            "nothing to train on: set config.cache, or config.texts, or config.answers='given' "
            "with config.prompts or config.dataset"
        )
    return texts


def _drafter(
    config: ConfigDict,
    target: specjax.Target,
    mask_token_id: int | None,
    texts: Sequence[TokenSequence],
    taps: tuple[int, ...] | None,
) -> tuple[DSpark, PyTree]:
    """A new drafter, or the one to go on from; `taps` are those to choose where none are named."""
    options = dict(config.drafter)
    if config.start:
        model, params = open_dspark(Path(config.start), target, any_target=config.any_target)
        # Checkpoints that have an embedding and a head may have rounded them.
        params = attach_target(params, target)
        return with_block_size(model, options["block_size"]), params
    count, layers_from = options.pop("draft_vocab"), options.pop("layers_from")
    if layers_from and config.cache:
        target = specjax.load_target(config.target, dtype=config.dtype)
    return init_dspark(
        target,
        jax.random.key(config.seed),
        taps=options.pop("taps") or taps,
        mask_token_id=mask_token_id,
        draft_vocab=frequent_tokens(texts, count, target.model.vocab_size) if count else None,
        layers_from=layers_from,
        dtype="float32",
        **options,
    )


def frequent_tokens(texts: Sequence[TokenSequence], count: int, vocab_size: int) -> list[int]:
    """The tokens that the texts' answers have most of; low ids first among equals.

    Args:
      texts: to count in.
      count: how many tokens.
      vocab_size: V.
    """
    counts = np.zeros(vocab_size, np.int64)
    for tokens_T, mask_T in texts:
        counts += np.bincount(tokens_T[mask_T], minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:count].tolist()
