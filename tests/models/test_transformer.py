"""Properties of the transformer that do not need recorded outputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import RopeConfig, TransformerConfig
from specjax.models.layers import BLOCK, attend, matmul, rotate, write_cache
from specjax.models.target import fingerprint
from specjax.models.transformer import TransformerTarget
from tests.reference import softmax
from tests.toys import tiny_target

apply = jax.jit(TransformerTarget.apply, static_argnames=("self", "taps", "logits"))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_logits_depend_on_no_later_token(target):
    """The gradient of logits at t with respect to the embedding at s is zero for s > t."""
    tokens = jnp.arange(6)[None]

    def logits_at(table_rows, t):
        params = {**target.params, "embed": {"weight": table_rows}}
        out = target.model.apply(params, tokens, tokens, None)
        return jnp.sum(out.logits[0, t] ** 2)

    # Untied head and distinct tokens: row s of the table is what position s receives.
    gradient_at = jax.jit(jax.grad(logits_at))
    for t in range(6):
        gradient = np.asarray(gradient_at(target.params["embed"]["weight"], t))
        size = np.abs(gradient[:6]).sum(axis=-1)
        assert np.all(size[t + 1 :] == 0)
        assert np.all(size[: t + 1] > 0)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 5], [9], [3, 1, 5]])
def test_cached_passes_equal_one_uncached_pass(target, chunks):
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (2, 9), 0, 61))
    whole = target.forward(tokens, taps=(-1, 0, 1))
    cache, start, parts = target.model.init_cache(2, 12), 0, []
    for size in chunks:
        positions = np.broadcast_to(start + np.arange(size), (2, size))
        out = apply(
            target.model, target.params, tokens[:, start : start + size], positions, cache,
            taps=(-1, 0, 1),
        )  # fmt: skip
        cache, start = out.cache, start + size
        parts.append(out)
    for name in ("logits", "hidden", "taps"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_allclose(joined, getattr(whole, name), rtol=1e-4, atol=1e-4)


def test_logits_can_be_left_out(target):
    tokens, positions = np.array([[1, 2, 3]]), np.arange(3)[None]
    whole = target.forward(tokens)
    last = apply(target.model, target.params, tokens, positions, None, logits="last")
    none = apply(target.model, target.params, tokens, positions, None, logits="none")
    expected = np.asarray(whole.logits)[:, -1:]
    np.testing.assert_allclose(last.logits, expected, rtol=1e-5, atol=1e-5)
    assert none.logits is None
    np.testing.assert_allclose(none.hidden, whole.hidden, rtol=1e-4, atol=1e-5)


def test_segments_of_a_row_are_passes_of_their_own(target):
    rows = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    tokens = jnp.array([[token for row in rows for token in row]])
    positions = jnp.concatenate([jnp.arange(len(row)) for row in rows])[None]
    segments = jnp.repeat(jnp.arange(3), jnp.array([3, 2, 4]))[None]
    out = target.model.apply(target.params, tokens, positions, None, segments=segments)
    apart = [target.forward(jnp.array([row])).logits[0] for row in rows]
    np.testing.assert_allclose(out.logits[0], jnp.concatenate(apart), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="without a cache"):
        target.model.apply(
            target.params, tokens, positions, target.model.init_cache(1, 16), segments=segments
        )


@pytest.mark.parametrize("window", [1, 100, 300, 700])
def test_windows_over_blocks_of_slots_equal_one_softmax(rng, window):
    """Rows at other positions, in a cache of several blocks; slots past the window hold noise."""
    q = rng.normal(size=(3, 2, 4, 8)).astype(np.float32)
    k, v = (rng.normal(size=(3, 2, 3 * BLOCK, 8)).astype(np.float32) for _ in "kv")
    positions = np.array([[0, 1], [400, 401], [766, 767]])
    slots = np.arange(3 * BLOCK)[None]
    windowed = jax.jit(functools.partial(attend, window=window, cap=2.0, scale=0.7))
    got = windowed(q, k, v, positions, slots, np.max(positions) + 1)
    np.testing.assert_allclose(got, windowed(q, k, v, positions, slots), atol=1e-5)
    behind = positions[:, None, :, None] - slots[None, :, None]
    products = np.einsum("btkgh,bksh->bkgts", q.reshape(3, 2, 2, 2, 8), k).reshape(3, 4, 2, -1)
    scores = 2.0 * np.tanh(0.7 * products / 2.0)
    weights = softmax(np.where((behind >= 0) & (behind < window), scores, -np.inf))
    expected = np.einsum("bnts,bnsh->btnh", weights, np.repeat(v, 2, axis=1))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_writes_out_of_range_are_dropped():
    cache = jnp.zeros((2, 1, 4, 2))
    new = jnp.ones((2, 3, 1, 2))
    written = write_cache(cache, new, jnp.array([[2, 3, 4], [4, 5, 6]]))
    assert written[0, 0, :, 0].tolist() == [0, 0, 1, 1]
    assert written[1].sum() == 0


def test_rotation_keeps_lengths_and_depends_on_distance_only(rng):
    x = jnp.asarray(rng.normal(size=(1, 2, 1, 8)), jnp.float32)
    for rope in (RopeConfig(), RopeConfig("llama3", 10_000.0, 8.0, 1.0, 4.0, 64)):
        products = []
        for start in (0, 90):
            q, k = rotate(x, jnp.array([[start, start + 5]]), rope)[0, :, 0]
            np.testing.assert_allclose(jnp.sum(q**2), jnp.sum(x[0, 0] ** 2), rtol=1e-5)
            products.append(jnp.dot(q, k))
        np.testing.assert_allclose(*products, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_bfloat16_products_accumulate_in_float32(rng, rows):
    x = jnp.asarray(rng.normal(size=(rows, 300)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(7, 300)), jnp.bfloat16)
    exact = np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(weight, np.float64).T
    out = matmul(x, weight)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "at least 1"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"norm_eps": float("nan")}, r"finite and above 0, got {'norm_eps': nan}"),
        ({"norm_eps": -1e-5}, "finite and above 0"),
    ],
)
def test_impossible_sizes_are_named(target, change, message):
    config: TransformerConfig = target.model.config
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


@pytest.mark.parametrize("name", ["theta", "factor", "low_freq_factor", "high_freq_factor"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_impossible_rotary_embeddings_are_named(name, value):
    with pytest.raises(ValueError, match=rf"finite and above 0, got {{'{name}': {value}}}"):
        RopeConfig(kind="llama3", **{name: value})
    with pytest.raises(ValueError, match=r"high_freq_factor .* must be above low_freq_factor"):
        RopeConfig(kind="llama3", low_freq_factor=4.0)


def test_forward_refuses_what_does_not_fit(target):
    with pytest.raises(ValueError, match="tokens must be"):
        target.forward(jnp.zeros((1, 257), jnp.int32))
    with pytest.raises(ValueError, match="tokens must be"):
        target.forward(jnp.zeros((1, 0), jnp.int32))
    with pytest.raises(ValueError, match="rows of equal length"):
        target.forward([[1, 2], [3]])


@pytest.mark.parametrize(
    "ids",
    [
        *(np.array([[i]]) for i in (61, -1, 2**32 + 1, 2**40, 2**63, 1.7, True)),
        *([[2**32 + 1]], [[2**70]], [[True]]),
    ],
)
def test_forward_scores_no_other_ids_than_it_got(target, ids):
    with pytest.raises(ValueError, match=r"token ids must be whole numbers in 0\.\.60"):
        target.forward(ids)


def test_fingerprints_tell_models_apart(target):
    print_ = target.fingerprint()
    assert print_ == tiny_target.__wrapped__().fingerprint()  # made anew
    as_numpy = dataclasses.replace(target, params=jax.tree.map(np.asarray, target.params))
    assert as_numpy.fingerprint() == print_
    cpu = jax.devices("cpu")[-1]
    elsewhere = dataclasses.replace(target, params=jax.device_put(target.params, cpu))
    assert elsewhere.fingerprint() == print_
    params = {**target.params, "final_norm": {"scale": target.params["final_norm"]["scale"] + 1e-3}}
    others = [dataclasses.replace(target, params=params), tiny_target(seed=1)]
    assert len({print_, *(other.fingerprint() for other in others)}) == 3


def test_fingerprints_are_of_the_weights_in_either_dtype(target):
    halves = jax.tree.map(lambda x: x.astype("bfloat16") if x.ndim == 2 else x, target.params)
    coarse = dataclasses.replace(target, params=halves, dtype="bfloat16")
    config = dataclasses.replace(target.model.config, norm_eps=1e-6)
    sized = dataclasses.replace(target, model=TransformerTarget(config))
    assert coarse.fingerprint() == sized.fingerprint() == target.fingerprint()
    assert len({str(other.identity()) for other in (target, coarse, sized)}) == 3


def test_fingerprints_stay_as_checkpoints_recorded_them():
    """Parameters that come from no generator, whose numbers may change with JAX's version."""
    params = {
        "embed": {"weight": np.arange(30_000, dtype=np.float32).reshape(300, 100) / 8},
        "norm": {"scale": np.arange(5, dtype=np.float32) / 8},
    }
    assert fingerprint(params) == "2320429dfde8f7afcc21055b3cae0266e46fe3b2067b865a7e222e1947ff1163"
