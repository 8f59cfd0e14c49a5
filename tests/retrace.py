"""Counts how often JAX traces a function, and says why it had to trace it again."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class _Argument(NamedTuple):
    """What one argument looked like to one trace."""

    leaves: dict[str, Any]  # an abstract value for arrays, the value itself where static
    treedef: jax.tree_util.PyTreeDef


def count_traces(fun: Callable, *, limit: int | None = None) -> Callable:
    """Wraps `fun` so that each of its traces is counted. Wrap first, jit afterwards.

        step = count_traces(speculate_step)
        jitted = jax.jit(step, static_argnames=("target", "drafter", "config"))
        ...
        assert step.traces() == 1

    A function that is already jitted is reached through its `__wrapped__`, and one that
    another calls by replacing it with `monkeypatch`. Every run of the Python body counts
    as a trace, so a call outside of jit does too, and the body of a loop or of a
    gradient may count more than once.

    Args:
      fun: the Python function.
      limit: the trace after this many raises an AssertionError that names each argument
        (parameter and path inside its pytree) in which it differs from the first.

    Returns:
      The function, with a method `traces()` that gives their number.
    """
    signature = inspect.signature(fun)
    seen: list[dict[str, _Argument]] = []

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        seen.append({name: _describe(value) for name, value in bound.arguments.items()})
        if limit is not None and len(seen) > limit:
            name = getattr(fun, "__qualname__", repr(fun))
            raise AssertionError(
                f"{name} was traced again (trace {len(seen)}, allowed {limit}):\n"
                + "\n".join(f"  {line}" for line in _differences(seen[0], seen[-1]))
            )
        return fun(*args, **kwargs)

    wrapped.traces = lambda: len(seen)
    return wrapped


def assert_no_retrace(fun: Callable) -> Callable:
    """`count_traces` that allows one trace."""
    return count_traces(fun, limit=1)


def _describe(value: Any) -> _Argument:
    paths, treedef = jax.tree_util.tree_flatten_with_path(value)
    return _Argument(
        {
            jax.tree_util.keystr(path): jax.typeof(leaf) if _is_array(leaf) else leaf
            for path, leaf in paths
        },
        treedef,
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)  # tracers are instances of jax.Array


def _differences(first: dict[str, _Argument], now: dict[str, _Argument]) -> list[str]:
    lines = []
    for name, then in first.items():
        lines += _argument_differences(name, then, now[name])
    return lines or [
        "no argument differs: it was jitted anew, or the devices or a JAX setting changed"
    ]


def _argument_differences(name: str, first: _Argument, now: _Argument) -> list[str]:
    lines = [f"{name}{path}: only in the first trace" for path in first.leaves.keys() - now.leaves]
    lines += [f"{name}{path}: not in the first trace" for path in now.leaves.keys() - first.leaves]
    for path in first.leaves.keys() & now.leaves.keys():
        lines += _leaf_differences(f"{name}{path}", first.leaves[path], now.leaves[path])
    if not lines and first.treedef != now.treedef:
        lines = [f"{name}: tree structure {first.treedef} -> {now.treedef}"]
    return sorted(lines)


def _leaf_differences(where: str, first: Any, now: Any) -> list[str]:
    if not (hasattr(first, "weak_type") and hasattr(now, "weak_type")):
        return [] if first == now else [f"{where}: static value {first!r} -> {now!r}"]
    lines = [
        f"{where}: {label} {getattr(first, field)} -> {getattr(now, field)}"
        for field, label in (("shape", "shape"), ("dtype", "dtype"), ("weak_type", "weak type"))
        if getattr(first, field) != getattr(now, field)
    ]
    if not lines and first != now:
        lines = [f"{where}: type {first} -> {now}"]
    return lines
