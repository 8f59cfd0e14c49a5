"""Losslessness of acceptance, by enumeration, on recorded cases and on scenarios.

Each check takes the acceptor it checks, so that the same checks are shown to catch
acceptors that are broken on purpose.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.accept import accept, accept_equal, accept_rejection
from specjax.decoding.sampling import draft_distribution, process_logits, round_keys
from specjax.decoding.types import DraftDist, Proposal, SamplingParams
from tests.reference import process
from tests.toys import sampling_state

V, G = 3, 2


def rejection(logits_BTV, proposal, verify_len_B, sampling, uniform_BG):
    """The library's acceptor: how many drafts are kept, the next token's distribution."""
    n_B, next_BV = accept_rejection(
        process_logits(logits_BTV, sampling), proposal, verify_len_B, uniform_BG
    )
    return n_B, jax.nn.softmax(next_BV)


def q_at_another_temperature(logits_BTV, proposal, verify_len_B, sampling, uniform_BG):
    dist = DraftDist(proposal.dist.logits_BGC * 0.5, proposal.dist.ids_BGC)
    proposal = Proposal(proposal.tokens_BG, dist)
    return rejection(logits_BTV, proposal, verify_len_B, sampling, uniform_BG)


def with_epsilon(logits_BTV, proposal, verify_len_B, sampling, uniform_BG):
    p_BTV = jax.nn.softmax(process_logits(logits_BTV, sampling))
    p_BG = jnp.take_along_axis(p_BTV[:, :-1], proposal.tokens_BG[:, :, None], axis=2)[..., 0]
    kept_BG = uniform_BG <= p_BG + 1e-9
    _, next_BV = rejection(logits_BTV, proposal, verify_len_B, sampling, uniform_BG)
    return jnp.sum(jnp.cumprod(kept_BG.astype(jnp.int32), axis=1), axis=1), next_BV


def without_residual(logits_BTV, proposal, verify_len_B, sampling, uniform_BG):
    n_B, _ = rejection(logits_BTV, proposal, verify_len_B, sampling, uniform_BG)
    p_BTV = jax.nn.softmax(process_logits(logits_BTV, sampling))
    return n_B, jnp.take_along_axis(p_BTV, n_B[:, None, None], axis=1)[:, 0]


def first_draft_unverified(logits_BTV, proposal, verify_len_B, sampling, uniform_BG):
    sure_BG = uniform_BG.at[:, 0].set(-1.0)  # -q < p always
    return rejection(logits_BTV, proposal, verify_len_B, sampling, sure_BG)


def bonus_from_wrong_row(logits_BTV, proposal, verify_len_B, sampling, uniform_BG):
    n_B, next_BV = rejection(logits_BTV, proposal, verify_len_B, sampling, uniform_BG)
    before_B = jnp.maximum(n_B - 1, 0)
    p_BTV = jax.nn.softmax(process_logits(logits_BTV, sampling))
    wrong_BV = jnp.take_along_axis(p_BTV, before_B[:, None, None], axis=1)[:, 0]
    return n_B, jnp.where((n_B == verify_len_B)[:, None], wrong_BV, next_BV)


def random_tables(rng):
    """Target and draft logits after every prefix, some probabilities nearly 0."""
    return (
        {
            prefix: (rng.normal(size=V) * 2).astype(np.float32)
            for length in range(G + 1)
            for prefix in itertools.product(range(V), repeat=length)
        }
        for _ in range(2)
    )


def acceptance_bounds(count):
    """The u below which draft k is kept, all before it being kept, by bisection."""
    bounds = np.zeros((V**G, G), np.float32)
    for k in range(G):
        low, high = np.zeros(V**G, np.float32), np.ones(V**G, np.float32)
        for _ in range(26):
            uniform = np.zeros_like(bounds)
            uniform[:, k] = (low + high) / 2
            kept = count(uniform) > k
            low, high = np.where(kept, uniform[:, k], low), np.where(kept, high, uniform[:, k])
        bounds[:, k] = np.where(high > 2**-24, high, 0)  # what bisection leaves of never
    return bounds


def check_enumeration(acceptor, rng, temperature, verify_len, candidates=False, **filters):
    """Sums over all drafts and acceptance outcomes: the output is the target's to 1e-6."""
    target_logits, draft_logits = random_tables(rng)
    if candidates:  # q lives on tokens 2 and 0 only
        draft_logits = {k: np.where(np.arange(V) == 1, -np.inf, v) for k, v in draft_logits.items()}
    p = {k: process(v, temperature, **filters) for k, v in target_logits.items()}
    q = {k: process(v, temperature, **filters) for k, v in draft_logits.items()}

    drafts = np.array(list(itertools.product(range(V), repeat=G)), np.int32)
    logits = np.array([[target_logits[tuple(d[:k])] for k in range(G + 1)] for d in drafts])
    with np.errstate(divide="ignore"):
        dist = np.log([[q[tuple(d[:k])] for k in range(G)] for d in drafts])
    ids = None
    if candidates:
        ids = np.broadcast_to(np.array([2, 0], np.int32), (*dist.shape[:2], 2))
        dist = np.take_along_axis(dist, ids, axis=2)
    proposal = Proposal(
        jnp.asarray(drafts),
        DraftDist(jnp.asarray(dist, jnp.float32), None if ids is None else jnp.asarray(ids)),
    )
    sampling = SamplingParams(
        temperature_B=temperature, **{f"{name}_B": value for name, value in filters.items()}
    ).rows(len(drafts), V)
    jitted = jax.jit(acceptor)

    def call(uniform):
        lengths = jnp.full(len(drafts), verify_len, jnp.int32)
        out = jitted(jnp.asarray(logits), proposal, lengths, sampling, jnp.asarray(uniform))
        return [np.asarray(x) for x in out]

    bounds = acceptance_bounds(lambda uniform: call(uniform)[0])
    uniform = rng.random((200, *bounds.shape), np.float32)
    for u in uniform:  # each draft's acceptance is a threshold of its own u alone
        expected = np.cumprod((u < bounds) & (np.arange(G) < verify_len), axis=1).sum(axis=1)
        clear = np.all(np.abs(u - bounds) > 1e-6, axis=1)
        np.testing.assert_array_equal(call(u)[0][clear], expected[clear])

    chance = np.zeros((V,) * (G + 1))
    for n in range(verify_len + 1):
        u = np.where(np.arange(G) < n, 0.0, 1.0 - 2**-24).astype(np.float32)
        count, next_probs = call(np.tile(u, (len(drafts), 1)))
        for row, draft in enumerate(drafts):
            reach = np.prod([q[tuple(draft[:k])][draft[k]] for k in range(G)])
            reach *= np.prod(bounds[row, :n]) * (1 - bounds[row, n] if n < verify_len else 1)
            if reach < 1e-12:
                continue
            assert count[row] == n
            for token in range(V):
                committed = (*draft[:n], token)
                for rest in itertools.product(range(V), repeat=G + 1 - len(committed)):
                    tail = [
                        p[(*committed, *rest[:k])][rest[k]] for k in range(len(rest))
                    ]  # later rounds, exact by induction
                    chance[(*committed, *rest)] += reach * next_probs[row, token] * np.prod(tail)
    exact = np.zeros_like(chance)
    for sequence in itertools.product(range(V), repeat=G + 1):
        exact[sequence] = np.prod([p[sequence[:k]][sequence[k]] for k in range(G + 1)])
    np.testing.assert_allclose(chance, exact, atol=1e-6)


