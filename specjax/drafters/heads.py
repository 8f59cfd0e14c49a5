"""Sequential and confidence heads of DSpark (Cheng et al., 2026, equations 4 to 8)."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.layers import Embedding, Linear

HEADS = ("vanilla", "gated", "rnn")


class SequentialHead(nn.Module):
    """Ties a block's drafts together: a bias on the logits from the token before.

    The bias is W2 f, where f of the given rank follows from e = W1[x_{k-1}] and h_k:
      vanilla (equation 5): f = e.
      gated (in the released code only): f = sigmoid(gate_proj [h_k; e]) * e.
      rnn (equation 6): gate, candidate, output = joint_proj [s; e; h_k]; f = tanh(output)
        and s' = sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(candidate), s = 0 at first.

    Attributes:
      kind: which.
      rank: R, the width of e and f.
      vocab_size: V, tokens that may come before.
      draft_vocab_size: tokens that may be drafted.
    """

    kind: str
    rank: int
    vocab_size: int
    draft_vocab_size: int

    def setup(self) -> None:
        self.w1 = Embedding(self.vocab_size, self.rank)
        self.w2 = Embedding(self.draft_vocab_size, self.rank)
        if self.kind == "gated":
            self.gate_proj = Linear(self.rank, ("rank", "embed"), use_bias=True)
        elif self.kind == "rnn":
            self.joint_proj = Linear(3 * self.rank, ("rank", "embed"), use_bias=True)

    def embed(self, previous: Int[Array, "*rows"]) -> Float[Array, "*rows R"]:
        """W1[x_{k-1}]."""
        return self.w1(previous)

    def step(
        self,
        state: Float[Array, "*rows R"],
        e: Float[Array, "*rows R"],
        hidden: Float[Array, "*rows D"],
    ) -> tuple[Float[Array, "*rows R"], Float[Array, "*rows R"]]:
        """The state after a position, and the f of that position."""
        if self.kind == "vanilla":
            return state, e
        if self.kind == "gated":
            return state, nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, e], axis=-1))) * e
        joint = self.joint_proj(jnp.concatenate([state, e, hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        keep = nn.sigmoid(gate)
        return keep * state + (1 - keep) * jnp.tanh(candidate), jnp.tanh(output)

    def block(
        self, e_NGR: Float[Array, "*rows G R"], hidden_NGD: Float[Array, "*rows G D"]
    ) -> Float[Array, "*rows G R"]:
        """The f of every position of whole blocks whose tokens are known."""
        state = jnp.zeros_like(e_NGR[..., 0, :])
        if self.kind != "rnn":
            return self.step(jnp.zeros_like(e_NGR), e_NGR, hidden_NGD)[1]
        features = []
        for k in range(e_NGR.shape[-2]):
            state, f = self.step(state, e_NGR[..., k, :], hidden_NGD[..., k, :])
            features.append(f)
        return jnp.stack(features, axis=-2)

    def bias(self, f: Float[Array, "*rows R"]) -> Float[Array, "*rows V"]:
        """W2 f, for every token that may be drafted."""
        return self.w2.attend(f)

    def bias_at(
        self, f_BR: Float[Array, "B R"], candidates_BC: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """W2 f at some tokens alone."""
        return jnp.einsum("BCR,BR->BC", self.w2(candidates_BC), f_BR)


class ConfidenceHead(nn.Module):
    """Logit of the chance that x_k is accepted given that all before it were (equation 7).

    Its input is h_k, with W1[x_{k-1}] appended where the drafter's options say so: all
    known before x_k is drawn.
    """

    @nn.compact
    def __call__(self, features: Float[Array, "*rows I"]) -> Float[Array, "*rows"]:
        return Linear(1, ("scalar", "embed"), use_bias=True, name="proj")(features)[..., 0]
