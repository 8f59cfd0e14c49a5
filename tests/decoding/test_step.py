"""The step and its drivers on toy models: distributions, stops, limits, rows, caches."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as scipy_stats

import specjax.decoding.step as step_module
from specjax.decoding import sampling as sampling_module
from specjax.decoding.loop import decode, init_decode_state, stream
from specjax.decoding.sampling import draft_probs
from specjax.decoding.schedule import ThresholdPolicy
from specjax.decoding.step import speculate_step
from specjax.decoding.types import (
    DecodeConfig,
    DecodeState,
    RoundStats,
    SamplingParams,
)
from specjax.drafters import NoDrafter, PromptLookup
from tests.reference import markov_joint, prompt_lookup, softmax
from tests.retrace import assert_no_retrace
from tests.toys import (
    MarkovDrafter,
    MarkovTarget,
    ScriptedDrafter,
    call,
    jitted_step,
    new_tokens,
    sampling_state,
    texts,
    tiny_target,
)

PROMPTS = [[5, 6, 7], [1], [9, 8] * 20, [3, 3, 3, 3, 4]]


def run(target, drafter, drafter_params, prompts, config, driver=decode, **options):
    """New tokens of each row, and the final state as NumPy arrays."""
    static = {"target": target.model, "drafter": drafter, "config": config}
    state = init_decode_state(target.params, drafter_params, prompts, **static, **options)
    state = driver(target.params, drafter_params, state, **static)
    return new_tokens(state)[: len(prompts)], jax.device_get(state)


def assert_equal_leaves(left, right, row=slice(None)):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a[row], b[row])


def greedy(target, prompts, **options):
    return run(target, NoDrafter(), (), prompts, DecodeConfig(0), **options)[0]


@pytest.fixture
def fresh_programs():
    """Programs are compiled anew, before and after the test replaces what they call."""
    jax.clear_caches()
    yield
    jax.clear_caches()


# --- Distribution ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LookBackPolicy:
    """Verifies all or none by the last confidence of the round before: legal, as it knows
    nothing of this round, and the sharpest test that this round's noise is new.
    """

    def init_state(self, batch):
        return jnp.zeros(batch, bool)

    def choose(self, state, confidence_BG, done_B, draft_len):
        confident_B = confidence_BG[:, -1] > 0.7
        return jnp.where(state, draft_len, 0).astype(jnp.int32), confident_B


def keyed_by_absolute_position(seed_B, anchor_position_B, draft_len):
    """Broken keys: noise of a token depends on where it stands, not on its round."""
    keys = sampling_module.round_keys(seed_B, anchor_position_B * 0, draft_len)
    positions_BG = anchor_position_B[:, None] + 1 + jnp.arange(draft_len)[None]
    at = jax.vmap(jax.random.fold_in)
    each = jax.vmap(at)
    return keys._replace(
        draft_BG=each(jnp.broadcast_to(keys.next_B[:, None], positions_BG.shape), positions_BG),
        accept_BG=each(keys.accept_BG, positions_BG),
        next_B=at(keys.next_B, anchor_position_B + 1000),
    )


def markov_p_value(policy, length=4, rows=1 << 17):
    """Chi-square of `length` sampled tokens of a two-token language against the exact joint."""
    target, drafter = MarkovTarget(2), MarkovDrafter()
    table = np.log(np.array([[0.7, 0.3], [0.4, 0.6]], np.float32))
    draft_table = np.log(np.array([[0.8, 0.2], [0.4, 0.6]], np.float32))
    static = {"target": target, "drafter": drafter, "config": DecodeConfig(3, policy)}
    state = init_decode_state(
        table,
        draft_table,
        [[0]] * rows,
        max_new_tokens=length + 1,
        sampling=SamplingParams(temperature_B=1.0, seed_B=0),
        **static,
    )
    state = decode(table, draft_table, state, **static)
    new = np.asarray(state.tokens_BS)[:, 1 : 1 + length]
    observed = np.bincount(new @ (2 ** np.arange(length)[::-1]), minlength=2**length)
    p = softmax(table)
    expected = markov_joint(p[0], p, length).reshape(-1) * rows
    return scipy_stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize("policy", [DecodeConfig(3).policy, LookBackPolicy()])
def test_sampled_text_has_the_targets_distribution(policy):
    """Significance 1e-3; the seeds are fixed, so this does not fail by chance."""
    assert markov_p_value(policy) > 1e-3


def test_keys_by_absolute_position_are_caught(monkeypatch, fresh_programs):
    monkeypatch.setattr(step_module, "round_keys", keyed_by_absolute_position)
    assert markov_p_value(LookBackPolicy()) < 1e-6


class NoiseTable:
    """Stands in for the generator: each row walks one leaf of the tree of all noise values.

    Every key's first use takes the next digit of the row's number; a key seen before in the
    row gives its old digit again, as a real generator would. Digits are midpoints of a
    lattice on which every decision of the test's distributions is exact.
    """

    def __init__(self, levels: list[int]):
        self.levels, self.keys, self.digits = levels, [], []
        self.rows = int(np.prod(levels))
        self.reused = 0

    def __call__(self, keys_B):
        data = np.asarray(jax.random.key_data(keys_B))
        number = np.arange(self.rows)
        stride = int(np.prod(self.levels[: len(self.keys)]))
        level = self.levels[len(self.keys)]
        value = (number // stride % level + 0.5) / level
        for seen, old in zip(self.keys, self.digits, strict=True):
            same = np.all(seen == data, axis=-1)
            self.reused += same.sum()
            value = np.where(same, old, value)
        self.keys.append(data)
        self.digits.append(value)
        return value.astype(np.float32)


def three_rounds(monkeypatch, table, draft_table, levels, drafter, config):
    """Joint of the first three tokens over every noise value of three rounds.

    `levels` are those of one round's draws in the order the step makes them: drafts,
    acceptances, the next token.
    """
    noise = NoiseTable(levels * 3)

    def sample(keys, logits):
        first = np.asarray(jax.nn.softmax(logits))[:, 0]
        return jnp.asarray((noise(keys) >= first).astype(np.int32))

    def uniform(keys):
        return jnp.asarray(np.stack([noise(key_B) for key_B in keys.T], axis=1))

    monkeypatch.setattr("specjax.decoding.accept.sample", sample)
    monkeypatch.setattr("specjax.decoding.sampling.sample", sample)
    monkeypatch.setattr("specjax.decoding.accept.uniform", uniform)
    rows = noise.rows
    state = DecodeState(
        tokens_BS=jnp.zeros((rows, 16), jnp.int32),
        length_B=jnp.ones(rows, jnp.int32),
        limit_B=jnp.full(rows, 12),
        done_B=jnp.zeros(rows, bool),
        sampling=sampling_state(
            SamplingParams(temperature_B=1.0, seed_B=np.zeros(rows, int)), rows, 2
        ),
        cache=MarkovTarget(2).init_cache(rows, 16),
        drafter_state=(),
        policy_state=(),
        stats=RoundStats.zeros(rows, config.draft_len),
    )
    with jax.disable_jit():
        for _ in range(3):
            state, _ = speculate_step(
                jnp.log(jnp.array(table)),
                jnp.log(jnp.array(draft_table)),
                state,
                target=MarkovTarget(2),
                drafter=drafter,
                config=config,
            )
    assert noise.reused == 0
    assert len(noise.keys) == len(noise.levels)
    new = np.asarray(state.tokens_BS)[:, 1:4]
    verified = np.asarray(state.stats.verified_BG).sum()
    assert verified > 0  # or nothing was put to the test
    return np.bincount(new @ [4, 2, 1], minlength=8) / rows


def exact_joint(table):
    p = np.array(table)
    return markov_joint(p[0], p, 3).reshape(-1)


def test_three_rounds_enumerated_through_the_step_with_its_keys(monkeypatch):
    """γ = 2, every draft verified."""
    table, draft_table = [[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]
    joint = three_rounds(
        monkeypatch, table, draft_table, [2, 2, 2, 2, 4], MarkovDrafter(), DecodeConfig(2)
    )
    np.testing.assert_allclose(joint, exact_joint(table), atol=1e-6)


@dataclasses.dataclass(frozen=True)
class AnticipatingDrafter(MarkovDrafter):
    """Broken: its confidence is the probability of the very token that it drew."""

    def propose(self, params, state, anchor_B, length_B, sampling, keys_BG):
        proposal, state = super().propose(params, state, anchor_B, length_B, sampling, keys_BG)
        chance_BG = draft_probs(proposal.dist, proposal.tokens_BG)
        return dataclasses.replace(proposal, confidence_BG=chance_BG), state


@pytest.mark.parametrize("drafter", [MarkovDrafter(), AnticipatingDrafter()])
def test_three_rounds_enumerated_under_a_threshold(monkeypatch, drafter):
    """γ = 1: after token 0 the confidence is 0.5, which is too low, after token 1 0.75."""
    table, draft_table = [[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.75, 0.25]]
    config = DecodeConfig(1, ThresholdPolicy(0.6))
    joint = three_rounds(monkeypatch, table, draft_table, [4, 6, 4], drafter, config)
    difference = np.abs(joint - exact_joint(table)).max()
    if isinstance(drafter, AnticipatingDrafter):
        assert difference > 0.01  # the same check finds the leak
    else:
        assert difference < 1e-6


# --- Greedy equality, rows and drivers --------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("draft_len", [1, pytest.param(3, marks=pytest.mark.slow), 7])
def test_greedy_speculative_equals_autoregressive(target, draft_len):
    expected = greedy(target, PROMPTS, max_new_tokens=60)
    config = DecodeConfig(draft_len)
    got, state = run(target, PromptLookup(), (), PROMPTS, config, max_new_tokens=60)
    assert got == expected
    assert state.stats.accepted_BG.sum() > 0  # or nothing was speculated


def test_cached_decoding_equals_the_uncached_forward(target):
    for prompt, new in zip(PROMPTS, greedy(target, PROMPTS, max_new_tokens=20), strict=True):
        text = np.zeros((1, 64), np.int32)
        text[0, : len(prompt) + 20] = prompt + new
        best = np.argmax(np.asarray(target.forward(text).logits)[0], axis=-1)
        assert best[len(prompt) - 1 :][:20].tolist() == new


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_while_loop_equals_python_loop(target, temperature):
    def streamed(*args, **static):
        rounds = stream(*args, **static)
        tokens = [[] for _ in PROMPTS]
        while True:
            try:
                out = next(rounds)
            except StopIteration as end:
                streamed.tokens = tokens
                return end.value
            for row, count in enumerate(out.count_B):
                tokens[row] += out.tokens_BT[row, :count].tolist()

    options = {
        "max_new_tokens": [30, 5, 17, 1],
        "sampling": SamplingParams(temperature_B=temperature, seed_B=3),
    }
    args = (target, PromptLookup(), (), PROMPTS, DecodeConfig(3))
    expected, looped = run(*args, **options)
    got, state = run(*args, driver=streamed, **options)
    assert got == expected
    assert [len(row) for row in got] == [30, 5, 17, 1]
    assert [row[1:] for row in got] == streamed.tokens  # the first is the prefill's
    assert_equal_leaves(looped.stats, state.stats)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_does_not_depend_on_neighbours_padding_or_order(target, temperature):
    seeds = np.array([11, 12, 13, 14])

    def rows(order, **options):
        sampling = SamplingParams(temperature_B=temperature, seed_B=seeds[order])
        prompts = [PROMPTS[i] for i in order]
        return run(
            target, PromptLookup(), (), prompts, DecodeConfig(3), max_new_tokens=24,
            sampling=sampling, **options,
        )[0]  # fmt: skip

    together = rows([0, 1, 2, 3])
    for row in range(4):
        assert rows([row]) == [together[row]]
    assert rows([2, 0, 3, 1]) == [together[i] for i in (2, 0, 3, 1)]
    assert rows([0, 1, 2], batch=8) == together[:3]
    assert rows([0, 1, 2, 3], max_len=200) == together


def test_rows_draw_their_own_noise(target):
    sampled = SamplingParams(temperature_B=1.0, seed_B=0)
    rows = run(target, NoDrafter(), (), [[5]] * 4, DecodeConfig(0), max_new_tokens=24,
               sampling=sampled)[0]  # fmt: skip
    assert len({tuple(row) for row in rows}) == 4
    shared = SamplingParams(temperature_B=1.0, seed_B=np.array([7, 7]))
    same = run(target, NoDrafter(), (), [[5]] * 2, DecodeConfig(0), max_new_tokens=24,
               sampling=shared)[0]  # fmt: skip
    assert same[0] == same[1]


def test_drafter_equal_to_the_target_is_always_accepted():
    table = jax.random.normal(jax.random.key(1), (11, 11))
    target = dataclasses.replace(tiny_target(), model=MarkovTarget(11), params=table)
    for temperature in (0.0, 0.9):
        sampling = SamplingParams(temperature_B=temperature)
        _, state = run(target, MarkovDrafter(), table, PROMPTS[:2], DecodeConfig(4),
                       max_new_tokens=41, sampling=sampling)  # fmt: skip
        np.testing.assert_array_equal(state.stats.accepted_BG, state.stats.verified_BG)
        assert state.stats.rounds_B.tolist() == [8, 8]
        assert state.stats.emitted_B.tolist() == [40, 40]


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3])
def test_one_wrong_draft_is_rejected_wherever_it_stands(target, wrong_at):
    prompt = PROMPTS[0]
    text = prompt + greedy(target, [prompt], max_new_tokens=8)[0]
    script = np.zeros((1, 128), np.int32)
    script[0, : len(text)] = text
    # After the prefill's token the first round drafts from this position on.
    script[0, len(prompt) + 1 + wrong_at] += 1
    static = {
        "target": target.model,
        "drafter": ScriptedDrafter(),
        "config": DecodeConfig(4),
    }
    state = init_decode_state(target.params, script, [prompt], max_new_tokens=8, **static)
    state, out = jitted_step(target.params, script, state, **static)
    assert out.accepted_B.tolist() == [wrong_at]
    assert texts(state) == [text[: len(prompt) + 2 + wrong_at]]


# --- Stops and limits -------------------------------------------------------------------


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("drafted_right", [True, False])
def test_stop_token_at_each_position_of_a_block(target, place, drafted_right):
    """Output ends at the stop token, whether it is a draft or the target's own token."""
    prompt = PROMPTS[3]
    new = greedy(target, [prompt], max_new_tokens=12)[0]
    stop = new[place]
    expected = new[: new.index(stop) + 1]
    script = np.zeros((1, 128), np.int32)
    if drafted_right:
        script[0, : len(prompt) + len(new)] = prompt + new
    got, state = run(target, ScriptedDrafter(), script, [prompt], DecodeConfig(4),
                     max_new_tokens=12, stop_ids=(60, stop))  # fmt: skip
    assert got == [expected]
    assert state.done_B.all()
    emitted = int(state.stats.emitted_B[0])
    assert emitted == len(expected) - 1
    # Committed = drafts kept + one of the target's own in each round but one ended by a draft.
    kept, bonus = int(state.stats.accepted_BG.sum()), int(state.stats.bonus_B[0])
    assert kept + bonus == emitted
    if drafted_right and emitted:
        assert kept == emitted
        assert bonus == 0


