"""New MTP modules for a target."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import attach_target, check_draft_vocab, drafters_own
from specjax.drafters.mtp import MTP, MTPConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget


def init_mtp(
    target: Target,
    key: jax.Array,
    *,
    depth: int = 1,
    draft_vocab: Sequence[int] | None = None,
    dtype: str | None = None,
    **options: Any,
) -> tuple[MTP, PyTree]:
    """New modules with random weights, which use the target's embedding and head.

    Their blocks are of the kind of the target's last layer.

    Args:
      target: the model that they extend.
      key: for the weights, from `jax.random.key`.
      depth: D, how many tokens ahead they learn to predict.
      draft_vocab: ids of the tokens that may be drafted; None is all.
      dtype: of the weight matrices; None is the target's. Train in "float32".
      options: further fields of `MTPConfig`.

    Raises:
      ValueError: options that are unknown or wrong, or a target that is not ours.
    """
    model = target.model
    if not isinstance(model, TransformerTarget):
        raise ValueError("MTP modules need a target loaded by specjax")
    known = {"hidden_source", "hidden_norm", "concat", "shared_module"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"unknown options {unknown}: known are {sorted(known)}")
    if depth >= model.max_len:
        raise ValueError(f"depth {depth} exceeds the context of {target.name}")
    ids = None if draft_vocab is None else check_draft_vocab(draft_vocab, model.vocab_size)
    last = model.config.num_layers - 1
    drafter = MTP(
        MTPConfig(
            block=dataclasses.replace(model.config.layer(last), num_layers=1),
            depth=depth,
            tap=last,
            draft_vocab_size=None if ids is None else len(ids),
            **options,
        )
    )
    weights = target.dtype if dtype is None else dtype

    @jax.jit
    def make(key: jax.Array) -> PyTree:
        params = nn.unbox(drafter.init_params(key))
        own = drafters_own(params)
        return jax.tree.map(lambda leaf: leaf.astype(weights) if leaf.ndim == 2 else leaf, own)

    params = make(key)
    if ids is not None:
        params["draft_ids"] = ids
    return drafter, attach_target(params, target)
