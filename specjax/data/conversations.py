"""Conversations of files and data sets as training data.

A record has one of these forms; where it has the keys of several, the first is taken:

    {"messages": [{"role": "system", "user" or "assistant", "content": "..."}, ...]}
    {"conversations": [{"from": "system", "human" or "gpt", "value": "..."}, ...]}
    {"turns": ["the user's first", ...]}
    {"prompt": "...", "response" or "completion": "..."}, or the prompt alone

the first being OpenAI's and the second ShareGPT's. Other keys are ignored, and so are keys
whose value is null, which data sets give to records that lack them.
"""

import importlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from specjax.data.prompts import check_unicode, find_prompt_files, first_turn, read_json_lines
from specjax.data.target_cache import TokenSequence
from specjax.models.target import Target

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves in a folder


class Conversation(NamedTuple):
    """One conversation.

    Attributes:
      messages: {"role": "system" | "user" | "assistant", "content": text}, in order; of user
        and assistant the user comes first.
      source: the file or data set that it is from.
      where: its place there, for messages.
    """

    messages: list[dict[str, str]]
    source: str
    where: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The messages up to the user's last: what the target is to answer."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: len(roles) - roles[::-1].index("user")]

    @property
    def answered(self) -> bool:
        """Whether it ends with an answer; else it is a prompt."""
        return _is_answer(self.messages[-1])


def read_conversation_files(pattern: str) -> Iterator[Conversation]:
    """The conversations of the JSON-lines files that a glob matches, in sorted order.

    Raises:
      ValueError: no such file; one that cannot be read or holds no conversation; a record of
        another form, naming file and line.
    """
    for path in find_prompt_files(pattern).values():
        yield from _parse_all(read_json_lines(path), str(path))


def read_conversation_dataset(
    name: str, *, subset: str | None = None, split: str = "train"
) -> Iterator[Conversation]:
    """The conversations of a data set that the package `datasets` loads.

    Args:
      name: on the hub, or a folder: of data files, or written by `save_to_disk`.
      subset: of those that the data set has; None takes its default.
      split: the part of it. A folder that holds one part alone has no others.

    Raises:
      ValueError: the package is not installed; a data set, subset or split that cannot be
        loaded or holds no conversation; a record of another form, naming data set and row.
    """
    rows = _load_rows(name, subset, split)
    return _parse_all(((f"{name}, row {i}", row) for i, row in enumerate(rows)), name)


def parse_conversation(record: Any, source: str, where: str) -> Conversation:
    """The conversation of a record, in one of the forms above.

    Answers before the first user's message, which data sets cut out of longer conversations
    have, are left out: nothing says what they answer.

    Raises:
      ValueError: another form, no user's message, or text that is not valid Unicode; it
        begins with `where`.
    """
    record = record if isinstance(record, dict) else {}
    given = {key: value for key, value in record.items() if value is not None}
    if "messages" in given or "conversations" in given:
        pairs = _listed(given.get("messages", given.get("conversations")), where)
    elif "turns" in given:
        pairs = [("user", first_turn(given, where))]
    elif "prompt" in given:
        answers = [given[key] for key in ("response", "completion") if key in given]
        if len(answers) > 1:
            raise ValueError(f'{where}: expected one of "response" and "completion", got both')
        pairs = [("user", given["prompt"]), *(("assistant", answer) for answer in answers)]
    else:
        raise ValueError(
            f'{where}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}, '
            f'{{"conversations": [{{"from": ..., "value": ...}}, ...]}}, {{"turns": [...]}}, '
            f'{{"prompt": ...}} or {{"prompt": ..., "response": ...}}'
        )
    messages = [_message(*pair, f"{where}, message {i}") for i, pair in enumerate(pairs, start=1)]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise ValueError(f"{where}: expected at least one message of the user")
    first = roles.index("user")
    head = [message for message in messages[:first] if message["role"] == "system"]
    return Conversation(head + messages[first:], source, where)


def encode_conversations(
    target: Target, conversations: Iterable[Conversation]
) -> Iterator[TokenSequence]:
    """The given answers as token sequences to be learnt; conversations without are left out.

    Args:
      target: with tokeniser and chat template.
      conversations: one source after the other.

    Raises:
      ValueError: as `encode_answers`; a source without any token to be learnt.
    """
    for source, group in itertools.groupby(conversations, key=lambda each: each.source):
        empty = True
        for conversation in group:
            for sequence in encode_answers(target, conversation):
                empty = False
                yield sequence
        if empty:
            raise ValueError(
                f"{source} holds no answer to learn from: expected conversations with messages "
                f"of the assistant, or have the target answer the prompts"
            )