def test_max_new_tokens_one_and_stop_as_the_very_first_token(target):
    first = greedy(target, PROMPTS, max_new_tokens=1)
    assert [len(row) for row in first] == [1, 1, 1, 1]
    stops = [row[0] for row in first]
    got, state = run(target, PromptLookup(), (), PROMPTS, DecodeConfig(3), max_new_tokens=9,
                     stop_ids=stops)  # fmt: skip
    assert got == first
    assert state.stats.rounds_B.sum() == 0


def test_finished_rows_change_nothing_visible(target):
    static = {"target": target.model, "drafter": PromptLookup(), "config": DecodeConfig(3)}
    state = init_decode_state(
        target.params, (), PROMPTS, max_new_tokens=[2, 40, 40, 40], batch=6, **static
    )
    state, _ = jitted_step(target.params, (), state, **static)
    assert state.done_B.tolist() == [True, False, False, False, True, True]
    after, out = jitted_step(target.params, (), state, **static)
    state, after, out = jax.device_get((state, after, out))
    for row in (0, 4, 5):
        length = int(state.length_B[row])
        assert out.count_B[row] == 0
        assert after.length_B[row] == length
        np.testing.assert_array_equal(after.tokens_BS[row], state.tokens_BS[row])
        assert_equal_leaves(after.stats, state.stats, row)
        for old, new in zip(state.cache, after.cache, strict=True):
            np.testing.assert_array_equal(
                old.k_BKSH[row, :, : length - 1], new.k_BKSH[row, :, : length - 1]
            )


