"""Losses of MTP modules against a loop, and what packed documents must not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.mtp_losses import MTPLossWeights, mtp_losses, next_token_loss

B, T, V, DEPTH = 2, 9, 11, 2


def batch(rng):
    return {
        "logits": tuple(rng.normal(size=(B, T, V)).astype(np.float32) for _ in range(DEPTH)),
        "probs": jax.nn.softmax(rng.normal(size=(B, T, V)).astype(np.float32)),
        "tokens": rng.integers(V, size=(B, T)).astype(np.int32),
        "mask": rng.uniform(size=(B, T)) < 0.8,
        "segments": np.array([[1] * 5 + [2] * 4, [1] * 6 + [0] * 3], np.int32),
    }


def losses(parts, weights=None, draft_ids=None, progress=0.0):
    return jax.jit(lambda parts, progress: mtp_losses(
        parts["logits"], parts["probs"], parts["tokens"], parts["mask"], parts["segments"],
        weights or MTPLossWeights(), progress, draft_ids,
    ))(parts, np.float32(progress))  # fmt: skip


@pytest.mark.parametrize("ids", [None, [0, 2, 3, 7, 9]])
def test_losses_equal_a_loop(rng, ids):
    parts = batch(rng)
    if ids is not None:
        parts["logits"] = tuple(x[..., ids] for x in parts["logits"])
        parts["probs"] = parts["probs"][..., np.array(ids)]
    weights = MTPLossWeights(0.3, depth_decay=0.6, distillation=0.25)
    got = losses(parts, weights, None if ids is None else jnp.array(ids))
    known = list(range(V)) if ids is None else ids
    sums = np.zeros((3, DEPTH))
    counts = np.zeros((3, DEPTH))
    lengths = []
    for b in range(B):
        for i in range(T - 1):

            def counted(k, b=b, i=i):
                j = i + k
                inside = j < T and parts["segments"][b, j] == parts["segments"][b, i] > 0
                return bool(inside and parts["mask"][b, j])

            length, reached = 1.0, counted(1)
            for k in range(1, DEPTH + 1):
                reached = reached and counted(k + 1)
                if not counted(k + 1):
                    continue
                q = np.asarray(jax.nn.softmax(parts["logits"][k - 1][b, i]))
                p = np.asarray(parts["probs"][b, i + k])
                label = parts["tokens"][b, i + k + 1]
                if label in known:
                    sums[0, k - 1] -= np.log(q[known.index(label)])
                    counts[0, k - 1] += 1
                sums[1, k - 1] -= np.sum(p * np.log(q))
                sums[2, k - 1] += np.minimum(p, q).sum()
                counts[1:, k - 1] += 1
            if counted(1):
                product = 1.0
                for k in range(1, DEPTH + 1):
                    if not all(counted(j) for j in range(2, k + 2)):
                        break
                    q = np.asarray(jax.nn.softmax(parts["logits"][k - 1][b, i]))
                    product *= np.minimum(np.asarray(parts["probs"][b, i + k]), q).sum()
                    length += product
                lengths.append(length)
    means = sums / counts
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(got.cross_entropy_K, means[0], **close)
    np.testing.assert_allclose(got.distillation_K, means[1], **close)
    np.testing.assert_allclose(got.acceptance_K, means[2], **close)
    np.testing.assert_allclose(got.expected_length, np.mean(lengths), **close)
    assert got.weight == len(lengths)
    mixed = 0.75 * means[0] + 0.25 * means[1]
    expected = 0.3 * (mixed[0] + 0.6 * mixed[1]) / 1.6
    np.testing.assert_allclose(got.total, expected, **close)


def test_another_document_of_the_row_changes_nothing(rng):
    """The losses of the first document alone: the second's tokens and outputs are others."""
    parts = batch(rng)
    parts["mask"][:, 5:] = False
    before = losses(parts)
    parts["tokens"][0, 5:] = (parts["tokens"][0, 5:] + 1) % V
    parts["probs"] = parts["probs"].at[0, 5:].set(1 / V)
    for logits in parts["logits"]:
        logits[0, 5:] = 0.0
    for left, right in zip(before, losses(parts), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_targets_own_loss_equals_a_loop(rng):
    parts = batch(rng)
    logits = parts["logits"][0]
    mean, count, normalizers = jax.jit(next_token_loss)(
        logits, parts["tokens"], parts["mask"], parts["segments"]
    )
    np.testing.assert_allclose(normalizers, np.log(np.exp(logits).sum(axis=-1)), rtol=1e-5)
    losses = []
    for b in range(B):
        for i in range(T - 1):
            same = parts["segments"][b, i] == parts["segments"][b, i + 1] > 0
            if same and parts["mask"][b, i + 1]:
                probs = np.asarray(jax.nn.softmax(logits[b, i]))
                losses.append(-np.log(probs[parts["tokens"][b, i + 1]]))
    assert count == len(losses)
    np.testing.assert_allclose(mean, np.mean(losses), rtol=1e-5)


def test_the_modules_count_less_late_in_a_run(rng):
    parts, weights = batch(rng), MTPLossWeights(0.3, late_scale=0.1, late=0.6)
    early, late = (losses(parts, weights, progress=progress).total for progress in (0.59, 0.6))
    np.testing.assert_allclose(early, 3 * late, rtol=1e-5)
    same = [losses(parts, progress=progress).total for progress in (0.0, 1.0)]
    assert same[0] == same[1]


def test_no_gradient_flows_into_the_targets_distribution(rng):
    parts = batch(rng)
    weights = MTPLossWeights(1.0, distillation=0.5)

    def total(probs):
        return losses({**parts, "probs": probs}, weights).total

    assert not np.any(jax.grad(total)(parts["probs"]))


@pytest.mark.parametrize(
    "options",
    [{"scale": -1.0}, {"distillation": 1.5}, {"late": 2.0}, {"late_scale": np.inf}],
)
def test_wrong_weights_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        MTPLossWeights(**options)
