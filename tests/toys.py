"""Tiny models whose distributions are known exactly, and a tiny random transformer."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.sampling import draw_draft
from specjax.decoding.step import speculate_step
from specjax.decoding.types import DraftDist, Proposal, SamplingState, TargetOutput
from specjax.models.config import TransformerConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget


@dataclasses.dataclass(frozen=True)
class MarkovTarget:
    """A language whose next-token logits are a table row chosen by the last token."""

    vocab_size: int
    max_len: int = 64

    def init_cache(self, batch, slots):
        return jnp.zeros((batch, slots), jnp.int32)

    def apply(self, params, tokens, positions, cache, *, taps=(), logits="all"):
        del taps
        rows = jnp.arange(len(tokens))[:, None]
        return TargetOutput(
            logits=None if logits == "none" else params[tokens],
            hidden=jnp.zeros((*tokens.shape, 1)),
            taps=None,
            cache=cache.at[rows, positions].set(tokens, mode="drop"),
        )


@dataclasses.dataclass(frozen=True)
class MarkovDrafter:
    """Drafts from a Markov table of its own; confident where that table is."""

    taps: tuple[int, ...] = ()

    def init_state(self, batch, slots):
        return ()

    def propose(self, params, state, anchor_B, length_B, sampling, keys_BG):
        tokens, logits = [anchor_B], []
        for key_B in keys_BG.T:
            drafted_BJ = jnp.stack(tokens, axis=1)[:, 1:]
            token_B, q_BV = draw_draft(
                params[tokens[-1]], sampling, length_B, drafted_BJ, len(tokens) - 1, key_B
            )
            tokens.append(token_B)
            logits.append(q_BV)
        logits_BGV = jnp.stack(logits, axis=1)
        confidence_BG = jnp.max(jax.nn.softmax(logits_BGV), axis=-1)
        return Proposal(jnp.stack(tokens[1:], axis=1), DraftDist(logits_BGV), confidence_BG), state

    def observe(self, params, state, tokens_BT, taps, hidden, start_B, count_B):
        return state


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Drafts the row's entries of a given text: params are the tokens by position."""

    taps: tuple[int, ...] = ()

    def init_state(self, batch, slots):
        return ()

    def propose(self, params, state, anchor_B, length_B, sampling, keys_BG):
        positions_BG = length_B[:, None] + jnp.arange(keys_BG.shape[1])[None]
        tokens_BG = jnp.take_along_axis(params, positions_BG, axis=1, mode="clip")
        ids_BGC = tokens_BG[:, :, None]
        return Proposal(tokens_BG, DraftDist(jnp.zeros(ids_BGC.shape), ids_BGC)), state

    def observe(self, params, state, tokens_BT, taps, hidden, start_B, count_B):
        return state


def sampling_state(params, batch, vocab_size):
    """Rows of one-token prompts without stop tokens or penalties."""
    return SamplingState(
        params.rows(batch, vocab_size), np.full((batch, 1), -1, np.int32), np.ones(batch, np.int32)
    )


# Compiled whole: run operation by operation, each would be a program of its own.
jitted_step = jax.jit(speculate_step, static_argnames=("target", "drafter", "config"))


@functools.partial(jax.jit, static_argnames=("model", "method"))
def call(model, method, *args):
    """A method of a drafter or a target, compiled whole."""
    return getattr(model, method)(*args)


def new_tokens(state):
    """Output tokens of each row."""
    fields = (state.tokens_BS, state.sampling.prompt_len_B, state.length_B)
    rows = zip(*jax.device_get(fields), strict=True)
    return [tokens[start:end].tolist() for tokens, start, end in rows]


def texts(state):
    """Committed tokens of each row, prompt and output."""
    rows = zip(*jax.device_get((state.tokens_BS, state.length_B)), strict=True)
    return [tokens[:length].tolist() for tokens, length in rows]


@functools.cache
def tiny_target(seed: int = 0, vocab_size: int = 61, max_len: int = 256) -> Target:
    """A random two-layer transformer with varied greedy output."""
    config = TransformerConfig(
        architecture="llama",
        vocab_size=vocab_size,
        width=32,
        mlp_width=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        max_len=max_len,
    )
    model = TransformerTarget(config)

    @jax.jit
    def make(key):
        params = nn.unbox(model.init_params(key))
        return jax.tree.map(lambda x: x * 2.0, params)  # sharper, so that outputs vary

    params = make(jax.random.key(seed))
    return Target(model, params, None, (), "tiny", "float32")
