"""Task "cache": the target writes or reads training text, and its hidden states are kept."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from tqdm import tqdm

import specjax
from specjax.checkpoints.head import save_head
from specjax.data.hidden_states import read_samples
from specjax.data.self_generated import Writing, write_answers, write_user_turns
from specjax.data.target_cache import (
    CacheWriter,
    Sample,
    TargetCache,
    TokenSequence,
    cache_bytes,
    check_room,
)
from specjax.data.texts import save_texts
from specjax.drafters.dspark_init import check_taps, default_taps, unused_token
from specjax.evaluation.report import environment
from specjax.files import digest, write_json
from specjax.models.transformer import TransformerTarget
from specjax.tasks.common import (
    conversations,
    enable_compilation_cache,
    given_texts,
    open_workdir,
    plain_config,
)


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/cache.py. Stopped, it goes on with the last whole shard.

    Raises:
      ValueError: bad settings, a model that cannot be loaded or gives no hidden states, a
        folder that holds another cache, or too little room on the disk.
    """
    made_with: dict[str, Any] = {"config": plain_config(config)}
    open_workdir(workdir)
    enable_compilation_cache(config.compilation_cache)
    writing = _writing(config)
    target = specjax.load_target(config.target, dtype=config.dtype)
    if not isinstance(target.model, TransformerTarget):
        raise ValueError(f"{config.target} gives no hidden states to train a drafter from")
    depth, width = target.model.config.num_layers, target.model.config.width
    taps = tuple(config.taps) or default_taps(depth)
    check_taps(taps, target, depth)
    mask_token_id = config.mask_token_id
    if mask_token_id is None:
        mask_token_id = unused_token(target)
    folder = workdir / "cache"
    size = cache_bytes(config.tokens, 0, len(taps), width)
    print(f"{config.tokens} tokens with {len(taps)} taps will take about {size / 1e9:.2f} GB")
    check_room(folder, size)
    made_with |= {
        "target": config.target,
        **target.identity(),
        "chat_template": digest(getattr(target.tokenizer, "chat_template", None)),
    }
    given = given_texts(config, target)
    if given is not None:
        made_with["texts"] = digest([text.tokens_T.tolist() for text in given])
    writer = CacheWriter(folder, taps=taps, width=width, made_with=made_with)
    save_head(folder, target, mask_token_id)
    if given is not None:
        batches = _read_given(target, given, taps, writing, writer.cursor)
    else:
        batches = _write(target, taps, writing, config, writer.cursor)
    _fill(writer, batches, config.tokens)
    cache = TargetCache(folder, check=False)
    save_texts(workdir / "texts.npz", cache.texts)
    report = {
        "task": config.task,
        "config": made_with["config"],
        "environment": environment(),
        "samples": len(cache),
        "tokens": int(cache.lengths.sum()),
        "bytes": sum(shard["bytes"] for shard in cache.manifest["shards"]),
    }
    write_json(workdir / "report.json", report)
    write_json(workdir / "config.json", report["config"])
    print(f"{report['samples']} sequences, {report['tokens']} tokens: {folder}")


def _writing(config: ConfigDict) -> Writing:
    names = {field.name for field in dataclasses.fields(Writing)}
    values = {name: value for name, value in config.items() if name in names}
    return Writing(**{**values, "temperatures": tuple(config.temperatures)})


class _Batch(NamedTuple):
    """Samples, and the cursor of those that follow them."""

    samples: list[Sample]
    cursor: int


def _fill(writer: CacheWriter, batches: Iterator[_Batch], tokens: int) -> None:
    """Adds batch after batch until there are that many tokens, or no more batches."""
    seen = {text.tobytes() for text in writer.read_tokens()}
    total, cursor = sum(map(len, seen)) // 4, writer.cursor  # int32
    with tqdm(total=tokens, initial=total, unit=" tokens", dynamic_ncols=True) as bar:
        while total < tokens:
            batch = next(batches, None)
            if batch is None:
                break
            samples, cursor = list(_unseen(batch.samples, seen)), batch.cursor
            writer.add(samples, cursor)
            new = sum(len(sample.tokens_T) for sample in samples)
            total += new
            bar.update(new)
    writer.finish(cursor)


def _read_given(
    target: specjax.Target,
    texts: Sequence[TokenSequence],
    taps: tuple[int, ...],
    writing: Writing,
    cursor: int,
) -> Iterator[_Batch]:
    """The target's hidden states over given texts; the cursor counts samples."""
    samples = read_samples(target, texts, taps, start=cursor)
    while batch := list(itertools.islice(samples, writing.batch_size)):
        cursor += len(batch)
        yield _Batch(batch, cursor)


def _write(
    target: specjax.Target,
    taps: tuple[int, ...],
    writing: Writing,
    config: ConfigDict,
    cursor: int,
) -> Iterator[_Batch]:
    """The target's answers to prompts, given or its own; the cursor counts batches."""
    prompts = [conversation.prompt for conversation in conversations(config) or ()]
    own = not prompts
    size = writing.batch_size
    while own or cursor * size < len(prompts):
        turns = (
            write_user_turns(target, writing, cursor)
            if own
            else prompts[cursor * size : (cursor + 1) * size]
        )
        samples = write_answers(target, turns, taps, writing, cursor)
        cursor += 1
        yield _Batch(samples, cursor)


def _unseen(samples: list[Sample], seen: set[bytes]) -> Iterator[Sample]:
    for sample in samples:
        key = sample.tokens_T.tobytes()
        if key not in seen:
            seen.add(key)
            yield sample
