"""Drivers of the step: prefill, the loop on the device, and the loop that streams."""

import dataclasses
from collections.abc import Generator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int

from specjax.decoding.schedule import FullPolicy
from specjax.decoding.step import speculate_step
from specjax.decoding.types import (
    DecodeConfig,
    DecodeState,
    DrafterModel,
    LogProbs,
    PyTree,
    RoundOutput,
    RoundStats,
    SamplingParams,
    SamplingState,
    TargetModel,
)

# Prompts run through the target in pieces of one of these lengths, the smallest that holds
# the longest prompt, and long ones in several pieces of the last: few programs to compile.
PREFILL_BUCKETS = (16, 64, 256)
_SLOT_MULTIPLE = 256  # also the block length of attention in models/layers.py
TokenIds = Sequence[int] | np.ndarray | jax.Array
_STATIC = ("target", "drafter", "config")


def init_decode_state(
    target_params: PyTree,
    drafter_params: PyTree,
    prompts: Sequence[TokenIds],
    *,
    target: TargetModel,
    drafter: DrafterModel,
    config: DecodeConfig,
    max_new_tokens: int | Sequence[int] | np.ndarray,
    sampling: SamplingParams | None = None,
    stop_ids: Sequence[int] | np.ndarray = (),
    max_len: int | None = None,
    batch: int | None = None,
) -> DecodeState:
    """Runs the prompts and samples each row's first token; `decode` goes on from there.

    Args:
      target_params: parameters of the target.
      drafter_params: parameters of the drafter.
      prompts: token ids of each row, of any lengths.
      target: static description of the target.
      drafter: static description of the drafter.
      config: static choices of the rounds to come.
      max_new_tokens: for all rows, or for each. A row also ends at the room it has.
      sampling: temperatures and seeds; None is greedy.
      stop_ids: tokens that end a row.
      max_len: room of a row, prompt and output together. None takes what the longest
        row may need. Calls with equal `max_len` share one compiled program.
      batch: rows of the state, at least the number of prompts; the rest have ended.

    Raises:
      ValueError: no prompts, an empty prompt, ids outside the vocabulary, a prompt that
        leaves no room for a new token, max_new_tokens below 1, invalid sampling.
    """
    for name, part, kind in (("target", target, TargetModel), ("drafter", drafter, DrafterModel)):
        if not isinstance(part, kind):
            raise ValueError(
                f"{name} must be a {kind.__name__} (of a loaded {name}, pass .model), got {part!r}"
            )
    room = _room(prompts, max_new_tokens, max_len, target.max_len)
    _check_prompts(prompts, target.vocab_size, room)
    batch = len(prompts) if batch is None else batch
    if batch < len(prompts):
        raise ValueError(f"batch ({batch}) must be at least the number of prompts ({len(prompts)})")

    new_B = np.minimum(np.broadcast_to(np.asarray(max_new_tokens), len(prompts)), room)
    params = (sampling or SamplingParams()).rows(len(prompts), target.vocab_size)
    spare = (0, batch - len(prompts))
    penalised = bool(np.any(params.penalised_B))
    state = allocate(
        _pad_prompts(prompts, batch),
        np.pad(np.array([len(p) for p in prompts], np.int32), spare, constant_values=1),
        np.pad(new_B.astype(np.int32), spare),
        _pad_stop_ids(stop_ids, target.vocab_size),
        # Rows that only fill the batch repeat the last one's parameters.
        jax.tree.map(
            lambda row: np.pad(row, [spare] + [(0, 0)] * (row.ndim - 1), mode="edge"), params
        ),
        np.int32(room),
        penalised=penalised,
        slots=-(-(room + config.draft_len + 1) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE,
        target=target,
        drafter=drafter,
        config=config,
    )
    return _prefill(
        target_params,
        drafter_params,
        state,
        max(len(p) for p in prompts) - 1,
        target=target,
        drafter=drafter,
        config=config,
    )


def decode(
    target_params: PyTree,
    drafter_params: PyTree,
    state: DecodeState,
    *,
    target: TargetModel,
    drafter: DrafterModel,
    config: DecodeConfig,
) -> DecodeState:
    """Steps until every row has ended, in one program on the device.

    The state is donated: use the one returned. Arguments as for `speculate_step`.

    Raises:
      ValueError: the state was donated before.
    """
    _check_not_donated(state)
    return _decode(
        target_params, drafter_params, state, target=target, drafter=drafter, config=config
    )


def stream(
    target_params: PyTree,
    drafter_params: PyTree,
    state: DecodeState,
    *,
    target: TargetModel,
    drafter: DrafterModel,
    config: DecodeConfig,
) -> Generator[RoundOutput, np.ndarray | None, DecodeState]:
    """Yields what each round committed, as NumPy arrays, until every row has ended.

    The same step as `decode`, driven from Python. The state is donated; the generator's
    return value is the final one. `send` takes a mask [B] of rows that are to end here.

    Raises:
      ValueError: the state was donated before.
    """
    _check_not_donated(state)
    while not np.all(state.done_B):
        state, output = _step(
            target_params, drafter_params, state, target=target, drafter=drafter, config=config
        )
        ended_B = yield jax.device_get(output)
        if ended_B is not None:
            state = dataclasses.replace(state, done_B=state.done_B | ended_B)
    return state


@partial(jax.jit, static_argnames=_STATIC, donate_argnames="state")
def _decode(
    target_params: PyTree,
    drafter_params: PyTree,
    state: DecodeState,
    *,
    target: TargetModel,
    drafter: DrafterModel,
    config: DecodeConfig,
) -> DecodeState:
    def step(state: DecodeState) -> DecodeState:
        return speculate_step(
            target_params, drafter_params, state, target=target, drafter=drafter, config=config
        )[0]

    return lax.while_loop(lambda state: ~jnp.all(state.done_B), step, state)


_step = partial(jax.jit, static_argnames=_STATIC, donate_argnames="state")(speculate_step)


@partial(jax.jit, static_argnames=("penalised", "slots", *_STATIC))
def allocate(
    prompts_BP: Int[Array, "B P"],
    prompt_len_B: Int[Array, " B"],
    max_new_B: Int[Array, " B"],
    stop_ids_E: Int[Array, " E"],
    params: SamplingParams,
    room: Int[Array, ""],
    *,
    penalised: bool,
    slots: int,
    target: TargetModel,
    drafter: DrafterModel,
    config: DecodeConfig,
) -> DecodeState:
    """A state whose rows hold their prompts and nothing else; `slots` is the room of a cache."""
    batch, width = prompts_BP.shape
    stop_ids_BE = jnp.where(jnp.asarray(params.ignore_eos_B)[:, None], -1, stop_ids_E[None])
    prompt_counts_BV = output_counts_BV = None
    if penalised:
        output_counts_BV = jnp.zeros((batch, target.vocab_size), jnp.int32)
        in_prompt_BP = jnp.arange(width)[None] < prompt_len_B[:, None]
        prompt_counts_BV = output_counts_BV.at[jnp.arange(batch)[:, None], prompts_BP].add(
            in_prompt_BP.astype(jnp.int32)
        )
    blank = jnp.zeros((batch, slots), jnp.float32)
    return DecodeState(
        tokens_BS=jnp.zeros((batch, slots), jnp.int32).at[:, :width].set(prompts_BP),
        length_B=prompt_len_B,
        limit_B=jnp.minimum(prompt_len_B + max_new_B, room),
        done_B=max_new_B == 0,
        sampling=SamplingState(
            params, stop_ids_BE, prompt_len_B, prompt_counts_BV, output_counts_BV
        ),
        cache=target.init_cache(batch, slots),
        drafter_state=drafter.init_state(batch, slots),
        policy_state=config.policy.init_state(batch),
        stats=RoundStats.zeros(batch, config.draft_len),
        logprobs=LogProbs(blank, blank) if config.logprobs else None,
    )


def _prefill(
    target_params: PyTree,
    drafter_params: PyTree,
    state: DecodeState,
    longest: int,
    *,
    target: TargetModel,
    drafter: DrafterModel,
    config: DecodeConfig,
) -> DecodeState:
    """Runs all but the last prompt token in chunks, then draws the first new token.

    The last prompt token is the first anchor, so the first token comes from a step
    without drafts and is checked for stops like any other.
    """
    chunk = next((size for size in PREFILL_BUCKETS if size >= longest), PREFILL_BUCKETS[-1])
    for start in range(0, longest, chunk):
        state = _prefill_chunk(
            target_params,
            drafter_params,
            state,
            np.int32(start),
            chunk=chunk,
            target=target,
            drafter=drafter,
        )
    first = dataclasses.replace(config, draft_len=0, policy=FullPolicy())
    policy_state, state = state.policy_state, dataclasses.replace(state, policy_state=())
    state, _ = _step(
        target_params, drafter_params, state, target=target, drafter=drafter, config=first
    )
    stats = RoundStats.zeros(len(state.done_B), config.draft_len)
    return dataclasses.replace(state, stats=stats, policy_state=policy_state)


@partial(jax.jit, static_argnames=("chunk", "target", "drafter"), donate_argnames="state")
def _prefill_chunk(
    target_params: PyTree,
    drafter_params: PyTree,
    state: DecodeState,
    start: Int[Array, ""],
    *,
    chunk: int,
    target: TargetModel,
    drafter: DrafterModel,
) -> DecodeState:
    positions_BT = jnp.broadcast_to(
        start + jnp.arange(chunk, dtype=jnp.int32), (len(state.length_B), chunk)
    )
    tokens_BT = jnp.take_along_axis(
        state.tokens_BS, positions_BT, axis=1, mode="fill", fill_value=0
    )
    out = target.apply(
        target_params, tokens_BT, positions_BT, state.cache, taps=drafter.taps, logits="none"
    )
    drafter_state = drafter.observe(
        drafter_params,
        state.drafter_state,
        tokens_BT,
        out.taps,
        out.hidden,
        start_B=positions_BT[:, 0],
        count_B=jnp.clip(state.sampling.prompt_len_B - 1 - start, 0, chunk),
    )
    return dataclasses.replace(state, cache=out.cache, drafter_state=drafter_state)


def _room(
    prompts: Sequence[TokenIds],
    max_new_tokens: int | Sequence[int] | np.ndarray,
    max_len: int | None,
    context: int,
) -> int:
    if not len(prompts):
        raise ValueError("no prompts: give at least one row of token ids")
    new = np.asarray(max_new_tokens)
    if new.shape not in ((), (len(prompts),)):
        raise ValueError(
            f"max_new_tokens has shape {new.shape}: give one number, "
            f"or one for each of the {len(prompts)} rows"
        )
    if not np.issubdtype(new.dtype, np.integer) or np.any(new < 1):
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {new}")
    if max_len is None:
        lengths = np.array([len(prompt) for prompt in prompts])
        return min(context, int(np.max(lengths + np.minimum(new, context))))
    if not isinstance(max_len, int | np.integer) or not 1 <= max_len <= context:
        raise ValueError(
            f"max_len must be a whole number in 1..{context}, the target's context; got {max_len}"
        )
    return max_len


def _check_prompts(prompts: Sequence[TokenIds], vocab_size: int, room: int) -> None:
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"row {row} has no tokens: a prompt needs at least one")
        if len(prompt) >= room:
            raise ValueError(
                f"row {row} has a prompt of {len(prompt)} tokens, which leaves no room for a "
                f"new one in the {room} that prompt and output may take: shorten it"
            )
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
            raise ValueError(f"row {row} must be a flat list of token ids, got {prompt!r}")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"row {row} has token ids outside 0..{vocab_size - 1}")


def _pad_prompts(prompts: Sequence[TokenIds], batch: int) -> np.ndarray:
    width = -(-max(len(prompt) for prompt in prompts) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
    padded = np.zeros((batch, width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    return padded


def _pad_stop_ids(stop_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    ids = np.asarray(stop_ids if len(stop_ids) else [], None if len(stop_ids) else np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or np.any((ids < 0) | (ids >= vocab_size)):
        raise ValueError(f"stop_ids must be token ids from 0 to {vocab_size - 1}, got {stop_ids}")
    # A multiple of four, so that few programs differ in it.
    return np.pad(np.unique(ids), (0, -len(np.unique(ids)) % 4 or 4), constant_values=-1)


def _check_not_donated(state: DecodeState) -> None:
    for leaf in jax.tree.leaves(state):
        traced = isinstance(leaf, Tracer)
        if isinstance(leaf, jax.Array) and not traced and leaf.is_deleted():
            raise ValueError(
                "this DecodeState was used before: decode and stream donate it. "
                "Go on with the state they return, or make a new one"
            )
