"""Token ids on disk: training texts without hidden states, about a megabyte a million tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.data.target_cache import TokenSequence, are_ids
from specjax.files import digest, replacing


def save_texts(path: Path, texts: Sequence[TokenSequence]) -> None:
    """Writes texts as a NumPy archive (.npz).

    It holds the ids of all texts one after the other, in the smallest unsigned type, their
    lengths, and which tokens are to be learnt, as bits.

    Raises:
      ValueError: no texts, or one without tokens, with other numbers than token ids, or with a
        mask that is not of its length and true or false.
    """
    if not texts:
        raise ValueError("no texts to save")
    for i, text in enumerate(texts):
        mask = text.loss_mask_T
        if not are_ids(text.tokens_T) or mask.shape != text.tokens_T.shape or mask.dtype != bool:
            raise ValueError(
                f"text {i} must have token ids, whole numbers from 0 to 2**31 - 1, and as many "
                f"booleans that say which are to be learnt"
            )
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
            tokens, lengths, bits = (stored[name] for name in ("tokens", "lengths", "loss_mask"))
    except Exception as error:  # NumPy, zipfile and zlib raise whatever they like
        raise ValueError(f"cannot read the texts {path}: {error}") from error
    if not are_ids(tokens):
        raise ValueError(f"the texts {path} are damaged: they hold other numbers than token ids")
    if not are_ids(lengths) or not lengths.min() or lengths.sum(dtype=np.int64) != len(tokens):
        raise ValueError(f"the texts {path} are damaged: the lengths do not add up")
    if bits.dtype != np.uint8 or bits.shape != (-(-len(tokens) // 8),):
        raise ValueError(f"the texts {path} are damaged: the mask is not of their length")
    tokens, lengths = tokens.astype(np.int32), lengths.astype(np.int64)
    mask = np.unpackbits(bits, count=len(tokens)).astype(bool)
    ends = np.cumsum(lengths)[:-1]
    pieces = zip(np.split(tokens, ends), np.split(mask, ends), strict=True)
    return [TokenSequence(*piece) for piece in pieces]
