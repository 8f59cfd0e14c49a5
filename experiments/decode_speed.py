"""How close decoding comes to the machine's limit: SmolLM2-135M, one row unless said.

    python experiments/decode_speed.py --out=decode_speed.json [--prompts='prompts/*.jsonl']

A round is compared with the weight products of its pass run alone in the same process:
what is above 1 is attention, element-wise work, acceptance and the loop. Medians over
repeats that take turns, so that a slow moment of the machine hits all alike; compilation
is left out. Prints a table, writes JSON and a PNG beside it.
"""

import argparse
import dataclasses
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import specjax
from specjax.api import encode_prompts
from specjax.checkpoints.dtype import resolve_dtype
from specjax.data.prompts import builtin_prompt, find_prompt_files, read_prompts
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.types import DraftDist, Proposal
from specjax.drafters import NoDrafter
from specjax.evaluation.report import environment, format_table, write_json
from specjax.models.layers import matmul
from specjax.tasks.common import enable_compilation_cache

LIVE = 200  # tokens in the cache when a measurement begins
SHORT, LONG = 500, 4000  # room of a row: 512 and 4096 slots
Timed = Callable[[], float]  # seconds of one round, step or pass


@dataclasses.dataclass(frozen=True)
class FixedDrafter:
    """Proposes the same tokens every round with a dense q; costs next to nothing."""

    taps: tuple[int, ...] = ()

    def init_state(self, batch: int, slots: int) -> tuple[()]:
        return ()

    def propose(self, params, state, anchor_B, length_B, sampling, keys_BG):
        """Params are q's logits [V]; drafts are its most likely token."""
        shape = keys_BG.shape
        tokens_BG = jnp.broadcast_to(jnp.argmax(params).astype(jnp.int32), shape)
        return Proposal(
            tokens_BG, DraftDist(jnp.broadcast_to(params, (*shape, len(params))))
        ), state

    def observe(self, params, state, *args, **kwargs):
        """Keeps nothing."""
        return state


def main() -> None:
    """Runs the experiment."""
    arguments = _parse_arguments()
    enable_compilation_cache("auto")
    repeats, rounds = (2, 4) if arguments.smoke else (7, 24)
    positions = (1, 8) if arguments.smoke else (1, 2, 4, 8, 16, 32, 64, 100)
    auto = resolve_dtype("auto")
    by_dtype = {}
    for dtype in ("float32", "bfloat16"):
        target = specjax.load_target("smollm2-135m", dtype=dtype)
        by_dtype[dtype] = measure(target, positions, repeats, rounds)
        if dtype == auto:
            by_dtype[dtype]["prompt_lookup"] = prompt_lookup(
                target, arguments.prompts, 1 if arguments.smoke else 10
            )
    peer = transformers_tokens_per_second(1 if arguments.smoke else 5)
    chosen = by_dtype[auto]
    result = {
        "command": shlex.join(sys.argv),
        "environment": environment(),
        "dtype": auto,
        **chosen["ratios"],
        "ours_over_transformers": peer and chosen["tokens_per_second"] / peer,
        "transformers_tokens_per_second": peer,
        "by_dtype": by_dtype,
    }
    write_json(arguments.out, result)
    print(_table(by_dtype, result))
    _plot(by_dtype, arguments.out.with_suffix(".png"))


