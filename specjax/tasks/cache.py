"""Task "cache": the target writes or reads training text, and its hidden states are kept."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from tqdm import tqdm

import specjax
from specjax.api import encode_prompts
from specjax.checkpoints.head import head_bytes, save_head
from specjax.data.hidden_states import read_samples
from specjax.data.self_generated import Writing, check_chat, write_answers, write_user_turns
from specjax.data.target_cache import (
    CacheWriter,
    Sample,
    TargetCache,
    TokenSequence,
    cache_bytes,
    check_room,
    is_complete,
)
from specjax.data.texts import digest_texts, save_texts
from specjax.drafters.dspark_init import (
    check_mask_token,
    check_taps,
    default_taps,
    unused_token,
)
from specjax.evaluation.report import environment
from specjax.files import digest, write_json
from specjax.models.transformer import TransformerTarget
from specjax.tasks.common import (
    check_sources,
    conversations,
    enable_compilation_cache,
    given_texts,
    open_workdir,
    plain_config,
)

# What a cache does not depend on; of the files that are read, the contents are compared.
_ELSEWHERE = ("compilation_cache", "texts", "prompts", "dataset", "dataset_subset", "dataset_split")
_PATIENCE = 20  # batches without anything new, of a target that writes user turns itself


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/cache.py. Stopped, it goes on where it was.

    Raises:
      ValueError: bad settings, a model that cannot be loaded or gives no hidden states, a
        folder that holds another cache, or too little room on the disk.
    """
    values = plain_config(config)
    made_with: dict[str, Any] = {
        "config": {name: value for name, value in values.items() if name not in _ELSEWHERE}
    }
    open_workdir(workdir, config.task)
    enable_compilation_cache(config.compilation_cache)
    check_sources(config)
    writing = _writing(config)
    for name, value in (("tokens", config.tokens), ("max_len", config.max_len)):
        if value is not None and value < 1:
            raise ValueError(f"config.{name} must be at least 1, got {value}")
    target = specjax.load_target(config.target, dtype=config.dtype)
    if not isinstance(target.model, TransformerTarget):
        raise ValueError(f"{config.target} gives no hidden states to train a drafter from")
    depth, width = target.model.config.num_layers, target.model.config.width
    taps = tuple(config.taps) or default_taps(depth)
    check_taps(taps, target, depth)
    mask_token_id = config.mask_token_id
    if mask_token_id is None:
        mask_token_id = unused_token(target)
    check_mask_token(mask_token_id, target)
    folder = workdir / "cache"
    given, messages = given_texts(config, target), []
    if given is None:
        check_chat(target)
        messages = [conversation.prompt for conversation in conversations(config) or ()]
    made_with |= {
        "target": config.target,
        **target.identity(),
        "chat_template": digest(getattr(target.tokenizer, "chat_template", None)),
        "texts": digest_texts(given or ()),
        "prompts": digest(messages),
    }
    if not is_complete(folder, made_with):
        writer = CacheWriter(folder, taps=taps, width=width, made_with=made_with)
        if given is None:
            tokens, patience, prompts = config.tokens, _PATIENCE, []
            if messages:  # there may be fewer tokens than are asked for
                patience, prompts = None, encode_prompts(target, messages)
                lengths = (len(prompt) + writing.answer_tokens for prompt in prompts)
                tokens = min(tokens, sum(min(n, target.model.max_len) for n in lengths))
            batches = _write(target, prompts, taps, writing, writer.cursor)
            most = tokens + writing.batch_size * (writing.user_tokens + writing.answer_tokens)
        else:
            limit = min(config.max_len or target.model.max_len, target.model.max_len)
            tokens, patience = sum(len(text.tokens_T[:limit]) for text in given), None
            batches = _read_given(target, given, taps, config, writer.cursor)
            most = tokens
        size = cache_bytes(most, 0, len(taps), width) + head_bytes(target)
        print(f"{tokens} tokens with {len(taps)} taps will take about {size / 1e9:.2f} GB")
        check_room(folder, size - writer.num_bytes)
        save_head(folder, target, mask_token_id)
        _fill(writer, batches, tokens, patience)
    if not all((workdir / name).exists() for name in ("texts.npz", "report.json", "config.json")):
        _report(values, workdir, TargetCache(folder, check=False), len(messages))
    print(f"Cache: {folder}")


