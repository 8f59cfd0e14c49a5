"""Prompt lookup composed with DSpark: each row drafts as the part that it chose would."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax.checkpoints import load_drafter
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.sampling import draft_distribution
from specjax.decoding.types import DecodeConfig, SamplingParams
from specjax.drafters import Composed, Drafter, NoDrafter, PromptLookup
from specjax.models.transformer import TransformerTarget
from tests.drafters.golden import FOLDER, golden_drafter, golden_target
from tests.toys import call, jitted_step, new_tokens, sampling_state, texts

REPEATING, FRESH = [5, 6, 7, 8, 5, 6, 7], [11, 3, 60, 9, 2]
DRAFT_LEN, MODEL_LEN = 4, 2
RESTRICTED = [{}, {"draft_vocab": tuple(range(0, 97, 2)), "candidates": 5}]


def composed(kind="dspark_gated", **restriction):
    model = golden_drafter(kind, **restriction)
    return Drafter(Composed(PromptLookup(), model.model, MODEL_LEN), model.params, "composed")


def start(drafter, prompts, config, target=None, **options):
    static = {"target": target or golden_target().model, "drafter": drafter.model, "config": config}
    state = init_decode_state(
        golden_target().params, drafter.params, prompts, max_new_tokens=30, max_len=80,
        sampling=SamplingParams(**options), **static,
    )  # fmt: skip
    return state, static


def propose(drafter, state, draft_len):
    keys = jax.random.split(jax.random.key(0), (len(state.length_B), DRAFT_LEN))
    anchor_B = np.array([text[-1] for text in texts(state)])
    sampling = sampling_state(SamplingParams(temperature_B=0.9), len(anchor_B), 97)
    proposal, _ = call(
        drafter.model, "propose", drafter.params, state.drafter_state, anchor_B, state.length_B,
        sampling, keys[:, :draft_len],
    )  # fmt: skip
    return jax.device_get(proposal)


def with_last_tokens(state, last):
    """The state with other last tokens, which decide what is looked up."""
    tokens_BS = np.array(state.tokens_BS)
    tokens_BS[np.arange(len(last)), np.asarray(state.length_B) - 1] = last
    return dataclasses.replace(state, tokens_BS=tokens_BS)


@pytest.mark.parametrize("restriction", RESTRICTED)
def test_each_row_has_the_drafts_and_the_q_of_its_part(restriction):
    whole, model = composed(**restriction), golden_drafter("dspark_gated", **restriction)
    state, _ = start(whole, [REPEATING, FRESH], DecodeConfig(DRAFT_LEN))
    state = with_last_tokens(state, [8, 60])
    got = propose(whole, state, DRAFT_LEN)
    part = dataclasses.replace(state, drafter_state=state.drafter_state[1])
    expected = propose(model, part, MODEL_LEN)
    assert got.count_B.tolist() == [DRAFT_LEN, MODEL_LEN]
    assert got.lens == (MODEL_LEN, DRAFT_LEN)
    assert got.tokens_BG[0].tolist() == [5, 6, 7, 8]
    assert got.tokens_BG[1, :MODEL_LEN].tolist() == expected.tokens_BG[1].tolist()
    assert got.confidence_BG[0].tolist() == pytest.approx([0.9] * DRAFT_LEN)
    np.testing.assert_array_equal(got.confidence_BG[1, :MODEL_LEN], expected.confidence_BG[1])
    q = jax.jit(draft_distribution, static_argnums=2)
    for k in range(DRAFT_LEN):
        q_BV = np.asarray(q(got.dist, np.full(2, k), 97))
        np.testing.assert_array_equal(q_BV[0], np.eye(97)[got.tokens_BG[0, k]])
        if k < MODEL_LEN:
            one_BV = np.asarray(q(expected.dist, np.full(2, k), 97))
            np.testing.assert_array_equal(q_BV[1], one_BV[1])


@pytest.mark.parametrize(
    ("restriction", "temperature"),
    [
        pytest.param(RESTRICTED[1], 0.0, marks=pytest.mark.slow),
        pytest.param(RESTRICTED[0], 0.0, marks=pytest.mark.slow),
        (RESTRICTED[0], 0.8),
        pytest.param(RESTRICTED[1], 0.8, marks=pytest.mark.slow),
    ],
)
def test_output_is_the_targets_own(restriction, temperature):
    """Token for token, greedy and coupled; rows that copy and rows that do not."""
    prompts = [REPEATING * 2, FRESH, [4] * 9]
    options = {"temperature_B": temperature, "seed_B": 3, "repetition_penalty_B": 1.05}

    def run(drafter, draft_len):
        config = DecodeConfig(draft_len, acceptance="coupled")
        state, static = start(drafter, prompts, config, **options)
        state = decode(golden_target().params, drafter.params, state, **static)
        return new_tokens(state), jax.device_get(state.stats)

    expected, _ = run(Drafter(NoDrafter(), (), "none"), 0)
    got, stats = run(composed(**restriction), DRAFT_LEN)
    assert got == expected
    # Only copies are longer than the model's drafts.
    assert stats.verified_BG[:, MODEL_LEN:].sum() > 0
    assert (stats.verified_BG[:, 0] > stats.verified_BG[:, MODEL_LEN]).any()


@dataclasses.dataclass(frozen=True)
class Counting(TransformerTarget):
    """Counts the positions that enter it while the program runs."""

    def apply(self, params, tokens, positions, cache, **options):
        jax.debug.callback(_SEEN.append, tokens.shape[1])
        return super().apply(params, tokens, positions, cache, **options)


_SEEN: list[int] = []


@pytest.mark.parametrize(
    ("prompt", "positions"), [(FRESH, MODEL_LEN + 1), ([4] * 9, DRAFT_LEN + 1)]
)
def test_a_round_costs_the_pass_of_its_longest_draft(prompt, positions):
    drafter, config = composed(), DecodeConfig(DRAFT_LEN)
    state, static = start(drafter, [prompt], config, target=Counting(golden_target().model.config))
    state = with_last_tokens(state, [33 if prompt == FRESH else 4])
    jax.effects_barrier()
    _SEEN.clear()
    jax.block_until_ready(jitted_step(golden_target().params, drafter.params, state, **static))
    jax.effects_barrier()
    assert [int(count) for count in _SEEN] == [positions]


@pytest.mark.slow
def test_state_after_rounds_equals_one_built_from_the_text():
    """Of both parts, whatever was accepted."""
    drafter, prompts = composed("dspark_rnn"), [REPEATING * 2, FRESH, [4] * 9]
    state, static = start(drafter, prompts, DecodeConfig(DRAFT_LEN), temperature_B=0.7, seed_B=1)
    for _ in range(6):
        state, _ = jitted_step(golden_target().params, drafter.params, state, **static)
    rebuilt, _ = start(drafter, texts(state), DecodeConfig(DRAFT_LEN))
    for row, text in enumerate(texts(state)):
        live = len(text) - 1
        left, right = state.drafter_state, rebuilt.drafter_state
        np.testing.assert_array_equal(left[0][row, :live], right[0][row, :live])
        for old, new in zip(jax.tree.leaves(left[1]), jax.tree.leaves(right[1]), strict=True):
            np.testing.assert_allclose(old[row, :, :live], new[row, :, :live], atol=1e-5)


def test_it_is_loaded_by_name():
    target = golden_target()
    source = f"prompt_lookup+{FOLDER / 'dspark_vanilla'}"
    drafter = load_drafter(source, target, candidates=5)
    assert isinstance(drafter.model, Composed)
    assert drafter.model.model.config.candidates == 5
    assert drafter.name == source
    with pytest.raises(ValueError, match="composed with DSpark drafters, not with prompt_lookup"):
        load_drafter("prompt_lookup+prompt_lookup", target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_len": 0}, "model_len must be from 1 to"),
        ({"model_len": 99}, "model_len must be from 1 to"),
        ({"model_len": 1, "lookup_confidence": 0.0}, "lookup_confidence must lie above 0"),
        ({"model_len": 1, "lookup_confidence": 1.5}, "lookup_confidence must lie above 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Composed(PromptLookup(), golden_drafter("dspark_vanilla").model, **options)