@pytest.mark.parametrize("short_of_full", [-7, -1, 0, 1])
def test_prompt_that_fills_the_room(target, short_of_full):
    draft_len, room = 7, 128
    prompt = [int(t) for t in np.arange(room + short_of_full) % 50]
    options = {"max_new_tokens": 50, "max_len": room}
    if short_of_full >= 0:
        with pytest.raises(ValueError, match=r"row 1 .* leaves no room"):
            run(target, PromptLookup(), (), [[1], prompt], DecodeConfig(draft_len), **options)
        return
    expected = greedy(target, [prompt], max_new_tokens=-short_of_full)
    got, _ = run(target, PromptLookup(), (), [prompt], DecodeConfig(draft_len), **options)
    assert got == expected
    assert len(got[0]) == -short_of_full


def test_long_prompts_run_in_chunks(target):
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 50, 600)]
    wide = dataclasses.replace(
        target,
        model=dataclasses.replace(
            target.model, config=dataclasses.replace(target.model.config, max_len=1024)
        ),
    )
    got = greedy(wide, [prompt, prompt[:3], prompt[:257]], max_new_tokens=6)
    for row, part in zip(got, (prompt, prompt[:3], prompt[:257]), strict=True):
        text = np.zeros((1, 640), np.int32)
        text[0, : len(part) + 6] = [*part, *row]
        best = np.argmax(np.asarray(wide.forward(text).logits)[0], axis=-1)
        assert best[len(part) - 1 : len(part) + 5].tolist() == row


