"""Text of the tokens, whole or as they come in."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
else:
    PreTrainedTokenizerBase = Any

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def decode_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """What the tokens spell, without special tokens and without tidying of spaces."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class TextRow:
    """The text of one row's output while its tokens come in, up to a stop string.

    Text is the row's as soon as no later token can change it: the bytes of a character
    wait for its last one. When tokens come in, and how many at a time, changes nothing.

    Attributes:
      text: what the tokens spell so far, cut before the stop string.
      stopped: a stop string has occurred; of several, the one that is complete first
        counts, and of those that end together the longest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._stop = stop
        self._starts: list[int] = []  # where in the text each token begins
        # Tokens that text has been taken from last, and those whose text is to come. The
        # former are decoded again with the latter, as the first token's text may differ.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._taken = 0
        self._finished = False

    @property
    def token_count(self) -> int:
        """Tokens whose text begins before the stop string; without one, all of them.

        Tokens that spell a character together all begin where it does.
        """
        return bisect_left(self._starts, len(self.text)) if self.stopped else len(self._starts)

    def add(self, tokens: Iterable[int]) -> None:
        """Takes in the next tokens."""
        for token in tokens:
            if self.stopped:
                return
            self._starts.append(len(self.text))
            self._pending.append(int(token))
            if self._is_open(int(token)):
                continue
            text = self._pending_text()
            if text and not text.endswith(_INCOMPLETE):
                self._append(text)
                self._context, self._pending = self._pending, []

    def finish(self) -> None:
        """No more tokens: what was incomplete stays so."""
        if not self.stopped:
            self._append(self._pending_text())
        self._pending = []
        self._finished = True

    def take(self) -> str:
        """The text that is new since the last call and that no stop string can cut."""
        start, self._taken = self._taken, max(self._taken, self._decided())
        return self.text[start : self._taken]

    def _is_open(self, token: int) -> bool:
        # A run of byte tokens decodes as a whole or not at all, and special tokens, which
        # have no text, do not end it.
        name = self._tokenizer.convert_ids_to_tokens(token)
        return token in self._special or bool(_BYTE_TOKEN.fullmatch(str(name)))

    def _pending_text(self) -> str:
        before = decode_text(self._tokenizer, self._context)
        return decode_text(self._tokenizer, self._context + self._pending)[len(before) :]

    def _append(self, text: str) -> None:
        known, self.text = len(self.text), self.text + text
        found = []
        for stop in self._stop:
            start = self.text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self.text, self.stopped = self.text[: min(found)[1]], True

    def _decided(self) -> int:
        """Length of the text before what may be the beginning of a stop string."""
        if self.stopped or self._finished:
            return len(self.text)
        possible = (
            size
            for stop in self._stop
            for size in range(1, len(stop))
            if self.text.endswith(stop[:size])
        )
        return len(self.text) - max(possible, default=0)
