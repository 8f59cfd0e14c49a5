"""Multi-token prediction (MTP): modules that extend a target and draft serially.

DeepSeek-AI, *DeepSeek-V3 Technical Report* (arXiv 2412.19437), section 2.2. Module k, from 1
to D, joins the hidden state of depth k - 1 at position i with the embedding of token i + k,
runs one transformer block at position i, and through the target's head predicts token
i + k + 1. Depth 0 is the target itself, which predicts token i + 1.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from specjax.decoding.sampling import draw_draft
from specjax.decoding.types import AnyArray, DraftDist, Proposal, PyTree, SamplingState
from specjax.models.config import TransformerConfig
from specjax.models.layers import Block, Embedding, LayerCache, Linear, RMSNorm, soft_cap
from specjax.models.transformer import TransformerTarget


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """Sizes and options of MTP modules; hashable.

    Which options a model was trained with never shows as wrong output, only as lower
    acceptance.

    Attributes:
      block: of every module; vocabulary, width, embedding scale and soft cap are the target's.
      depth: D, how many tokens ahead the modules were trained to predict.
      tap: the target's last layer, whose output is h^0 where `hidden_norm` is "pre".
      hidden_source: whose hidden state depth k > 1 sees: that of depth k - 1 ("chain") or
        the target's ("pinned").
      hidden_norm: hidden states are handed on before ("pre") or after ("post") the final norm,
        the target's or the module's.
      concat: order of embedding and hidden state in the input of the projection.
      shared_module: one module serves all depths.
      draft_vocab_size: tokens that may be drafted, if not all: parameter `draft_ids` lists
        them, and q is 0 elsewhere.
    """

    block: TransformerConfig
    depth: int
    tap: int
    hidden_source: str = "chain"
    hidden_norm: str = "post"
    concat: str = "emb_h"
    shared_module: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            if type(getattr(self, name)) not in kinds:
                raise ValueError(f"{name} must be {kinds[0].__name__}, got {getattr(self, name)!r}")
        if self.depth < 1 or self.tap < 0:
            raise ValueError(f"depth must be at least 1 and tap a layer, got {self}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be {' or '.join(map(repr, known))}, got {getattr(self, name)!r}"
                )

    @property
    def head_size(self) -> int:
        """Rows of the language-model head."""
        return self.draft_vocab_size or self.block.vocab_size


_KINDS = {
    "depth": (int,),
    "tap": (int,),
    "shared_module": (bool,),
    "draft_vocab_size": (int, type(None)),
}
_CHOICES = {
    "hidden_source": ("chain", "pinned"),
    "hidden_norm": ("pre", "post"),
    "concat": ("emb_h", "h_emb"),
}


class MTPModule(nn.Module):
    """One module: projection of embedding and hidden state, transformer block, final norm."""

    config: MTPConfig

    def setup(self) -> None:
        c = self.config.block
        self.embedding_norm = RMSNorm(c.norm_eps)
        self.hidden_norm = RMSNorm(c.norm_eps)
        self.projection = Linear(c.width, ("embed", "taps"))
        self.block = Block(c)
        self.final_norm = RMSNorm(c.norm_eps)

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        embedded_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayerCache | None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], LayerCache | None]:
        """What is handed on, what the head sees, and the cache."""
        parts = [self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)]
        if self.config.concat == "h_emb":
            parts.reverse()
        x_BTD = self.projection(jnp.concatenate(parts, axis=-1))
        x_BTD, cache = self.block(x_BTD, positions_BT, cache, segments_BT)
        normed_BTD = self.final_norm(x_BTD)
        return normed_BTD if self.config.hidden_norm == "post" else x_BTD, normed_BTD, cache


class MTPNet(nn.Module):
    """The modules' parameters, with the embedding and the head that are the target's."""

    config: MTPConfig

    def setup(self) -> None:
        c, block = self.config, self.config.block
        self.embed = Embedding(block.vocab_size, block.width, block.embed_scale)
        self.lm_head = Linear(c.head_size, ("vocab", "embed"))
        if c.draft_vocab_size is not None:
            self.draft_ids = self.param(
                "draft_ids", lambda key: jnp.arange(c.head_size, dtype=jnp.int32)
            )
        count = 1 if c.shared_module else c.depth
        self.modules = [MTPModule(c, name=f"module_{i}") for i in range(count)]

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        hidden_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T K D"]:
        """Training pass; what the head sees of each depth, at the position of its hidden state."""
        length = tokens_BT.shape[1]
        below_BTD, seen = hidden_BTD, []
        for k in range(1, self.config.depth + 1):
            # Of the last k positions, which have no token k ahead, nothing is learnt.
            ahead_BT = jnp.pad(tokens_BT[:, k:], ((0, 0), (0, min(k, length))))
            out_BTD, normed_BTD, _ = self.run(
                k, below_BTD, ahead_BT, positions_BT, None, segments_BT
            )
            seen.append(normed_BTD)
            if self.config.hidden_source == "chain":
                below_BTD = out_BTD
        return jnp.stack(seen, axis=2)

    def run(
        self,
        depth: int,
        hidden_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: LayerCache | None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], LayerCache | None]:
        """The module of a depth (from 1); see `MTPModule`."""
        module = self.modules[0 if self.config.shared_module else depth - 1]
        return module(hidden_BTD, self.embed(tokens_BT), positions_BT, cache, segments_BT)

    def logits(self, normed: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        return soft_cap(self.lm_head(normed), self.config.block.logit_cap)


@struct.dataclass
class MTPState:
    """Of `length` observed tokens.

    Attributes:
      caches: by depth k, keys and values of positions below length - k; what drafting wrote
        beyond them is overwritten.
      hidden_BKD: by depth k, what its module gets as hidden state at position length - k,
        which waits for the token at `length`.
    """

    caches: tuple[LayerCache, ...]
    hidden_BKD: Float[AnyArray, "B K D"]


@dataclasses.dataclass(frozen=True)
class MTP:
    """The *drafter* contract (docs/design.md) for MTP modules.

    More drafts than depths reuse the last module on its own output.
    """

    config: MTPConfig

    @property
    def layer_config(self) -> TransformerConfig:
        """Sizes of the layers, for sharding."""
        return self.config.block

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.tap,) if self.config.hidden_norm == "pre" else ()

    def init_params(self, key: jax.Array) -> PyTree:
        """Random float32 parameters, as boxed pytree with logical axis names."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        hidden = jnp.zeros((1, 1, self.config.block.width), jnp.float32)
        net = MTPNet(self.config)
        params = net.init(key, tokens, hidden, tokens)["params"]
        head = net.init(key, hidden, method="logits")["params"]
        return {**params, **head}

    def param_shapes(self) -> PyTree:
        """Pytree of `jax.ShapeDtypeStruct`, without making any array."""
        return nn.unbox(jax.eval_shape(self.init_params, jax.random.key(0)))

    def init_state(self, batch: int, slots: int) -> MTPState:
        c = self.config
        layers = dataclasses.replace(c.block, num_layers=c.depth)
        hidden_BKD = jnp.zeros((batch, c.depth, c.block.width), jnp.float32)
        return MTPState(TransformerTarget(layers).init_cache(batch, slots), hidden_BKD)

    def forward(
        self,
        params: PyTree,
        tokens_BT: Int[Array, "B T"],
        hidden_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T K D"]:
        """Training pass over whole sequences.

        Args:
          params: of the drafter.
          tokens_BT: token ids.
          hidden_BTD: the target's hidden states, before or after its final norm as the
            configuration says.
          positions_BT: of the tokens in their documents.
          segments_BT: documents that share a row, which do not see each other.

        Returns:
          What the head sees, by position i and depth k: its logits (`head_logits`) are those
          of token i + k + 1. The last k positions of a row or document mean nothing.
        """
        out: Any = MTPNet(self.config).apply(
            {"params": params}, tokens_BT, hidden_BTD, positions_BT, segments_BT
        )
        return out

    def head_logits(
        self, params: PyTree, normed: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows V"]:
        """Of the tokens that may be drafted."""
        return self._run(params, "logits", normed)

    def propose(
        self,
        params: PyTree,
        state: MTPState,
        anchor_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
        sampling: SamplingState,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, MTPState]:
        """One pass of a module per draft.

        Draft s comes from depth s at position length - 2. Depth s has first to see what it
        has not: its entries from position length - 1 - s on, whose tokens are the anchor and
        the drafts before.
        """
        c, (batch, draft_len) = self.config, keys_BG.shape
        caches = list(state.caches)
        ids_V = params.get("draft_ids")
        tokens_BG = jnp.zeros((batch, draft_len), jnp.int32)
        inputs_BsD = state.hidden_BKD[:, :0]
        last_BD = state.hidden_BKD[:, 0]
        q_logits = []
        for s in range(1, draft_len + 1):
            depth = min(s, c.depth)
            fed_BG = jnp.concatenate([anchor_B[:, None], tokens_BG], axis=1)[:, :s]
            first_B = length_B - 1 - s
            if s <= c.depth:
                inputs_BsD = jnp.concatenate([state.hidden_BKD[:, s - 1 : s], inputs_BsD], axis=1)
            else:
                inputs_BsD, fed_BG, first_B = (
                    last_BD[:, None],
                    fed_BG[:, -1:],
                    length_B - 2 + s - depth,
                )
            out_BsD, normed_BsD, caches[depth - 1] = self._step(
                params, depth, inputs_BsD, fed_BG, first_B, caches[depth - 1]
            )
            if c.hidden_source == "chain":
                inputs_BsD, last_BD = out_BsD, out_BsD[:, -1]
            logits_BV = self._run(params, "logits", normed_BsD[:, -1])
            ids_BV = None if ids_V is None else jnp.broadcast_to(ids_V, logits_BV.shape)
            token_B, q_BV = draw_draft(
                logits_BV, sampling, length_B, tokens_BG, s - 1, keys_BG[:, s - 1], ids_BV
            )
            tokens_BG = tokens_BG.at[:, s - 1].set(token_B)
            q_logits.append(q_BV)
        q_BGV = jnp.stack(q_logits, axis=1)
        ids_BGV = None if ids_V is None else jnp.broadcast_to(ids_V, q_BGV.shape)
        confidence_BG = jnp.max(jax.nn.softmax(q_BGV), axis=-1)
        proposal = Proposal(tokens_BG, DraftDist(q_BGV, ids_BGV), confidence_BG)
        return proposal, MTPState(tuple(caches), state.hidden_BKD)

    def observe(
        self,
        params: PyTree,
        state: MTPState,
        tokens_BT: Int[Array, "B T"],
        taps: Float[Array, "B T M D"] | None,
        hidden: Float[Array, "B T D"],
        start_B: Int[Array, " B"],
        count_B: Int[Array, " B"],
    ) -> MTPState:
        """Runs every module over the committed tokens with the target's hidden states.

        Token t completes the entry t - k of depth k: an entry waits k tokens for its own.
        """
        below_BTD = hidden if taps is None else taps[:, :, 0]
        caches, waiting = [], []
        for k, cache in enumerate(state.caches, start=1):
            sequence_BTD = jnp.concatenate([state.hidden_BKD[:, k - 1 : k], below_BTD], axis=1)
            waiting.append(sequence_BTD[jnp.arange(len(count_B)), count_B])
            inputs_BTD = sequence_BTD[:, :-1]
            out_BTD, _, cache = self._step(params, k, inputs_BTD, tokens_BT, start_B - k, cache)
            below_BTD = out_BTD if self.config.hidden_source == "chain" else inputs_BTD
            caches.append(cache)
        return MTPState(tuple(caches), jnp.stack(waiting, axis=1))

    def _step(
        self,
        params: PyTree,
        depth: int,
        inputs_BTD: Array,
        tokens_BT: Array,
        first_B: Array,
        cache: LayerCache,
    ) -> tuple[Array, Array, LayerCache]:
        """A module over the positions from `first_B` on; those before 0 are not kept."""
        offsets_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        positions_BT = first_B[:, None] + offsets_1T
        positions_BT = jnp.where(positions_BT < 0, cache.k_BKSH.shape[2], positions_BT)
        return self._run(params, "run", depth, inputs_BTD, tokens_BT, positions_BT, cache)

    def _run(self, params: PyTree, method: str, *args: Any) -> Any:
        return MTPNet(self.config).apply({"params": params}, *args, method=method)
