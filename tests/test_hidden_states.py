"""A target's hidden states over given texts."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax.data import hidden_states
from specjax.data.hidden_states import read_samples
from specjax.data.target_cache import CacheWriter, TargetCache, TokenSequence
from tests.evaluation.tiny_target import tiny_target
from tests.retrace import count_traces
from tests.toys import MarkovTarget

TAPS = (-1, 0)
LENGTHS = (3, 70, 64, 5, 130, 128, 9, 160, 65)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [
        TokenSequence(rng.integers(0, 257, n, dtype=np.int32), np.arange(n) >= n // 2)
        for n in LENGTHS
    ]


def read(target, sequences, **options):
    return list(read_samples(target, sequences, TAPS, batch_tokens=256, **options))


def test_states_are_those_of_a_pass_over_the_text(target, sequences):
    for sample, sequence in zip(read(target, iter(sequences)), sequences, strict=True):
        np.testing.assert_array_equal(sample.tokens_T, sequence.tokens_T)
        np.testing.assert_array_equal(sample.loss_mask_T, sequence.loss_mask_T)
        out = target.forward(sample.tokens_T[None], taps=TAPS)
        assert sample.taps_TMD.dtype == sample.hidden_TD.dtype == jax.numpy.bfloat16
        close = {"rtol": 1e-2, "atol": 1e-2}
        np.testing.assert_allclose(sample.taps_TMD.astype(np.float32), out.taps[0], **close)
        np.testing.assert_allclose(sample.hidden_TD.astype(np.float32), out.hidden[0], **close)


def compare(left, right):
    for before, after in zip(left, right, strict=True):
        jax.tree.map(np.testing.assert_array_equal, before, after)


def test_hidden_states_of_few_passes_are_held_at_once(target, sequences, monkeypatch):
    whole, taken = read(target, sequences), []

    def give():
        for sequence in sequences:
            taken.append(len(sequence.tokens_T))
            yield sequence

    monkeypatch.setattr(hidden_states, "_WINDOW", 1)
    compare(whole, read(target, give()))
    taken.clear()
    next(read_samples(target, give(), TAPS, batch_tokens=256))
    assert sum(taken[:-1]) < 256 <= sum(taken) < sum(LENGTHS)  # read no further


def test_a_length_has_one_program(target, sequences, monkeypatch):
    traced = count_traces(hidden_states.hidden_states.__wrapped__)
    monkeypatch.setattr(
        hidden_states, "hidden_states", jax.jit(traced, static_argnames=("model", "taps"))
    )
    assert len(read(target, sequences * 2)) == 2 * len(sequences)
    assert traced.traces() == 3


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("start", [1, 2, 5, 9, 10])
def test_reading_goes_on_anywhere(target, sequences, monkeypatch, start, window):
    monkeypatch.setattr(hidden_states, "_WINDOW", window)
    whole = read(target, sequences)
    passes = []
    read_batch = hidden_states._read_batch
    monkeypatch.setattr(
        hidden_states, "_read_batch", lambda *args: passes.append(args) or read_batch(*args)
    )
    rest = read(target, sequences, start=start)
    assert len(rest) == max(len(whole) - start, 0)
    compare(whole[start:], rest)
    # One window has the batches 0, 2, 3, 6; 1, 5; 8; 4; 7. Of three, they are 0, 2, 3; 1; 4, then
    # 5; 6; 7, then 8.
    expected = {4: {1: 5, 2: 5, 5: 4, 9: 0, 10: 0}, 1: {1: 7, 2: 6, 5: 4, 9: 0, 10: 0}}
    assert len(passes) == expected[window][start]


def test_long_sequences_are_cut(target, sequences):
    samples = read(target, sequences, max_len=40)
    # Of the longer ones, half of the tokens are learnt: those of 80 or more have none left.
    assert sorted(len(sample.tokens_T) for sample in samples) == [3, 5, 9, 40, 40, 40]
    long = TokenSequence(np.zeros(200, np.int32), np.ones(200, np.bool_))
    [sample] = read(target, [long], max_len=1000)
    assert sample.tokens_T.shape == sample.loss_mask_T.shape == (160,)


def test_samples_go_into_a_cache(target, sequences, tmp_path):
    writer = CacheWriter(tmp_path / "cache", taps=TAPS, width=16, made_with={})
    samples = read(target, sequences)
    writer.add(samples, len(samples))
    writer.finish(len(samples))
    cache = TargetCache(tmp_path / "cache")
    for kept, sample in zip(cache, samples, strict=True):
        np.testing.assert_array_equal(kept.taps_TMD, sample.taps_TMD)


@pytest.mark.parametrize("token", [-1, 257])
def test_tokens_outside_the_vocabulary_are_refused(target, token):
    sequence = TokenSequence(np.array([token], np.int32), np.array([True]))
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.256, the vocabulary of tiny"):
        read(target, [sequence])


@pytest.mark.parametrize("options", [{"max_len": 0}, {"batch_tokens": 0}, {"start": -1}])
def test_wrong_sizes_are_refused(target, sequences, options):
    with pytest.raises(ValueError, match="must be at least 1"):
        list(read_samples(target, sequences, TAPS, **options))


def test_targets_without_hidden_states_are_refused(target, sequences):
    with pytest.raises(ValueError, match="taps must name a layer"):
        list(read_samples(target, sequences, ()))
    with pytest.raises(ValueError, match=r"taps \[7\] are not layers"):
        list(read_samples(target, sequences, (7,)))

    class Stateless(MarkovTarget):
        def apply(self, params, tokens, positions, cache, **options):
            cache = self.init_cache(*tokens.shape)
            return super().apply(params, tokens, positions, cache, **options)

    foreign = dataclasses.replace(target, model=Stateless(257, max_len=160), params=np.eye(257))
    with pytest.raises(ValueError, match="gives no hidden states to train a drafter from"):
        list(read_samples(foreign, sequences, TAPS))
