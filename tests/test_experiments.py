"""The experiments run at smoke size and write what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "options", "keys"),
    [
        ("losslessness.py", ["--prompts=tests/data/prompts.jsonl"], {"identical", "runs"}),
        (
            "decode_speed.py",
            [],
            {
                "step_over_matmuls",
                "verify8_over_matmuls",
                "verify8_over_step",
                "overhead_t0",
                "overhead_t1",
                "overhead_top_p",
                "long_cache_over_short",
                "rows32_over_row1",
                "ours_over_transformers",
            },
        ),
    ],
)
def test_experiment(tmp_path, smollm2_gguf, script, options, keys):
    del smollm2_gguf  # only to skip without it
    out = tmp_path / "result.json"
    command = [sys.executable, f"experiments/{script}", f"--out={out}", "--smoke", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert keys <= result.keys()
    assert result["environment"]["versions"]
    assert result.get("identical", True)
