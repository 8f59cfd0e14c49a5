import dataclasses
import json

import numpy as np
import pytest

import specjax
from specjax.evaluation.comparison import Difference, compare
from specjax.evaluation.plots import plot_report
from specjax.evaluation.report import (
    build_report,
    environment,
    format_table,
    identical,
    summary,
)
from specjax.evaluation.runner import Settings
from specjax.files import write_json
from tests.evaluation.tiny_target import tiny_target

CONFIG = {"target": "tiny", "drafter": "prompt_lookup", "draft_len": 3, "temperature": 0.0}
RUN_KEYS = {
    *("name", "drafter", "policy", "file", "prompts", "tokens", "seconds", "prefill_seconds"),
    *("compile_seconds", "tokens_per_second", "mean_accepted_length", "survival_by_position"),
    *("acceptance_by_position", "rounds_by_accepted", "drafted", "verified", "verify_rate"),
    "rounds",
}


@pytest.fixture(scope="module")
def comparisons():
    target = tiny_target()
    drafter = specjax.load_drafter("prompt_lookup", target)
    settings = Settings(max_new_tokens=6, draft_len=3, batch_size=2)
    sets = {"a": [[1, 2, 3], [4, 5]], "b": [[6]]}
    return compare(target, drafter, sets, settings, check="float32", gap_tolerance=0.0)


def report_of(comparisons):
    return build_report(
        "evaluate",
        CONFIG,
        comparisons,
        drafter="prompt_lookup",
        policy="full",
        set_key="file",
    )


def test_report_schema(comparisons):
    report = report_of(comparisons)
    assert report.keys() == {
        *("task", "config", "environment", "runs", "speedup", "identical", "as_run"),
        *("checks", "completions"),
    }
    assert [(run["name"], run["file"]) for run in report["runs"]] == [
        (name, file) for file in (None, "a", "b") for name in ("autoregressive", "speculative")
    ]
    assert all(run.keys() == RUN_KEYS for run in report["runs"])
    autoregressive, speculative = report["runs"][:2]
    assert autoregressive["drafter"] is None
    assert speculative["drafter"] == "prompt_lookup"
    assert speculative["prompts"] == 3
    assert speculative["tokens"] == 18
    assert len(speculative["survival_by_position"]) == 3
    assert speculative["verified"] <= speculative["drafted"] <= 3 * speculative["rounds"]
    ratio = speculative["tokens_per_second"] / autoregressive["tokens_per_second"]
    assert report["speedup"] == pytest.approx(ratio)
    assert report["identical"] is True
    assert report["as_run"] == {"identical": True, "ties": []}
    completions = [(c["file"], c["prompt"], c["finish_reason"]) for c in report["completions"]]
    assert completions == [("a", 0, "length"), ("a", 1, "length"), ("b", 0, "length")]
    assert all(isinstance(c["text"], str) for c in report["completions"])


def test_ties_name_their_set(comparisons):
    tie = Difference(1, 4, 7, 8, 0.125)
    parted = dataclasses.replace(comparisons[0], as_run=[tie])
    report = report_of([parted, comparisons[1]])
    assert report["as_run"]["identical"] is False
    assert report["as_run"]["ties"] == [
        {
            "file": "a",
            "prompt": 1,
            "position": 4,
            "autoregressive_token": 7,
            "speculative_token": 8,
            "logit_gap": 0.125,
        }
    ]
    assert "part in 1 of 3 outputs; the largest logit gap where they do is 0.125" in summary(
        [parted, comparisons[1]], "file", "bfloat16"
    )


def test_without_tokeniser_completions_are_token_ids(comparisons):
    bare = dataclasses.replace(comparisons[1].speculative, texts=None)
    [completion] = report_of([dataclasses.replace(comparisons[1], speculative=bare)])["completions"]
    assert completion["token_ids"] == bare.tokens[0]
    assert "text" not in completion


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [((True, True), True), ((True, None), None), ((None, False), False)],
)
def test_identical_overall(comparisons, verdicts, expected):
    pairs = zip(comparisons, verdicts, strict=True)
    assert identical([dataclasses.replace(c, identical=v) for c, v in pairs]) is expected


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "In float32, speculative and autoregressive output are identical."),
        ({"identical": False}, "output are NOT identical."),
        ({"as_run": None, "identical": None}, "equal in distribution, not token for token"),
        (
            {
                "identical": None,
                "check": {
                    "kind": "gap",
                    "largest_gap": 0.5,
                    "positions": 2,
                    "of": 9,
                    "tolerance": 0.25,
                    "passed": False,
                },
            },
            "2 of 9 tokens are not the first choice; largest gap 0.5, tolerance 0.25: NOT passed.",
        ),
    ],
)
def test_summary_says_what_was_compared(comparisons, changes, line):
    assert line in summary([dataclasses.replace(comparisons[0], **changes)], "file", "float32")


def test_environment_tells_versions_and_device():
    found = environment()
    assert found["versions"].keys() >= {"python", "jax", "specjax", "numpy"}
    assert found["device"]["backend"] == "cpu"
    assert found["git"] is None or len(found["git"]["commit"]) == 40


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "x.json", {"a": [float("nan"), np.float32(1.5)], "b": np.arange(2)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, 1.5], "b": [0, 1]}


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_table_columns_line_up():
    assert format_table(["name", "x"], [["a", "1.25"], ["longer", "-"]]).splitlines() == [
        "name       x",
        "------  ----",
        "a       1.25",
        "longer     -",
    ]


def test_plot(comparisons, tmp_path):
    pytest.importorskip("matplotlib")
    names = ["_cost in $", r"$\frac{$"]  # text, not formulas
    named = [dataclasses.replace(c, name=n) for c, n in zip(comparisons, names, strict=True)]
    report = report_of(named) | {"config": CONFIG | {"target": "$HOME/$model_"}}
    plot_report(report, "file", tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]
