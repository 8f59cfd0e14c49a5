"""DSpark and DFlash against the recorded reference, and against their own training path."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.sampling import draft_distribution
from specjax.decoding.schedule import ThresholdPolicy
from specjax.decoding.types import DecodeConfig, DraftDist, SamplingParams
from specjax.drafters import Drafter, DSpark, DSparkConfig, NoDrafter, init_dspark
from specjax.drafters.dspark_init import restrict, unused_token
from tests.drafters.enumerated import check_enumerated_round, repeat_rows
from tests.drafters.golden import CLOSE, KINDS, golden_drafter, golden_target, recorded
from tests.reference import softmax
from tests.toys import call, jitted_step, new_tokens, sampling_state, texts, tiny_target


def split_taps(features_BTC: np.ndarray, taps: int = 2) -> np.ndarray:
    """The recorded features have the taps side by side."""
    return features_BTC.reshape(*features_BTC.shape[:2], taps, -1)


def observe(drafter, state, features_BTMD, start, count):
    """Takes in the first `count` of one row's features; tokens and last hidden are not used."""
    features_BTMD = np.asarray(features_BTMD)
    return call(
        drafter.model, "observe", drafter.params, state,
        np.zeros(features_BTMD.shape[:2], np.int32), features_BTMD, features_BTMD[:, :, 0],
        np.array([start]), np.array([count]),
    )  # fmt: skip


def propose(drafter, state, anchor_B, length_B, sampling, keys_BG):
    """The proposal as NumPy arrays, and the state after it."""
    proposal, state = call(
        drafter.model, "propose", drafter.params, state, anchor_B, length_B, sampling, keys_BG
    )
    return jax.device_get(proposal), state


def forward(drafter, features_BTMD, tokens_BAG, previous_BAG, anchors_BA):
    """The training pass, as NumPy arrays."""
    return jax.device_get(
        call(
            drafter.model, "forward", drafter.params, features_BTMD, tokens_BAG, previous_BAG,
            anchors_BA,
        )
    )  # fmt: skip


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


# --- The training pass -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_pass_equals_the_reference(kind):
    drafter, gold = golden_drafter(kind), recorded(kind, "train")
    anchors, keep = gold["anchor_positions"], gold["block_keep_mask"]
    tokens = np.full(gold["prev_token_ids"].shape, drafter.model.config.mask_token_id, np.int32)
    tokens[:, :, 0] = gold["prev_token_ids"][:, :, 0]
    features = split_taps(gold["target_hidden_states"])
    out = forward(drafter, features, tokens, gold["prev_token_ids"], anchors)
    for got, name in zip(
        out, ("output_hidden", "base_logits", "draft_logits", "confidence_pred"), strict=True
    ):
        if got is None:
            assert kind == "dflash"
            assert name not in gold
        else:
            np.testing.assert_allclose(got[keep], gold[name][keep], **CLOSE)


def test_target_features_at_or_after_the_anchor_change_nothing():
    drafter, gold = golden_drafter("dspark_rnn"), recorded("dspark_rnn", "train")
    anchors, tokens = gold["anchor_positions"][:, :2], gold["prev_token_ids"][:, :2]

    def hidden(features):
        return forward(drafter, features, tokens, tokens, anchors).logits_BAGV[:, 1]

    features = split_taps(gold["target_hidden_states"])
    later = np.arange(features.shape[1])[None] >= anchors[:, 1:]
    noise = np.random.default_rng(0).normal(size=features.shape).astype(np.float32)
    changed = features + noise * later[:, :, None, None]
    np.testing.assert_array_equal(hidden(features), hidden(changed))
    before = features + noise * ~later[:, :, None, None]
    assert np.abs(hidden(features) - hidden(before)).max() > 0.1


