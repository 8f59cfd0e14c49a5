"""Experiments run at smoke size and write what they promise."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.checkpoints import save_drafter
from specjax.data.target_cache import TokenSequence
from specjax.data.texts import save_texts
from specjax.drafters import init_dspark
from specjax.files import write_json

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def start(script, *options):
    return python(f"experiments/{script}", *options)


def python(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # where it is not installed
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 1800}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, **options)


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
        for step, length in ((10, 1.2), (20, 1.4))
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
            later = measured["later_acceptance"]
            assert later is None or 0 <= later <= 1
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


def test_claims_are_judged_file_by_file(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    quality = importlib.import_module("drafter_quality")

    def drafter(lengths, later=0.5):
        entry = {"speedup": 1.0, "later_acceptance": later}
        files = {
            f"file {i}": {**entry, "mean_accepted_length": length}
            for i, length in enumerate(lengths)
        }
        return dict.fromkeys(quality.TEMPERATURES, files)

    def judge(**drafters):
        return {name: claim["holds"] for name, claim in quality.judge_claims(drafters).items()}

    dspark, lookup = drafter([2.0, 3.0], later=0.6), drafter([1.0, 3.5])
    assert judge(dspark=dspark, dflash=drafter([1.9, 2.9])) == {
        "dspark_beats_dflash_on_every_file": True,
        "dspark_beats_dflash_at_later_positions": True,
    }
    assert judge(dspark=dspark, dflash=drafter([1.0, 3.0], later=0.7)) == {
        "dspark_beats_dflash_on_every_file": False,
        "dspark_beats_dflash_at_later_positions": False,
    }
    for composed, best in (([2.0, 3.5], True), ([2.5, 3.4], False)):
        assert judge(dspark=dspark, prompt_lookup=lookup, composed=drafter(composed)) == {
            "dspark_beats_prompt_lookup_on_average": True,
            "composed_at_least_the_better_on_every_file": best,
        }
    assert not any(judge(dspark=drafter([1.0, 1.0]), prompt_lookup=lookup).values())


def test_drafter_training(tmp_path, smollm2_gguf):
    del smollm2_gguf
    rng = np.random.default_rng(0)
    mask = np.arange(40) >= 10
    texts = [TokenSequence(rng.integers(100, 9000, 40, np.int32), mask) for _ in range(6)]
    save_texts(tmp_path / "texts.npz", texts)
    options = ["--config.taps=(1, 10, 19, 28)", f"--config.texts={tmp_path / 'texts.npz'}"]
    made = python(
        *("-m", "specjax.main", "--config=configs/cache.py", *options, f"--workdir={tmp_path}/data")
    )
    assert made.returncode == 0, made.stderr
    out, cache = tmp_path / "result.json", f"--cache={tmp_path}/data/cache"
    done = start(
        "drafter_training.py", f"--out={out}", "--smoke", cache, "--only", "block 3, then 5"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["sequences"] == 6
    assert result["greedy_part"] == 0
    (name, tried), *others = result["runs"].items()
    assert (name, others) == ("block 3, then 5", [])
    assert tried["steps"] == [1, 2]
    assert [phase["drafter"]["block_size"] for phase in tried["phases"]] == [3, 5]
    assert len(tried["acceptance_by_position"]) == 5
    assert all(1 < length < 4 for length in tried["expected_length"])
    assert (tmp_path / "result.png").stat().st_size > 0


def test_finished_runs_of_drafter_training_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    runs_of = importlib.import_module("drafter_training").runs_of
    path, result = tmp_path / "result.json", {"steps": 5, "environment": {"jax": "1", "taps": (1,)}}
    assert runs_of(path, result) == {}
    for text in ("", "[]", '{"steps": 5}'):
        path.write_text(text)
        assert runs_of(path, result) == {}
    write_json(path, result | {"runs": {"base": {"steps": [5]}}})
    assert runs_of(path, result) == {"base": {"steps": [5]}}
    assert runs_of(path, result | {"steps": 6}) == {}


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
        (["--drafters", "a=b", "--out=result.png"], "must be a file NAME.json"),
        (["--drafters", "a=b", "--out=tests"], "must be a file NAME.json"),
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
