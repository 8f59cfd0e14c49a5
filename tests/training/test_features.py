"""The target's states in training: from a cache and from the target they are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.hidden_states import read_samples
from specjax.data.target_cache import CacheWriter, TargetCache, TokenSequence, collate
from specjax.models.transformer import Head
from specjax.training import features
from specjax.training.features import CachedStates, OnlineStates, log_normalizers, target_probs
from tests.toys import tiny_target

TAPS = (-1, 0)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [
        TokenSequence(rng.integers(0, 61, n, np.int32), np.arange(n) >= 2) for n in (5, 9, 12, 7)
    ]


@pytest.fixture
def cache(target, texts, tmp_path):
    writer = CacheWriter(tmp_path / "cache", taps=TAPS, width=32, made_with={})
    writer.add(list(read_samples(target, texts, TAPS)), 1)
    writer.finish(1)
    return TargetCache(tmp_path / "cache")


@pytest.fixture
def head(target):
    return Head(target.params["lm_head"]["weight"])


def test_online_batches_equal_those_of_a_cache(target, texts, cache, head):
    online, cached = OnlineStates(texts, target, TAPS), CachedStates(cache, head, TAPS)
    batches = [
        data.complete(collate([data[i] for i in range(len(texts))], 12))
        for data in (online, cached)
    ]
    real = np.arange(12) < np.array([len(text.tokens_T) for text in texts])[:, None]
    np.testing.assert_array_equal(batches[0].tokens_BT, batches[1].tokens_BT)
    np.testing.assert_array_equal(batches[0].loss_mask_BT, batches[1].loss_mask_BT)
    for left, right in zip(batches[0][2:], batches[1][2:], strict=True):
        left, right = (np.asarray(array, np.float32)[real] for array in (left, right))
        np.testing.assert_allclose(left, right, rtol=1e-2, atol=1e-2)  # one bfloat16 step


@pytest.mark.parametrize("ids", [None, [3, 4, 40]])
def test_probabilities_are_the_targets(target, texts, head, ids):
    out = target.forward(texts[1].tokens_T[None])
    chosen = None if ids is None else jnp.array(ids)
    got = target_probs(out.hidden, head, log_normalizers(out.hidden, head), chosen)
    expected = jax.nn.softmax(out.logits)
    expected = expected if ids is None else expected[..., chosen]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_fewer_taps_than_the_cache_has_may_be_used(cache, head):
    data = CachedStates(cache, head, (0,))
    np.testing.assert_array_equal(data[1].taps_TMD[:, 0], cache[1].taps_TMD[:, 1])
    with pytest.raises(ValueError, match=r"holds layers \(-1, 0\) .* taps \(0, 1\)"):
        CachedStates(cache, head, (0, 1))


def test_normalizers_are_computed_once_for_each_head(cache, head):
    first = CachedStates(cache, head, TAPS)
    count, path = [], cache.directory / "normalizers.npz"
    written = path.stat().st_mtime_ns
    again = CachedStates(cache, head, TAPS, count.append)
    assert path.stat().st_mtime_ns == written
    assert sum(count) == sum(cache.lengths)  # as where they are computed
    count.clear()
    np.testing.assert_array_equal(first[2].normalizer_T, again[2].normalizer_T)
    other = CachedStates(cache, Head(head.weight_VD * 2), TAPS, count.append)
    assert sum(count) == sum(cache.lengths)
    assert (other[2].normalizer_T != first[2].normalizer_T).any()
    path.write_bytes(b"damaged")
    count.clear()
    repaired = CachedStates(cache, head, TAPS, count.append)
    assert sum(count) == sum(cache.lengths)
    np.testing.assert_array_equal(first[2].normalizer_T, repaired[2].normalizer_T)


def test_long_sequences_are_normalised_piece_by_piece(cache, head, monkeypatch):
    whole = CachedStates(cache, head, TAPS)
    (cache.directory / "normalizers.npz").unlink()
    monkeypatch.setattr(features, "_ROWS", 4)
    pieces = CachedStates(cache, head, TAPS)
    for i in range(len(cache)):
        np.testing.assert_allclose(whole[i].normalizer_T, pieces[i].normalizer_T, rtol=1e-6)
