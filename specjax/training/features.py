"""Where training gets the target's hidden states: from a cache, or from the target itself."""

import contextlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.data.corpus import PackedRow
from specjax.data.hidden_states import hidden_states
from specjax.data.target_cache import Sample, TargetCache, TokenSequence
from specjax.data.texts import digest_texts
from specjax.drafters.borrowed import language_model_head
from specjax.files import replacing
from specjax.models.target import Target
from specjax.models.transformer import Head

_ROWS = 256  # hidden states whose logits are computed together


class Batch(NamedTuple):
    """Sequences padded to one length, on the device; without states where the target learns too.

    Attributes:
      tokens_BT: token ids.
      loss_mask_BT: tokens to be learnt.
      segments_BT: documents of a row, which do not see each other; 0 is padding.
      positions_BT: of the tokens in their documents.
      taps_BTMD: outputs of the tapped layers at each token.
      hidden_BTD: the input of the language-model head at each token.
      normalizer_BT: log-sum-exp of the head's logits at each token.
    """

    tokens_BT: Int[Array, "B T"]
    loss_mask_BT: Bool[Array, "B T"]
    segments_BT: Int[Array, "B T"]
    positions_BT: Int[Array, "B T"]
    taps_BTMD: Float[Array, "B T M D"] | None = None
    hidden_BTD: Float[Array, "B T D"] | None = None
    normalizer_BT: Float[Array, "B T"] | None = None


@runtime_checkable
class TrainingData(Protocol):
    """Sequences to train on, as Grain's data sources, and the states of a batch of them."""

    @property
    def texts(self) -> Sequence[Any]:
        """The sequences' tokens and masks, as `TokenSequence` names them."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """Plain values that are the same for equal data."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any:
        """A NamedTuple of one sequence's arrays, for `collate`."""
        ...

    def complete(self, collated: Any) -> Batch:
        """The batch of what `collate` made of such tuples."""
        ...


class CachedStates:
    """Sequences with the states that a target cache holds, which needs no target.

    The normalizers, for which the target's whole head is run once, are kept beside the
    shards (normalizers.npz), for other runs.
    """

    def __init__(
        self,
        cache: TargetCache,
        head: Head,
        taps: tuple[int, ...],
        on_tokens: Callable[[int], object] = lambda count: None,
    ):
        """Reads the normalizers, or computes and keeps them.

        Args:
          cache: of the target.
          head: its language-model head.
          taps: the drafter's, among those of the cache.
          on_tokens: called with the number of tokens done since the call before.

        Raises:
          ValueError: a cache that does not have the taps, or of another width.
        """
        width = head.weight_VD.shape[1]
        if not set(taps) <= set(cache.taps) or cache.width != width:
            raise ValueError(
                f"the cache holds layers {cache.taps} of width {cache.width} and the drafter "
                f"taps {taps} of width {width}: make the cache with its taps"
            )
        self._cache = cache
        self._columns = [cache.taps.index(tap) for tap in taps]
        self._starts = np.concatenate([[0], np.cumsum(cache.lengths)])
        self.texts: Sequence[TokenSequence] = cache.texts
        self.identity = {
            "samples": len(cache),
            "tokens": int(cache.lengths.sum()),
            "fingerprint": cache.fingerprint or digest_texts(cache.texts),
            "made_with": cache.manifest.get("made_with"),
        }
        path = cache.directory / "normalizers.npz"
        key = np.array([cache.fingerprint, _fingerprint(head)])
        values = _read(path, key) if cache.fingerprint else None
        if values is None:
            values = self._compute(head, on_tokens)
            # A cache that only others may write to, or another run that is as far as this one.
            with (
                contextlib.suppress(OSError),
                replacing(path) as partial_path,
                open(partial_path, "wb") as file,
            ):
                np.savez(file, key=key, values=values)
        else:
            on_tokens(len(values))
        self._values = values

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, index: Any) -> Sample:
        start, end = self._starts[index : index + 2]
        sample = self._cache[int(index)]
        return sample._replace(
            taps_TMD=sample.taps_TMD[:, self._columns], normalizer_T=self._values[start:end]
        )

    def complete(self, collated: Sample) -> Batch:
        tokens_BT, mask_BT, *states = map(jnp.asarray, collated)
        return Batch(tokens_BT, mask_BT, *_one_document(tokens_BT), *states)

    def _compute(self, head: Head, on_tokens: Callable[[int], object]) -> np.ndarray:
        values = []
        for index in range(len(self)):
            hidden_TD = self._cache[index].hidden_TD
            length = len(hidden_TD)
            padded_TD = np.pad(hidden_TD, ((0, -length % _ROWS), (0, 0)))
            pieces = padded_TD.astype(np.float32).reshape(-1, _ROWS, padded_TD.shape[-1])
            normalizers = [log_normalizers(piece, head) for piece in pieces]
            values.append(np.concatenate(normalizers)[:length])
            on_tokens(length)
        return np.concatenate(values)


