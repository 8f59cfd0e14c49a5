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


def process(
    logits: np.ndarray,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, by sorting."""
    p = softmax(logits / temperature)
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0)
        p /= p.sum()
    if top_p < 1:
        order = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(order), top_p)
        p = np.where(p >= order[min(last, len(p) - 1)], p, 0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def adjust(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> np.ndarray:
    """Logits after repetition, frequency and presence penalties, token by token."""
    logits = logits.copy()
    for token in set(prompt) | set(output):
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    for token in set(output):
        logits[token] -= frequency * output.count(token) + presence
    return logits
