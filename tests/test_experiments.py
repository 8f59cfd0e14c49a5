"""Experiments run at smoke size and write what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def test_losslessness(tmp_path, smollm2_gguf):
    del smollm2_gguf  # only to skip without it
    out = tmp_path / "result.json"
    options = ["--prompts=tests/data/prompts.jsonl", f"--out={out}", "--smoke"]
    command = [sys.executable, "experiments/losslessness.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["identical"]
    assert result["environment"]["versions"]
