"""One round, all of whose outcomes are summed: its law must be the target's."""

import functools

import jax
import numpy as np

from specjax.decoding.accept import accept_rejection
from specjax.decoding.sampling import draft_probs, process_logits
from specjax.decoding.types import SamplingParams
from tests.reference import softmax
from tests.toys import call, sampling_state


def repeat_rows(tree, rows):
    """One row's state as that of many."""
    return jax.tree.map(lambda leaf: np.repeat(leaf, rows, axis=0), tree)


def check_enumerated_round(target, drafter, state, prompt, anchor, *, rows=4096, top_k=5):
    """All pairs of drafts that q allows, and all outcomes of their acceptance.

    Args:
      target: of specjax.
      drafter: whose state after the prompt is `state`, of one row.
      state: the drafter's.
      prompt: token ids.
      anchor: the token after them.
      rows: drawn to meet every pair.
      top_k: tokens that p and q keep.
    """
    vocab_size = target.model.vocab_size
    params = SamplingParams(temperature_B=1.5, top_k_B=top_k)
    many, _ = call(
        drafter.model, "propose", drafter.params, repeat_rows(state, rows),
        np.full(rows, anchor, np.int32), np.full(rows, len(prompt) + 1, np.int32),
        sampling_state(params, rows, vocab_size), jax.random.split(jax.random.key(0), (rows, 2)),
    )  # fmt: skip
    many = jax.device_get(many)
    pairs, index = np.unique(many.tokens_BG, axis=0, return_index=True)
    proposal = jax.tree.map(lambda leaf: leaf[index], many)
    q = np.asarray(jax.jit(draft_probs)(proposal.dist, proposal.tokens_BG), np.float64)
    assert np.isclose(np.prod(q, axis=1).sum(), 1, atol=1e-6)  # every pair has been met

    drafted = [[*prompt, anchor, *pair] for pair in pairs.tolist()]
    logits = jax.jit(process_logits)(
        np.asarray(target.forward(drafted).logits)[:, -3:], params.rows(len(pairs), vocab_size)
    )
    accept = functools.partial(jax.jit(accept_rejection), logits, proposal, np.full(len(pairs), 2))

    def chance_and_next(k):
        """How likely draft k is kept, those before it being kept; what follows if it is not."""
        low, high = np.zeros(len(pairs), np.float32), np.ones(len(pairs), np.float32)
        for _ in range(26):
            uniform = np.zeros((len(pairs), 2), np.float32)
            uniform[:, k] = (low + high) / 2
            kept = np.asarray(accept(uniform)[0]) > k
            low, high = np.where(kept, uniform[:, k], low), np.where(kept, high, uniform[:, k])
        uniform[:, k] = 1.0 - 2**-24
        return low, softmax(np.asarray(accept(uniform)[1]))

    p = softmax(np.asarray(logits))
    for k, groups in enumerate([[np.arange(len(pairs))], by_value(pairs[:, 0])]):
        chance, after = chance_and_next(k)
        for group in groups:
            if k and p[group[0], 0, pairs[group[0], 0]] == 0:
                continue  # its first draft is never kept
            law = np.zeros(vocab_size)
            for row in group:
                weight = q[row, 0] * q[row, 1] if k == 0 else q[row, 1]
                law += weight * (1 - chance[row]) * after[row] * (chance[row] < 1 - 1e-6)
                law[pairs[row, k]] += weight * chance[row]
            np.testing.assert_allclose(law, p[group[0], k], atol=1e-6)


def by_value(values):
    """Indices of equal values."""
    return [np.flatnonzero(values == value) for value in np.unique(values)]
