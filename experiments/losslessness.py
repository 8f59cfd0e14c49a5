"""Greedy speculative output equals greedy autoregressive output, token for token.

    python experiments/losslessness.py --prompts='prompts/*.jsonl' --out=losslessness.json

Decodes the first prompts of each file of prompts (JSON lines of {"turns": [...]}) with
SmolLM2-135M in float32 at highest matmul precision, with prompt lookup at several draft
lengths. Prints a table, writes JSON, and exits with 1 if any output differs.
"""

import argparse
import dataclasses
import shlex
import sys
from functools import partial
from pathlib import Path

import jax

import specjax
from specjax.api import encode_prompts
from specjax.data.prompts import find_prompt_files, read_prompts
from specjax.evaluation.comparison import differences
from specjax.evaluation.metrics import mean_accepted_length
from specjax.evaluation.report import environment, format_table, write_json
from specjax.evaluation.runner import Settings, decode_all, room
from specjax.tasks.common import ProgressBar, enable_compilation_cache

DRAFT_LENGTHS = (1, 3, 7)
PROMPTS_PER_FILE = 10


def main() -> int:
    """Runs the experiment; the process's exit code."""
    arguments = _parse_arguments()
    files = find_prompt_files(arguments.prompts)
    limit, max_new_tokens = (2, 16) if arguments.smoke else (PROMPTS_PER_FILE, 64)
    texts = {name: read_prompts(path, limit) for name, path in files.items()}
    enable_compilation_cache("auto")
    target = specjax.load_target("smollm2-135m", dtype="float32")
    drafter = specjax.load_drafter("prompt_lookup", target)
    settings = Settings(max_new_tokens, draft_len=0, batch_size=limit)
    rows = []
    with (
        jax.default_matmul_precision("highest"),
        ProgressBar(sum(map(len, texts.values())) * (len(DRAFT_LENGTHS) + 1)) as bar,
    ):
        for name, prompts in texts.items():
            rows += _compare_file(target, drafter, name, prompts, settings, partial(bar.tell, name))
    failed = sum(len(row["differences"]) for row in rows)
    write_json(
        arguments.out,
        {
            "command": shlex.join(sys.argv),
            "environment": environment(),
            "target": target.name,
            "dtype": target.dtype,
            "max_new_tokens": max_new_tokens,
            "identical": not failed,
            "runs": rows,
        },
    )
    print(_table(rows))
    print(f"{failed} outputs differ." if failed else "Every output is identical.")
    return 1 if failed else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", required=True, help="glob of JSON-lines files of prompts")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="2 prompts a file, 16 tokens each")
    return parser.parse_args()


def _compare_file(target, drafter, name, texts, settings, on_batch) -> list[dict]:
    """One entry for each draft length."""
    prompts = encode_prompts(target, texts, chat=True)
    max_len = room(target, name, prompts, settings.max_new_tokens)
    autoregressive = decode_all(target, None, prompts, settings, max_len, on_batch)
    rows = []
    for draft_len in DRAFT_LENGTHS:
        drafting = dataclasses.replace(settings, draft_len=draft_len)
        speculative = decode_all(target, drafter, prompts, drafting, max_len, on_batch)
        parted = differences(target, prompts, autoregressive, speculative)
        rows.append(
            {
                "file": name,
                "draft_len": draft_len,
                "prompts": len(prompts),
                "tokens": speculative.token_count,
                "mean_accepted_length": mean_accepted_length(speculative.stats),
                "differences": [dataclasses.asdict(difference) for difference in parted],
            }
        )
    return rows


def _table(rows: list[dict]) -> str:
    return format_table(
        ["file", "draft length", "prompts", "tokens", "mean accepted length", "identical"],
        [
            [
                row["file"],
                str(row["draft_len"]),
                str(row["prompts"]),
                str(row["tokens"]),
                f"{row['mean_accepted_length']:.2f}",
                "NO" if row["differences"] else "yes",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
