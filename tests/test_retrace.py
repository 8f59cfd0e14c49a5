"""The retrace helper: it counts, stays silent when nothing changed, and names the culprit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tests.retrace import assert_no_retrace, count_traces


class State(NamedTuple):
    length: jax.Array
    extra: jax.Array | None = None


def scale(state, factor, *, power=1):
    return jax.tree.map(lambda x: factor * x**power, state)


def jitted():
    return jax.jit(assert_no_retrace(scale), static_argnames="power")


def state(*shape, dtype=jnp.float32, **kwargs):
    return State(jnp.zeros(shape, dtype), **kwargs)


ONE = jnp.float32(1)


def test_same_types_trace_once():
    counted = count_traces(scale)
    fun = jax.jit(counted)
    for value in (1.0, 2.0, 3.0):
        fun(state(2), jnp.float32(value))
    assert counted.traces() == 1
    fun(state(3), ONE)
    assert counted.traces() == 2


@pytest.mark.parametrize(
    ("args", "power", "message"),
    [
        ((state(3), ONE), 1, r"state\.length: shape \(2,\) -> \(3,\)"),
        ((state(2, dtype=jnp.bfloat16), ONE), 1, r"state\.length: dtype float32 -> bfloat16"),
        ((state(2), 1.0), 1, "factor: weak type False -> True"),
        ((state(2), ONE), 2, "power: static value 1 -> 2"),
        ((state(2, extra=ONE), ONE), 1, r"state\.extra: not in the first trace"),
        (((jnp.zeros(2),), ONE), 1, r"state\.length: only in the first trace"),
    ],
    ids=["shape", "dtype", "weak_type", "static", "leaf", "container"],
)
def test_names_what_changed_and_nothing_else(args, power, message):
    fun = jitted()
    fun(state(2), ONE)
    others = {"state", "factor", "power"} - {message.split("\\")[0].split(":")[0]}
    with pytest.raises(AssertionError, match=message) as raised:
        fun(*args, power=power)
    assert not any(f"  {name}" in str(raised.value) for name in others)


def test_static_part_of_a_tree():
    fun = jax.jit(assert_no_retrace(lambda tree: tree))
    fun({"a": (ONE, [])})
    with pytest.raises(AssertionError, match=r"tree: tree structure .* -> "):
        fun({"a": (ONE, {})})


def test_jitting_anew_is_told_apart():
    traced = assert_no_retrace(scale)
    jax.jit(traced)(state(2), ONE)
    jax.clear_caches()
    with pytest.raises(AssertionError, match="no argument differs"):
        jax.jit(traced)(state(2), ONE)


def test_cached_call_after_a_failed_retrace_still_works():
    fun = jitted()
    fun(state(2), ONE)
    with pytest.raises(AssertionError, match="trace 2, allowed 1"):
        fun(state(3), ONE)
    fun(state(2), ONE)
