"""New DSpark drafters, and what makes one fit a target."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import (
    attach_target,
    check_draft_vocab,
    check_targets_own,
    drafters_own,
    language_model_head,
)
from specjax.drafters.dspark import DSpark, DSparkConfig
from specjax.models.config import RopeConfig, TransformerConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget


def init_dspark(
    target: Target,
    key: jax.Array,
    *,
    num_layers: int = 2,
    taps: Sequence[int] | None = None,
    block_size: int = 7,
    mask_token_id: int | None = None,
    draft_vocab: Sequence[int] | None = None,
    layers_from: Sequence[int] = (),
    dtype: str | None = None,
    **options: Any,
) -> tuple[DSpark, PyTree]:
    """A new drafter with random or copied weights, which uses the target's embedding and head.

    `split_params` says which of its parameters are to be trained; wrap it as
    `specjax.Drafter(model, params, name)` to decode with it.

    Args:
      target: the model it will draft for; its layers give the sizes of the drafter's.
      key: for the weights, from `jax.random.key`.
      num_layers: of the backbone.
      taps: context features; None takes five layers (fewer of a shallow target) from the
        second to the last but two, evenly spread.
      block_size: the longest draft.
      mask_token_id: None chooses one that the target does not use (`unused_token`).
      draft_vocab: ids of the tokens that may be drafted; None is all.
      layers_from: one layer of the target for each draft layer, to start with its weights.
        The context then starts as the last tap, and the final norm as the target's.
      dtype: of the weight matrices; None is the target's. Train in "float32".
      options: further fields of `DSparkConfig`.

    Raises:
      ValueError: options that cannot be combined, or a target that is not ours.
    """
    model = target.model
    if not isinstance(model, TransformerTarget):
        raise ValueError("a new drafter needs a target loaded by specjax")
    if taps is None:
        taps = default_taps(model.config.num_layers)
    known = {field.name for field in dataclasses.fields(DSparkConfig)}
    known -= {"backbone", "draft_vocab_size"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"unknown options {unknown}: known are {sorted(known)}")
    ids = None if draft_vocab is None else check_draft_vocab(draft_vocab, model.vocab_size)
    config = DSparkConfig(
        backbone=_backbone(model.config, num_layers),
        taps=tuple(map(_plain_int, np.atleast_1d(taps))),
        block_size=_plain_int(block_size),
        mask_token_id=unused_token(target) if mask_token_id is None else _plain_int(mask_token_id),
        draft_vocab_size=None if ids is None else len(ids),
        **{name: _plain_int(value) for name, value in options.items()},
    )
    drafter = DSpark(config)
    check_fits(drafter, target)

    @jax.jit
    def make(key: jax.Array) -> PyTree:
        return drafters_own(nn.unbox(drafter.init_params(key)))

    weights = target.dtype if dtype is None else dtype
    if weights not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}")
    made = make(key)
    if layers_from:
        made = _copy_layers(made, target, tuple(layers_from), num_layers)
    params = jax.tree.map(lambda leaf: leaf.astype(weights) if leaf.ndim == 2 else leaf, made)
    if ids is not None:
        params["draft_ids"] = ids
    return drafter, attach_target(params, target)


def default_taps(depth: int) -> tuple[int, ...]:
    """Five layers (fewer of few) from the second to the last but two, evenly spread.

    Args:
      depth: layers of the target.
    """
    spread = np.linspace(min(1, depth - 2), max(depth - 3, 1), 5)
    return tuple(sorted({min(round(tap), depth - 2) for tap in spread}))


def check_taps(taps: Sequence[Any], target: Target, depth: int) -> None:
    """Makes sure that these are layers that a target has, and not its last among them.

    Of the last layer some implementations store the normed state, so none may tap it.

    Raises:
      ValueError: they are not.
    """
    whole = all(type(tap) is int for tap in taps)
    if not taps or not whole or list(taps) != sorted(set(taps)) or taps[0] < -1:
        raise ValueError(f"taps must be increasing layers from -1, the embedding; got {taps}")
    if taps[-1] > depth - 2:
        raise ValueError(
            f"taps {taps} reach beyond layer {depth - 2}, the last but one of {target.name}: tap "
            f"earlier layers; a checkpoint of these was made for another target"
        )


def _backbone(target: TransformerConfig, num_layers: int) -> TransformerConfig:
    """Layers of Qwen3's kind, whatever the target's, of the sizes of its full-attention layers.

    A factor of the target's embeddings and a cap of its logits are not taken over.
    """
    sizes = ("vocab_size", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim")
    same = {name: getattr(target, name) for name in (*sizes, "norm_eps", "max_len", "rope")}
    if target.rope.kind == "proportional":
        same["rope"] = RopeConfig(theta=target.rope.theta)
    return TransformerConfig(architecture="qwen3", num_layers=num_layers, qk_norm=True, **same)


def _copy_layers(
    params: PyTree, target: Target, layers: tuple[int, ...], num_layers: int
) -> PyTree:
    """The parameters with the target's in the draft layers and the final norm."""
    known = [name in target.params for name in (f"layer_{i}" for i in layers)]
    if len(layers) != num_layers or not all(known):
        raise ValueError(
            f"layers_from must name {num_layers} layers of {target.name}, got {layers}"
        )
    assert isinstance(target.model, TransformerTarget)  # init_dspark made sure
    gelu = target.model.config.activation != "silu"
    params = dict(params)
    for i, source in enumerate(layers):
        layer = jax.tree.map(jnp.asarray, target.params[f"layer_{source}"])
        drafts = params[f"layer_{i}"]
        # The draft layer may have norms that the target's has not, but nothing else may differ.
        attention = {**drafts["attention"], **layer["attention"]}
        layer = {**layer, "attention": attention}
        if jax.tree.map(jnp.shape, layer) != jax.tree.map(jnp.shape, drafts) or gelu:
            raise ValueError(
                f"layers_from: the layers of {target.name} are of another kind than a drafter's "
                f"(those of Llama, Mistral and Qwen3 are alike): start with random ones"
            )
        params[f"layer_{i}"] = layer
    width, inputs = params["fc"]["weight"].shape
    last = jnp.eye(width, inputs, k=inputs - width, dtype=jnp.float32)
    params |= {"fc": {"weight": last}, "final_norm": target.params["final_norm"]}
    return params


