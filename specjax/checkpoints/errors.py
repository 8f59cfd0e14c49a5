"""The error that every problem with a checkpoint raises."""


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message says why and how to mend it."""


def name_some(names: list[str], limit: int = 6) -> str:
    """The first names of a list, for messages about many tensors."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
