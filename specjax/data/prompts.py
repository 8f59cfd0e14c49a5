"""Prompts: built-in ones for a first run, and files of them for evaluation."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.files import matching

_TEXT = (
    "The old lighthouse stands on a cliff above the harbour. Every evening the keeper climbs "
    "one hundred and twelve steps to light the lamp. The lamp has burned every night since 1871, "
    "and ships from many countries have been guided home by it. On clear days, visitors may "
    "climb the tower with the keeper and look out over the sea. The keeper says that the best "
    "time to visit is early in the morning, when the harbour is quiet and the fishing boats "
    "are coming home."
)

BUILTIN: dict[str, str] = {
    "mathematics": (
        "A baker makes 24 loaves of bread every day. She sells each loaf for 3 dollars and "
        "always has 4 loaves left over. How much money does she make in one week? "
        "Reason step by step."
    ),
    "code": (
        "Write a Python function that takes a list of numbers and returns the largest and the "
        "smallest of them. Add a docstring and an example of how to call it."
    ),
    "chat": "I have one free day in Paris. What should I see, and why?",
    "rewrite": (
        "Rewrite the following text. Change the word keeper to guardian and leave all other "
        f"words exactly as they are.\n\n{_TEXT}"
    ),
}


def builtin_prompt(name: str) -> str:
    """The built-in prompt of that name.

    Raises:
      ValueError: an unknown name.
    """
    if name not in BUILTIN:
        raise ValueError(f"unknown built-in prompt {name!r}: known are {', '.join(BUILTIN)}")
    return BUILTIN[name]


def find_prompt_files(pattern: str) -> dict[str, Path]:
    """The files that a glob matches, in sorted order, under short unique names.

    Args:
      pattern: a glob as the shell's, with `**` for any depth of folders.

    Returns:
      Each file by its stem, or by its whole path where two stems are equal.

    Raises:
      ValueError: no pattern, one that matches no file, or file names that are not UTF-8.
    """
    if not pattern:
        raise ValueError(
            "no prompts given: set config.prompts to a glob of .jsonl files, "
            "for example --config.prompts='prompts/*.jsonl'"
        )
    paths = matching(pattern)
    if not paths:
        raise ValueError(f"no prompt file matches {pattern!r}")
    for path in paths:
        if not _encodable(str(path)):
            raise ValueError(f"the file name {str(path)!r} is not UTF-8: rename the file")
    unique = len({path.stem for path in paths}) == len(paths)
    return {path.stem if unique else str(path): path for path in paths}


def read_prompts(path: Path, limit: int = 0) -> list[str]:
    """Reads a JSON-lines file of {"turns": [first, ...]}; the first turn is the prompt.

    This is the format of DeepSpec's evaluation sets. Blank lines are skipped.

    Args:
      path: the file, in UTF-8; a byte-order mark is skipped.
      limit: how many prompts to read; 0 reads all.

    Raises:
      ValueError: naming file and line: invalid JSON, no "turns", a first turn that is
        not a string or not valid Unicode; or a file that cannot be read or holds no prompt.
    """
    if limit < 0:
        raise ValueError(f"limit must be at least 0 (0 reads all prompts), got {limit}")
    records = itertools.islice(read_json_lines(path), limit or None)
    prompts = [first_turn(record, where) for where, record in records]
    if not prompts:
        raise ValueError(f"the prompt file {path} holds no prompts")
    return prompts


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON-lines file, one by one, each with where it stands.

    Args:
      path: the file, in UTF-8; a byte-order mark and blank lines are skipped.

    Yields:
      "file, line number" for messages, and the value.

    Raises:
      ValueError: a file that cannot be read; a line that is not JSON.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _parse(line, where)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompt file {path}: {error}") from error


def first_turn(record: Any, where: str) -> str:
    """The prompt of {"turns": [first, ...]}.

    Raises:
      ValueError: another record, or a first turn that is not valid Unicode; it begins with
        `where`.
    """
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError(f'{where}: expected {{"turns": ["the prompt", ...]}}')
    check_unicode(turns[0], where)
    return turns[0]


def check_unicode(text: str, where: str) -> None:
    """Makes sure that a string is text, which half of a surrogate pair is not.

    Raises:
      ValueError: it is not; the message begins with `where`.
    """
    if not _encodable(text):
        raise ValueError(f"{where}: the text holds half of a surrogate pair, which is no character")


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers too long, nesting too deep
        raise ValueError(f"{where}: not valid JSON ({error})") from error


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