@pytest.mark.parametrize(
    "setting",
    [{"jax_enable_x64": True}, {"jax_default_prng_impl": "rbg"}, {"jax_debug_nans": True}],
    ids=str,
)
def test_output_does_not_depend_on_the_programs_settings(target, setting):
    """The state keeps its dtypes, and rows their own noise, whatever JAX's defaults are."""
    options = {
        "max_new_tokens": [1, 9, 20, 30],
        "sampling": SamplingParams(temperature_B=np.array([0.7, 0, 0.7, 5], np.float32), seed_B=3),
    }
    args = (target, PromptLookup(min_ngram=1), (), PROMPTS, DecodeConfig(3))
    expected, state = run(*args, **options)
    [(name, value)] = setting.items()
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        got, again = run(*args, **options)
    finally:
        jax.config.update(name, before)
    assert got == expected
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(s)] for s in (state, again)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("room", [2**31 - 1, 2**31, 2**40, 2**63 - 1])
def test_any_number_of_new_tokens_may_be_asked_for(target, room):
    [new], _ = run(target, NoDrafter(), (), [[5]], DecodeConfig(0), max_new_tokens=room, max_len=30)
    assert len(new) == 29


@pytest.mark.parametrize("wrong", [-1, -3, 61, 2**31 - 1])
def test_ids_that_no_token_has_are_rejected(target, wrong):
    script = np.full((1, 256), wrong, np.int32)
    for temperature in (0.0, 1.0):
        options = {"sampling": SamplingParams(temperature_B=temperature), "max_new_tokens": 9}
        [new], state = run(target, ScriptedDrafter(), script, [[5]], DecodeConfig(3), **options)
        assert len(new) == 9
        assert min(new) >= 0
        assert max(new) < 61
        assert state.stats.accepted_BG.sum() == 0