# --- Drafting and the cache --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_two_drafting_rounds_equal_the_reference(kind):
    drafter, gold = golden_drafter(kind), recorded(kind, "infer")
    state = drafter.model.init_state(1, 64)
    rounds = {
        "r1": (gold["context_ids"], gold["target_hidden_states"], gold["anchor_token"], 0),
        "r2": (
            gold["r2_new_context_ids"],
            gold["r2_target_hidden_states"],
            gold["r2_anchor_token"],
            gold["context_ids"].shape[1],
        ),
    }
    keys = jax.random.split(jax.random.key(0), (1, drafter.model.config.block_size))
    for name, (ids, features, anchor, start) in rounds.items():
        count = ids.shape[1]
        # One position more than is committed, as in a round whose last draft is rejected.
        more = np.pad(split_taps(features), ((0, 0), (0, 1), (0, 0), (0, 0)), "edge")
        state = observe(drafter, state, more, start, count)
        length = start + count
        assert length == gold[f"{name}_cache_len_after"]
        for side, layer in itertools.product("kv", ("0", "_last")):
            cache = np.asarray(state[0 if layer == "0" else -1][side == "v"])
            np.testing.assert_allclose(
                cache[:, :, :length], gold[f"{name}_cache_{side}{layer}"], **CLOSE
            )
            assert not np.any(cache[:, :, length:])  # nothing but what was committed
        sampling = sampling_state(SamplingParams(), 1, 97)
        proposal, after = propose(drafter, state, anchor, np.array([length + 1]), sampling, keys)
        jax.tree.map(np.testing.assert_array_equal, after, state)
        np.testing.assert_array_equal(proposal.tokens_BG, gold[f"{name}_draft_tokens"])
        shifted = gold[f"{name}_corrected_logits"]
        shifted = shifted - shifted.max(axis=-1, keepdims=True)
        np.testing.assert_allclose(proposal.dist.logits_BGC, shifted, **CLOSE)
        if proposal.confidence_BG is None:
            assert kind == "dflash"
        else:
            expected = sigmoid(gold[f"{name}_confidence_logits"])
            np.testing.assert_allclose(proposal.confidence_BG, expected, **CLOSE)


def rounds_of(kind, drafter, gold, policy):
    """Every round of a recorded greedy decode, driven step by step.

    The reference goes on while the anchor stands before the limit: one token more.
    """
    target = golden_target(kind)
    prompt = gold["prompt_ids"].tolist()
    static = {
        "target": target.model,
        "drafter": drafter.model,
        "config": DecodeConfig(drafter.model.config.block_size, policy),
    }
    state = init_decode_state(
        target.params, drafter.params, [prompt], max_new_tokens=int(gold["max_new_tokens"]) + 1,
        stop_ids=gold["stop_token_ids"].tolist(), **static,
    )  # fmt: skip
    outs = []
    while not np.any(state.done_B):
        state, out = jitted_step(target.params, drafter.params, state, **static)
        outs.append(jax.device_get(out))
    return jax.device_get(state), outs


SLOW_DECODES = [("decode_threshold", kind) for kind in KINDS[1:]]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind,
            name,
            # Their confidences are compared in the rounds above.
            marks=pytest.mark.slow if (name, kind) in SLOW_DECODES else [],
        )
        for kind in KINDS
        for name in ("decode", "decode_stop", "decode_threshold")
        if (kind, name) != ("dflash", "decode_threshold")
    ],
)
def test_whole_decodes_equal_the_reference(kind, name):
    drafter, gold = golden_drafter(kind), recorded(kind, name)
    threshold = float(gold["confidence_threshold"])
    policy = ThresholdPolicy(threshold) if threshold else DecodeConfig(1).policy
    state, outs = rounds_of(kind, drafter, gold, policy)
    text = texts(state)[0][: len(gold["output_ids"])]
    assert text == gold["output_ids"].tolist()
    assert (
        text[: len(gold["target_ar_greedy_ids"])]
        == gold["target_ar_greedy_ids"].tolist()[: len(text)]
    )
    verified = np.array([out.verify_len_B[0] for out in outs])
    accepted = np.array([out.accepted_B[0] for out in outs])
    stops = np.isin(gold["stop_token_ids"], text[-1:]).any()
    if stops:  # ours are told before the cut at a stop token
        verified[-1] = min(verified[-1], outs[-1].count_B[0])
        accepted[-1] = min(accepted[-1], outs[-1].count_B[0])
    np.testing.assert_array_equal(verified, gold["proposal_lengths"])
    np.testing.assert_array_equal(accepted, gold["accepted_draft_lengths"])
    assert int(state.stats.rounds_B[0]) == len(gold["acceptance_lengths"])
    committed = int(state.stats.accepted_BG.sum() + state.stats.bonus_B.sum())
    assert committed == gold["acceptance_lengths"].sum()


