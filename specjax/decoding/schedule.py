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


POLICIES: dict[str, Policy] = {"full": FullPolicy()}
