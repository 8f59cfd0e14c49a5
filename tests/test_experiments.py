"""Experiments run at smoke size and write what they promise."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import specjax
from specjax.checkpoints import save_drafter
from specjax.drafters import init_dspark

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def start(script, *options):
    command = [sys.executable, f"experiments/{script}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # where it is not installed
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )


def run(script, out, *options):
    prompts = "--prompts=tests/data/prompts.jsonl"
    done = start(script, prompts, f"--out={out}", "--smoke", *options)
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
    assert list(result["by_dtype"]) == [result["dtype"]]
    assert (tmp_path / "result.png").stat().st_size > 0


def test_drafter_quality(tmp_path, smollm2_gguf):
    del smollm2_gguf
    target = specjax.load_target("smollm2-135m", dtype="bfloat16")
    options = {"num_layers": 1, "taps": (1,), "draft_vocab": range(64)}
    drafter = init_dspark(target, jax.random.key(0), **options, markov_rank=4, candidates=8)
    save_drafter(tmp_path / "drafter", *drafter, target)
    lines = [
        {"step": step, "set": "held_out", "expected_length": length, "acceptance_G": [length - 1]}
        for step, length in ((10, 1.5), (20, 1.4), (10, 1.2))  # went on from a checkpoint
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(
        "drafter_quality.py",
        tmp_path / "result.json",
        *("--drafters", "prompt_lookup=prompt_lookup", f"dspark={tmp_path / 'drafter'}"),
        *("--draft-len", "dspark=4", "--main=prompt_lookup", f"--logs=random={tmp_path}"),
    )
    lookup, dspark = (result["drafters"][name] for name in ("prompt_lookup", "dspark"))
    assert (lookup["draft_len"], dspark["draft_len"]) == (7, 4)
    for drafter in (lookup, dspark):
        assert drafter["greedy"]["prompts"]["identical"]
        for mode in ("greedy", "sampled"):
            measured = drafter[mode]["prompts"]
            assert measured["speedup"] > 0
            assert measured["mean_accepted_length"] >= 1
            assert measured["rounds"] <= measured["tokens"]
            for shares in ("acceptance_by_position", "survival_by_position"):
                assert len(measured[shares]) == drafter["draft_len"]
    assert result["speedup_mean"] == lookup["greedy"]["prompts"]["speedup"]
    assert "cost_ms" not in lookup
    assert set(dspark["cost_ms"]) == {
        *("draft", "verify", "accept_commit", "observe", "round", "step")
    }
    assert min(dspark["cost_ms"].values()) > 0
    assert list(result["claims"]) == ["dspark_beats_prompt_lookup_on_average"]
    assert result["learning_curves"]["random"] == {
        "step": [10, 20],
        "seconds": None,
        "expected_length": [1.2, 1.4],
        "first_acceptance": [1.2 - 1, 1.4 - 1],
    }
    assert (tmp_path / "result.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "dspark"], "expected NAME=VALUE, got 'dspark'"),
        (["--drafters", "a=b", "a=c"], "a name is given twice in --drafters"),
        (["--drafters", "a=b", "--main=c"], "unknown drafter 'c' in --main"),
        (["--drafters", "a=b", "--draft-len", "a=0"], "expected a whole number"),
        (["--drafters", "a=b", "--logs", "a=nowhere"], "cannot read the training log"),
        (["--drafters", "a=b", "--prompts=nowhere/*"], "no prompt file matches"),
        (["--drafters", "a=nothing"], "unknown drafter 'nothing'"),
    ],
)
def test_bad_arguments_are_explained(options, message, tmp_path, smollm2_gguf):
    del smollm2_gguf
    given = ["--prompts=tests/data/prompts.jsonl", f"--out={tmp_path / 'result.json'}", *options]
    done = start("drafter_quality.py", *given)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_mtp_from_scratch_and_its_rivals(tmp_path):
    """A small model with its modules; then the other drafters, for that model."""
    out, runs = tmp_path / "result.json", tmp_path / "runs"
    done = start("mtp_from_scratch.py", f"--out={out}", f"--workdir={runs}", "--smoke")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["identical"]
    assert 1 <= result["draft_len"] <= 6
    assert result["speedup"] > 0
    assert len(result["acceptance_by_depth"]) == 1
    for key in ("main_loss_with", "main_loss_without"):
        assert 3 < result[key] < 6, key
    assert (tmp_path / "result.png").stat().st_size > 0

    done = start(
        "dspark_vs_mtp.py", f"--out={out}", f"--workdir={tmp_path / 'rivals'}", "--smoke",
        f"--target={runs / 'with/target'}", f"--joint={runs / 'with/drafter'}",
        "--corpus=specjax/**/*.py", "--draft-vocab=64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drafters = json.loads(out.read_text())["drafters"]
    assert set(drafters) == {"dspark", "dflash", "mtp_1", "mtp_3", "mtp_joint", "prompt_lookup"}
    for name, drafter in drafters.items():
        assert drafter["greedy"]["held out"]["identical"], name
        assert (drafter["parameters_added"] > 0) == (name != "prompt_lookup")
        assert drafter["target_changed"] == (name == "mtp_joint")