def test_a_drafter_or_state_of_another_draft_length_is_refused(target):
    static = {"target": target.model, "drafter": PromptLookup(), "config": DecodeConfig(3)}
    state = init_decode_state(target.params, (), [[5]], max_new_tokens=9, **static)
    with pytest.raises(ValueError, match="made for draft_len 3"):
        decode(target.params, (), state, **static | {"config": DecodeConfig(5)})


# --- Caches -----------------------------------------------------------------------------


def test_caches_hold_exactly_the_committed_tokens(target):
    """After rounds of random accepted lengths both caches equal ones built from scratch."""
    drafter = PromptLookup(min_ngram=1)
    static = {"target": target.model, "drafter": drafter, "config": DecodeConfig(5)}
    state = init_decode_state(target.params, (), PROMPTS, max_new_tokens=60, max_len=100, **static)
    lengths = set()
    for _ in range(8):
        state, out = jitted_step(target.params, (), state, **static)
        lengths |= set(out.accepted_B.tolist())
    assert len(lengths) > 1
    fresh = init_decode_state(
        target.params, (), texts(state), max_new_tokens=1, max_len=100, **static
    )
    state, fresh = jax.device_get((state, fresh))
    for row, text in enumerate(texts(state)):
        live = len(text) - 1
        np.testing.assert_array_equal(
            state.drafter_state[row, :live], fresh.drafter_state[row, :live]
        )
        for old, new in zip(state.cache, fresh.cache, strict=True):
            for a, b in zip(old, new, strict=True):
                np.testing.assert_allclose(a[row, :, :live], b[row, :, :live], 1e-4, 1e-4)


