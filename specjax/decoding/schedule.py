"""Verification policies: how many of a round's drafts to verify, row by row.

Whether draft k is verified must not depend on x_k, on later drafts, or on any noise
that x_k or its acceptance will use (invariant I5 of docs/design.md); confidences are
known before their token is drawn, so a policy may use those up to and including k.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@runtime_checkable
class Policy(Protocol):
    """Chooses verification lengths; frozen and hashable, its memory is a pytree."""

    def init_state(self, batch: int) -> Any: ...

    def choose(
        self,
        state: Any,
        confidence_BG: Float[Array, "B G"] | None,
        done_B: Bool[Array, " B"],
        draft_len: int,
    ) -> tuple[Int[Array, " B"], Any]:
        """How many drafts of each row to verify (0..draft_len), and the new memory."""
        ...


@dataclasses.dataclass(frozen=True)
class FullPolicy:
    """Verifies every draft."""

    def init_state(self, batch: int) -> tuple[()]:
        del batch
        return ()

    def choose(
        self,
        state: tuple[()],
        confidence_BG: Float[Array, "B G"] | None,
        done_B: Bool[Array, " B"],
        draft_len: int,
    ) -> tuple[Int[Array, " B"], tuple[()]]:
        del confidence_BG
        return jnp.full(done_B.shape, draft_len, jnp.int32), state


@dataclasses.dataclass(frozen=True)
class ThresholdPolicy:
    """Verifies drafts up to the first whose confidence is below a threshold.

    Confidences are taken one by one, not as products. DSpark's released code decodes so
    (`confidence_threshold`).

    Attributes:
      threshold: from 0, which verifies all, to 1.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"a confidence threshold must be from 0 to 1, got {self.threshold}")

    def init_state(self, batch: int) -> tuple[()]:
        del batch
        return ()

    def choose(
        self,
        state: tuple[()],
        confidence_BG: Float[Array, "B G"] | None,
        done_B: Bool[Array, " B"],
        draft_len: int,
    ) -> tuple[Int[Array, " B"], tuple[()]]:
        """As `Policy.choose`.

        Raises:
          ValueError: a drafter without confidences.
        """
        if draft_len == 0:
            return jnp.zeros(done_B.shape, jnp.int32), state
        if confidence_BG is None:
            raise ValueError(
                "the policy 'threshold' needs confidences, which this drafter does not give: "
                "take the policy 'full', or a drafter with a confidence head"
            )
        confident_BG = (confidence_BG >= self.threshold).astype(jnp.int32)
        return jnp.sum(jnp.cumprod(confident_BG, axis=1), axis=1, dtype=jnp.int32), state


def parse_policy(text: str) -> Policy:
    """The policy that a name such as "full" or "threshold:0.5" stands for.

    Raises:
      ValueError: an unknown name, or a threshold that is not from 0 to 1.
    """
    name, _, argument = text.partition(":")
    if text == "full":
        return FullPolicy()
    if name == "threshold":
        try:
            threshold = float(argument)
        except ValueError:
            raise ValueError(f"{text!r} needs a number, as in 'threshold:0.5'") from None
        return ThresholdPolicy(threshold)
    raise ValueError(f"unknown policy {text!r}: known are 'full' and 'threshold:T'")
