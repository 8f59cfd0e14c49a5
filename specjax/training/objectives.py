"""What training runs minimise: a drafter's losses, alone or beside its target's own.

An objective is frozen and hashable, so static in compiled programs. `trained` and `fixed` are
pytrees of parameters; see each class for what they hold.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from specjax.decoding.types import AnyArray, PyTree
from specjax.drafters.borrowed import attach_head, split_params
from specjax.drafters.dspark import DSpark
from specjax.drafters.mtp import MTP
from specjax.models.transformer import Head, TransformerTarget
from specjax.training.anchors import anchor_candidates, make_blocks, sample_anchors
from specjax.training.features import Batch, target_probs
from specjax.training.losses import LossWeights, dspark_losses
from specjax.training.mtp_losses import MTPLossWeights, mtp_losses, next_token_loss

Losses = dict[str, Array]


class Fixed(NamedTuple):
    """What a drafter's losses need that is not trained.

    Attributes:
      params: of the drafter, those that are the target's or do not learn.
      head: the target's.
    """

    params: PyTree
    head: Head


@runtime_checkable
class Objective(Protocol):
    """What a training run minimises; a dataclass.

    Attributes:
      parts: of `trained`, whose gradients are clipped apart; () clips all together.
    """

    parts: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def compute_dtype(self) -> str:
        """Of the matrix products."""
        ...

    def losses(
        self,
        trained: PyTree,
        fixed: Any,
        batch: Batch,
        key: Key[Array, ""],
        progress: Float[Array, ""],
    ) -> Losses:
        """Losses of sequences [B, T].

        Args:
          trained: parameters that learn.
          fixed: those that do not.
          batch: the sequences.
          key: of whatever is drawn.
          progress: part of the run that is done, from 0 to 1.

        Returns:
          Means over positions; "total" is minimised, and batches are averaged by "weight".
        """
        ...

    def score(self, losses: dict[str, Any]) -> float:
        """What the best checkpoint has most of, on held-out sequences."""
        ...

    def anchors(self, loss_mask_BT: Bool[AnyArray, "B T"]) -> int:
        """Positions of a batch from which drafts are learnt, or tokens, where all are."""
        ...


@dataclasses.dataclass(frozen=True)
class DSparkObjective:
    """A DSpark drafter's losses, at anchors that are drawn, of rows that hold a document each.

    Attributes:
      model: the drafter; `trained` holds its own parameters, and `fixed` is `Fixed`.
      weights: of the losses.
      num_anchors: blocks of each sequence.
      compute_dtype: of the matrix products; parameters and the rest stay float32.
    """

    model: DSpark
    weights: LossWeights = dataclasses.field(default_factory=LossWeights)
    num_anchors: int = 64
    compute_dtype: str = "float32"

    parts: ClassVar[tuple[str, ...]] = ()
    # Whether a target that learns too is to be shaped by these losses.
    shapes_target: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {self.num_anchors}")

    def losses(
        self, trained: PyTree, fixed: Fixed, batch: Batch, key: Array, progress: Array
    ) -> Losses:
        """See `Objective`."""
        del progress
        assert batch.taps_BTMD is not None  # of data for drafters
        assert batch.hidden_BTD is not None
        assert batch.normalizer_BT is not None
        params = {**cast_products(trained, self.compute_dtype), **fixed.params}
        tokens_BT, mask_BT, config = batch.tokens_BT, batch.loss_mask_BT, self.model.config
        rows, length = tokens_BT.shape
        uniform = jax.random.uniform(key, (rows, length - 1))
        anchors_BA, keep_BA = sample_anchors(mask_BT, uniform, self.num_anchors)
        blocks = make_blocks(
            tokens_BT,
            mask_BT,
            anchors_BA,
            keep_BA,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
        out = self.model.forward(
            params,
            batch.taps_BTMD.astype(jnp.float32),
            blocks.tokens_BAG,
            blocks.previous_BAG,
            anchors_BA,
        )
        ids = params.get("draft_ids")
        states = jnp.arange(rows)[:, None, None], blocks.states_BAG
        hidden, normalizer = batch.hidden_BTD, batch.normalizer_BT
        if blocks.states_BAG.size < tokens_BT.size:
            probs_BAGV = target_probs(hidden[states], fixed.head, normalizer[states], ids)
        else:  # many blocks share a state
            probs_BAGV = target_probs(hidden, fixed.head, normalizer, ids)[states]
        return dspark_losses(out, blocks, probs_BAGV, self.weights, ids)._asdict()

    def score(self, losses: dict[str, Any]) -> float:
        return losses["expected_length"]

    def anchors(self, loss_mask_BT: Bool[AnyArray, "B T"]) -> int:
        candidates_B = anchor_candidates(loss_mask_BT).sum(axis=1)
        return int(np.minimum(candidates_B, self.num_anchors).sum())


@dataclasses.dataclass(frozen=True)
class MTPObjective:
    """The losses of MTP modules, at every position.

    Attributes:
      model: the modules; `trained` holds their parameters, and `fixed` is `Fixed`.
      weights: of the losses.
      compute_dtype: of the matrix products; parameters and the rest stay float32.
    """

    model: MTP
    weights: MTPLossWeights = dataclasses.field(default_factory=MTPLossWeights)
    compute_dtype: str = "float32"

    parts: ClassVar[tuple[str, ...]] = ()
    shapes_target: ClassVar[bool] = True

    def losses(
        self, trained: PyTree, fixed: Fixed, batch: Batch, key: Array, progress: Array
    ) -> Losses:
        """See `Objective`."""
        del key
        assert batch.hidden_BTD is not None  # of data for drafters
        assert batch.normalizer_BT is not None
        params = {**cast_products(trained, self.compute_dtype), **fixed.params}
        below_BTD = batch.hidden_BTD
        if self.model.taps:
            assert batch.taps_BTMD is not None
            below_BTD = batch.taps_BTMD[:, :, 0]
        normed_BTKD = self.model.forward(
            params,
            batch.tokens_BT,
            below_BTD.astype(jnp.float32),
            batch.positions_BT,
            batch.segments_BT,
        )
        ids = params.get("draft_ids")
        depths = range(self.model.config.depth)
        logits = [self.model.head_logits(params, normed_BTKD[:, :, k]) for k in depths]
        return mtp_losses(
            logits,
            target_probs(batch.hidden_BTD, fixed.head, batch.normalizer_BT, ids),
            batch.tokens_BT,
            batch.loss_mask_BT,
            batch.segments_BT,
            self.weights,
            progress,
            ids,
        )._asdict()

    def score(self, losses: dict[str, Any]) -> float:
        return losses["expected_length"]

    def anchors(self, loss_mask_BT: Bool[AnyArray, "B T"]) -> int:
        return int(loss_mask_BT.sum())


@dataclasses.dataclass(frozen=True)
class JointObjective:
    """A target's own cross-entropy and, if there is one, a drafter's losses beside it.

    MTP modules shape the target (DeepSeek-V3, arXiv 2412.19437, equation 25): their gradient
    flows into its hidden states, embedding and head. That of a DSpark drafter stops there.

    Attributes:
      target: the model; `trained` holds its parameters as "target", the drafter's own as
        "drafter", and `fixed` those of the drafter that do not learn (`draft_ids`).
      drafter: what learns beside it; None trains the target alone.
      compute_dtype: of the matrix products; parameters and the rest stay float32.
    """

    target: TransformerTarget
    drafter: DSparkObjective | MTPObjective | None
    compute_dtype: str = "float32"

    parts: ClassVar[tuple[str, ...]] = ("target", "drafter")

    def losses(
        self, trained: PyTree, fixed: PyTree, batch: Batch, key: Array, progress: Array
    ) -> Losses:
        """See `Objective`."""
        params = cast_products(trained["target"], self.compute_dtype)
        out = self.target.apply(
            params,
            batch.tokens_BT,
            batch.positions_BT,
            None,
            taps=self.drafter.model.taps if self.drafter else (),
            logits="none",
            segments=batch.segments_BT,
        )
        head = self.target.head(params)
        head = head._replace(weight_VD=head.weight_VD.astype(self.compute_dtype))
        main, weight, normalizer_BT = next_token_loss(
            head.logits(out.hidden), batch.tokens_BT, batch.loss_mask_BT, batch.segments_BT
        )
        if self.drafter is None:
            return {"total": main, "main": main, "weight": weight}
        states, embed = (out.taps, out.hidden, normalizer_BT), params["embed"]
        if not self.drafter.shapes_target:
            states, embed, head = lax.stop_gradient((states, embed, head))
        seen = batch._replace(taps_BTMD=states[0], hidden_BTD=states[1], normalizer_BT=states[2])
        shared = Fixed(attach_head(fixed, embed, head), head)
        losses = self.drafter.losses(trained["drafter"], shared, seen, key, progress)
        return {**losses, "total": main + losses["total"], "main": main, "weight": weight}

    def score(self, losses: dict[str, Any]) -> float:
        return -losses["main"]

    def anchors(self, loss_mask_BT: Bool[AnyArray, "B T"]) -> int:
        if self.drafter is None:
            return int(loss_mask_BT.sum())
        return self.drafter.anchors(loss_mask_BT)


def divide(params: PyTree, head: Head) -> tuple[PyTree, Fixed]:
    """A drafter's parameters as `trained` and `fixed`, for a target that stays as it is.

    Args:
      params: all of the drafter, those of the target's with them.
      head: the target's.
    """
    trained, fixed = split_params(params)
    return trained, Fixed(fixed, head)


def cast_products(params: PyTree, dtype: str) -> PyTree:
    """With the matrices that activations are multiplied by in that dtype.

    Tables whose rows are looked up keep theirs: their gradients are sums over tokens.
    """

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        table = any(getattr(key, "key", None) in ("embed", "w1") for key in path)
        return leaf if leaf.ndim != 2 or table else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
