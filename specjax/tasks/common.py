"""What the tasks share: the workdir, the compilation cache, loading, and the results."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

import specjax
from specjax.api import default_draft_len
from specjax.data.conversations import (
    Conversation,
    encode_conversations,
    read_conversation_dataset,
    read_conversation_files,
)
from specjax.data.target_cache import TokenSequence
from specjax.data.texts import read_texts
from specjax.evaluation.comparison import Comparison
from specjax.evaluation.plots import plot_report
from specjax.evaluation.report import build_report, summary
from specjax.evaluation.runner import Settings
from specjax.files import cache_folder, matching, partial_path, plain, write_json

_SOURCES = ("cache", "texts", "prompts", "dataset", "corpus")  # what may be learnt from
_RESULTS = ("report.json", "config.json", "report.png", "finished.json")


def open_workdir(workdir: Path, task: str) -> None:
    """Makes the folder if need be and makes sure that the results can be written to it.

    Raises:
      ValueError: it is no folder, cannot be made or written to, or holds folders named
        like results, or another task's results.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write to the workdir {workdir} ({error.strerror}): "
            "give another folder with --workdir"
        ) from error
    files = [workdir / name for name in _RESULTS]
    for path in (*files, *map(partial_path, files)):
        if path.is_dir():
            raise ValueError(
                f"{path} is a folder, where a file is to be written: remove it, "
                "or give another folder with --workdir"
            )
    found = _task_of(workdir)
    if found not in (None, task):
        raise ValueError(
            f"{workdir} holds the results of the task {found!r}: give another folder with --workdir"
        )


def _task_of(workdir: Path) -> str | None:
    """Whose results a folder holds, if any."""
    try:
        return json.loads((workdir / "config.json").read_text(encoding="utf-8"))["task"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def enable_compilation_cache(folder: str) -> None:
    """Keeps compiled programs on disk, so that the next run needs not compile them.

    Args:
      folder: where; "auto" is a folder in the user's cache directory unless JAX has been
        given one already; "off" leaves JAX's setting alone.
    """
    already = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder == "off" or (folder == "auto" and already):
        return
    if folder == "auto":
        folder = str(cache_folder() / "compiled")
    jax.config.update("jax_compilation_cache_dir", folder)


def load_models(config: ConfigDict) -> tuple[specjax.Target, specjax.Drafter]:
    """The target and the drafter that the config names."""
    target = specjax.load_target(config.target, dtype=config.dtype)
    drafter = specjax.load_drafter(
        config.drafter,
        target,
        candidates=config.candidates,
        any_target=bool(config.get("any_target", False)),
    )
    return target, drafter


def check_sources(config: ConfigDict) -> None:
    """Makes sure that there is one thing to learn from.

    Raises:
      ValueError: more than one.
    """
    named = [f"config.{name}" for name in _SOURCES if config.get(name)]
    if len(named) > 1:
        raise ValueError(f"give only one of {', '.join(named)}")


def conversations(config: ConfigDict) -> Iterator[Conversation] | None:
    """Those of config.prompts (a glob of files) or config.dataset; None where neither is set.

    Raises:
      ValueError: what `specjax.data.conversations` raises.
    """
    if config.prompts:
        return read_conversation_files(config.prompts)
    if config.dataset:
        return read_conversation_dataset(
            config.dataset, subset=config.dataset_subset, split=config.dataset_split
        )
    return None


def given_texts(config: ConfigDict, target: specjax.Target) -> list[TokenSequence] | None:
    """Texts that need not be written: config.texts (a glob), or given answers; None without.

    Repetitions are left out: one could be learnt and another held out.

    Raises:
      ValueError: settings that contradict each other, or files that cannot be read or have no
        token to learn.
    """
    if config.answers not in ("target", "given"):
        raise ValueError(f"config.answers must be 'target' or 'given', got {config.answers!r}")
    if config.texts:
        paths = matching(config.texts) or [Path(config.texts)]  # which says what is wrong
        return _distinct([text for path in paths for text in _learnable(path)])
    if config.answers == "target":
        return None
    source = conversations(config)
    if source is None:
        raise ValueError("config.answers='given' needs config.prompts or config.dataset")
    counted = tqdm(source, desc="reading", unit=" conversations", dynamic_ncols=True)
    return _distinct(list(encode_conversations(target, iter(counted))))


def _learnable(path: Path) -> list[TokenSequence]:
    texts = read_texts(path)
    if not any(text.loss_mask_T.any() for text in texts):
        raise ValueError(f"the texts {path} have no token to learn: their mask is all false")
    return texts


def _distinct(texts: list[TokenSequence]) -> list[TokenSequence]:
    by_tokens: dict[bytes, TokenSequence] = {}
    for text in texts:
        by_tokens.setdefault(text.tokens_T.tobytes(), text)
    if repeated := len(texts) - len(by_tokens):
        print(f"{repeated} of {len(texts)} texts repeat others and are left out")
    return list(by_tokens.values())


def suit_draft_len(config: ConfigDict, drafter: specjax.Drafter) -> None:
    """Puts what `generate` would take where the config has no draft_len."""
    if config.draft_len is None:
        config.draft_len = default_draft_len(drafter)


def decode_settings(config: ConfigDict, batch_size: int) -> Settings:
    """How the config asks to decode; without a draft_len, without drafts."""
    return Settings(
        max_new_tokens=config.max_new_tokens,
        draft_len=0 if config.draft_len is None else config.draft_len,
        temperature=config.temperature,
        seed=config.seed,
        acceptance=config.acceptance,
        policy=config.policy,
        batch_size=batch_size,
    )


def plain_config(config: ConfigDict) -> dict[str, Any]:
    """The config as JSON gives it back.

    Raises:
      ValueError: text that is not valid Unicode, which no file could hold.
    """
    values = plain(config.to_dict())
    for key, value in values.items():
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"config.{key} is not valid UTF-8: {value!r}") from error
    return values


class ProgressBar(tqdm):
    """A bar of decoded outputs on the standard error stream, for `compare` to tell."""

    def __init__(self, total: int):
        super().__init__(total=total, unit=" outputs", file=sys.stderr, dynamic_ncols=True)

    def tell(self, what: str, rows: int) -> None:
        """That many more rows are done; `what` they were is shown."""
        self.set_description(what, refresh=False)
        self.update(rows)


def write_results(
    config: ConfigDict,
    workdir: Path,
    target: specjax.Target,
    comparisons: Sequence[Comparison],
    set_key: str,
    heading: str = "",
) -> None:
    """Writes report.json, config.json and report.png, and prints heading and table."""
    report = build_report(
        config.task,
        plain_config(config),
        comparisons,
        drafter=config.drafter,
        policy=config.policy,
        set_key=set_key,
    )
    write_json(workdir / "config.json", report["config"])
    write_json(workdir / "report.json", report)
    print(heading + summary(comparisons, set_key, target.dtype))
    print(f"Report: {workdir / 'report.json'}")
    try:
        plot_report(report, set_key, workdir / "report.png")
        print(f"Figure: {workdir / 'report.png'}")
    except ImportError:
        print("No figure: matplotlib is not installed (pip install 'specjax[plots]').")
    except Exception as error:  # whatever it is, the results are complete without
        print(f"No figure: {' '.join(str(error).split())}")
