"""From a drafter of specjax's own to one that other engines read, through the task."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import specjax
from specjax.checkpoints import save_drafter
from specjax.tasks import export, generate
from tests.drafters.golden import golden_drafter, golden_target


@pytest.fixture
def drafter(monkeypatch, tmp_path):
    """The folder of one with a trimmed vocabulary, for the target that tasks load."""
    target = golden_target()
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: target)
    made = golden_drafter("dspark_gated", draft_vocab=tuple(range(50)), candidates=9)
    save_drafter(tmp_path / "own", made.model, made.params, target)
    return str(tmp_path / "own")


def test_exports_a_drafter_that_decodes_alike(drafter, get_config, tmp_path, capsys):
    config = get_config("export", drafter=drafter)
    export.run(config, tmp_path / "w")
    printed = capsys.readouterr().out
    assert "from all 97 tokens, specjax from 50 tokens and 9 candidates: theirs may" in printed
    assert f"{tmp_path / 'w/deepspec'} (" in printed
    report = json.loads((tmp_path / "w/report.json").read_text())
    assert report["task"] == "export"
    assert report["config"] == json.loads((tmp_path / "w/config.json").read_text())
    assert report["drafter_bytes"] > 0
    before, after = (
        specjax.load_drafter(source, golden_target())
        for source in (drafter, tmp_path / "w/deepspec")
    )
    assert before.model == after.model
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    with pytest.raises(ValueError, match="exists: remove it"):
        export.run(config, tmp_path / "w")
    export.run(get_config("export", drafter=drafter, replace=True), tmp_path / "w")


@pytest.mark.parametrize("name", ["prompt_lookup", "prompt_lookup+{drafter}"])
def test_other_drafters_are_refused(drafter, get_config, tmp_path, name):
    config = get_config("export", drafter=name.format(drafter=drafter))
    with pytest.raises(ValueError, match=r"is not a DSpark drafter.*the source alone"):
        export.run(config, tmp_path / "w")
    assert not list((tmp_path / "w").iterdir())


def test_a_drafter_of_another_target(drafter, get_config, tmp_path, monkeypatch):
    params = jax.tree.map(lambda x: x * 1.01, golden_target().params)
    other = dataclasses.replace(golden_target(), params=params, name="other")
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: other)
    for task, name in ((export, "export"), (generate, "quickstart")):
        with pytest.raises(
            ValueError, match=r"trained for the target '.*data/drafters/target'.*any_target=True"
        ):
            task.run(get_config(name, drafter=drafter), tmp_path / "w")
