"""The drafter of autoregressive decoding: it keeps nothing and proposes nothing."""

import dataclasses
from typing import Any

from specjax.decoding.types import Proposal


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Goes with `DecodeConfig(draft_len=0)`."""

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def init_state(self, batch: int, slots: int) -> tuple[()]:
        del batch, slots
        return ()

    def propose(self, *args: Any, **kwargs: Any) -> tuple[Proposal, Any]:
        """Raises ValueError: it has no drafts to give."""
        raise ValueError("decoding without a drafter needs draft_len 0")

    def observe(self, params: Any, state: tuple[()], *args: Any, **kwargs: Any) -> tuple[()]:
        return state
