"""Logits processors: each equals its definition, and speculation changes none of them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from scipy import stats as scipy_stats

from specjax.checkpoints import load_drafter
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.sampling import adjust_logits, process_logits
from specjax.decoding.types import DecodeConfig, SamplingParams
from specjax.drafters import NoDrafter, PromptLookup
from tests.reference import adjust, process, softmax
from tests.toys import (
    MarkovDrafter,
    MarkovTarget,
    jitted_step,
    new_tokens,
    sampling_state,
    texts,
    tiny_target,
)

PROMPTS = [[5, 6, 7], [1], [9, 8] * 20, [3, 3, 3, 3, 4]]
PROCESSORS = [
    {"top_k_B": 3},
    {"top_p_B": 0.6},
    {"min_p_B": 0.3},
    {"repetition_penalty_B": 1.7},
    {"frequency_penalty_B": 0.8, "presence_penalty_B": 0.5},
    {"frequency_penalty_B": -0.6},
    {"logit_bias": {4: 3.0, 9: -float("inf")}},
    {"min_new_tokens_B": 12},
    {"ignore_eos_B": True},
    {
        "top_k_B": 9,
        "top_p_B": 0.9,
        "min_p_B": 0.01,
        "repetition_penalty_B": 1.2,
        "frequency_penalty_B": 0.3,
        "logit_bias": {4: 1.0},
        "min_new_tokens_B": 5,
    },
]


def some_slow(*fast):
    """All of PROCESSORS as parameters; those whose index is not given are slow tests."""
    return [
        pytest.param(options, id=" ".join(options), marks=[] if i in fast else pytest.mark.slow)
        for i, options in enumerate(PROCESSORS)
    ]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def generate(
    target,
    drafter,
    drafter_params,
    config,
    prompts=PROMPTS,
    stop_ids=(7, 20),
    batch=None,
    **options,
):
    static = {"target": target.model, "drafter": drafter, "config": config}
    state = init_decode_state(
        target.params, drafter_params, prompts, max_new_tokens=24, max_len=80, batch=batch,
        sampling=SamplingParams(**options), stop_ids=stop_ids, **static,
    )  # fmt: skip
    state = jax.device_get(decode(target.params, drafter_params, state, **static))
    return new_tokens(state)[: len(prompts)], state


@pytest.mark.parametrize("options", [
    {"top_k": 1}, {"top_k": 4}, {"top_k": 99}, {"top_p": 0.5}, {"top_p": 1e-6}, {"top_p": 0.999},
    {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 5, "top_p": 0.7, "min_p": 0.1},
])  # fmt: skip
def test_kept_tokens_equal_the_definition(rng, options):
    logits = (rng.normal(size=(6, 2, 40)) * 3).astype(np.float32)
    temperature = np.array([0.3, 0.7, 1.0, 1.3, 2.0, 5.0], np.float32)
    params = SamplingParams(
        temperature_B=temperature, **{f"{name}_B": value for name, value in options.items()}
    ).rows(6, 40)
    got = softmax(np.asarray(jax.jit(process_logits)(logits, params)))
    for row, position in itertools.product(range(6), range(2)):
        expected = process(logits[row, position], temperature[row], **options)
        np.testing.assert_allclose(got[row, position], expected, atol=1e-5)


def test_order_of_processors_decides_the_support():
    """Temperature 2 before top-p 0.5: the nucleus of the flattened distribution."""
    logits = np.log(np.array([[[0.6, 0.2, 0.1, 0.1]]], np.float32))
    params = SamplingParams(temperature_B=2.0, top_p_B=0.5).rows(1, 4)
    kept = np.isfinite(jax.jit(process_logits)(logits, params))[0, 0]
    assert kept.tolist() == (process(logits[0, 0], 2.0, top_p=0.5) > 0).tolist()
    assert kept.sum() == 2  # before the temperature one token would hold the mass


def test_penalties_see_the_drafts_before_each_position(rng):
    prompt, output, drafts = [1, 2, 2], [3, 5, 3], [5, 5, 9]
    options = {"repetition": 1.4, "frequency": 0.3, "presence": 0.7}
    logits = (rng.normal(size=(1, 4, 12)) * 3).astype(np.float32)
    params = SamplingParams(**{f"{name}_penalty_B": value for name, value in options.items()})
    state = dataclasses.replace(
        sampling_state(params, 1, 12),
        prompt_len_B=np.array([3]),
        prompt_counts_BV=np.bincount(prompt, minlength=12)[None],
        output_counts_BV=np.bincount(output, minlength=12)[None],
    )
    earlier = np.arange(3)[None] < np.arange(4)[:, None]
    got = jax.jit(adjust_logits)(logits, state, np.array([6]), np.array([drafts]), earlier)
    got = np.asarray(got)
    for k in range(4):
        expected = adjust(logits[0, k], prompt, output + drafts[:k], **options)
        np.testing.assert_allclose(got[0, k], expected, rtol=1e-5)


# A bias of nothing, which changes no output: with it fewer programs differ.
UNBIASED = {"logit_bias": {}}


@pytest.mark.parametrize("options", some_slow(3, 4, 6, 7, 8, 9))
def test_greedy_output_is_unchanged(target, options):
    options = UNBIASED | options
    expected, _ = generate(target, NoDrafter(), (), DecodeConfig(0), **options)
    got, state = generate(target, PromptLookup(min_ngram=1), (), DecodeConfig(4), **options)
    assert got == expected
    assert state.stats.verified_BG.sum() > 0


@pytest.mark.parametrize("options", some_slow(4, 9))
def test_coupled_output_is_unchanged(target, options):
    options = UNBIASED | options | {"temperature_B": 0.8, "seed_B": 3}
    expected, _ = generate(
        target, NoDrafter(), (), DecodeConfig(0, acceptance="coupled"), **options
    )
    config = DecodeConfig(4, acceptance="coupled")
    early = load_drafter("early_exit:1", target)
    got, state = generate(target, early.model, early.params, config, **options)
    assert got == expected
    assert state.stats.accepted_BG.sum() > 0


@pytest.mark.parametrize("options", [
    {}, {"top_k_B": 2}, {"top_p_B": 0.9}, {"min_p_B": 0.2}, {"repetition_penalty_B": 1.5},
    {"presence_penalty_B": 1.0, "frequency_penalty_B": 0.5}, {"logit_bias": {2: 1.0}},
])  # fmt: skip
def test_sampled_text_has_the_processed_distribution(options):
    """Chi-square of the first three tokens against the exact joint; significance 1e-3."""
    rows, size, length, temperature = 1 << 16, 3, 3, 1.2
    table, draft_table = np.array(
        [jax.random.normal(jax.random.key(seed), (size, size)) for seed in (2, 3)]
    )
    draft_table = draft_table * np.float32(1.5)
    static = {"target": MarkovTarget(size), "drafter": MarkovDrafter(), "config": DecodeConfig(2)}
    state = init_decode_state(
        table, draft_table, [[0]] * rows, max_new_tokens=length + 1,
        sampling=SamplingParams(temperature_B=temperature, **options), **static,
    )  # fmt: skip
    new = np.asarray(decode(table, draft_table, state, **static).tokens_BS)[:, 1 : 1 + length]
    observed = np.zeros((size,) * length)
    np.add.at(observed, tuple(new.T), 1)
    expected = np.zeros_like(observed)
    penalties = {k.removesuffix("_penalty_B"): v for k, v in options.items() if "penalty" in k}
    filters = {
        name.removesuffix("_B"): value
        for name, value in options.items()
        if name in ("top_k_B", "top_p_B", "min_p_B")
    }
    bias = np.zeros(size)
    for token, value in options.get("logit_bias", {}).items():
        bias[token] = value
    for sequence in itertools.product(range(size), repeat=length):
        chance, text = 1.0, [0]
        for token in sequence:
            logits = adjust(table[text[-1]] + bias, [0], text[1:], **penalties)
            chance *= process(logits, temperature, **filters)[token]
            text.append(token)
        expected[sequence] = chance * rows
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert possible.sum() > 1
    assert scipy_stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-3


def test_min_p_that_leaves_one_token_at_a_drafted_position(target):
    options = {"temperature_B": 1.0, "min_p_B": 1.0}
    expected, _ = generate(target, NoDrafter(), (), DecodeConfig(0))
    early = load_drafter("early_exit:1", target)
    for acceptance in ("rejection", "coupled"):
        config = DecodeConfig(3, acceptance=acceptance)
        assert generate(target, early.model, early.params, config, **options)[0] == expected


def test_min_new_tokens_and_ignore_eos(target):
    [free] = generate(target, NoDrafter(), (), DecodeConfig(0), PROMPTS[:1], ())[0]
    stop = free[3]
    config = DecodeConfig(0)
    [early] = generate(target, NoDrafter(), (), config, PROMPTS[:1], (stop,))[0]
    assert early == free[: free.index(stop) + 1]
    [ignored] = generate(target, NoDrafter(), (), config, PROMPTS[:1], (stop,), ignore_eos_B=True)[
        0
    ]
    assert ignored == free
    [later] = generate(target, NoDrafter(), (), config, PROMPTS[:1], (stop,), min_new_tokens_B=10)[
        0
    ]
    assert stop not in later[:10]


@pytest.mark.parametrize(("options", "message"), [
    ({"top_k_B": -1}, "top_k must be"),
    ({"top_k_B": 2.5}, "top_k must be"),
    ({"top_p_B": 0.0}, "top_p must be"),
    ({"top_p_B": 1.1}, "top_p must be"),
    ({"min_p_B": float("nan")}, "min_p must be"),
    ({"repetition_penalty_B": 0.0}, "repetition_penalty must be"),
    ({"frequency_penalty_B": float("inf")}, "frequency_penalty must be"),
    ({"logit_bias": {61: 1.0}}, "logit_bias has token ids outside"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias must be"),
    ({"logit_bias": [{1: 1.0}, {}]}, "logit_bias must be"),
    ({"min_new_tokens_B": -1}, "min_new_tokens must be"),
])  # fmt: skip
def test_values_out_of_range_are_named(options, message):
    columns = {name: np.asarray(v) if name != "logit_bias" else v for name, v in options.items()}
    params = SamplingParams()
    for name, value in columns.items():
        object.__setattr__(params, name, value)  # past the type checks of the tests
    with pytest.raises(ValueError, match=message):
        params.rows(1, 61)


# --- Coupled acceptance and draft models --------------------------------------------------

# Drafts that are all accepted, those that seldom are, and rows without any.
FAST = [("self", 3), ("early_exit:1", 7), ("prompt_lookup", 3)]


@pytest.mark.parametrize(
    ("drafter_name", "draft_len"),
    [
        pytest.param(name, size, marks=[] if (name, size) in FAST else pytest.mark.slow)
        for name in ("prompt_lookup", "early_exit:1", "self", "other")
        for size in (1, 3, 7)
    ],
)
def test_coupled_sampling_equals_autoregressive_token_for_token(target, drafter_name, draft_len):
    named = {"self": target, "other": tiny_target(seed=5)}
    drafter = load_drafter(named.get(drafter_name, drafter_name), target)
    options = {"temperature_B": 0.8, "seed_B": np.array([4, 7, 9, 11])}
    expected, _ = generate(
        target, NoDrafter(), (), DecodeConfig(0, acceptance="coupled"), **options
    )
    config = DecodeConfig(draft_len, acceptance="coupled")
    got, state = generate(target, drafter.model, drafter.params, config, **options)
    assert got == expected
    order = [2, 0, 3]
    again, _ = generate(
        target, drafter.model, drafter.params, config, [PROMPTS[i] for i in order],
        batch=4, temperature_B=0.8, seed_B=options["seed_B"][order],
    )  # fmt: skip
    assert again == [expected[i] for i in order]
    if drafter_name == "self":
        whole = state.stats.accepted_BG == state.stats.verified_BG
        assert whole.all()


def assert_draft_cache_is_exact(target_params, drafter_params, state, **options):
    """Over live entries it equals the cache of a state made from the committed text."""
    options = {"max_new_tokens": 1, **options}
    fresh = init_decode_state(target_params, drafter_params, texts(state), **options)
    caches = jax.device_get((state.drafter_state.cache, fresh.drafter_state.cache))
    for row, text in enumerate(texts(state)):
        for old, new in zip(*caches, strict=True):
            for a, b in zip(old, new, strict=True):
                live = len(text) - 1
                np.testing.assert_allclose(a[row, :, :live], b[row, :, :live], 1e-4, 1e-4)


def test_draft_model_cache_after_ten_full_acceptances(target):
    drafter = load_drafter(target, target)
    config = DecodeConfig(3)
    static = {"target": target.model, "drafter": drafter.model, "config": config}
    state = init_decode_state(
        target.params, drafter.params, PROMPTS, max_new_tokens=60, max_len=120, **static
    )
    for _ in range(10):
        state, out = jitted_step(target.params, drafter.params, state, **static)
        assert out.accepted_B.tolist() == [3] * 4
    assert_draft_cache_is_exact(target.params, drafter.params, state, max_len=120, **static)


def test_draft_model_cache_after_random_accept_lengths(target):
    drafter = load_drafter("early_exit:1", target)
    static = {"target": target.model, "drafter": drafter.model, "config": DecodeConfig(3)}
    options = {"max_len": 120, "sampling": SamplingParams(temperature_B=0.7)}
    state = init_decode_state(
        target.params, drafter.params, PROMPTS, max_new_tokens=60, **options, **static
    )
    lengths = set()
    for _ in range(10):
        state, out = jitted_step(target.params, drafter.params, state, **static)
        lengths |= set(out.accepted_B.tolist())
    assert len(lengths) > 1
    assert_draft_cache_is_exact(target.params, drafter.params, state, **options, **static)


def test_different_vocabularies_are_refused(target):
    with pytest.raises(ValueError, match="vocabularies differ"):
        load_drafter(tiny_target(vocab_size=50), target)
    for name in ("early_exit:0", "early_exit:2", "early_exit:x"):
        with pytest.raises(ValueError, match=r"early exit after|needs a number of layers"):
            load_drafter(name, target)


def test_log_probabilities_of_emitted_tokens(target):
    prompt = PROMPTS[0]
    for temperature, drafter in ((0.0, "prompt_lookup"), (0.7, "early_exit:1")):
        loaded = load_drafter(drafter, target)
        config = DecodeConfig(3, logprobs=True)
        [new], state = generate(
            target, loaded.model, loaded.params, config, [prompt], (), temperature_B=temperature,
            top_k_B=5,
        )  # fmt: skip
        text = np.array([prompt + new])
        logits = np.asarray(target.forward(text).logits)[0, len(prompt) - 1 : -1]
        span = slice(len(prompt), len(prompt) + len(new))
        expected = [np.log(softmax(row))[token] for row, token in zip(logits, new, strict=True)]
        np.testing.assert_allclose(state.logprobs.raw[0, span], expected, atol=1e-4)
        processed = np.zeros(len(new))
        if temperature:
            processed = [
                np.log(process(row, temperature, top_k=5)[token])
                for row, token in zip(logits, new, strict=True)
            ]
        np.testing.assert_allclose(state.logprobs.processed[0, span], processed, atol=1e-3)


def test_rounds_without_drafts_cost_one_position(target):
    """Prompt lookup that never matches verifies nothing, and decodes as without drafter."""
    prompts = [[5, 6, 7], [1]]
    got, state = generate(target, PromptLookup(8, 8), (), DecodeConfig(3), prompts)
    assert got == generate(target, NoDrafter(), (), DecodeConfig(0), prompts)[0]
    assert state.stats.verified_BG.sum() == 0
    assert state.stats.drafted_B.sum() == 0