def with_block_size(model: DSpark, block_size: int) -> DSpark:
    """The drafter for blocks of another size, for which its parameters serve as well.

    Raises:
      ValueError: a size below 1.
    """
    return DSpark(dataclasses.replace(model.config, block_size=block_size))


def restrict(
    model: DSpark, params: PyTree, draft_vocab: Sequence[int] | None, candidates: int | None
) -> tuple[DSpark, PyTree]:
    """The drafter with a trimmed vocabulary, or with another number of candidates.

    Args:
      model: the drafter.
      params: its parameters.
      draft_vocab: ids of the tokens that may be drafted; None changes nothing.
      candidates: as in `DSparkConfig`; 0 is all, None changes nothing.

    Raises:
      ValueError: ids outside the vocabulary or named twice, a drafter that is trimmed
        already, or more candidates than tokens.
    """
    config = model.config
    if draft_vocab is not None:
        if config.draft_vocab_size is not None:
            raise ValueError("the drafter's vocabulary is trimmed already")
        ids = check_draft_vocab(draft_vocab, config.backbone.vocab_size)
        params = {**params, "lm_head": {"weight": params["lm_head"]["weight"][ids]}}
        if config.markov_rank:
            w2 = {"weight": params["markov"]["w2"]["weight"][ids]}
            params["markov"] = {**params["markov"], "w2": w2}
        params["draft_ids"] = ids
        config = dataclasses.replace(config, draft_vocab_size=len(ids))
    if candidates is not None:
        config = dataclasses.replace(config, candidates=_plain_int(candidates) or None)
    return DSpark(config), params