def _report(config: dict[str, Any], workdir: Path, cache: TargetCache, prompts: int) -> None:
    """Writes what stands beside a cache of answers to so many prompts: its texts, and how."""
    save_texts(workdir / "texts.npz", cache.texts)
    report = {
        "task": config["task"],
        "config": config,
        "environment": environment(),
        "samples": len(cache),
        "tokens": int(cache.lengths.sum()),
        "bytes": sum(shard["bytes"] for shard in cache.manifest["shards"]),
    }
    write_json(workdir / "report.json", report)
    write_json(workdir / "config.json", config)
    print(f"{report['samples']} sequences, {report['tokens']} tokens")
    if prompts:
        print(f"of {prompts} prompts; too short, too long and repeated answers are left out")


def _writing(config: ConfigDict) -> Writing:
    names = {field.name for field in dataclasses.fields(Writing)}
    values: dict[str, Any] = {name: value for name, value in config.items() if name in names}
    for name in ("temperatures", "user_openings"):
        values[name] = tuple(values[name])
    return Writing(**values)


class _Batch(NamedTuple):
    """Samples, and the cursor of those that follow them."""

    samples: list[Sample]
    cursor: int


def _fill(
    writer: CacheWriter, batches: Iterator[_Batch], tokens: int, patience: int | None
) -> None:
    """Adds batch after batch until there are that many tokens, or no more batches.

    It also ends where as many batches in a row as `patience` gave nothing that is new.
    """
    seen = {text.tobytes() for text in writer.read_tokens()}
    total, cursor, idle = sum(map(len, seen)) // 4, writer.cursor, 0  # int32
    with tqdm(total=tokens, initial=total, unit=" tokens", dynamic_ncols=True) as bar:
        while total < tokens:
            try:
                batch = next(batches, None)
            except KeyboardInterrupt:
                writer.save(cursor)
                raise
            if batch is None:
                break
            samples, cursor = list(_unseen(batch.samples, seen)), batch.cursor
            writer.add(samples, cursor)
            idle = 0 if samples else idle + 1
            if idle == patience:
                bar.write(
                    f"It ends here, since {idle} batches in a row gave nothing new. For more, in "
                    f"another folder: raise user_temperature, user_tokens or answer_tokens, lower "
                    f"min_answer_tokens, or give prompts"
                )
                break
            new = sum(len(sample.tokens_T) for sample in samples)
            total += new
            bar.update(new)
    writer.finish(cursor)


def _read_given(
    target: specjax.Target,
    texts: Sequence[TokenSequence],
    taps: tuple[int, ...],
    config: ConfigDict,
    cursor: int,
) -> Iterator[_Batch]:
    """The target's hidden states over given texts; the cursor counts samples."""
    samples = read_samples(target, texts, taps, max_len=config.max_len, start=cursor)
    while batch := list(itertools.islice(samples, config.batch_size)):
        cursor += len(batch)
        yield _Batch(batch, cursor)


def _write(
    target: specjax.Target,
    prompts: Sequence[list[int]],
    taps: tuple[int, ...],
    writing: Writing,
    cursor: int,
) -> Iterator[_Batch]:
    """The target's answers to prompts, or to its own without any; the cursor counts batches."""
    size = writing.batch_size
    while not prompts or cursor * size < len(prompts):
        turns = (
            prompts[cursor * size : (cursor + 1) * size]
            if prompts
            else write_user_turns(target, writing, cursor)
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
