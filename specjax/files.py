"""Files that are written whole or not at all, and JSON of plain values."""

import contextlib
import glob
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def write_json(path: Path, value: Any) -> None:
    """Writes what `plain` makes of the value."""
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
    with replacing(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which then takes the place of `path`.

    A reader finds the old file or the whole new one; an error leaves the old one alone.
    """
    partial = partial_path(path)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def cache_folder() -> Path:
    """Ours in the user's cache folder; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "specjax"


def matching(pattern: str) -> list[Path]:
    """The files that a glob matches, sorted; `**` is any depth of folders, `~` one's home."""
    matches = map(Path, glob.glob(os.path.expanduser(pattern), recursive=True))
    return sorted(path for path in matches if path.is_file())


def partial_path(path: Path) -> Path:
    """Where the file is while it is written."""
    return path.with_name(f".{path.name}.partial")


def plain(value: Any) -> Any:
    """The value as JSON gives it back.

    Keys become text, tuples lists and NumPy values plain ones; numbers that JSON lacks
    (NaN, infinities) become None.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """One entry "key (old value, now new value)" for each leaf that differs."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += changes(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} ({before!r}, now {after!r})")
    return found


def digest(value: Any) -> str:
    """SHA-256 of the value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of what the file holds."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask for the same out of a folder, which is made if need be.

    Where system or file system have no locks, it keeps none out.

    Raises:
      ValueError: another one is there.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl  # of POSIX

            folder.mkdir(parents=True, exist_ok=True)
            opened = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process works in {folder}: wait for it, or give another folder"
            ) from None
        except (OSError, ImportError):  # or the folder cannot be made, which the caller will see
            pass
        yield
