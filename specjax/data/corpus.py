"""Plain text to train models on: files, a tokeniser, and documents packed into rows."""

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.data.target_cache import TokenSequence
from specjax.files import matching

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Of tokenisers that are trained here: the end of a document, and what no text has, which
# stands for tokens that are to be drafted.
END, MASK = "<|endoftext|>", "<|mask|>"


class PackedRow(NamedTuple):
    """Documents side by side, for `collate`-like stacking.

    Attributes:
      tokens_T: token ids.
      loss_mask_T: tokens to be learnt.
      segments_T: documents of the row, counted from 1; 0 is padding.
      positions_T: from 0 on in every document, or in what the row has of it.
    """

    tokens_T: Int[np.ndarray, " T"]
    loss_mask_T: Bool[np.ndarray, " T"]
    segments_T: Int[np.ndarray, " T"]
    positions_T: Int[np.ndarray, " T"]


def find_documents(pattern: str) -> list[Path]:
    """The files of a corpus, in order of their names.

    Args:
      pattern: a glob ("books/**/*.txt"); "" is the Python standard library's own sources,
        which any machine has.

    Raises:
      ValueError: no such files.
    """
    if pattern:
        files = matching(pattern)
    else:
        library = Path(sysconfig.get_path("stdlib"))
        files = sorted(
            path
            for path in library.rglob("*.py")
            if path.is_file()
            and not {"site-packages", "dist-packages"} & set(path.relative_to(library).parts)
        )
    if not files:
        hint = f": of a folder, give its files ({pattern}/**/*)" if Path(pattern).is_dir() else ""
        raise ValueError(f"no file matches {pattern or 'the standard library'!r}{hint}")
    return files


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """The texts of files, in order; empty ones and those that are no UTF-8 are left out."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokeniser (Radford et al., 2019) of the texts.

    Args:
      texts: to learn merges from.
      vocab_size: tokens in all, the 256 bytes, `END` and `MASK` among them.

    Raises:
      ValueError: too small a vocabulary.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import

    if vocab_size < 258:
        raise ValueError(f"vocab_size must be at least 258 (bytes, END, MASK), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, mask_token=MASK)


def begin_token(tokenizer: Any) -> int | None:
    """The token that a tokeniser puts before texts, if it does, so that a decode begins with it."""
    begin = tokenizer.bos_token_id
    return begin if begin is not None and tokenizer("")["input_ids"][:1] == [begin] else None


def pack(
    documents: Iterable[Sequence[int]], end: int, length: int, begin: int | None = None
) -> Iterator[PackedRow]:
    """Rows of `length` tokens, in which documents follow each other.

    A document that does not end within its row goes on in the next, as a segment of its own.
    The last row is padded.

    Args:
      documents: token ids.
      end: id of the end token, put after every document.
      length: T of a row.
      begin: id of a token put before every segment (`begin_token`).

    Raises:
      ValueError: rows that hold no token of a document.
    """
    before = [] if begin is None else [begin]
    if length <= len(before):
        raise ValueError(f"rows of {length} tokens hold no text: raise the length")
    row: list[tuple[int, int, int]] = []
    segment = 0
    for document in documents:
        tokens, done = [*document, end], 0
        while done < len(tokens):
            room = length - len(row) - len(before)
            if room > 0:
                segment += 1
                part = [*before, *tokens[done : done + room]]
                row += [(token, segment, position) for position, token in enumerate(part)]
                done += room
            else:
                row += [(end, 0, 0)] * (length - len(row))
            if len(row) == length:
                yield _row(row)
                row, segment = [], 0
    if row:
        yield _row(row + [(end, 0, 0)] * (length - len(row)))


def _row(entries: list[tuple[int, int, int]]) -> PackedRow:
    tokens_T, segments_T, positions_T = np.array(entries, np.int32).T
    return PackedRow(tokens_T, segments_T > 0, segments_T, positions_T)


def single_rows(texts: Iterable[TokenSequence]) -> Iterator[PackedRow]:
    """Each text as a row of its own."""
    for tokens_T, mask_T in texts:
        positions_T = np.arange(len(tokens_T), dtype=np.int32)
        yield PackedRow(tokens_T, mask_T, np.ones_like(positions_T), positions_T)