def test_nothing_leaks_from_one_request_to_the_next(target):
    first = run(target, PromptLookup(), (), PROMPTS, DecodeConfig(3), max_new_tokens=40)[0]
    run(target, PromptLookup(), (), [[2] * 90], DecodeConfig(3), max_new_tokens=5)
    again = run(target, PromptLookup(), (), PROMPTS, DecodeConfig(3), max_new_tokens=40)[0]
    assert first == again


def test_one_compilation_whatever_lengths_and_temperatures(target, fresh_programs):
    """A second and third batch of the same shape trace nothing anew."""
    config = DecodeConfig(3)
    traced = assert_no_retrace(speculate_step)
    static = {"target": target.model, "drafter": PromptLookup(), "config": config}
    step = jax.jit(traced, static_argnames=tuple(static))
    for prompts, temperature in (
        (PROMPTS, 0.0),
        (PROMPTS[::-1], 0.7),
        ([[1], [2], [3], [4] * 20], 3.0),
    ):
        state = init_decode_state(
            target.params, (), prompts, max_new_tokens=[20, 3, 9, 30], max_len=120,
            sampling=SamplingParams(temperature_B=temperature), stop_ids=(3,), **static,
        )  # fmt: skip
        while not np.all(state.done_B):
            state, _ = step(target.params, (), state, **static)
    assert traced.traces() == 1


