"""Task "evaluate": measures a drafter on files of prompts, file by file, resumably."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from specjax.api import encode_prompts
from specjax.data.prompts import find_prompt_files, read_prompts
from specjax.evaluation.comparison import Comparison, compare, outputs
from specjax.evaluation.report import environment
from specjax.evaluation.runner import room
from specjax.files import changes, digest, plain, write_json
from specjax.models.target import fingerprint
from specjax.tasks.common import (
    ProgressBar,
    decode_settings,
    enable_compilation_cache,
    load_models,
    open_workdir,
    plain_config,
    suit_draft_len,
    write_results,
)


def run(config: ConfigDict, workdir: Path) -> None:
    """Runs the task; see configs/evaluate.py.

    Files that an earlier run with the same config and weights finished in this workdir
    are not decoded again.

    Raises:
      ValueError: bad settings, unknown names, bad prompt files, models that cannot be
        loaded, or a workdir that cannot be written to or holds other results.
    """
    config = config.copy_and_resolve_references()  # to complete it
    plain_config(config)  # can be written
    open_workdir(workdir, config.task)
    enable_compilation_cache(config.compilation_cache)
    decode_settings(config, config.batch_size)  # are possible
    files = find_prompt_files(config.prompts)
    texts = {name: read_prompts(path, config.limit) for name, path in files.items()}
    target, drafter = load_models(config)
    suit_draft_len(config, drafter)
    settings = decode_settings(config, config.batch_size)
    prompts = {name: encode_prompts(target, rows, config.chat) for name, rows in texts.items()}
    for name, rows in prompts.items():
        room(target, name, rows, settings.max_new_tokens)  # none is too long
    made_with = {
        "config": plain_config(config),
        "target": {**target.identity(), "stop_ids": target.stop_ids},
        "drafter": {"model": repr(drafter.model), "weights": fingerprint(drafter.params)},
        "environment": environment(),
    }
    finished = _Finished(workdir / "finished.json", plain(made_with))
    todo = {name: rows for name, rows in prompts.items() if not finished.has(name, rows)}
    done = [name for name in prompts if name not in todo]
    if done:
        print(f"Finished before, not decoded again: {', '.join(done)}")
    count = sum(map(len, todo.values()))
    with ProgressBar(outputs(target, count, settings, config.check)) as bar:
        for name, rows in todo.items():
            [comparison] = compare(
                target,
                drafter,
                {name: rows},
                settings,
                check=config.check,
                gap_tolerance=config.gap_tolerance,
                on_batch=bar.tell,
            )
            finished.add(comparison, rows)
    comparisons = [finished.get(name) for name in prompts]
    write_results(config, workdir, target, comparisons, set_key="file")


class _Finished:
    """The comparisons that are done, kept in the workdir.

    Results count only for what they were made with: the config, models, versions, device
    and prompts.
    """

    def __init__(self, path: Path, made_with: dict[str, Any]):
        self._path = path
        self._made_with = made_with
        self._entries: dict[str, Any] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            if stored.pop("sha256") != digest(stored):
                raise ValueError("it was changed by another program")
            self._entries = dict(stored["files"].items())
            changed = changes(stored["made_with"], self._made_with)
            if not changed:
                for name in self._entries:  # an older version may have written other fields
                    self.get(name)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"cannot read {self._path} ({e!r}): remove it to start afresh") from e
        if changed:
            raise ValueError(
                f"{self._path} holds results made with another {'; '.join(changed)}. "
                "Use another --workdir, or remove that file to start afresh"
            )

    def has(self, name: str, prompts: list[list[int]]) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.get("prompts") == digest(prompts)

    def get(self, name: str) -> Comparison:
        return Comparison.from_json(self._entries[name]["comparison"])

    def add(self, comparison: Comparison, prompts: list[list[int]]) -> None:
        self._entries[comparison.name] = {
            "prompts": digest(prompts),
            "comparison": plain(dataclasses.asdict(comparison)),
        }
        content = {"made_with": self._made_with, "files": self._entries}
        write_json(self._path, {**content, "sha256": digest(content)})