def measure(
    target: specjax.Target, positions: tuple[int, ...], repeats: int, rounds: int
) -> dict[str, Any]:
    """Every time of one dtype, in milliseconds, and the ratios made of them."""
    q_logits = jnp.asarray(np.random.default_rng(0).normal(size=target.model.vocab_size) * 3)
    timed: dict[str, Timed] = {
        "step": rounds_of(target, rounds),
        "step_long_cache": rounds_of(target, rounds, room=LONG),
        "step_32_rows": rounds_of(target, rounds, batch=32),
    }
    for name, sampling in {
        "round8_t0": {},
        "round8_t1": {"temperature_B": 1.0},
        "round8_top_p": {"temperature_B": 1.0, "top_p_B": 0.9},
    }.items():
        timed[name] = rounds_of(
            target, rounds, draft_len=7, q_logits=q_logits.astype(jnp.float32), **sampling
        )
    for count in positions:
        timed[f"pass{count}"] = passes_of(target, rounds, count)
        timed[f"matmuls{count}"] = matmuls_of(target, rounds, count)
    ms = {name: 1e3 * value for name, value in _medians(timed, repeats).items()}
    ratios = {
        "step_over_matmuls": ms["step"] / ms["matmuls1"],
        "verify8_over_matmuls": ms["pass8"] / ms["matmuls8"],
        "verify8_over_step": ms["pass8"] / ms["step"],
        **{
            f"overhead_{kind}": (ms[f"round8_{kind}"] - ms["pass8"]) / ms[f"round8_{kind}"]
            for kind in ("t0", "t1", "top_p")
        },
        "long_cache_over_short": ms["step_long_cache"] / ms["step"],
        "rows32_over_row1": 32 * ms["step"] / ms["step_32_rows"],
    }
    return {"ms": ms, "ratios": ratios, "tokens_per_second": 1e3 / ms["step"]}


def rounds_of(
    target: specjax.Target,
    rounds: int,
    *,
    batch: int = 1,
    room: int = SHORT,
    draft_len: int = 0,
    q_logits: jax.Array | None = None,
    **sampling: float,
) -> Timed:
    """Seconds of one round of `decode`, from LIVE tokens on."""
    drafter = FixedDrafter() if draft_len else NoDrafter()
    static: dict[str, Any] = {
        "target": target.model,
        "drafter": drafter,
        "config": specjax.DecodeConfig(draft_len),
    }
    prompts = [[(7 * i + row) % 1000 + 100 for i in range(LIVE)] for row in range(batch)]

    def run() -> float:
        state = init_decode_state(
            target.params,
            q_logits,
            prompts,
            max_new_tokens=rounds + 1,
            max_len=room,
            sampling=specjax.SamplingParams(**sampling),
            **static,
        )
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(decode(target.params, q_logits, state, **static))
        return (time.perf_counter() - start) / int(jnp.max(state.stats.rounds_B))

    return run


