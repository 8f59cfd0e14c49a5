"""Task "cache": the target writes training text, and its hidden states are kept."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

import specjax
from specjax.checkpoints.head import save_head
from specjax.data.prompts import find_prompt_files, read_prompts
from specjax.data.self_generated import Writing, write_answers, write_user_turns
from specjax.data.target_cache import (
    CacheWriter,
    Sample,
    TargetCache,
    cache_bytes,
    check_room,
)
from specjax.evaluation.report import environment
from specjax.files import digest, write_json
from specjax.models.transformer import TransformerTarget
from specjax.tasks.common import enable_compilation_cache, open_workdir, plain_config


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
    taps, width = tuple(config.taps), target.model.config.width
    folder = workdir / "cache"
    size = cache_bytes(config.tokens, 0, len(taps), width)
    print(f"{config.tokens} tokens with {len(taps)} taps will take about {size / 1e9:.2f} GB")
    check_room(folder, size)
    made_with |= {
        "target": config.target,
        "weights": target.fingerprint(),
        "dtype": target.dtype,
        "chat_template": digest(getattr(target.tokenizer, "chat_template", None)),
    }
    writer = CacheWriter(folder, taps=taps, width=width, made_with=made_with)
    save_head(folder, target, config.mask_token_id)
    _fill(writer, target, taps, writing, config)
    cache = TargetCache(folder, check=False)
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


def _fill(
    writer: CacheWriter,
    target: specjax.Target,
    taps: tuple[int, ...],
    writing: Writing,
    config: ConfigDict,
) -> None:
    """Adds batch after batch until there are `config.tokens`, or no prompts are left."""
    seen = {tokens.tobytes() for tokens in writer.read_tokens()}
    total = sum(map(len, seen)) // 4  # int32
    batches = _prompt_batches(config.prompts, writing.batch_size)
    batch = writer.cursor
    with tqdm(total=config.tokens, initial=total, unit=" tokens", dynamic_ncols=True) as bar:
        while total < config.tokens and (batches is None or batch < len(batches)):
            turns = write_user_turns(target, writing, batch) if batches is None else batches[batch]
            samples = list(_unseen(write_answers(target, turns, taps, writing, batch), seen))
            batch += 1
            writer.add(samples, batch)
            new = sum(len(sample.tokens_T) for sample in samples)
            total += new
            bar.update(new)
    writer.finish(batch)


def _prompt_batches(pattern: str, size: int) -> list[list[str]] | None:
    """The prompts of the files that a glob matches, in batches; None without a glob."""
    if not pattern:
        return None
    texts = [text for path in find_prompt_files(pattern).values() for text in read_prompts(path)]
    return [texts[i : i + size] for i in range(0, len(texts), size)]


def _unseen(samples: list[Sample], seen: set[bytes]) -> Iterator[Sample]:
    for sample in samples:
        key = sample.tokens_T.tobytes()
        if key not in seen:
            seen.add(key)
            yield sample
