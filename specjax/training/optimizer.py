"""The optimiser of training, which DeepSpec configures so for drafters."""

import math

import jax
import optax

from specjax.decoding.types import PyTree


def warmup_cosine(peak: float, total_steps: int, warmup_ratio: float) -> optax.Schedule:
    """A learning rate that rises linearly and then falls to 0 along a half cosine.

    With w = int(warmup_ratio * total_steps), step s < w takes peak (s + 1) / w, and a later
    one peak (1 + cos(pi (s - w) / (total_steps - w))) / 2.

    Raises:
      ValueError: no steps, or a ratio outside 0..1.
    """
    if total_steps < 1 or not 0 <= warmup_ratio < 1 or not 0 < peak < math.inf:
        raise ValueError(
            f"total_steps must be at least 1 and warmup_ratio from 0 to below 1, the peak above "
            f"0; got {total_steps}, {warmup_ratio} and {peak}"
        )
    warmup = int(warmup_ratio * total_steps)
    cosine = optax.cosine_decay_schedule(peak, total_steps - warmup)
    rise = optax.constant_schedule(peak)
    if warmup > 1:
        rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    return optax.join_schedules([rise, cosine], [warmup])


def adamw(
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    parts: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    """AdamW on gradients clipped by their global norm.

    Args:
      schedule: the learning rate by step.
      weight_decay: its coefficient; layers' scalars, which have no gradient, keep their value.
      max_grad_norm: gradients are clipped to it.
      parts: where the parameters are a dictionary of these, each is clipped by its own norm,
        so that none changes what another learns.
    """
    mask = _learns if weight_decay else None
    transform = optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(schedule, b1=0.9, b2=0.999, eps=1e-8, weight_decay=weight_decay, mask=mask),
    )
    if not parts:
        return transform
    return optax.partition(dict.fromkeys(parts, transform), {part: part for part in parts})


def _learns(params: PyTree) -> PyTree:
    """Which parameters are not layers' scalars, through which no gradient flows."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: getattr(path[-1], "key", None) != "scalar", params
    )
