"""Texts on disk: what is read is what was saved, or an error that names the file."""

import numpy as np
import pytest

from specjax.data.target_cache import TokenSequence
from specjax.data.texts import read_texts, save_texts


def texts(rng, largest):
    lengths = (1, 9, 30)
    return [
        TokenSequence(rng.integers(0, largest, n, np.int32), rng.random(n) < 0.5) for n in lengths
    ]


@pytest.mark.parametrize(
    ("largest", "dtype"), [(200, np.uint8), (60_000, np.uint16), (2**31, "u4")]
)
def test_texts_are_read_as_they_were_saved(tmp_path, rng, largest, dtype):
    saved = texts(rng, largest)
    saved[0].tokens_T[0] = largest - 1
    save_texts(tmp_path / "texts.npz", saved)
    for left, right in zip(saved, read_texts(tmp_path / "texts.npz"), strict=True):
        np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
        np.testing.assert_array_equal(left.loss_mask_T, right.loss_mask_T)
    with np.load(tmp_path / "texts.npz") as stored:
        assert stored["tokens"].dtype == dtype


def test_damaged_texts_are_named(tmp_path, rng):
    path = tmp_path / "texts.npz"
    with pytest.raises(ValueError, match=r"cannot read the texts .*texts.npz"):
        read_texts(path)
    save_texts(path, texts(rng, 9))
    whole = path.read_bytes()
    for part in (whole[:-30], b"", b"text"):
        path.write_bytes(part)
        with pytest.raises(ValueError, match=r"cannot read the texts .*texts.npz"):
            read_texts(path)
    arrays = {
        "tokens": np.arange(5),
        "lengths": np.array([2, 2]),
        "loss_mask": np.zeros(1, np.uint8),
    }
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="the lengths do not add up"):
        read_texts(path)
    np.savez(path, tokens=np.arange(5))
    with pytest.raises(ValueError, match="cannot read the texts"):
        read_texts(path)
    with pytest.raises(ValueError, match="no texts to save"):
        save_texts(path, [])
