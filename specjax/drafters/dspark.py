"""DSpark: a parallel backbone over the target's hidden states, and a sequential head.

Cheng et al., *DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
Generation* (2026). One pass of the backbone over the anchor and mask tokens gives the
base logits of a whole block; the head then draws its tokens from left to right. Without
the head (`markov_rank` 0) this is DFlash.
"""

import dataclasses
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.decoding.sampling import draw_draft
from specjax.decoding.types import DraftDist, Proposal, PyTree, SamplingState
from specjax.drafters.heads import HEADS, ConfidenceHead, SequentialHead
from specjax.models.config import TransformerConfig
from specjax.models.layers import (
    Block,
    Embedding,
    LayerCache,
    Linear,
    RMSNorm,
    soft_cap,
    write_cache,
)
from specjax.models.transformer import TransformerTarget

Context = tuple[LayerCache, ...]
_OPTIONAL_SIZES = ("draft_vocab_size", "candidates")


@dataclasses.dataclass(frozen=True)
class DSparkConfig:
    """Sizes and options of a DSpark drafter; hashable.

    Attributes:
      backbone: the draft layers; vocabulary and width are the target's.
      taps: target layers whose outputs are the context features (-1 is the embedding).
      block_size: the longest draft, as trained.
      mask_token_id: stands for the tokens still to be drafted.
      markov_rank: R of the sequential head; 0 has none (DFlash).
      markov_head: its kind (`SequentialHead`).
      confidence_head: whether there is one.
      confidence_with_markov: whether it sees the token before.
      draft_vocab_size: tokens that may be drafted, if not all: parameter `draft_ids`
        lists them, and q is 0 elsewhere.
      candidates: the sequential head chooses among that many tokens of each position,
        the likeliest by the backbone; q is 0 elsewhere. None is all.
    """

    backbone: TransformerConfig
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    markov_rank: int = 256
    markov_head: str = "vanilla"
    confidence_head: bool = True
    confidence_with_markov: bool = True
    draft_vocab_size: int | None = None
    candidates: int | None = None

    def __post_init__(self) -> None:
        vocab_size = self.backbone.vocab_size
        for name in ("block_size", "mask_token_id", "markov_rank", *_OPTIONAL_SIZES):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name in _OPTIONAL_SIZES):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if not all(type(tap) is int for tap in self.taps):
            raise ValueError(f"taps must be layer indices, got {self.taps}")
        if not 1 <= self.block_size <= self.backbone.max_len:
            raise ValueError(
                f"block_size must be at least 1 and at most the target's context of "
                f"{self.backbone.max_len}, got {self.block_size}"
            )
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank must be at least 0 (no head), got {self.markov_rank}")
        if self.markov_head not in HEADS:
            raise ValueError(
                f"unknown markov_head {self.markov_head!r}: known are {', '.join(HEADS)}"
            )
        if not self.taps or min(self.taps) < -1 or sorted(set(self.taps)) != list(self.taps):
            raise ValueError(
                f"taps must be increasing layer indices from -1 (the embedding), got {self.taps}"
            )
        if self.confidence_head and self.confidence_with_markov and not self.markov_rank:
            raise ValueError(
                "a confidence head that sees the sequential head's embedding needs a head: "
                "set confidence_with_markov=False, or markov_rank above 0"
            )
        if not 0 <= self.mask_token_id < vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} lies outside the vocabulary of {vocab_size}"
            )
        for name, bound in (("draft_vocab_size", vocab_size), ("candidates", self.head_size)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= bound:
                raise ValueError(f"{name} must be from 1 to {bound}, got {value}")

    @property
    def head_size(self) -> int:
        """Rows of the language-model head."""
        return self.draft_vocab_size or self.backbone.vocab_size


class BlockOutput(NamedTuple):
    """What the drafter says of A blocks of G positions a row; V is the head's size.

    Attributes:
      hidden_BAGD: after the final norm.
      base_BAGV: the backbone's own logits.
      logits_BAGV: with the sequential head's bias.
      confidence_BAG: logits; None without a confidence head.
    """

    hidden_BAGD: Float[Array, "B A G D"]
    base_BAGV: Float[Array, "B A G V"]
    logits_BAGV: Float[Array, "B A G V"]
    confidence_BAG: Float[Array, "B A G"] | None


class DSparkNet(nn.Module):
    """The drafter's parameters and their parts of the computation."""

    config: DSparkConfig

    def setup(self) -> None:
        c, backbone = self.config, self.config.backbone
        self.embed = Embedding(backbone.vocab_size, backbone.width, backbone.embed_scale)
        self.lm_head = Linear(c.head_size, ("vocab", "embed"))
        if c.draft_vocab_size is not None:
            self.draft_ids = self.param(
                "draft_ids", lambda key: jnp.arange(c.head_size, dtype=jnp.int32)
            )
        self.fc = Linear(backbone.width, ("embed", "taps"))
        self.hidden_norm = RMSNorm(backbone.norm_eps)
        self.layers = [
            Block(backbone.layer(i), name=f"layer_{i}") for i in range(backbone.num_layers)
        ]
        self.final_norm = RMSNorm(backbone.norm_eps)
        if c.markov_rank:
            self.markov = SequentialHead(
                c.markov_head, c.markov_rank, backbone.vocab_size, c.head_size
            )
        if c.confidence_head:
            self.confidence = ConfidenceHead()

    def __call__(
        self,
        taps_BTMD: Float[Array, "B T M D"],
        tokens_BAG: Int[Array, "B A G"],
        previous_BAG: Int[Array, "B A G"],
        anchors_BA: Int[Array, "B A"],
    ) -> BlockOutput:
        """Packed blocks, teacher-forced."""
        batch, length = taps_BTMD.shape[:2]
        positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        context = tuple(
            LayerCache(*(new_BTKH.swapaxes(1, 2) for new_BTKH in layer))
            for layer in self.context(taps_BTMD, positions_BT)
        )
        hidden_BAGD = self.hidden(tokens_BAG, anchors_BA, context, live=None)
        base_BAGV = logits_BAGV = self.base_logits(hidden_BAGD)
        confidence_BAG = e_BAGR = None
        if self.config.markov_rank:
            e_BAGR = self.markov.embed(previous_BAG)
            logits_BAGV = base_BAGV + self.markov.bias(self.markov.block(e_BAGR, hidden_BAGD))
        if self.config.confidence_head:
            confidence_BAG = self._confidence(hidden_BAGD, e_BAGR)
        return BlockOutput(hidden_BAGD, base_BAGV, logits_BAGV, confidence_BAG)

    def context(
        self, taps_BTMD: Float[Array, "B T M D"], positions_BT: Int[Array, "B T"]
    ) -> tuple[tuple[Array, Array], ...]:
        """Keys and values [B, T, K, H] that each layer makes of the target's features.

        Equation 2, and the layer's own projections on the result (KV injection).
        """
        features_BTD = self.hidden_norm(self.fc(taps_BTMD.reshape(*taps_BTMD.shape[:2], -1)))
        return tuple(
            layer.attention.keys_values(features_BTD, positions_BT) for layer in self.layers
        )

    def hidden(
        self,
        tokens_BAG: Int[Array, "B A G"],
        anchors_BA: Int[Array, "B A"],
        context: Context,
        live: Int[Array, ""] | None,
    ) -> Float[Array, "B A G D"]:
        """The backbone over blocks that begin at their anchors' positions (equation 3).

        `live` bounds the slots of the context that are read; see `attend`.
        """
        batch, blocks, length = tokens_BAG.shape
        offsets_11G = jnp.arange(length, dtype=jnp.int32)[None, None]
        positions_BT = (anchors_BA[:, :, None] + offsets_11G).reshape(batch, -1)
        x_BTD = self.embed(tokens_BAG.reshape(batch, -1))
        for layer, cache in zip(self.layers, context, strict=True):
            x_BTD = layer.inject(x_BTD, positions_BT, cache, anchors_BA, live)
        return self.final_norm(x_BTD).reshape(batch, blocks, length, -1)

    def base_logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """The backbone's own, under its soft cap if any; the sequential head adds to them."""
        return soft_cap(self.lm_head(hidden), self.config.backbone.logit_cap)

    def correct(
        self,
        state_BR: Float[Array, "B R"],
        previous_B: Int[Array, " B"],
        hidden_BD: Float[Array, "B D"],
        base_BC: Float[Array, "B C"],
        candidates_BC: Int[Array, "B C"] | None,
    ) -> tuple[Float[Array, "B R"], Float[Array, "B C"], Float[Array, " B"] | None]:
        """One position of a block: head state, logits and confidence logit.

        `candidates_BC` are the rows of the head that `base_BC` holds; None is all.
        """
        e_BR = confidence_B = None
        if self.config.markov_rank:
            e_BR = self.markov.embed(previous_B)
            state_BR, f_BR = self.markov.step(state_BR, e_BR, hidden_BD)
            base_BC = base_BC + (
                self.markov.bias(f_BR)
                if candidates_BC is None
                else self.markov.bias_at(f_BR, candidates_BC)
            )
        if self.config.confidence_head:
            confidence_B = self._confidence(hidden_BD, e_BR)
        return state_BR, base_BC, confidence_B

    def _confidence(self, hidden: Array, e: Array | None) -> Array:
        if self.config.confidence_with_markov:
            assert e is not None  # the configuration made sure
            hidden = jnp.concatenate([hidden, e], axis=-1)
        return self.confidence(hidden)


@dataclasses.dataclass(frozen=True)
class DSpark:
    """The *drafter* contract (docs/design.md) for DSpark and DFlash.

    Its state holds the keys and values of the context features, by layer, at their
    absolute positions. `propose` leaves it alone; `observe` writes committed positions.
    """

    config: DSparkConfig

    @property
    def layer_config(self) -> TransformerConfig:
        """Sizes of the layers, for sharding."""
        return self.config.backbone

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def init_params(self, key: jax.Array) -> PyTree:
        """Random float32 parameters, as boxed pytree with logical axis names."""
        c = self.config
        tokens = jnp.zeros((1, 1, 1), jnp.int32)
        taps = jnp.zeros((1, 1, len(c.taps), c.backbone.width), jnp.float32)
        return DSparkNet(c).init(key, taps, tokens, tokens, tokens[:, :, 0])["params"]

    def param_shapes(self) -> PyTree:
        """Pytree of `jax.ShapeDtypeStruct`, without making any array."""
        return nn.unbox(jax.eval_shape(self.init_params, jax.random.key(0)))

    def init_state(self, batch: int, slots: int) -> Context:
        return TransformerTarget(self.config.backbone).init_cache(batch, slots)

    def forward(
        self,
        params: PyTree,
        taps_BTMD: Float[Array, "B T M D"],
        tokens_BAG: Int[Array, "B A G"],
        previous_BAG: Int[Array, "B A G"],
        anchors_BA: Int[Array, "B A"],
    ) -> BlockOutput:
        """Teacher-forced pass over A blocks a row, masked from each other; for training.

        Args:
          params: of the drafter.
          taps_BTMD: the target's features at positions 0..T-1.
          tokens_BAG: each block's input, its anchor token and mask tokens.
          previous_BAG: the token before each that is to be predicted, the anchor first.
          anchors_BA: positions of the anchors.
        """
        out = DSparkNet(self.config).apply(
            {"params": params}, taps_BTMD, tokens_BAG, previous_BAG, anchors_BA
        )
        return cast(BlockOutput, out)

    def propose(
        self,
        params: PyTree,
        state: Context,
        anchor_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
        sampling: SamplingState,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, Context]:
        """One pass of the backbone over a whole block, then G draws from left to right.

        Raises:
          ValueError: more drafts than the block size.
        """
        c, (batch, draft_len) = self.config, keys_BG.shape
        if draft_len > c.block_size:
            raise ValueError(
                f"draft_len {draft_len} is more than this drafter's block size of "
                f"{c.block_size}: ask for at most that"
            )
        block_BG = jnp.full((batch, c.block_size), c.mask_token_id, jnp.int32)
        block_BG = block_BG.at[:, 0].set(anchor_B)
        anchors_B1 = length_B[:, None] - 1
        hidden_BGD = self._run(
            params, "hidden", block_BG[:, None], anchors_B1, state, jnp.max(anchors_B1)
        )[:, 0, :draft_len]
        base_BGC, rows_BGC, ids_BGC = self._candidates(
            params, self._run(params, "base_logits", hidden_BGD)
        )

        def at(array_BG: Array | None, k: Array) -> Array | None:
            return None if array_BG is None else array_BG[:, k]

        def draw(carry: Any, k: Array) -> tuple[Any, Any]:
            head_state, previous_B, drafted_BG = carry
            head_state, logits_BC, confidence_B = self._run(
                params,
                "correct",
                head_state,
                previous_B,
                hidden_BGD[:, k],
                base_BGC[:, k],
                at(rows_BGC, k),
            )
            token_B, q_BC = draw_draft(
                logits_BC, sampling, length_B, drafted_BG, k, keys_BG[:, k], at(ids_BGC, k)
            )
            return (head_state, token_B, drafted_BG.at[:, k].set(token_B)), (q_BC, confidence_B)

        start = (
            jnp.zeros((batch, c.markov_rank), jnp.float32),
            anchor_B,
            jnp.zeros((batch, draft_len), jnp.int32),
        )
        (_, _, drafted_BG), by_position = lax.scan(
            draw, start, jnp.arange(draft_len, dtype=jnp.int32)
        )
        q_BGC, confidence_BG = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), by_position)
        if confidence_BG is not None:
            confidence_BG = nn.sigmoid(confidence_BG)
        return Proposal(drafted_BG, DraftDist(q_BGC, ids_BGC), confidence_BG), state

    def _candidates(
        self, params: PyTree, base_BGV: Float[Array, "B G V"]
    ) -> tuple[Float[Array, "B G C"], Int[Array, "B G C"] | None, Int[Array, "B G C"] | None]:
        """Base logits of the tokens to choose among, their rows of the head, and their ids.

        Rows are None where all of the head's are there, ids where these are all tokens.
        """
        base_BGC, rows_BGC = base_BGV, None
        if self.config.candidates is not None:
            base_BGC, rows_BGC = lax.top_k(base_BGV, self.config.candidates)
        if self.config.draft_vocab_size is None:
            return base_BGC, rows_BGC, rows_BGC
        ids_V = params["draft_ids"]
        ids_BGC = jnp.broadcast_to(ids_V, base_BGC.shape) if rows_BGC is None else ids_V[rows_BGC]
        return base_BGC, rows_BGC, ids_BGC

    def observe(
        self,
        params: PyTree,
        state: Context,
        tokens_BT: Int[Array, "B T"],
        taps: Float[Array, "B T M D"] | None,
        hidden: Float[Array, "B T D"],
        start_B: Int[Array, " B"],
        count_B: Int[Array, " B"],
    ) -> Context:
        """Writes the context keys and values of the committed positions."""
        del tokens_BT, hidden
        assert taps is not None  # asked for by `taps`
        offsets_1T = jnp.arange(taps.shape[1], dtype=jnp.int32)[None]
        positions_BT = start_B[:, None] + offsets_1T
        new = self._run(params, "context", taps, positions_BT)
        # What is not committed moves past the cache's end, where writes are dropped.
        slots_BT = positions_BT + jnp.where(
            offsets_1T < count_B[:, None], 0, state[0].k_BKSH.shape[2]
        )
        return tuple(
            LayerCache(
                write_cache(layer.k_BKSH, k_BTKH, slots_BT),
                write_cache(layer.v_BKSH, v_BTKH, slots_BT),
            )
            for layer, (k_BTKH, v_BTKH) in zip(state, new, strict=True)
        )

    def _run(self, params: PyTree, method: str, *args: Any) -> Any:
        return DSparkNet(self.config).apply({"params": params}, *args, method=method)
