"""Slow NumPy versions of what the library computes, written from the definitions."""

import itertools

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


def markov_joint(first: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """P(y_1..y_n) of a Markov chain: [V] * n, from P(y_1) and rows P(next | last)."""
    joint = np.zeros((len(first),) * length)
    for sequence in itertools.product(range(len(first)), repeat=length):
        steps = itertools.pairwise(sequence)
        joint[sequence] = first[sequence[0]] * np.prod([table[a, b] for a, b in steps])
    return joint


def prompt_lookup(text: list[int], draft_len: int, max_ngram: int) -> list[int]:
    """What followed the longest repeated suffix of the text, its latest occurrence."""
    best, end = 0, len(text) - 2  # no match: the last token again
    for j in range(len(text) - 1):
        size = 0
        while size < max_ngram and size <= j and text[j - size] == text[-1 - size]:
            size += 1
        if size and size >= best:
            best, end = size, j
    text = list(text)
    for k in range(draft_len):
        text.append(text[end + 1 + k])
    return text[-draft_len:]
