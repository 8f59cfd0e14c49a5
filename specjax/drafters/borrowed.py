"""What drafters share with their target: its embedding and its head."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.decoding.types import PyTree
from specjax.models.target import Target
from specjax.models.transformer import Head, TransformerTarget

# Parameters that are the target's: frozen in training, and left out of specjax's checkpoints.
TARGETS_OWN = ("embed", "lm_head")


def drafters_own(params: PyTree) -> PyTree:
    """The parameters, or their shapes, that are not the target's."""
    return {name: part for name, part in params.items() if name not in TARGETS_OWN}


def split_params(params: PyTree) -> tuple[PyTree, PyTree]:
    """The drafter's parameters that are trained, and those that stay as they are.

    Fixed are the target's embedding and head, and the ids of a trimmed vocabulary.
    """
    fixed = {name: part for name, part in params.items() if name in (*TARGETS_OWN, "draft_ids")}
    return {name: part for name, part in params.items() if name not in fixed}, fixed


def attach_target(params: PyTree, target: Target) -> PyTree:
    """The parameters with the target's embedding and (the drafter's rows of) its head.

    Raises:
      ValueError: a target that is not ours.
    """
    return attach_head(params, target.params["embed"], language_model_head(target))


def attach_head(params: PyTree, embed: PyTree, head: Head) -> PyTree:
    """The parameters with an embedding and (the drafter's rows of) a head; traceable."""
    weight = head.weight_VD
    if "draft_ids" in params:
        weight = weight[params["draft_ids"]]
    return {**params, "embed": embed, "lm_head": {"weight": weight}}


def check_targets_own(params: PyTree, target: Target) -> None:
    """Makes sure that a drafter's embedding and head are the target's.

    Raises:
      ValueError: one is not; or a target that is not ours.
    """
    shared = attach_target(params, target)
    for name in TARGETS_OWN:
        if not np.array_equal(params[name]["weight"], shared[name]["weight"]):
            raise ValueError(
                f"the drafter's {name} is not {target.name}'s, which would take its place: "
                f"train the rest alone (specjax.drafters.split_params)"
            )


def language_model_head(target: Target) -> Head:
    """The target's.

    Raises:
      ValueError: a target that is not ours, whose hidden states are not known.
    """
    if not isinstance(target.model, TransformerTarget):
        raise ValueError(
            f"{target.name} gives no hidden states: drafters are trained for, and share the "
            f"embedding and head of, a target loaded by specjax"
        )
    return target.model.head(target.params)


def check_draft_vocab(ids: Sequence[int], vocab_size: int) -> Int[Array, " V"]:
    """The ids in increasing order.

    Raises:
      ValueError: none, ids outside the vocabulary, or named twice.
    """
    values = np.asarray(ids)
    if values.ndim != 1 or not len(values) or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"draft_vocab must be a flat list of token ids, got {ids!r}")
    if values.min() < 0 or values.max() >= vocab_size or len(np.unique(values)) < len(values):
        raise ValueError(f"draft_vocab must be distinct token ids from 0 to {vocab_size - 1}")
    return jnp.asarray(np.sort(values), jnp.int32)