def expand(model: DSpark, params: PyTree, target: Target) -> tuple[DSpark, PyTree]:
    """The drafter that may draft every token: what `restrict` limits is whole again.

    Tokens that it could not draft get the target's rows of the head and no bias of the
    sequential head.

    Args:
      model: the drafter.
      params: its parameters.
      target: of the drafter.

    Raises:
      ValueError: a trimmed drafter whose embedding or head is not the target's.
    """
    config = dataclasses.replace(model.config, draft_vocab_size=None, candidates=None)
    if model.config.draft_vocab_size is not None:
        check_targets_own(params, target)
        params = {**params, "lm_head": {"weight": language_model_head(target).weight_VD}}
        ids = params.pop("draft_ids")
        if config.markov_rank:
            w2_CR = params["markov"]["w2"]["weight"]
            w2_VR = jnp.zeros((config.head_size, config.markov_rank), w2_CR.dtype)
            w2 = {"weight": w2_VR.at[ids].set(w2_CR)}
            params["markov"] = {**params["markov"], "w2": w2}
    return DSpark(config), params


def _plain_int(value: Any) -> Any:
    """NumPy's integers as Python's, which JSON knows; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def check_fits(model: DSpark, target: Target) -> None:
    """Makes sure that a drafter can draft for a target.

    Raises:
      ValueError: another vocabulary or width, taps that the target does not have, or a mask
        token that ends sequences.
    """
    config, other = model.config, target.model
    if config.backbone.vocab_size != other.vocab_size:
        raise ValueError(
            f"the drafter's vocabulary has {config.backbone.vocab_size} tokens and that of "
            f"{target.name} {other.vocab_size}: it was made for another target"
        )
    check_mask_token(config.mask_token_id, target)
    if not isinstance(other, TransformerTarget):
        return
    if config.backbone.width != other.config.width:
        raise ValueError(
            f"the drafter is {config.backbone.width} wide and {target.name} {other.config.width}: "
            f"it was made for another target"
        )
    check_taps(config.taps, target, other.config.num_layers)


def check_mask_token(mask_token_id: int, target: Target) -> None:
    """Makes sure that a token can stand for what is to be drafted.

    Raises:
      ValueError: one that the target does not have, or one that ends its sequences.
    """
    if not 0 <= mask_token_id < target.model.vocab_size:
        raise ValueError(
            f"mask_token_id {mask_token_id} lies outside the vocabulary of "
            f"{target.model.vocab_size}"
        )
    if mask_token_id in target.stop_ids:
        raise ValueError(
            f"mask_token_id {mask_token_id} is an end-of-sequence token of {target.name}: a "
            f"drafter trained so would learn to end; it needs a token that text does not have"
        )


def unused_token(target: Target) -> int:
    """A token that the target's text does not have, to stand for what is to be drafted.

    The tokeniser's mask token, or else an id past its vocabulary, or else the last of its
    special tokens that has no part in sequences or chats.

    Raises:
      ValueError: there is none.
    """
    # Annotated by transformers with whatever its attributes may hold.
    tokenizer: Any = target.tokenizer
    vocab_size = target.model.vocab_size
    hint = "name one with mask_token_id"
    if tokenizer is None:
        raise ValueError(f"{target.name} has no tokeniser to choose a mask token from: {hint}")
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id not in target.stop_ids:
        return tokenizer.mask_token_id
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    template = str(tokenizer.chat_template or "")
    used = {*target.stop_ids, tokenizer.bos_token_id, tokenizer.eos_token_id}
    used |= {tokenizer.pad_token_id, tokenizer.unk_token_id}
    for token, index in sorted(tokenizer.get_added_vocab().items(), key=lambda item: -item[1]):
        if index not in used and index < vocab_size and token not in template:
            return index
    raise ValueError(f"every token of {target.name} has a use: {hint}")
