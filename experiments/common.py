"""What the experiments share: arguments, provenance, timing of a round's parts, figures."""

import argparse
import contextlib
import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import specjax
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.sampling import round_keys
from specjax.decoding.step import commit, judge
from specjax.decoding.types import DecodeState, Proposal, TargetOutput
from specjax.drafters import Drafter, NoDrafter
from specjax.evaluation.report import environment
from specjax.files import replacing

LIVE = 200  # tokens in the cache when a measurement begins
SHORT = 500  # room of a row: 512 slots
PLAIN = Drafter(NoDrafter(), (), "none")
Timed = Callable[[], float]  # seconds of one round, step or pass


def argument_parser(doc: str | None, smoke: str) -> argparse.ArgumentParser:
    """With --out and --smoke; what the latter does is the help's to say."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--out", required=True, type=_output_path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def _output_path(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    if path.is_dir() or path.suffix != ".json":
        raise argparse.ArgumentTypeError(
            f"{path} must be a file NAME.json (the figure is NAME.png)"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {path.parent}: {error}") from error


def provenance() -> dict[str, Any]:
    """The command and the environment of a result."""
    return {"command": shlex.join(sys.argv), "environment": environment()}


@contextlib.contextmanager
def explained(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the program with a message for what a run that trains raises, or on Ctrl-C."""
    try:
        yield
    except (ValueError, subprocess.CalledProcessError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped: the same command goes on.")


def read_log(workdir: Path) -> list[dict[str, Any]]:
    """The entries that the task "train" logged."""
    lines = (workdir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def held_out_entries(workdir: Path) -> list[dict[str, Any]]:
    """Its evaluations on held-out sequences."""
    return [entry for entry in read_log(workdir) if entry["set"] == "held_out"]


def save_figure(path: Path, size: tuple[float, float], draw: Callable[[Any], object]) -> None:
    """Writes what `draw` makes of a matplotlib figure as PNG; says so without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("No figure: matplotlib is not installed (pip install 'specjax[plots]').")
        return
    # Names are text, not formulas.
    style = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style), replacing(path) as partial:
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(partial, format="png", dpi=150)


def take_turns(timed: dict[str, Timed], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, `repeats` times; they take turns, compiled before."""
    for run in timed.values():
        run()  # compiles
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, run in timed.items():
            taken[name].append(run())
    return taken


def seconds(run: Callable[[], Any]) -> float:
    """Wall-clock of a call, with the arrays that it returns."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def rounds_of(
    target: specjax.Target,
    rounds: int,
    drafter: Drafter = PLAIN,
    draft_len: int = 0,
    *,
    batch: int = 1,
    room: int = SHORT,
    **sampling: float,
) -> Timed:
    """Seconds of one round of `decode`, from LIVE tokens on; at most `rounds` of them."""
    static = _static(target, drafter, draft_len)

    def run() -> float:
        state = _begin(target, rounds, drafter, draft_len, batch, room, **sampling)
        start = time.perf_counter()
        state = jax.block_until_ready(decode(target.params, drafter.params, state, **static))
        return (time.perf_counter() - start) / int(jnp.max(state.stats.rounds_B))

    return run


def passes_of(target: specjax.Target, passes: int, count: int, taps: tuple[int, ...] = ()) -> Timed:
    """Seconds of one pass of the target over `count` positions, logits and taps and all."""

    @jax.jit
    def loop(params: Any, cache: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            cache, tokens = carry
            # They move as a decode's do, or the compiler would compute what follows from
            # them once for all passes.
            positions = (LIVE + i + offsets)[None]
            out = target.model.apply(params, tokens, positions, cache, taps=taps)
            best = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
            return out.cache, best + _used(out.taps)

        offsets = jnp.arange(count, dtype=jnp.int32)
        return lax.fori_loop(jnp.int32(0), passes, step, (cache, offsets[None]))

    cache = target.model.init_cache(1, 512)
    return lambda: seconds(lambda: loop(target.params, cache)) / passes


def proposals_of(target: specjax.Target, rounds: int, drafter: Drafter, draft_len: int) -> Timed:
    """Seconds of one greedy proposal, whatever the target would say to it."""

    @jax.jit
    def loop(params: Any, state: DecodeState, keys: Any) -> Any:
        def propose(i: Any, carry: Any) -> Any:
            anchor_B, drafter_state = carry
            proposal, drafter_state = drafter.model.propose(
                params, drafter_state, anchor_B, state.length_B, state.sampling, keys
            )
            # All that a round would use goes into the next anchor, or it would be left out.
            return proposal.tokens_BG[:, -1] + _used(proposal), drafter_state

        return lax.fori_loop(0, rounds, propose, (jnp.array([5]), state.drafter_state))

    state = _without_cache(_begin(target, rounds, drafter, draft_len))
    keys = jax.random.split(jax.random.key(0), (1, draft_len))
    return lambda: seconds(lambda: loop(drafter.params, state, keys)) / rounds


def acceptances_of(target: specjax.Target, rounds: int, drafter: Drafter, draft_len: int) -> Timed:
    """Seconds of acceptance and commit in a greedy round."""
    config = specjax.DecodeConfig(draft_len)

    @jax.jit
    def loop(state: DecodeState, proposal: Proposal, logits: jax.Array) -> DecodeState:
        verify_len_B = jnp.array([draft_len])

        def turn(i: Any, state: DecodeState) -> DecodeState:
            keys = round_keys(
                jnp.asarray(state.sampling.params.seed_B), state.length_B - 1, draft_len
            )
            # Other logits in every turn, or their arg-max would be computed once.
            out = TargetOutput(logits[i % 2], hidden, None, ())
            judged = judge(out, proposal, verify_len_B, state, keys, config)
            return commit(state, proposal, verify_len_B, judged)[0]

        return lax.fori_loop(0, rounds, turn, state)

    state = _begin(target, rounds, drafter, draft_len)
    anchor_B = state.tokens_BS[:, LIVE]
    proposal, _ = jax.jit(drafter.model.propose)(
        drafter.params,
        state.drafter_state,
        anchor_B,
        state.length_B,
        state.sampling,
        jax.random.split(jax.random.key(0), (1, draft_len)),
    )
    hidden = jnp.zeros((1, draft_len + 1, 1))
    logits = _normal(2, 1, draft_len + 1, target.model.vocab_size)
    state = dataclasses.replace(_without_cache(state), drafter_state=())
    return lambda: seconds(lambda: loop(state, proposal, logits)) / rounds


def observes_of(target: specjax.Target, rounds: int, drafter: Drafter, draft_len: int) -> Timed:
    """Seconds that the drafter takes to observe a round of which all drafts were kept."""

    @jax.jit
    def loop(params: Any, state: Any, taps: jax.Array, hidden: jax.Array) -> Any:
        def turn(i: Any, state: Any) -> Any:
            # Other features in every turn, or what is made of them would be computed once.
            return drafter.model.observe(
                params,
                state,
                tokens_BT,
                taps[i % 2] if drafter.model.taps else None,
                hidden[i % 2],
                start_B=jnp.array([LIVE]) + i,
                count_B=jnp.array([draft_len + 1]),
            )

        return lax.fori_loop(0, rounds, turn, state)

    width = target.model.config.width  # type: ignore[attr-defined]
    tokens_BT = 100 + jnp.arange(draft_len + 1, dtype=jnp.int32)[None]
    taps = _normal(2, 1, draft_len + 1, len(drafter.model.taps), width)
    hidden = _normal(2, 1, draft_len + 1, width)
    state = _begin(target, rounds, drafter, draft_len).drafter_state
    return lambda: seconds(lambda: loop(drafter.params, state, taps, hidden)) / rounds


def _static(target: specjax.Target, drafter: Drafter, draft_len: int) -> dict[str, Any]:
    config = specjax.DecodeConfig(draft_len)
    return {"target": target.model, "drafter": drafter.model, "config": config}


def _begin(
    target: specjax.Target,
    rounds: int,
    drafter: Drafter,
    draft_len: int,
    batch: int = 1,
    room: int = SHORT,
    **sampling: float,
) -> DecodeState:
    """A state of LIVE tokens a row, all different, and the first new one."""
    kinds = min(target.model.vocab_size - 100, 1000)
    prompts = [[(7 * i + row) % kinds + 100 for i in range(LIVE)] for row in range(batch)]
    state = init_decode_state(
        target.params,
        drafter.params,
        prompts,
        max_new_tokens=rounds + 1,
        max_len=room,
        sampling=specjax.SamplingParams(**sampling),
        **_static(target, drafter, draft_len),
    )
    return jax.block_until_ready(state)


def _without_cache(state: DecodeState) -> DecodeState:
    """Without what a program that does not donate the state would copy."""
    return dataclasses.replace(state, cache=())


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def _used(tree: Any) -> jax.Array:
    """0, which the compiler can't know before it has computed every leaf."""
    total = sum(jnp.max(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree))
    return jnp.asarray(total > 1e9).astype(jnp.int32)
