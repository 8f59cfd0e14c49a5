"""A loaded target: its static model, its parameters and its tokeniser."""

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from specjax.decoding.types import AnyArray, PyTree, TargetModel, TargetOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Values of each parameter that enter its fingerprint.
_SAMPLE = 4096


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
    params: PyTree = dataclasses.field(repr=False)
    tokenizer: "PreTrainedTokenizerBase | None" = dataclasses.field(repr=False)
    stop_ids: tuple[int, ...]
    name: str
    dtype: str

    def fingerprint(self) -> str:
        """Tells these parameters from others, in whichever dtype; see `fingerprint`."""
        return fingerprint(self.params)

    def identity(self) -> dict[str, str]:
        """All that tells its outputs from others': sizes and options, parameters, dtype."""
        return {"model": repr(self.model), "weights": self.fingerprint(), "dtype": self.dtype}

    def forward(
        self,
        tokens_BT: Shaped[AnyArray, "B T"] | Sequence[Sequence[int]],
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Causal pass over whole sequences without a cache, for scoring and parity.

        It checks the tokens, so it cannot be traced: inside your own jitted function call
        `target.model.apply(target.params, tokens, positions, None, taps=taps)`.

        Args:
          tokens_BT: token ids, every row from position 0.
          taps: layers whose outputs to return; -1 is the embedding.

        Raises:
          ValueError: not whole numbers, ids outside the vocabulary, rows of unequal
            length, no tokens, or more than the model's context length.
        """
        try:
            ids = np.asarray(tokens_BT)
        except ValueError as error:
            raise ValueError("tokens must be rows of equal length: pad the shorter ones") from error
        if ids.ndim != 2 or not 0 < ids.shape[1] <= self.model.max_len:
            raise ValueError(f"tokens must be [rows, 1..{self.model.max_len}], got {ids.shape}")
        # Before they become int32, which would wrap large ids and cut fractions off.
        whole = np.issubdtype(ids.dtype, np.integer)
        if not whole or np.any((ids < 0) | (ids >= self.model.vocab_size)):
            raise ValueError(
                f"token ids must be whole numbers in 0..{self.model.vocab_size - 1}, "
                f"got {ids.dtype} from {ids.min()} to {ids.max()}"
            )
        tokens = jnp.asarray(ids.astype(np.int32))
        return _forward(self.params, tokens, target=self.model, taps=taps)


def fingerprint(params: PyTree) -> str:
    """A hash that changes with the parameters, equal on every device and in either dtype.

    It covers of each parameter its path, shape and up to 4096 evenly spaced values, those of
    matrices rounded to bfloat16; other values may change without notice. Checkpoints keep it:
    what it is of the same parameters must not change.

    Args:
      params: pytree of arrays.

    Returns:
      SHA-256 in hexadecimal.
    """
    digest = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    for path, leaf in sorted((jax.tree_util.keystr(path), leaf) for path, leaf in leaves):
        digest.update(f"{path} {leaf.shape}".encode())
        flat = np.arange(0, leaf.size, -(-leaf.size // _SAMPLE) or 1)
        values = np.asarray(_take(leaf, np.unravel_index(flat, leaf.shape)))
        # On the host, so that every device rounds alike.
        digest.update((values.astype(jnp.bfloat16) if leaf.ndim > 1 else values).tobytes())
    return digest.hexdigest()


@jax.jit
def _take(values: Array, at: tuple[Array, ...]) -> Array:
    return values[at]


@partial(jax.jit, static_argnames=("target", "taps"))
def _forward(
    params: PyTree, tokens_BT: Array, *, target: TargetModel, taps: tuple[int, ...]
) -> TargetOutput:
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return target.apply(params, tokens_BT, positions_BT, None, taps=taps)