def passes_of(target: specjax.Target, passes: int, count: int) -> Timed:
    """Seconds of one pass of the target over `count` positions, logits and all."""

    @jax.jit
    def loop(params: Any, cache: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            cache, tokens = carry
            out = target.model.apply(params, tokens, positions, cache)
            return out.cache, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

        positions = (LIVE + jnp.arange(count, dtype=jnp.int32))[None]
        return lax.fori_loop(0, passes, step, (cache, positions))

    cache = target.model.init_cache(1, 512)
    return lambda: _seconds(lambda: loop(target.params, cache)) / passes


def matmuls_of(target: specjax.Target, passes: int, count: int) -> Timed:
    """Seconds of the weight products of such a pass, and nothing else."""

    @jax.jit
    def loop(params: Any, x: jax.Array) -> jax.Array:
        def weight(*path: str) -> jax.Array:
            node = params
            for name in path:
                node = node[name]
            return node["weight"]

        def step(i: Any, x: jax.Array) -> jax.Array:
            for layer in range(target.model.config.num_layers):  # type: ignore[attr-defined]
                part, mlp = (f"layer_{layer}", "attention"), (f"layer_{layer}", "mlp")
                q = matmul(x, weight(*part, "q_proj"))
                k, v = matmul(x, weight(*part, "k_proj")), matmul(x, weight(*part, "v_proj"))
                x = matmul(q, weight(*part, "o_proj")) + jnp.mean(k + v)
                up = matmul(x, weight(*mlp, "gate_proj")) + matmul(x, weight(*mlp, "up_proj"))
                x = matmul(up, weight(*mlp, "down_proj"))
            head = matmul(x, params["embed"]["weight"])
            return x / (1.0 + jnp.max(jnp.abs(x))) + jnp.max(head) * 1e-6

        return lax.fori_loop(0, passes, step, x)

    x = jnp.ones((count, target.model.config.width))  # type: ignore[attr-defined]
    return lambda: _seconds(lambda: loop(target.params, x)) / passes


def prompt_lookup(target: specjax.Target, pattern: str | None, limit: int) -> dict[str, float]:
    """Wall-clock speed-up of prompt lookup over plain decoding, per set of prompts."""
    sets = {"rewrite": [builtin_prompt("rewrite")]}
    if pattern:
        for name, path in find_prompt_files(pattern).items():
            sets[name] = read_prompts(path, limit)
    drafter = specjax.load_drafter("prompt_lookup", target)
    speedups = {}
    for name, texts in sets.items():
        seconds = {"plain": 0.0, "lookup": 0.0}
        for ids in encode_prompts(target, texts):
            for method, how in (("plain", None), ("lookup", drafter)):
                run = {"max_new_tokens": 128, "max_len": len(ids) + 128, "draft_len": 7}
                specjax.generate(target, how, [ids], **run | {"max_new_tokens": 2})
                seconds[method] += specjax.generate(target, how, [ids], **run).decode_seconds
        speedups[name] = seconds["plain"] / seconds["lookup"]
    return speedups


def transformers_tokens_per_second(repeats: int) -> float | None:
    """Greedy decoding by transformers with PyTorch in float32; None if not installed."""
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    config = specjax.load_target("smollm2-135m", dtype="float32").model.config  # type: ignore[attr-defined]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            tie_word_embeddings=config.tied_head,
        )
    ).eval()  # random weights: the speed is the same
    ids = torch.arange(100, 100 + LIVE)[None]

    def run() -> float:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, max_new_tokens=2, min_new_tokens=2, **options)
            prefill = time.perf_counter() - start
            model.generate(ids, max_new_tokens=34, min_new_tokens=34, **options)
        return (time.perf_counter() - start - 2 * prefill) / 32

    run()
    return 1 / statistics.median(run() for _ in range(repeats))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _medians(timed: dict[str, Timed], repeats: int) -> dict[str, float]:
    for run in timed.values():
        run()  # compiles
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, run in timed.items():
            samples[name].append(run())
    return {name: statistics.median(values) for name, values in samples.items()}


def _table(by_dtype: dict[str, Any], result: dict[str, Any]) -> str:
    names = list(next(iter(by_dtype.values()))["ratios"])
    rows = [[name, *(f"{run['ratios'][name]:.3f}" for run in by_dtype.values())] for name in names]
    rows.append(["tokens/s", *(f"{run['tokens_per_second']:.1f}" for run in by_dtype.values())])
    lines = [format_table(["", *by_dtype], rows), f"dtype=auto: {result['dtype']}"]
    for name, speedup in by_dtype[result["dtype"]]["prompt_lookup"].items():
        lines.append(f"prompt lookup, {name}: {speedup:.2f} x plain decoding")
    if result["ours_over_transformers"]:
        lines.append(f"over transformers in float32: {result['ours_over_transformers']:.2f} x")
    return "\n".join(lines)


def _plot(by_dtype: dict[str, Any], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No figure: matplotlib is not installed (pip install 'specjax[plots]').")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for dtype, run in by_dtype.items():
        for kind, style in (("pass", "-o"), ("matmuls", ":")):
            counts = [int(name[len(kind) :]) for name in run["ms"] if name.startswith(kind)]
            label = f"{dtype}, {'whole pass' if kind == 'pass' else 'its products alone'}"
            axes.plot(counts, [run["ms"][f"{kind}{count}"] for count in counts], style, label=label)
    axes.set(xlabel="positions in a pass", ylabel="milliseconds", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--prompts", help="glob of prompt files for prompt lookup")
    parser.add_argument("--smoke", action="store_true", help="few repeats, few sizes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
