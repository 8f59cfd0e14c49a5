"""MTP modules: the training pass, drafting with caches, and losslessness."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.api import default_draft_len
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.step import speculate_step
from specjax.decoding.types import DecodeConfig, SamplingParams
from specjax.drafters import Drafter, NoDrafter
from specjax.drafters.mtp import MTP
from specjax.drafters.mtp_init import init_mtp
from tests.drafters.enumerated import check_enumerated_round
from tests.toys import call, sampling_state, tiny_target

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
jitted_step = jax.jit(speculate_step, static_argnames=("target", "drafter", "config"))
OPTIONS = [
    {"hidden_source": source, "hidden_norm": norm, "concat": concat, "shared_module": shared}
    for source, norm, concat, shared in [
        ("chain", "post", "emb_h", False),
        ("pinned", "pre", "h_emb", False),
        ("chain", "pre", "h_emb", True),
    ]
]


def make(depth: int = 2, options: dict | None = None):
    target = tiny_target()
    model, params = init_mtp(target, jax.random.key(3), depth=depth, **(options or {}))
    modules = {k: jax.tree.map(lambda x: 2 * x, p) for k, p in params.items() if "module" in k}
    return target, model, {**params, **modules}


def hidden_of(target, model: MTP, tokens):
    out = target.forward(tokens, taps=model.taps)
    return out.hidden if out.taps is None else out.taps[:, :, 0]


def texts_of(state) -> list[list[int]]:
    """The committed tokens of every row."""
    rows = zip(np.asarray(state.tokens_BS), np.asarray(state.length_B), strict=True)
    return [row[:length].tolist() for row, length in rows]


# --- A slow version in NumPy -------------------------------------------------------------


def numpy_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * np.asarray(scale)


def numpy_module(params, config, hidden_TD, embedded_TD, first: int = 0):
    """One module over one row, position by position and head by head."""
    weight = jax.tree.map(np.asarray, params)
    parts = [
        numpy_norm(embedded_TD, weight["embedding_norm"]["scale"]),
        numpy_norm(hidden_TD, weight["hidden_norm"]["scale"]),
    ]
    if config.concat == "h_emb":
        parts.reverse()
    x = np.concatenate(parts, axis=-1) @ weight["projection"]["weight"].T
    block, attention = weight["block"], weight["block"]["attention"]
    normed = numpy_norm(x, block["attention_norm"]["scale"])
    q, k, v = (normed @ attention[f"{n}_proj"]["weight"].T for n in "qkv")
    length, width = len(x), 8
    angles = np.outer(first + np.arange(length), 1e4 ** (-np.arange(0, width, 2) / width))

    def rotated(y):
        a, b = y[:, : width // 2], y[:, width // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    heads = []
    for n in range(4):
        qn = rotated(q[:, n * width : (n + 1) * width])
        kn, vn = (y[:, n // 2 * width : (n // 2 + 1) * width] for y in (k, v))
        scores = qn @ rotated(kn).T / np.sqrt(width)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        heads.append(weights / weights.sum(axis=-1, keepdims=True) @ vn)
    x = x + np.concatenate(heads, axis=-1) @ attention["o_proj"]["weight"].T
    normed = numpy_norm(x, block["mlp_norm"]["scale"])
    gate, up = (normed @ block["mlp"][f"{n}_proj"]["weight"].T for n in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp"]["down_proj"]["weight"].T
    normed = numpy_norm(x, weight["final_norm"]["scale"])
    return normed if config.hidden_norm == "post" else x, normed


def numpy_drafts(target, model, params, text: list[int], count: int) -> list[int]:
    """The greedy drafts after a text, with all modules run anew over all of it."""
    c, table = model.config, np.asarray(params["embed"]["weight"])
    n, tokens = len(text), list(text)
    below = np.asarray(hidden_of(target, model, np.array([text])))[0, : n - 1]
    for s in range(1, count + 1):
        k = min(s, c.depth)
        module = params["module_0" if c.shared_module else f"module_{k - 1}"]
        if s > c.depth:  # one position more, with the last output in place of a hidden state
            inputs = np.concatenate([inputs, (out if c.hidden_source == "chain" else below)[-1:]])
        else:
            inputs = below
        out, normed = numpy_module(module, c, inputs, table[tokens[k : k + len(inputs)]])
        if c.hidden_source == "chain":
            below = out
        head = np.asarray(params["lm_head"]["weight"])
        choice = int(np.argmax(head @ normed[-1]))
        tokens.append(int(params["draft_ids"][choice]) if "draft_ids" in params else choice)
    return tokens[n:]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_pass_equals_a_slow_one(options):
    target, model, params = make(3, options)
    tokens = np.random.default_rng(0).integers(61, size=(1, 12))
    hidden = hidden_of(target, model, tokens)
    got = jax.jit(model.forward)(params, jnp.asarray(tokens), hidden, jnp.arange(12)[None])
    below, table = np.asarray(hidden[0]), np.asarray(params["embed"]["weight"])
    for k in (1, 2, 3):
        module = params["module_0" if model.config.shared_module else f"module_{k - 1}"]
        out, normed = numpy_module(module, model.config, below[: 12 - k], table[tokens[0, k:]])
        np.testing.assert_allclose(got[0, : 12 - k, k - 1], normed, **CLOSE)
        if model.config.hidden_source == "chain":
            below = out


# --- Drafting ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "draft_len"),
    [
        pytest.param(
            options, count, marks=[pytest.mark.slow] * (options is not OPTIONS[0] or count < 5)
        )
        for options, count in itertools.product(OPTIONS, (1, 2, 5))
    ],
    ids=str,
)
def test_drafts_equal_those_without_caches_after_any_accepted_lengths(options, draft_len):
    target, model, params = make(2, options)
    static = {"target": target.model, "drafter": model, "config": DecodeConfig(draft_len)}
    prompts = [[7], [5, 9, 11, 2, 30, 31], [1, 2]]
    state = init_decode_state(
        target.params, params, prompts, max_new_tokens=30, max_len=60,
        sampling=SamplingParams(temperature_B=jnp.array([0.0, 0.0, 0.9]), seed_B=4), **static,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), (3, draft_len))
    propose = jax.jit(model.propose)
    for _ in range(4):
        rows = texts_of(state)
        anchors = jnp.asarray([row[-1] for row in rows])
        greedy = sampling_state(SamplingParams(temperature_B=0.0), 3, 61)
        proposal, _ = propose(params, state.drafter_state, anchors, state.length_B, greedy, keys)
        for row, drafts in zip(rows, np.asarray(proposal.tokens_BG).tolist(), strict=True):
            if len(row) > model.config.depth:  # else a depth has no position before the anchor
                assert drafts == numpy_drafts(target, model, params, row, draft_len)
        state, _ = jitted_step(target.params, params, state, **static)


@pytest.mark.parametrize(
    "options",
    [OPTIONS[2], *(pytest.param(options, marks=pytest.mark.slow) for options in OPTIONS[:2])],
    ids=str,
)
def test_caches_after_rounds_hold_the_chain_over_the_text(options):
    target, model, params = make(2, options)
    static = {"target": target.model, "drafter": model, "config": DecodeConfig(4)}
    prompts = [[7], [5, 9, 11, 2, 30, 31]]
    kept = {"max_len": 60, "sampling": SamplingParams(temperature_B=0.9), **static}
    state = init_decode_state(target.params, params, prompts, max_new_tokens=30, **kept)
    for _ in range(5):
        state, _ = jitted_step(target.params, params, state, **static)
    for row, length in enumerate(np.asarray(state.length_B)):
        text = np.asarray(state.tokens_BS)[row, : length - 1].tolist()
        anew = init_decode_state(target.params, params, [text], max_new_tokens=2, **kept)
        pairs = zip(state.drafter_state.caches, anew.drafter_state.caches, strict=True)
        for k, (cache, fresh) in enumerate(pairs, start=1):
            for got, expected in zip(cache, fresh, strict=True):
                live = length - 1 - k
                np.testing.assert_allclose(got[row, :, :live], expected[0, :, :live], **CLOSE)
        np.testing.assert_allclose(
            state.drafter_state.hidden_BKD[row], anew.drafter_state.hidden_BKD[0], **CLOSE
        )


@pytest.mark.parametrize(
    ("acceptance", "temperature"),
    [("rejection", 0.0), pytest.param("coupled", 0.8, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "draft_len",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)],
)
def test_output_is_the_targets_own(acceptance, temperature, draft_len):
    """Ragged rows too: each as if it were alone."""
    target, model, params = make(2)
    prompts = [[7], [5, 9, 11, 2, 30, 31], [1, 2]]
    outputs = []
    for drafter, drafter_params, count in ((NoDrafter(), (), 0), (model, params, draft_len)):
        config = DecodeConfig(count, acceptance=acceptance)
        static = {"target": target.model, "drafter": drafter, "config": config}
        state = init_decode_state(
            target.params, drafter_params, prompts, max_new_tokens=20, max_len=60,
            sampling=SamplingParams(temperature_B=temperature, seed_B=1), **static,
        )  # fmt: skip
        state = decode(target.params, drafter_params, state, **static)
        outputs.append(texts_of(state))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_enumerated_round_has_the_targets_distribution(depth):
    target, model, params = make(depth)
    prompt, anchor = [3, 14, 15, 9], 26
    out = target.forward([prompt])
    state = call(
        model, "observe", params, model.init_state(1, 16), np.array([prompt]), None, out.hidden,
        np.array([0]), np.array([len(prompt)]),
    )  # fmt: skip
    check_enumerated_round(target, Drafter(model, params, "mtp"), state, prompt, anchor)


def test_a_trimmed_vocabulary_drafts_its_tokens_alone():
    target = tiny_target()
    ids = [3, 5, 8, 13, 21, 34, 55]
    model, params = init_mtp(target, jax.random.key(3), depth=1, draft_vocab=ids)
    assert params["lm_head"]["weight"].shape == (7, 32)
    state = model.init_state(1, 16)
    keys = jax.random.split(jax.random.key(0), (1, 4))
    sampling = sampling_state(SamplingParams(temperature_B=1.0), 1, 61)
    proposal, _ = jax.jit(model.propose)(
        params, state, jnp.array([4]), jnp.array([6]), sampling, keys
    )
    assert set(np.asarray(proposal.tokens_BG).ravel().tolist()) <= set(ids)


@pytest.mark.parametrize(("depth", "draft_len"), [(1, 3), (5, 5)])
def test_drafts_that_are_made_unless_others_are_asked_for(depth, draft_len):
    _, model, params = make(depth)
    assert default_draft_len(Drafter(model, params, "mtp")) == draft_len


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth must be at least 1"),
        ({"hidden_source": "free"}, "hidden_source must be 'chain' or 'pinned'"),
        ({"hidden_norm": "none"}, "hidden_norm must be 'pre' or 'post'"),
        ({"concat": "both"}, "concat must be"),
        ({"layers": 3}, r"unknown options \['layers'\]"),
        ({"draft_vocab": [1, 1]}, "distinct token ids"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        init_mtp(tiny_target(), jax.random.key(0), **options)