def check_scenarios(acceptor):
    """Named cases on one-hot and disjoint distributions, each alone and in a padded batch."""
    low = -np.inf
    cases = {
        # name: (p logits by position, q logits by position, drafts, u, n, support of next)
        "p equals q": ([[0, 0, 0]] * 3, [[0, 0, 0]] * 2, [1, 2], [0.99, 0.99], 2, {0, 1, 2}),
        "q inside p": ([[0, 0, 0]] * 3, [[0, 0, low]] * 2, [0, 1], [0.99, 0.99], 0, {2}),
        "p inside q": ([[0, 0, low]] * 3, [[0, 0, 0]] * 2, [2, 1], [0.5, 0.5], 0, {0, 1}),
        "disjoint": ([[0, low, low]] * 3, [[low, 0, low]] * 2, [1, 1], [0.5, 0.5], 0, {0}),
        "u is 0, p(x) is 0": ([[0, 0, low]] * 3, [[0, 0, 0]] * 2, [2, 0], [0, 0], 0, {0, 1}),
        "wrong first": ([[0, low, low]] * 3, [[0, 0, low]] * 2, [1, 0], [0, 0], 0, {0}),
        "wrong second": ([[0, low, low]] * 3, [[0, 0, low]] * 2, [0, 1], [0, 0], 1, {0}),
        "all right": (
            [[0, low, low], [0, low, low], [low, low, 0]],
            [[0, 0, low]] * 2,
            [0, 0],
            [0.99, 0.99],
            2,
            {2},
        ),
    }
    for padding in (0, 5):
        for name, (p, q, drafts, u, n, support) in cases.items():
            batch = 1 + padding

            def rows(values, dtype=np.float32, batch=batch):
                return jnp.asarray(np.stack([np.asarray(values, dtype)] * batch))

            count, probs = acceptor(
                rows(p),
                Proposal(rows(drafts, np.int32), DraftDist(rows(q))),
                jnp.full(batch, G, jnp.int32),
                SamplingParams(temperature_B=1.0).rows(batch, V),
                rows(u),
            )
            assert np.all(np.isfinite(probs)), name
            assert np.all(np.asarray(count) == n), name
            assert {int(t) for t in np.flatnonzero(probs[-1])} == support, name
            assert np.allclose(np.sum(probs, axis=-1), 1), name


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("verify_len", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_output_distribution_is_the_targets(rng, temperature, verify_len, candidates):
    check_enumeration(rejection, rng, temperature, verify_len, candidates)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.3}], ids=str)