@pytest.mark.parametrize("position", [3, 3000])
def test_training_and_decoding_logits_agree(position):
    """Also far into a text: the rotary positions of the two paths are the same."""
    drafter = golden_drafter("dspark_vanilla")
    rng = np.random.default_rng(position)
    length = position + 2
    features = rng.normal(size=(1, length, 2, 32)).astype(np.float32)
    block = drafter.model.config.block_size
    anchor = 5
    state = drafter.model.init_state(1, -(-(length + 1) // 256) * 256)
    state = observe(drafter, state, features, 0, position)
    keys = jax.random.split(jax.random.key(0), (1, block))
    sampling = sampling_state(SamplingParams(), 1, 97)
    proposal, _ = propose(
        drafter, state, np.array([anchor]), np.array([position + 1]), sampling, keys
    )
    previous = np.array([[[anchor, *proposal.tokens_BG[0, :-1].tolist()]]], np.int32)
    tokens = np.full((1, 1, block), drafter.model.config.mask_token_id, np.int32)
    tokens[..., 0] = anchor
    out = forward(drafter, features, tokens, previous, np.array([[position]]))
    q = softmax(out.logits_BAGV[0, 0])
    np.testing.assert_allclose(softmax(proposal.dist.logits_BGC[0]), q, **CLOSE)
    np.testing.assert_allclose(
        proposal.confidence_BG[0], sigmoid(out.confidence_BAG[0, 0]), **CLOSE
    )


def test_cache_after_rounds_equals_one_built_from_the_text():
    """Whatever was accepted, in rows of different lengths."""
    target, drafter = golden_target(), golden_drafter("dspark_rnn")
    prompts = [[1, 2, 3], [4] * 30, [50, 60]]
    static = {"target": target.model, "drafter": drafter.model, "config": DecodeConfig(4)}
    options = {"max_len": 120, "sampling": SamplingParams(temperature_B=0.7, seed_B=1), **static}
    state = init_decode_state(target.params, drafter.params, prompts, max_new_tokens=40, **options)
    accepted = set()
    for _ in range(8):
        state, out = jitted_step(target.params, drafter.params, state, **static)
        accepted |= set(out.accepted_B.tolist())
    assert len(accepted) > 1  # or nothing was put to the test
    rebuilt = init_decode_state(
        target.params, drafter.params, texts(state), max_new_tokens=1, **options
    )
    states = jax.device_get((state.drafter_state, rebuilt.drafter_state))
    for row, text in enumerate(texts(state)):
        for old, new in zip(*map(jax.tree.leaves, states), strict=True):
            live = len(text) - 1
            np.testing.assert_allclose(old[row, :, :live], new[row, :, :live], atol=1e-5)


# --- Restricted drafts -------------------------------------------------------------------

RESTRICTED = {
    "all": {},
    "candidates": {"candidates": 5},
    "trimmed": {"draft_vocab": tuple(range(0, 97, 2))},
    "both": {"draft_vocab": tuple(range(0, 97, 2)), "candidates": 5},
}


SOME_SLOW = [
    "all",
    pytest.param("candidates", marks=pytest.mark.slow),
    pytest.param("trimmed", marks=pytest.mark.slow),
    "both",
]


# Processors that drafts must follow; decoding with any such takes the same program.
PROCESSED = {
    "seed_B": 5,
    "top_p_B": 0.95,
    "repetition_penalty_B": 1.1,
    "frequency_penalty_B": 0.1,
    "min_new_tokens_B": 6,
    "logit_bias": {4: 1.5, 11: -float("inf")},
}


def run(drafter, draft_len, **options):
    """Output of a coupled decode, and the state after it as NumPy arrays."""
    target = golden_target()
    static = {
        "target": target.model,
        "drafter": drafter.model,
        "config": DecodeConfig(draft_len, acceptance="coupled"),
    }
    state = init_decode_state(
        target.params, drafter.params, [[5, 6, 7], [1], [9, 8] * 10], max_new_tokens=24,
        max_len=80, stop_ids=(7, 20), sampling=SamplingParams(**PROCESSED | options), **static,
    )  # fmt: skip
    state = jax.device_get(decode(target.params, drafter.params, state, **static))
    return new_tokens(state), state


@functools.cache
def undrafted(**options):
    return run(Drafter(NoDrafter(), (), "none"), 0, **options)[0]


@pytest.mark.parametrize(
    ("restriction", "temperature"),
    [
        ("all", 0.8),
        ("both", 0.8),
        ("both", 0.0),
        pytest.param("all", 0.0, marks=pytest.mark.slow),
        pytest.param("candidates", 0.0, marks=pytest.mark.slow),
        pytest.param("candidates", 0.8, marks=pytest.mark.slow),
        pytest.param("trimmed", 0.0, marks=pytest.mark.slow),
        pytest.param("trimmed", 0.8, marks=pytest.mark.slow),
    ],
)
def test_output_is_the_targets_own(restriction, temperature):
    """Token for token: greedy, and coupled, with processors that drafts must follow."""
    drafter = golden_drafter("dspark_gated", **RESTRICTED[restriction])
    got, state = run(drafter, 3, temperature_B=temperature)
    assert got == undrafted(temperature_B=temperature)
    assert state.stats.accepted_BG.sum() > 0


@pytest.mark.parametrize("restriction", SOME_SLOW)
def test_draft_is_drawn_from_q(restriction):
    """Many rows of one state: how often each token comes first is what q says."""
    rows, drafter = 20_000, golden_drafter("dspark_vanilla", **RESTRICTED[restriction])
    gold = recorded("dspark_vanilla", "infer")
    state = drafter.model.init_state(1, 16)
    state = observe(drafter, state, split_taps(gold["target_hidden_states"]), 0, 10)
    keys = jax.random.split(jax.random.key(3), (rows, 2))
    sampling = sampling_state(SamplingParams(temperature_B=1.5, top_p_B=0.9), rows, 97)
    anchors, lengths = np.repeat(gold["anchor_token"], rows), np.full(rows, 11)
    proposal, _ = propose(drafter, repeat_rows(state, rows), anchors, lengths, sampling, keys)
    q, ids = softmax(proposal.dist.logits_BGC), proposal.dist.ids_BGC
    ids = np.arange(97) if ids is None else ids[0, 0]
    if "draft_vocab" in RESTRICTED[restriction]:
        assert set(ids.tolist()) <= set(RESTRICTED[restriction]["draft_vocab"])
    first = proposal.tokens_BG[:, 0]
    counts = np.bincount(first, minlength=97)
    expected = np.zeros(97)
    expected[ids] = q[0, 0]
    assert 0.5 * np.abs(counts / rows - expected).sum() < 0.02
    # Of the second draft each row has a q of its own, after its own first draft.
    for token in np.unique(first):
        same = q[first == token, 1]
        np.testing.assert_allclose(same, same[:1].repeat(len(same), axis=0), atol=1e-6)


@pytest.mark.parametrize("restriction", SOME_SLOW)
def test_enumerated_round_has_the_targets_distribution(restriction):
    prompt, anchor = [3, 14, 15, 9], 26
    target, drafter = golden_target(), golden_drafter("dspark_vanilla", **RESTRICTED[restriction])
    out = target.forward([prompt], taps=drafter.model.taps)
    state = observe(drafter, drafter.model.init_state(1, 16), out.taps, 0, len(prompt))
    check_enumerated_round(target, drafter, state, prompt, anchor)


def test_candidates_that_are_all_forbidden_still_have_a_distribution():
    drafter = golden_drafter("dspark_vanilla", draft_vocab=(7, 20))
    options = {"min_new_tokens_B": 24, "temperature_B": 0.9}
    got, state = run(drafter, 2, **options)
    assert got == undrafted(**options)
    assert state.stats.accepted_BG.sum() == 0


# --- Options -----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", [None, False, True])
@pytest.mark.parametrize("trimmed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_combination_builds_or_says_why_not(rank, head, confidence, trimmed):
    options = {
        "markov_rank": rank,
        "markov_head": head,
        "confidence_head": confidence is not None,
        "confidence_with_markov": bool(confidence),
        "draft_vocab": [3, 1, 4, 15] if trimmed else None,
        "mask_token_id": 60,
    }
    target = tiny_target()
    if confidence and not rank:
        with pytest.raises(ValueError, match="set confidence_with_markov=False, or markov_rank"):
            init_dspark(target, jax.random.key(0), **options)
        return
    made = []

    def build(key):
        made.append(init_dspark(target, key, num_layers=1, **options))
        return made[0][1]

    params = jax.eval_shape(build, jax.random.key(0))  # all but the compilation
    model = made[0][0]
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, model.param_shapes()
    )

    def propose(params, keys):
        state, sampling = model.init_state(2, 16), sampling_state(SamplingParams(), 2, 61)
        anchors, lengths = jnp.array([1, 2]), jnp.array([1, 5])
        proposal, _ = model.propose(params, state, anchors, lengths, sampling, keys)
        return proposal.tokens_BG, proposal.dist.logits_BGC, proposal.confidence_BG

    keys = jax.random.split(jax.random.key(0), (2, 3))
    tokens, q_logits, confidences = jax.eval_shape(propose, params, keys)
    assert tokens.shape == (2, 3)
    assert q_logits.shape == (2, 3, 4 if trimmed else 61)
    assert (confidences is None) == (confidence is None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"markov_rank": -1}, "markov_rank must be at least 0"),
        ({"markov_head": "lstm"}, "unknown markov_head 'lstm'"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"taps": (1, 0)}, "increasing layer indices"),
        ({"taps": ()}, "increasing layer indices"),
        ({"taps": (-2,)}, "increasing layer indices"),
        ({"taps": (1,)}, "reach beyond layer 0"),
        ({"mask_token_id": 61}, "outside the vocabulary of 61"),
        ({"mask_token_id": 9}, "mask_token_id 9 is an end-of-sequence token"),
        ({"mask_token_id": None}, "name one with mask_token_id"),
        ({"candidates": 62}, "candidates must be from 1 to 61"),
        ({"draft_vocab": [1, 2], "candidates": 3}, "candidates must be from 1 to 2"),
        ({"draft_vocab": [1, 1]}, "distinct token ids from 0 to 60"),
        ({"draft_vocab": [61]}, "distinct token ids from 0 to 60"),
        ({"draft_vocab": []}, "flat list of token ids"),
        ({"num_layers": 0}, "every size must be at least 1"),
        ({"block_size": 2**31 - 1}, "at most the target's context of 256"),
        ({"candidates": True}, "candidates must be a whole number, got True"),
        ({"dtype": "int8"}, "dtype must be 'float32' or 'bfloat16'"),
        ({"draft_vocab_size": 4}, "unknown options"),
        ({"rank": 3}, r"unknown options \['rank'\]: known are .*markov_rank"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    target = dataclasses.replace(tiny_target(), stop_ids=(9,))
    with pytest.raises(ValueError, match=message):
        init_dspark(target, jax.random.key(0), **{"mask_token_id": 60, **options})


def test_ids_that_no_token_has_are_no_ones():
    """As an index -1 would be the last token."""
    dist = DraftDist(np.zeros((1, 1, 2), np.float32), np.array([[[-1, 1]]]))
    q = jax.jit(draft_distribution, static_argnums=2)(dist, np.array([0]), 4)
    np.testing.assert_allclose(q, [[0, 0.5, 0, 0]])


def test_more_drafts_than_the_block_size_are_refused():
    drafter, sampling = golden_drafter("dflash"), sampling_state(SamplingParams(), 1, 97)
    keys = jax.random.split(jax.random.key(0), (1, 6))
    with pytest.raises(ValueError, match="more than this drafter's block size of 5"):
        propose(
            drafter, drafter.model.init_state(1, 16), np.array([1]), np.array([2]), sampling, keys
        )


def test_a_trimmed_vocabulary_is_not_trimmed_again():
    drafter = golden_drafter("dflash", draft_vocab=(1, 2, 3))
    with pytest.raises(ValueError, match="trimmed already"):
        restrict(drafter.model, drafter.params, [1], None)


class Tokenizer:
    """As much of a tokeniser as the choice of a mask token looks at."""

    mask_token_id = bos_token_id = unk_token_id = None
    eos_token_id = pad_token_id = 3
    chat_template = "{{ '<user>' }}"

    def __init__(self, size=61, **fields):
        self.size = size
        vars(self).update(fields)

    def __len__(self):
        return self.size

    def get_added_vocab(self):
        return {"<end>": 3, "<user>": 5, "<issue>": 4}


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Tokenizer(), 4),  # neither the end nor in the template
        (Tokenizer(mask_token_id=8), 8),
        (Tokenizer(mask_token_id=3), 4),  # ends sequences
        (Tokenizer(size=50), 60),  # past the tokeniser's vocabulary
    ],
)
def test_mask_token_of_a_target_without_one(tokenizer, expected):
    target = dataclasses.replace(tiny_target(), tokenizer=tokenizer, stop_ids=(3,))
    assert unused_token(target) == expected


def test_mask_token_must_be_named_where_all_have_a_use():
    tokenizer = Tokenizer(chat_template="<user> <issue>")
    target = dataclasses.replace(tiny_target(), tokenizer=tokenizer, stop_ids=(3,))
    with pytest.raises(ValueError, match="every token of tiny has a use"):
        unused_token(target)


def test_config_is_hashable_and_model_comparable():
    config = golden_drafter("dspark_rnn").model.config
    assert isinstance(config, DSparkConfig)
    assert hash(DSpark(config)) == hash(DSpark(dataclasses.replace(config)))
