"""Greedy speculative output equals greedy autoregressive output, token for token.

    python experiments/losslessness.py --prompts='prompts/*.jsonl' --out=losslessness.json

Decodes the first prompts of each file of prompts (JSON lines of {"turns": [...]}) with
SmolLM2-135M in float32 at highest matmul precision, with prompt lookup at several draft
lengths. Prints a table, writes JSON, and exits with 1 if any output differs.
"""

import argparse
import dataclasses
import sys
from functools import partial

import jax
from common import argument_parser, provenance

import specjax
from specjax.api import encode_prompts
from specjax.data.prompts import find_prompt_files, read_prompts
from specjax.evaluation.comparison import differences
from specjax.evaluation.metrics import mean_accepted_length
from specjax.evaluation.report import format_table
from specjax.evaluation.runner import Settings, decode_all, room
from specjax.files import write_json
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
    sets = {name: encode_prompts(target, rows) for name, rows in texts.items()}
    with (
        jax.default_matmul_precision("highest"),
        ProgressBar(sum(map(len, sets.values())) * (len(DRAFT_LENGTHS) + 1)) as bar,
    ):
        runs = _compare(target, drafter, sets, settings, bar)
    failed = sum(len(run["differences"]) for run in runs)
    write_json(
        arguments.out,
        {
            **provenance(),
            "target": target.name,
            "dtype": target.dtype,
            "max_new_tokens": max_new_tokens,
            "identical": not failed,
            "runs": runs,
        },
    )
    print(_table(runs))
    print(f"{failed} outputs differ." if failed else "Every output is identical.")
    return 1 if failed else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, smoke="2 prompts a file, 16 tokens each")
    parser.add_argument("--prompts", required=True, help="glob of JSON-lines files of prompts")
    return parser.parse_args()


def _compare(
    target: specjax.Target,
    drafter: specjax.Drafter,
    sets: dict[str, list[list[int]]],
    settings: Settings,
    bar: ProgressBar,
) -> list[dict]:
    """One entry for each file and draft length."""
    max_len = max(room(target, name, rows, settings.max_new_tokens) for name, rows in sets.items())
    runs = []
    for name, prompts in sets.items():
        tell = partial(bar.tell, name)
        autoregressive = decode_all(target, None, prompts, settings, max_len, tell)
        for draft_len in DRAFT_LENGTHS:
            drafting = dataclasses.replace(settings, draft_len=draft_len)
            speculative = decode_all(target, drafter, prompts, drafting, max_len, tell)
            parted = differences(target, prompts, autoregressive, speculative)
            runs.append(
                {
                    "file": name,
                    "draft_len": draft_len,
                    "prompts": len(prompts),
                    "tokens": speculative.token_count,
                    "mean_accepted_length": mean_accepted_length(speculative.stats),
                    "differences": [dataclasses.asdict(difference) for difference in parted],
                }
            )
    return runs


def _table(runs: list[dict]) -> str:
    return format_table(
        ["file", "draft length", "prompts", "tokens", "mean accepted length", "identical"],
        [
            [
                run["file"],
                str(run["draft_len"]),
                str(run["prompts"]),
                str(run["tokens"]),
                f"{run['mean_accepted_length']:.2f}",
                "NO" if run["differences"] else "yes",
            ]
            for run in runs
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