def encode_answers(target: Target, conversation: Conversation) -> Iterator[TokenSequence]:
    """A conversation's given answers as token sequences, as a rule one with all of them.

    Learnt are the tokens of each answer from what follows the generation prompt to the first
    that ends a turn (without one, all that the template writes for it). A template that
    shows an answer otherwise once the conversation goes on (Qwen3's, which drops reasoning)
    gives a sequence for each answer, in the context that the target has when it answers.
    What follows the last answer is left out, and so are spaces and line ends before an answer,
    which would become one token with the end of the generation prompt.

    Args:
      target: with tokeniser and chat template.
      conversation: any; without answers there are no sequences.

    Raises:
      ValueError: no tokeniser or chat template; a template that refuses the conversation, or
        whose generation prompt is no prefix, in tokens, of the conversation with the answer.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    messages = [
        {**message, "content": message["content"].lstrip()} if _is_answer(message) else message
        for message in conversation.messages
    ]
    for i in (i for i, message in enumerate(messages) if _is_answer(message)):
        before = _render(target, messages[:i], conversation.where, add_generation_prompt=True)
        after = _render(target, messages[: i + 1], conversation.where, add_generation_prompt=False)
        if after[: len(before)] != before:
            raise ValueError(
                f"{conversation.where}, message {i + 1}: with the chat template of {target.name} "
                f"the tokens before an answer change when it is added, so the tokens of the "
                f"answer can't be told: have the target answer the prompts instead"
            )
        if before[: len(tokens)] != tokens:
            yield from _sequence(tokens, mask)
            tokens, mask = [], []
        answer = after[len(before) :]
        ends = (n for n, token in enumerate(answer, start=1) if token in target.stop_ids)
        learnt = next(ends, len(answer))
        mask += [False] * (len(before) - len(tokens))
        mask += [True] * learnt + [False] * (len(answer) - learnt)
        tokens = after
    yield from _sequence(tokens, mask)


def _load_rows(name: str, subset: str | None, split: str) -> Iterable[Any]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"the data set {name!r} needs the package datasets: pip install 'specjax[datasets]'"
        ) from error
    path = Path(name).expanduser()
    try:
        if any((path / file).is_file() for file in _SAVED):
            rows = datasets.load_from_disk(str(path))
        else:
            rows = datasets.load_dataset(str(path) if path.is_dir() else name, subset, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"cannot load the data set {name!r}: {error}") from error
    if isinstance(rows, dict) and split not in rows:
        raise ValueError(f"the data set {name!r} has no split {split!r}: it has {', '.join(rows)}")
    return rows[split] if isinstance(rows, dict) else rows


def _parse_all(records: Iterable[tuple[str, Any]], source: str) -> Iterator[Conversation]:
    empty = True
    for where, record in records:
        empty = False
        yield parse_conversation(record, source, where)
    if empty:
        raise ValueError(f"{source} holds no conversations")


def _listed(items: Any, where: str) -> list[tuple[Any, Any]]:
    """Role and text of each item of a list of messages, in either form."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(
            f'{where}: expected a list of {{"role": ..., "content": ...}} or of '
            f'{{"from": ..., "value": ...}}'
        )

    def either(item: dict[str, Any], *keys: str) -> Any:
        return next((item[key] for key in keys if item.get(key) is not None), None)

    return [(either(item, "role", "from"), either(item, "content", "value")) for item in items]


def _message(role: Any, text: Any, where: str) -> dict[str, str]:
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{where}: expected the role {', '.join(_ROLES)}, got {role!r}")
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected text, got {type(text).__name__}")
    check_unicode(text, where)
    return {"role": _ROLES[role], "content": text}


def _is_answer(message: dict[str, str]) -> bool:
    return message["role"] == "assistant"


def _render(
    target: Target, messages: list[dict[str, str]], where: str, *, add_generation_prompt: bool
) -> list[int]:
    """Token ids of the messages."""
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            f"{target.name} has no tokeniser with a chat template to write conversations with"
        )
    try:
        ids: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False
        )
    except TemplateError as error:
        raise ValueError(
            f"{where}: the chat template of {target.name} refuses it: {error}"
        ) from error
    return list(ids)


def _sequence(tokens: Sequence[int], mask: Sequence[bool]) -> Iterator[TokenSequence]:
    if any(mask):
        yield TokenSequence(np.array(tokens, np.int32), np.array(mask, np.bool_))
