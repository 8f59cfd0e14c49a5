"""A target's hidden states over texts that are given."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Int

from specjax.data.target_cache import Sample, TokenSequence
from specjax.decoding.types import PyTree, TargetModel
from specjax.models.target import Target

_SHORTEST = 64  # positions of the smallest program
_WINDOW = 4  # passes' worth of tokens whose hidden states are held at once


def read_samples(
    target: Target,
    sequences: Iterable[TokenSequence],
    taps: tuple[int, ...],
    *,
    max_len: int | None = None,
    batch_tokens: int = 4096,
    start: int = 0,
) -> Iterator[Sample]:
    """The sequences with the target's hidden states over them, in bfloat16.

    They come in the order of the sequences. Those of about one length, among some that follow
    one another, share a pass, and all passes of a length one compiled program. What is left
    without tokens to be learnt is left out.

    Args:
      target: the model.
      sequences: to be read, once, as they are needed.
      taps: layers whose outputs are kept; at least one.
      max_len: longer sequences are cut; None takes the model's context, which is the limit.
      batch_tokens: tokens of one pass, padding included, where it has several rows.
      start: samples to leave out at the beginning; no pass is made for most of them.

    Raises:
      ValueError: sizes out of range, no taps, a model that does not have them, or token ids
        outside its vocabulary.
    """
    limit = target.model.max_len if max_len is None else min(max_len, target.model.max_len)
    if min(limit, batch_tokens) < 1 or start < 0 or not taps:
        raise ValueError(
            f"max_len and batch_tokens must be at least 1, start at least 0, and taps must name "
            f"a layer; got {max_len}, {batch_tokens}, {start} and {taps}"
        )
    for window in _windows(sequences, limit, _WINDOW * batch_tokens):
        samples: dict[int, Sample] = {}
        for batch, shape in _batches(window, limit, batch_tokens):
            if batch[-1] >= start:
                read = _read_batch(target, [window[index] for index in batch], taps, shape)
                samples.update(zip(batch, read, strict=True))
        yield from (samples[index] for index in range(start, len(window)))
        start = max(start - len(window), 0)


def _windows(
    sequences: Iterable[TokenSequence], max_len: int, tokens: int
) -> Iterator[list[TokenSequence]]:
    """Sequences that follow one another, of at least as many tokens together."""
    window: list[TokenSequence] = []
    count = 0
    for tokens_T, mask_T in sequences:
        sequence = TokenSequence(tokens_T[:max_len], mask_T[:max_len])
        if not sequence.loss_mask_T.any():
            continue
        window.append(sequence)
        count += len(sequence.tokens_T)
        if count >= tokens:
            yield window
            window, count = [], 0
    yield window


def _batches(
    window: Sequence[TokenSequence], max_len: int, batch_tokens: int
) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Indices, in order, of those that share a pass, and the shape of its program."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, text in enumerate(window):
        needed = 1 << (len(text.tokens_T) - 1).bit_length()
        groups[min(max(needed, _SHORTEST), max_len)].append(index)
    for length, indices in groups.items():
        rows = max(batch_tokens // length, 1)
        for i in range(0, len(indices), rows):
            yield indices[i : i + rows], (rows, length)


def _read_batch(
    target: Target, batch: list[TokenSequence], taps: tuple[int, ...], shape: tuple[int, int]
) -> list[Sample]:
    tokens_BT = np.zeros(shape, np.int32)
    for row, (tokens_T, _) in enumerate(batch):
        if tokens_T.min() < 0 or tokens_T.max() >= target.model.vocab_size:
            raise ValueError(
                f"token ids must lie in 0..{target.model.vocab_size - 1}, the vocabulary of "
                f"{target.name}; got {tokens_T.min()} to {tokens_T.max()}"
            )
        tokens_BT[row, : len(tokens_T)] = tokens_T
    states = hidden_states(target.params, jnp.asarray(tokens_BT), model=target.model, taps=taps)
    taps_BTMD, hidden_BTD = jax.device_get(states)
    return [
        Sample(*sequence, taps_BTMD[row, :length], hidden_BTD[row, :length])
        for row, sequence in enumerate(batch)
        for length in [len(sequence.tokens_T)]
    ]


@partial(jax.jit, static_argnames=("model", "taps"))
def hidden_states(
    params: PyTree, tokens_BT: Int[Array, "B T"], *, model: TargetModel, taps: tuple[int, ...]
) -> tuple[BFloat16[Array, "B T M D"], BFloat16[Array, "B T D"]]:
    """Taps and last hidden states of texts that are padded at the end."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    out = model.apply(params, tokens_BT, positions_BT, None, taps=taps, logits="none")
    if taps and out.taps is None:
        raise ValueError(f"{model} gives no hidden states to train a drafter from")
    none_BTMD = jnp.zeros((*tokens_BT.shape, 0, out.hidden.shape[-1]))
    taps_BTMD = none_BTMD if out.taps is None else out.taps
    return taps_BTMD.astype(jnp.bfloat16), out.hidden.astype(jnp.bfloat16)