class OnlineStates:
    """Texts whose states the target computes for every batch: nothing to store."""

    def __init__(self, texts: Sequence[TokenSequence], target: Target, taps: tuple[int, ...]):
        """Takes texts, of `read_texts` or `encode_conversations`.

        Raises:
          ValueError: a target that gives no hidden states.
        """
        self._head = language_model_head(target)
        self.texts, self._target, self._taps = texts, target, taps
        self.identity = {
            "samples": len(texts),
            "texts": digest_texts(texts),
            **target.identity(),
        }

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> TokenSequence:
        return self.texts[int(index)]

    def complete(self, collated: TokenSequence) -> Batch:
        tokens_BT, mask_BT = map(jnp.asarray, collated)
        target = self._target
        taps_BTMD, hidden_BTD = hidden_states(
            target.params, tokens_BT, model=target.model, taps=self._taps
        )
        normalizer_BT = log_normalizers(hidden_BTD, self._head)
        states = taps_BTMD, hidden_BTD, normalizer_BT
        return Batch(tokens_BT, mask_BT, *_one_document(tokens_BT), *states)


class TextAlone:
    """Rows without states, for a target that learns too: its objective computes them."""

    def __init__(self, rows: Sequence[PackedRow]):
        """Takes rows of `pack` or `single_rows`."""
        self.texts = rows
        self.identity = {"rows": len(rows), "texts": digest_texts(rows)}

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> PackedRow:
        return self.texts[int(index)]

    def complete(self, collated: PackedRow) -> Batch:
        return Batch(*map(jnp.asarray, collated))


def _one_document(tokens_BT: Array) -> tuple[Array, Array]:
    """Segments and positions of rows that hold one document each; the mask tells padding."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return jnp.ones_like(tokens_BT), positions_BT


def target_probs(
    hidden: Float[Array, "*rows D"],
    head: Head,
    normalizer: Float[Array, "*rows"],
    draft_ids: Int[Array, " C"] | None,
) -> Float[Array, "*rows _"]:
    """What the target thinks of the tokens that may be drafted.

    Args:
      hidden: the target's last hidden states.
      head: its language-model head.
      normalizer: log-sum-exp of its logits.
      draft_ids: the tokens; None is all.
    """
    return jnp.exp(head.logits(hidden, draft_ids) - normalizer[..., None])


@jax.jit
def log_normalizers(hidden: Float[Array, "*rows D"], head: Head) -> Float[Array, "*rows"]:
    """Log-sum-exp of the target's logits."""
    return jax.nn.logsumexp(head.logits(hidden), axis=-1)


def _fingerprint(head: Head) -> str:
    """Changes with the head; from its sums, which are quick to make."""
    weight_VD = head.weight_VD
    sums = np.asarray(jnp.sum(weight_VD.astype(jnp.float32), axis=0)).tobytes().hex()[:64]
    return f"{weight_VD.dtype} {weight_VD.shape} {head.cap} {sums}"


def _read(path: Path, key: np.ndarray) -> np.ndarray | None:
    """None where they are missing, damaged, or another cache's or head's."""
    try:
        with open(path, "rb") as file, np.load(file) as stored:
            return stored["values"] if np.array_equal(stored["key"], key) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