def test_a_donated_state_used_twice_is_a_clear_error(target):
    static = {"target": target.model, "drafter": PromptLookup(), "config": DecodeConfig(3)}
    for driver in (decode, lambda *a, **k: list(stream(*a, **k))):
        state = init_decode_state(target.params, (), PROMPTS, max_new_tokens=20, **static)
        driver(target.params, (), state, **static)
        with pytest.raises(ValueError, match="used before"):
            driver(target.params, (), state, **static)


# --- Bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "row 1 has no tokens"),
        ([[1], [61]], {}, "row 1 has token ids outside"),
        ([[-1]], {}, "row 0 has token ids outside"),
        ([np.array([1.5])], {}, "row 0 must be a flat list"),
        ([[1] * 300], {}, "row 0 .* leaves no room"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be"),
        ([[1]], {"max_new_tokens": np.array(2.5)}, "max_new_tokens must be"),
        ([[1]], {"max_new_tokens": [1, 2]}, "max_new_tokens has shape"),
        ([[1]], {"max_len": 257}, "max_len must be"),
        ([[1], [2]], {"batch": 1}, "batch"),
        ([[1]], {"stop_ids": [-5]}, "stop_ids must be"),
        ([[1]], {"stop_ids": [61]}, "stop_ids must be"),
        ([[1]], {"stop_ids": np.array([2.5])}, "stop_ids must be"),
        ([[1]], {"sampling": SamplingParams(temperature_B=-0.5)}, "temperature must be"),
        ([[1]], {"sampling": SamplingParams(temperature_B=float("nan"))}, "temperature must be"),
        ([[1]], {"sampling": SamplingParams(temperature_B=np.ones(2))}, "temperature has shape"),
        ([[1]], {"sampling": SamplingParams(seed_B=-1)}, "seed must be"),
        ([[1]], {"sampling": SamplingParams(seed_B=2**32)}, "seed must be"),
    ],
)
def test_bad_input_is_named(target, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        run(target, PromptLookup(), (), prompts, DecodeConfig(2), **{"max_new_tokens": 4} | options)


def test_bad_config_is_named(target):
    with pytest.raises(ValueError, match="draft_len"):
        DecodeConfig(-1)
    with pytest.raises(ValueError, match="acceptance"):
        DecodeConfig(1, acceptance="typical")
    with pytest.raises(ValueError, match="draft_len 0"):
        run(target, NoDrafter(), (), [[1]], DecodeConfig(2), max_new_tokens=3)
    with pytest.raises(ValueError, match="taps"):
        target.forward(jnp.array([[1, 2]]), taps=(2,))


# --- Prompt lookup ----------------------------------------------------------------------


def test_prompt_lookup_equals_its_definition(rng):
    drafter, slots, draft_len = PromptLookup(max_ngram=3, min_ngram=1), 32, 5
    rows = [rng.integers(0, 3, n).tolist() for n in itertools.chain(range(1, 20), [20] * 13)]
    state = drafter.init_state(len(rows), slots)
    padded = np.zeros((len(rows), slots), np.int32)
    for row, text in enumerate(rows):
        padded[row, : len(text)] = text
    length_B = np.array([len(text) for text in rows])
    state = call(
        drafter, "observe", (), state, padded, None, np.zeros((len(rows), slots, 1), np.float32),
        np.zeros(len(rows), np.int32), length_B - 1,
    )  # fmt: skip
    anchor_B = np.array([text[-1] for text in rows])
    keys_BG = jax.random.split(jax.random.key(0), (len(rows), draft_len))
    sampling = sampling_state(SamplingParams(), len(rows), 3)
    proposal, _ = call(drafter, "propose", (), state, anchor_B, length_B, sampling, keys_BG)
    proposal = jax.device_get(proposal)
    expected = [prompt_lookup(text, draft_len, 3) for text in rows]
    assert proposal.tokens_BG.tolist() == expected
    np.testing.assert_array_equal(proposal.dist.ids_BGC[..., 0], proposal.tokens_BG)
