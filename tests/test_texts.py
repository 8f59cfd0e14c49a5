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


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        ([5, -100, 7], [True] * 3),  # a label that is to be ignored
        ([5, 2**31, 7], [True] * 3),
        ([5.0, 6.0, 7.0], [True] * 3),
        ([[5, 6, 7]], [[True] * 3]),
        ([5, 6, 7], [True] * 2),
        ([5, 6, 7], [1, 0, 1]),
        ([], []),
    ],
)
def test_only_token_ids_with_their_mask_are_saved(tmp_path, rng, tokens, mask):
    with pytest.raises(ValueError, match="text 3 must have token ids"):
        save_texts(
            tmp_path / "texts.npz",
            [*texts(rng, 9), TokenSequence(np.array(tokens), np.array(mask))],
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", np.array([5, -1, 7]), "other numbers than token ids"),
        ("tokens", np.array([5, 2**32 + 5, 7]), "other numbers than token ids"),
        ("tokens", np.array([5.7, 1, 2]), "other numbers than token ids"),
        ("tokens", np.array([[5, 6, 7]]), "other numbers than token ids"),
        ("tokens", np.array(3), "other numbers than token ids"),
        ("lengths", np.array([3, 0]), "the lengths do not add up"),
        ("lengths", np.array([4, -1]), "the lengths do not add up"),
        ("loss_mask", np.zeros(0, np.uint8), "the mask is not of their length"),
        ("loss_mask", np.zeros(3, bool), "the mask is not of their length"),
    ],
)
def test_texts_of_another_kind_are_refused(tmp_path, name, value, message):
    arrays = {
        "tokens": np.arange(3),
        "lengths": np.array([1, 2]),
        "loss_mask": np.zeros(1, np.uint8),
    }
    np.savez(tmp_path / "texts.npz", **arrays)
    assert len(read_texts(tmp_path / "texts.npz")) == 2
    np.savez(tmp_path / "texts.npz", **arrays | {name: value})
    with pytest.raises(ValueError, match=message):
        read_texts(tmp_path / "texts.npz")


def test_a_changed_byte_is_an_error_or_changes_nothing(tmp_path, rng):
    path, saved = tmp_path / "texts.npz", texts(rng, 9)
    save_texts(path, saved)
    whole = path.read_bytes()
    refused = 0
    for position in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[position] ^= 0x55
        path.write_bytes(changed)
        try:
            found = read_texts(path)
        except ValueError:
            refused += 1
            continue
        for left, right in zip(found, saved, strict=True):
            np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
    assert refused > len(whole) // 9
    np.save(tmp_path / "array.npy", np.arange(3))
    with pytest.raises(ValueError, match="cannot read the texts"):
        read_texts(tmp_path / "array.npy")
