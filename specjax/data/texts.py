"""Token ids on disk: training texts without hidden states, about a megabyte a million tokens."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.data.target_cache import TokenSequence
from specjax.files import digest, replacing


def save_texts(path: Path, texts: Sequence[TokenSequence]) -> None:
    """Writes texts as a NumPy archive (.npz).

    It holds the ids of all texts one after the other, in the smallest unsigned type, their
    lengths, and which tokens are to be learnt, as bits.

    Raises:
      ValueError: no texts.
    """
    if not texts:
        raise ValueError("no texts to save")
    tokens = np.concatenate([text.tokens_T for text in texts])
    mask = np.concatenate([text.loss_mask_T for text in texts])
    with replacing(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(
            file,
            tokens=tokens.astype(np.min_scalar_type(int(tokens.max()))),
            lengths=np.array([len(text.tokens_T) for text in texts], np.uint32),
            loss_mask=np.packbits(mask),
        )


def digest_texts(texts: Sequence[Sequence[np.ndarray]]) -> str:
    """Of all that sequences hold, a `TokenSequence` or `PackedRow` each."""
    return digest([[array.tolist() for array in text] for text in texts])


def read_texts(path: Path) -> list[TokenSequence]:
    """The texts that `save_texts` wrote.

    Raises:
      ValueError: a file that is missing, damaged or something else.
    """
    try:
        with open(path, "rb") as file, np.load(file) as stored:
            tokens = stored["tokens"].astype(np.int32)
            lengths = stored["lengths"].astype(np.int64)
            mask = np.unpackbits(stored["loss_mask"], count=len(tokens)).astype(bool)
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read the texts {path}: {error}") from error
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1 or lengths.sum() != len(tokens):
        raise ValueError(f"the texts {path} are damaged: the lengths do not add up")
    ends = np.cumsum(lengths)[:-1]
    pieces = zip(np.split(tokens, ends), np.split(mask, ends), strict=True)
    return [TokenSequence(*piece) for piece in pieces]