def test_output_distribution_is_the_processed_targets(rng, filters):
    for verify_len in range(G + 1):
        check_enumeration(rejection, rng, 1.3, verify_len, **filters)


def test_scenarios():
    check_scenarios(rejection)


@pytest.mark.parametrize(
    "broken",
    [q_at_another_temperature, without_residual, first_draft_unverified, bonus_from_wrong_row],
)
def test_enumeration_catches(rng, broken):
    with pytest.raises(AssertionError):
        check_enumeration(broken, rng, 0.7, G)


@pytest.mark.parametrize("broken", [with_epsilon, first_draft_unverified])
def test_scenarios_catch(broken):
    with pytest.raises(AssertionError):
        check_scenarios(broken)


def test_greedy_output_is_the_argmax_whatever_the_drafts(rng):
    target_logits, _ = random_tables(rng)
    drafts = np.array(list(itertools.product(range(V), repeat=G)), np.int32)
    logits = np.array([[target_logits[tuple(d[:k])] for k in range(G + 1)] for d in drafts])
    for verify_len in range(G + 1):
        verdict = accept_equal(
            jnp.argmax(logits, axis=-1), jnp.asarray(drafts), jnp.full(len(drafts), verify_len)
        )
        for draft, n, token in zip(drafts, *map(np.asarray, verdict), strict=True):
            committed = (*draft[:n], token)
            for k, value in enumerate(committed):
                assert value == np.argmax(target_logits[tuple(committed[:k])])
            assert n == verify_len or draft[n] != token


