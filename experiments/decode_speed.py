"""How close decoding comes to the machine's limit: SmolLM2-135M, one row unless said.

    python experiments/decode_speed.py --out=decode_speed.json [--prompts='prompts/*.jsonl']

A round is compared with the weight products of its pass run alone in the same process:
what is above 1 is attention, element-wise work, acceptance and the loop. Times are medians
over repeats that take turns, ratios medians of each repeat's own ratio, so that a slow
moment of the machine hits both sides; compilation is left out. Prints a table, writes JSON
and a PNG beside it.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import (
    LIVE,
    Timed,
    argument_parser,
    passes_of,
    proposals_of,
    provenance,
    rounds_of,
    save_figure,
    seconds,
    take_turns,
)
from jax import lax

import specjax
from specjax.api import encode_prompts
from specjax.checkpoints.dtype import resolve_dtype
from specjax.data.prompts import builtin_prompt, find_prompt_files, read_prompts
from specjax.decoding.types import DraftDist, Proposal
from specjax.drafters import Drafter, init_dspark
from specjax.evaluation.report import format_table
from specjax.files import write_json
from specjax.models.layers import matmul
from specjax.tasks.common import enable_compilation_cache

LONG = 4000  # room of a row: 4096 slots instead of 512
# A DSpark drafter of which 30 MB in bfloat16 hold all but what is the target's.
DSPARK = {
    "num_layers": 2,
    "taps": (1, 14, 27),
    "draft_vocab": range(12_288),
    "candidates": 64,
}


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
    if arguments.peer:
        print(json.dumps(transformers_tokens_per_second(arguments.peer)))
        return
    enable_compilation_cache("auto")
    repeats, rounds = (2, 4) if arguments.smoke else (7, 24)
    positions = (1, 8) if arguments.smoke else (1, 2, 4, 8, 16, 32, 64, 100)
    auto = resolve_dtype("auto")
    by_dtype = {}
    for dtype in (auto,) if arguments.smoke else ("float32", "bfloat16"):
        target = specjax.load_target("smollm2-135m", dtype=dtype)
        by_dtype[dtype] = measure(target, positions, repeats, rounds)
        if dtype == auto:
            by_dtype[dtype]["prompt_lookup"] = prompt_lookup(
                target, arguments.prompts, 1 if arguments.smoke else 10
            )
    peer = peer_tokens_per_second(arguments, 1 if arguments.smoke else 5)
    chosen = by_dtype[auto]
    result = {
        **provenance(),
        "dtype": auto,
        **chosen["ratios"],
        "ours_over_transformers": peer and chosen["tokens_per_second"] / peer,
        "transformers_tokens_per_second": peer,
        "by_dtype": by_dtype,
    }
    write_json(arguments.out, result)
    print(_table(by_dtype, result))
    save_figure(arguments.out.with_suffix(".png"), (7, 4), partial(_draw, by_dtype))


def measure(
    target: specjax.Target, positions: tuple[int, ...], repeats: int, rounds: int
) -> dict[str, Any]:
    """Every time of one dtype, in milliseconds, and the ratios made of them."""
    q_logits = jnp.asarray(np.random.default_rng(0).normal(size=target.model.vocab_size) * 3)
    q_logits = q_logits.astype(jnp.float32)
    fixed = Drafter(FixedDrafter(), q_logits, "fixed")
    dspark = _random_dspark(target, markov_rank=64)
    headless = _random_dspark(target, markov_rank=0, confidence_with_markov=False)
    # What is compared stands side by side, so that both meet the machine in the same state.
    timed: dict[str, Timed] = {
        "step_32_rows": rounds_of(target, rounds, batch=32),
        "step_long_cache": rounds_of(target, rounds, room=LONG),
        "step": rounds_of(target, rounds),
        "pass1": passes_of(target, rounds, 1),
        "matmuls1": matmuls_of(target, rounds, 1),
        "proposal7": proposals_of(target, rounds, dspark, 7),
        "proposal7_no_head": proposals_of(target, rounds, headless, 7),
        "round8_dspark": rounds_of(target, rounds, dspark, 7),
        "matmuls8": matmuls_of(target, rounds, 8),
        "round8_t0": rounds_of(target, rounds, fixed, 7),
        "pass8": passes_of(target, rounds, 8),
        "round8_t1": rounds_of(target, rounds, fixed, 7, temperature_B=1.0),
        "round8_top_p": rounds_of(target, rounds, fixed, 7, temperature_B=1.0, top_p_B=0.9),
    }
    for count in positions:
        timed.setdefault(f"pass{count}", passes_of(target, rounds, count))
        timed.setdefault(f"matmuls{count}", matmuls_of(target, rounds, count))
    taken = take_turns(timed, repeats)

    def ratio(name: str, other: str) -> float:
        pairs = zip(taken[name], taken[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    ms = {name: 1e3 * statistics.median(values) for name, values in taken.items()}
    ratios = {
        "step_over_matmuls": ratio("step", "matmuls1"),
        "verify8_over_matmuls": ratio("pass8", "matmuls8"),
        "verify8_over_step": ratio("pass8", "step"),
        **{
            f"overhead_{kind}": 1 - ratio("pass8", f"round8_{kind}")
            for kind in ("t0", "t1", "top_p")
        },
        "long_cache_over_short": ratio("step_long_cache", "step"),
        "rows32_over_row1": 32 * ratio("step", "step_32_rows"),
        "proposal7_over_step": ratio("proposal7", "step"),
        "head_over_round": ratio("proposal7", "round8_dspark")
        - ratio("proposal7_no_head", "round8_dspark"),
    }
    return {"ms": ms, "ratios": ratios, "tokens_per_second": 1e3 / ms["step"]}


def _random_dspark(target: specjax.Target, **options: Any) -> Drafter:
    return Drafter(*init_dspark(target, jax.random.key(0), **DSPARK, **options), "dspark")


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
    return lambda: seconds(lambda: loop(target.params, x)) / passes


def prompt_lookup(target: specjax.Target, pattern: str | None, limit: int) -> dict[str, float]:
    """Wall-clock speed-up of prompt lookup over plain decoding, per set of prompts."""
    sets = {"rewrite": [builtin_prompt("rewrite")]}
    if pattern:
        for name, path in find_prompt_files(pattern).items():
            sets[name] = read_prompts(path, limit)
    drafter = specjax.load_drafter("prompt_lookup", target)
    speedups = {}
    for name, texts in sets.items():
        spent = {"plain": 0.0, "lookup": 0.0}
        for ids in encode_prompts(target, texts):
            for method, how in (("plain", None), ("lookup", drafter)):
                run = {"max_new_tokens": 128, "max_len": len(ids) + 128, "draft_len": 7}
                specjax.generate(target, how, [ids], **run | {"max_new_tokens": 2})
                spent[method] += specjax.generate(target, how, [ids], **run).decode_seconds
        speedups[name] = spent["plain"] / spent["lookup"]
    return speedups


def peer_tokens_per_second(arguments: argparse.Namespace, repeats: int) -> float | None:
    """What `transformers_tokens_per_second` says in a process, or environment, of its own."""
    command = [arguments.peer_python, __file__, f"--peer={repeats}", f"--out={arguments.out}"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


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


def _draw(by_dtype: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    for dtype, run in by_dtype.items():
        for kind, style in (("pass", "-o"), ("matmuls", ":")):
            counts = [int(name[len(kind) :]) for name in run["ms"] if name.startswith(kind)]
            label = f"{dtype}, {'whole pass' if kind == 'pass' else 'its products alone'}"
            axes.plot(counts, [run["ms"][f"{kind}{count}"] for count in counts], style, label=label)
    axes.set(xlabel="positions in a pass", ylabel="milliseconds", xscale="log", yscale="log")
    axes.legend()


def _parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, smoke="few repeats, few sizes")
    parser.add_argument("--prompts", help="glob of prompt files for prompt lookup")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="interpreter in which PyTorch and specjax are installed, if not in this one",
    )
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)  # its own runs of it
    return parser.parse_args()


if __name__ == "__main__":
    main()
