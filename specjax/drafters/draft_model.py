"""A smaller model as drafter: another target of the same vocabulary, or the first layers
of the target itself.

Leviathan et al. (arXiv 2211.17192) draft with a smaller model; early exit drafts with the
target's own first layers and head, without extra weights (Zhang et al., arXiv 2309.08168).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.decoding.sampling import draw_draft
from specjax.decoding.types import AnyArray, DraftDist, Proposal, PyTree, SamplingState, TargetModel
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget


@struct.dataclass
class DraftModelState:
    """The draft model's cache, which holds committed tokens up to the anchor's position.

    Attributes:
      cache: keys and values.
      written_B: positions below it were written by this round's `propose`, from tokens
        that are the committed ones as far as they were accepted.
    """

    cache: PyTree
    written_B: Int[AnyArray, " B"]


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts serially with a model that meets the contract of a target."""

    model: TargetModel

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def init_state(self, batch: int, slots: int) -> DraftModelState:
        return DraftModelState(self.model.init_cache(batch, slots), jnp.zeros(batch, jnp.int32))

    def propose(
        self,
        params: PyTree,
        state: DraftModelState,
        anchor_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
        sampling: SamplingState,
        keys_BG: Key[Array, "B G"],
    ) -> tuple[Proposal, DraftModelState]:
        """One pass per draft, and one more over the last draft.

        The last pass draws nothing: without it a round whose drafts are all kept would
        leave the cache without its last token.
        """
        batch, draft_len = keys_BG.shape

        def step(carry: Any, k: Array) -> tuple[Any, tuple[Array, Array]]:
            cache, token_B, drafted_BG = carry
            positions_B1 = length_B[:, None] - 1 + k
            out = self.model.apply(params, token_B[:, None], positions_B1, cache)
            assert out.logits is not None
            key_B = keys_BG[:, jnp.minimum(k, draft_len - 1)]
            next_B, q_BV = draw_draft(out.logits[:, 0], sampling, length_B, drafted_BG, k, key_B)
            drafted_BG = drafted_BG.at[:, k].set(next_B, mode="drop")
            return (out.cache, next_B, drafted_BG), (next_B, q_BV)

        start = (state.cache, anchor_B, jnp.zeros((batch, draft_len), jnp.int32))
        (cache, _, drafted_BG), (_, logits_TBV) = lax.scan(
            step, start, jnp.arange(draft_len + 1, dtype=jnp.int32)
        )
        logits_BGV = logits_TBV[:draft_len].swapaxes(0, 1)
        confidence_BG = jnp.max(jax.nn.softmax(logits_BGV), axis=-1)
        proposal = Proposal(drafted_BG, DraftDist(logits_BGV), confidence_BG)
        return proposal, DraftModelState(cache, length_B + draft_len)

    def observe(
        self,
        params: PyTree,
        state: DraftModelState,
        tokens_BT: Int[Array, "B T"],
        taps: Float[Array, "B T M D"] | None,
        hidden: Float[Array, "B T D"],
        start_B: Int[Array, " B"],
        count_B: Int[Array, " B"],
    ) -> DraftModelState:
        """Runs the model over what it has not seen: prompts, and rounds without drafts."""
        del taps, hidden

        def run(carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
            out = self.model.apply(params, tokens_BT, positions_BT, carry[1], logits="none")
            return jnp.array(False), out.cache

        unseen = jnp.any(start_B + count_B > state.written_B)
        # A loop of one turn, not a conditional, so that the cache is changed in place.
        _, cache = lax.while_loop(lambda carry: carry[0], run, (unseen, state.cache))
        return DraftModelState(cache, state.written_B)


def draft_model(draft: Target, target: Target) -> tuple[DraftModel, PyTree]:
    """A loaded model as drafter for `target`, and its parameters.

    Raises:
      ValueError: the vocabularies differ.
    """
    sizes = draft.model.vocab_size, target.model.vocab_size
    same = sizes[0] == sizes[1]
    if same and draft.tokenizer is not None and target.tokenizer is not None:
        same = draft.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    if not same:
        raise ValueError(
            f"{draft.name} cannot draft for {target.name}: their vocabularies differ "
            f"({sizes[0]} and {sizes[1]} tokens); choose a drafter of the same tokeniser"
        )
    return DraftModel(draft.model), draft.params


def early_exit(target: Target, num_layers: int) -> tuple[DraftModel, PyTree]:
    """The target's first layers with its own final norm and head, sharing its arrays.

    Raises:
      ValueError: a model that is not ours, or not fewer layers than it has.
    """
    model = target.model
    if not isinstance(model, TransformerTarget):
        raise ValueError("early exit needs a target loaded by specjax")
    if not 1 <= num_layers < model.config.num_layers:
        raise ValueError(
            f"early exit after {num_layers} layers: give 1 to {model.config.num_layers - 1}, "
            f"as {target.name} has {model.config.num_layers}"
        )
    config = dataclasses.replace(model.config, num_layers=num_layers)
    dropped = {f"layer_{i}" for i in range(num_layers, model.config.num_layers)}
    params = {name: part for name, part in target.params.items() if name not in dropped}
    return DraftModel(dataclasses.replace(model, config=config)), params
