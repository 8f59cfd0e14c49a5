import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.evaluation.comparison import compare, outputs, score_gaps
from specjax.evaluation.runner import Settings, decode_all
from tests.evaluation.tiny_target import STOP, tiny_target

SETTINGS = Settings(max_new_tokens=6, draft_len=3)
SETS = {"a": [[1, 2, 3], [4, 5]], "b": [[6]]}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return specjax.load_drafter("prompt_lookup", target)


def run(target, drafter, settings=SETTINGS, check="float32", sets=SETS, **options):
    return compare(target, drafter, sets, settings, check=check, gap_tolerance=0.01, **options)


def break_speculation(monkeypatch, change):
    """`change` alters the tokens and finish reasons of every speculative result."""
    generate = specjax.generate

    def broken(target, drafter, prompts, **options):
        result = generate(target, drafter, prompts, **options)
        if drafter is None:
            return result
        rows = zip(result.tokens, result.finish_reasons, strict=True)
        tokens, reasons = zip(*(change(target, *row) for row in rows), strict=True)
        return dataclasses.replace(result, tokens=list(tokens), finish_reasons=list(reasons))

    monkeypatch.setattr(specjax, "generate", broken)


def wrong_third_token(target, tokens, reason):
    return [(t + 1) % 256 if i == 2 else t for i, t in enumerate(tokens)], reason


def test_speculation_is_identical(target, drafter):
    first, second = run(target, drafter)
    assert (first.name, second.name) == ("a", "b")
    assert first.as_run == second.as_run == []
    assert first.identical is second.identical is True
    assert first.speculative.tokens == first.autoregressive.tokens
    assert len(first.speculative.tokens) == 2


def test_a_broken_decoder_is_caught(target, drafter, monkeypatch):
    break_speculation(monkeypatch, wrong_third_token)
    first, _ = run(target, drafter)
    assert first.identical is False
    assert [(d.prompt, d.position) for d in first.as_run] == [(0, 2), (1, 2)]
    difference = first.as_run[1]
    tokens = first.autoregressive.tokens[1]
    assert difference.autoregressive_token == tokens[2]
    assert difference.speculative_token == (tokens[2] + 1) % 256
    prefix = jnp.asarray([[4, 5, *tokens[:2]]])
    logits = target.forward(prefix).logits[0, -1]
    gap = logits[difference.autoregressive_token] - logits[difference.speculative_token]
    assert difference.logit_gap == pytest.approx(float(gap), rel=1e-4)
    assert difference.logit_gap > 0


def test_an_early_end_is_a_difference(target, drafter, monkeypatch):
    break_speculation(monkeypatch, lambda target, tokens, reason: (tokens[:4], "stop"))
    [comparison] = run(target, drafter, sets={"b": SETS["b"]})
    [difference] = comparison.as_run
    assert difference.position == 4
    assert difference.autoregressive_token == comparison.autoregressive.tokens[0][4]
    assert difference.speculative_token == STOP
    assert difference.logit_gap > 0


def test_a_cut_output_is_a_difference(target, drafter, monkeypatch):
    break_speculation(monkeypatch, lambda target, tokens, reason: (tokens[:4], "length"))
    [comparison] = run(target, drafter, sets={"b": SETS["b"]})
    [difference] = comparison.as_run
    assert (difference.position, difference.speculative_token) == (4, None)
    assert difference.logit_gap is None


def test_bfloat16_is_judged_in_float32(drafter, monkeypatch):
    target = tiny_target("bfloat16")
    dtypes = []
    break_speculation(
        monkeypatch,
        lambda target, tokens, reason: (
            dtypes.append({x.dtype.name for x in jax.tree.leaves(target.params)}),
            # Broken in the measured dtype only.
            wrong_third_token(target, tokens, reason)
            if target.dtype == "bfloat16"
            else (tokens, reason),
        )[1],
    )
    progress = []
    first, second = run(target, drafter, on_batch=lambda what, rows: progress.append((what, rows)))
    assert first.identical is second.identical is True
    assert len(first.as_run) == 2
    assert first.check == {"kind": "float32", "differences": []}
    assert dtypes[-1] == {"float32"}
    assert progress[-1] == ("check in float32", 3)  # all sets together
    assert sum(rows for _, rows in progress) == outputs(target, 3, SETTINGS, "float32")


def test_a_difference_in_float32_is_told_with_its_set(drafter, monkeypatch):
    target = tiny_target("bfloat16")

    def change(target, tokens, reason):
        wrong = target.dtype == "float32" and tokens == expected
        return wrong_third_token(target, tokens, reason) if wrong else (tokens, reason)

    as_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)
    exact = dataclasses.replace(target, params=as_float32, dtype="float32")
    expected = decode_all(exact, None, SETS["b"], SETTINGS, 16).tokens[0]
    break_speculation(monkeypatch, change)
    first, second = run(target, drafter)
    assert first.identical is True
    assert second.identical is False
    [difference] = second.check["differences"]
    assert (difference["prompt"], difference["position"]) == (0, 2)


@pytest.mark.parametrize("check", ["none", "gap"])
def test_bfloat16_unchecked_is_unknown(drafter, check):
    for comparison in run(tiny_target("bfloat16"), drafter, check=check):
        assert comparison.identical is None
        assert comparison.as_run is not None
        assert comparison.check["kind"] == check


def test_gaps_of_greedy_output(target, drafter, monkeypatch):
    [comparison] = run(target, drafter, check="gap", sets={"b": SETS["b"]})
    assert comparison.check["passed"]
    assert comparison.check["positions"] == 0
    assert comparison.check["of"] == 6
    break_speculation(monkeypatch, wrong_third_token)
    [comparison] = run(target, drafter, check="gap", sets={"b": SETS["b"]})
    assert not comparison.check["passed"]
    assert comparison.check["largest_gap"] > comparison.check["tolerance"] == 0.01
    assert comparison.identical is False  # the run itself was float32


def test_gap_of_the_end_token(target):
    output = decode_all(target, None, SETS["b"], SETTINGS, 16)
    logits = target.forward(jnp.asarray([[6, *output.tokens[0][:2]]])).logits[0]
    ended = dataclasses.replace(output, tokens=[output.tokens[0][:2]], finish_reasons=["stop"])
    score = score_gaps(target, SETS["b"], ended, 0.0)
    assert score["of"] == 3
    gap = float(jnp.max(logits[-1]) - logits[-1, STOP])
    assert score["largest_gap"] == pytest.approx(gap, rel=1e-4)


def test_sampled_outputs_are_not_compared(target, drafter):
    settings = dataclasses.replace(SETTINGS, temperature=1.0)
    for comparison in run(target, drafter, settings):
        assert comparison.identical is None
        assert comparison.as_run is None
    assert np.all(comparison.speculative.stats.rounds_B > 0)


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -0.1])
def test_gap_tolerances(target, drafter, tolerance):
    with pytest.raises(ValueError, match="gap_tolerance must be finite and at least 0"):
        compare(target, drafter, SETS, SETTINGS, check="gap", gap_tolerance=tolerance)


def test_unknown_check(target, drafter):
    with pytest.raises(ValueError, match="unknown check 'float16': known are float32, gap, none"):
        run(target, drafter, check="float16")