def test_recorded_cases(data_dir):
    case = np.load(data_dir / "verify.npz")
    batch, draft_len = case["draft_tokens"].shape
    temperature = case["temperature"]
    scale = np.where(temperature > 0, temperature, 1)[:, None, None]
    proposal = Proposal(
        jnp.asarray(case["draft_tokens"]), DraftDist(jnp.asarray(case["draft_logits"] / scale))
    )
    logits, lengths = jnp.asarray(case["target_logits"]), jnp.asarray(case["draft_count"])
    sampling = SamplingParams(temperature_B=temperature).rows(batch, 23)
    greedy = accept_equal(jnp.argmax(logits, axis=-1), proposal.tokens_BG, lengths)
    sampled_n, sampled_next = rejection(
        logits, proposal, lengths, sampling, jnp.asarray(case["uniforms"])
    )
    n = np.where(temperature == 0, greedy.accepted_B, sampled_n)
    one_hot = np.eye(logits.shape[-1])[np.asarray(greedy.next_B)]
    next_probs = np.where((temperature == 0)[:, None], one_hot, sampled_next)

    prefix = case["accept_prefix_mask"].astype(bool)
    mask = np.arange(draft_len) < n[:, None]
    stopped = case["terminated_by_stop_token"].astype(bool)
    # The recorded mask ends where the reference stops reading: at an accepted stop token.
    np.testing.assert_array_equal(mask[~stopped], prefix[~stopped])
    assert np.all(n[stopped] >= case["accepted_draft_tokens"][stopped])
    np.testing.assert_allclose(
        next_probs[~stopped], case["next_token_distribution"][~stopped], atol=1e-6
    )


def test_mixed_temperatures_have_no_nan():
    rows, width = 4, 8
    logits = jax.random.normal(jax.random.key(0), (rows, G + 1, width)) * 5
    best = jnp.argmax(logits, axis=-1)
    proposal = Proposal(
        best[:, :G].astype(jnp.int32), DraftDist(jax.nn.one_hot(best[:, :G], width) * 3)
    )
    temperature = np.array([0, 1e-6, 0.7, 5], np.float32)
    sampling = sampling_state(SamplingParams(temperature_B=temperature), rows, width)
    keys = round_keys(sampling.params.seed_B, jnp.zeros(rows, jnp.int32), G)
    with jax.debug_nans(True):
        verdict = jax.jit(accept)(logits, proposal, jnp.full(rows, G), sampling, keys)
    for row in (0, 1):  # no temperature and next to none: the arg-max
        assert verdict.accepted_B[row] == G
        assert verdict.next_B[row] == best[row, G]


def test_candidate_distribution_is_scattered_over_the_vocabulary():
    dist = DraftDist(jnp.log(jnp.array([[[0.25, 0.75]]])), jnp.array([[[4, 1]]]))
    probs = draft_distribution(dist, jnp.zeros(1, jnp.int32), vocab_size=6)
    np.testing.assert_allclose(probs, [[0, 0.75, 0, 0, 0.25, 0]], atol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_drafts_drawn_from_processed_logits_reproduce_the_target(rng, position):
    """200,000 draws with top-2 drafts: total variation to p under 0.01 at every position."""
    size, length, draws = 5, 3, 200_000
    p = np.stack([process(row, 1.0) for row in rng.normal(size=(length + 1, size)) * 1.5])
    q_logits = rng.normal(size=(length, size)).astype(np.float32)
    q_logits[q_logits < np.sort(q_logits, axis=-1)[:, -2:-1]] = -np.inf
    dist = jnp.broadcast_to(jnp.asarray(q_logits), (draws, length, size))
    drafts = jnp.stack(
        [
            jax.random.categorical(jax.random.key(k), jnp.asarray(q_logits[k]), shape=(draws,))
            for k in range(length)
        ],
        axis=1,
    ).astype(jnp.int32)
    sampling = sampling_state(SamplingParams(temperature_B=1.0), draws, size)
    keys = round_keys(sampling.params.seed_B, jnp.zeros(draws, jnp.int32), length)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (draws, length + 1, size))
    verdict = jax.jit(accept)(
        logits, Proposal(drafts, DraftDist(dist)), jnp.full(draws, length), sampling, keys
    )
    reached = np.asarray(verdict.accepted_B) >= position
    kept = np.asarray(verdict.accepted_B) > position
    tokens = np.where(kept, drafts[:, position], verdict.next_B)[reached]
    observed = np.bincount(tokens, minlength=size) / reached.sum()
    assert np.abs(observed - p[position]).sum() / 2 < 0.01
