"""A loaded target: its static model, its parameters and its tokeniser."""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.decoding.types import AnyArray, PyTree, TargetModel, TargetOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Target:
    """What `load_target` returns.

    Attributes:
      model: static and hashable; the `target` argument of the decoding functions.
      params: its parameters; their `target_params` argument.
      tokenizer: for text prompts; None if the checkpoint has none (pass token ids).
      stop_ids: end-of-sequence ids.
      name: how it was asked for, for reports.
      dtype: of the weight matrices.
    """

    model: TargetModel
    params: PyTree
    tokenizer: "PreTrainedTokenizerBase | None"
    stop_ids: tuple[int, ...]
    name: str
    dtype: str

    def forward(self, tokens_BT: Int[AnyArray, "B T"], taps: tuple[int, ...] = ()) -> TargetOutput:
        """Causal pass over whole sequences without a cache, for scoring and parity.

        Args:
          tokens_BT: token ids, every row from position 0.
          taps: layers whose outputs to return; -1 is the embedding.

        Raises:
          ValueError: ids outside the vocabulary, no tokens, or more than the model's
            context length.
        """
        tokens_BT = jnp.asarray(tokens_BT, jnp.int32)
        if tokens_BT.ndim != 2 or not 0 < tokens_BT.shape[1] <= self.model.max_len:
            raise ValueError(
                f"tokens must be [rows, 1..{self.model.max_len}], got {tokens_BT.shape}"
            )
        if not jnp.all((tokens_BT >= 0) & (tokens_BT < self.model.vocab_size)):
            raise ValueError(f"token ids must lie in 0..{self.model.vocab_size - 1}")
        return _forward(self.params, tokens_BT, target=self.model, taps=taps)


@partial(jax.jit, static_argnames=("target", "taps"))
def _forward(
    params: PyTree, tokens_BT: Array, *, target: TargetModel, taps: tuple[int, ...]
) -> TargetOutput:
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return target.apply(params, tokens_BT, positions_BT, None, taps=taps)
