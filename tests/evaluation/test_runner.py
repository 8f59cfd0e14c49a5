import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.evaluation.runner import Measurement, Settings, decode_all, measure, room
from specjax.files import write_json
from tests.evaluation.tiny_target import tiny_target

SETTINGS = Settings(max_new_tokens=6, draft_len=3, batch_size=2)
PROMPTS = [[1, 2, 3], [4, 5], [6]]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return specjax.load_drafter("prompt_lookup", target)


@pytest.fixture
def calls(monkeypatch):
    """The calls of `specjax.generate`, which still does its work."""
    generate, made = specjax.generate, []

    def record(target, drafter, prompts, **options):
        made.append((drafter is not None, prompts, options))
        return generate(target, drafter, prompts, **options)

    monkeypatch.setattr(specjax, "generate", record)
    return made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"draft_len": -1}, "draft_len must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"seed": -1}, "seed must be whole numbers, from 0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **options)


def test_room(target):
    assert room(target, "set", PROMPTS, 6) == 9
    with pytest.raises(ValueError, match=r"set: prompt 1 has 158 tokens.*context of 160"):
        room(target, "set", [[1], [1] * 158], 6)


def test_both_ways_take_turns_after_warm_ups(target, drafter, calls):
    progress = []
    measure(target, drafter, PROMPTS, SETTINGS, 16, progress.append)
    order = [(method, len(rows), options["max_new_tokens"]) for method, rows, options in calls]
    assert order == [
        *[(False, 2, 2), (True, 2, 2), (False, 2, 6), (True, 2, 6)],
        *[(False, 1, 2), (True, 1, 2), (False, 1, 6), (True, 1, 6)],
    ]
    assert {options["max_len"] for _, _, options in calls} == {16}
    assert progress == [2, 2, 1, 1]


def test_compilation_is_timed_apart(target, drafter):
    settings = dataclasses.replace(SETTINGS, batch_size=4)  # as in no other test
    first, _ = measure(target, drafter, PROMPTS, settings, 16)
    again, speculative = measure(target, drafter, PROMPTS, settings, 16)
    assert first.compile_seconds > first.seconds
    assert again.compile_seconds == speculative.compile_seconds == 0
    assert again.seconds == again.prefill_seconds + again.decode_seconds > 0
    assert again.token_count == sum(map(len, again.tokens)) == 18
    assert again.tokens_per_second == 18 / again.seconds


def test_a_timed_run_that_compiled_is_repeated(target, monkeypatch):
    generate, calls = specjax.generate, []

    def compiles_late(target, drafter, prompts, **options):
        calls.append(options["max_new_tokens"])
        if len(calls) == 3:  # the first timed one
            jax.jit(lambda x: x + 1)(jnp.zeros(3))
        return generate(target, drafter, prompts, **options)

    monkeypatch.setattr(specjax, "generate", compiles_late)
    autoregressive, _ = measure(target, None, PROMPTS[:1], SETTINGS, 16)
    assert calls == [2, 2, 6, 6, 6]
    assert autoregressive.compile_seconds > 0
    assert len(autoregressive.tokens) == 1


def test_a_prompts_seed_does_not_depend_on_the_batch_size(target, calls):
    settings = dataclasses.replace(SETTINGS, seed=2**32 - 2, temperature=1.0)
    by_two = decode_all(target, None, PROMPTS, settings, 16)
    seeds = [np.asarray(options["sampling"].seed_B).tolist() for _, _, options in calls]
    assert seeds == [[2**32 - 2, 2**32 - 1], [0]]
    by_one = decode_all(target, None, PROMPTS, dataclasses.replace(settings, batch_size=1), 16)
    assert by_one.tokens == by_two.tokens


def test_measurement_survives_json(target, drafter, tmp_path):
    for measurement in measure(target, drafter, PROMPTS, SETTINGS, 16):
        write_json(tmp_path / "m.json", dataclasses.asdict(measurement))
        read = Measurement.from_json(json.loads((tmp_path / "m.json").read_text()))
        assert read.tokens == measurement.tokens
        assert read.texts == measurement.texts
        assert read.seconds == measurement.seconds
        jax.tree.map(np.testing.assert_array_equal, *map(vars, (read.stats, measurement.stats)))
