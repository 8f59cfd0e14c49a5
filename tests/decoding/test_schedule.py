"""Policies: what they choose, and what they refuse."""

import jax.numpy as jnp
import pytest

from specjax.decoding.schedule import FullPolicy, ThresholdPolicy, parse_policy


def test_threshold_stops_at_the_first_low_confidence():
    confidence = jnp.array([[0.9, 0.4, 0.9], [0.5, 0.6, 0.7], [0.1, 1.0, 1.0], [1.0, 1.0, 0.49]])
    done = jnp.zeros(4, bool)
    lengths, state = ThresholdPolicy(0.5).choose((), confidence, done, 3)
    assert lengths.tolist() == [1, 3, 0, 2]
    assert state == ()
    assert ThresholdPolicy(0.0).choose((), confidence, done, 3)[0].tolist() == [3] * 4
    assert FullPolicy().choose((), confidence, done, 3)[0].tolist() == [3] * 4


def test_policies_by_name():
    assert parse_policy("full") == FullPolicy()
    assert parse_policy("threshold:0.25") == ThresholdPolicy(0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "unknown policy 'none': known are 'full' and 'threshold:T'"),
        ("threshold", "needs a number, as in 'threshold:0.5'"),
        ("threshold:x", "needs a number"),
        ("threshold:1.5", "must be from 0 to 1"),
        ("threshold:nan", "must be from 0 to 1"),
    ],
)
def test_wrong_names_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_a_threshold_needs_confidences():
    with pytest.raises(ValueError, match="needs confidences, which this drafter does not give"):
        ThresholdPolicy(0.5).choose((), None, jnp.zeros(2, bool), 3)
