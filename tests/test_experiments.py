"""Experiments run at smoke size and write what they promise."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(script, out):
    options = ["--prompts=tests/data/prompts.jsonl", f"--out={out}", "--smoke"]
    command = [sys.executable, f"experiments/{script}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # where it is not installed
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_losslessness(tmp_path, smollm2_gguf):
    del smollm2_gguf  # only to skip without it
    result = run("losslessness.py", tmp_path / "result.json")
    assert result["identical"]
    assert result["environment"]["versions"]


def test_decode_speed(tmp_path, smollm2_gguf):
    del smollm2_gguf
    result = run("decode_speed.py", tmp_path / "result.json")
    for key in (
        *("step_over_matmuls", "verify8_over_matmuls", "verify8_over_step", "overhead_t0"),
        *("overhead_t1", "overhead_top_p", "long_cache_over_short", "rows32_over_row1"),
        *("proposal7_over_step", "head_over_round"),
    ):
        assert math.isfinite(result[key]), key
    assert result["ours_over_transformers"] is None or result["ours_over_transformers"] > 0
    assert set(result["by_dtype"]) == {"float32", "bfloat16"}
    assert (tmp_path / "result.png").stat().st_size > 0
