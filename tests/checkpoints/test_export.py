"""Drafters written in DeepSpec's format."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax.checkpoints import CheckpointError, load_drafter, load_target, save_drafter
from specjax.checkpoints.dspark import export_dspark
from specjax.drafters import DSpark
from tests.drafters.golden import FOLDER, golden_drafter, golden_target
from tests.toys import tiny_target

# Keys that transformers writes of every model, and has defaults for.
DEFAULTS = {
    *("attention_dropout", "initializer_range", "max_window_layers", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
    *("sliding_window", "use_sliding_window"),
}
OTHERS = ("dspark_vanilla", "dspark_rnn", "dflash")
KINDS = ("dspark_gated", *OTHERS)
IDS, CANDIDATES = (0, 3, *range(10, 90, 2)), 7


def export(directory, drafter, target, **options):
    export_dspark(directory, drafter.model, drafter.params, target, **options)
    return directory


def read_config(directory):
    return json.loads((directory / "config.json").read_text())


def edit(directory, **changes):
    (directory / "config.json").write_text(json.dumps(read_config(directory) | changes))
    return directory


def assert_same(drafter, other):
    assert drafter.model == other.model
    equal = functools.partial(np.testing.assert_array_equal, strict=True)  # dtypes too
    jax.tree.map(equal, drafter.params, other.params)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_deepspec(tmp_path, kind):
    drafter = golden_drafter(kind)
    folder = export(tmp_path / "a" / "drafter", drafter, golden_target(), dtype="float32")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["drafter"]
    config, expected = read_config(folder), read_config(FOLDER / kind)
    assert config.keys() - expected.keys() == {"target_name", "target_fingerprint", "rope_theta"}
    assert expected.keys() - config.keys() == DEFAULTS
    num_anchors = {"num_anchors": 512}  # of training, which the drafter does not know
    same = {key: expected[key] for key in expected.keys() - DEFAULTS} | num_anchors
    assert {key: config[key] for key in same} == same
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors"}
    stored, wanted = (
        safetensors.numpy.load_file(path / "model.safetensors") for path in (folder, FOLDER / kind)
    )
    assert stored.keys() == wanted.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor, wanted[name], strict=True)
    assert_same(load_drafter(folder, golden_target()), drafter)


@pytest.mark.parametrize("own", [True, False])
def test_gemma4_drafters_are_the_same_again(tmp_path, own):
    """In either format: what another program trained may be trained on, and leave again."""
    target, drafter = golden_target("dspark_gemma4"), golden_drafter("dspark_gemma4")
    write = save_drafter if own else export_dspark
    write(tmp_path / "drafter", drafter.model, drafter.params, target, dtype="float32")
    kind = "SpecjaxDSparkModel" if own else "Gemma4DSparkModel"
    assert read_config(tmp_path / "drafter")["architectures"] == [kind]
    assert_same(load_drafter(tmp_path / "drafter", target), drafter)


@pytest.mark.parametrize(
    "kind", ["dspark_gated", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_a_restricted_drafter_decodes_as_before(tmp_path, kind):
    target = golden_target()
    drafter = golden_drafter(kind, draft_vocab=IDS, candidates=CANDIDATES)
    folder = export(tmp_path / "drafter", drafter, target, dtype="float32")
    back = load_drafter(folder, target)
    prompts = [[5, 6, 7], [20, 3]]
    before, after = (
        specjax.generate(target, part, prompts, max_new_tokens=12, draft_len=3)
        for part in (drafter, back)
    )
    assert before.tokens == after.tokens
    np.testing.assert_array_equal(before.stats.rounds_B, after.stats.rounds_B)
    np.testing.assert_array_equal(before.stats.accepted_BG, after.stats.accepted_BG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restriction_is_kept(tmp_path, kind):
    target = golden_target()
    drafter = golden_drafter(kind, draft_vocab=IDS, candidates=CANDIDATES)
    folder = export(tmp_path / "drafter", drafter, target, dtype="float32")
    assert_same(load_drafter(folder, target), drafter)
    edit(folder, specjax={})  # all that tells of it: the rest is DeepSpec's
    again = load_drafter(folder, target, draft_vocab=IDS, candidates=CANDIDATES)
    assert_same(again, drafter)


@pytest.mark.parametrize("kind", ["dspark_rnn", "dflash"])
def test_other_engines_see_the_whole_vocabulary(tmp_path, kind):
    target, whole = golden_target(), golden_drafter(kind)
    drafter = golden_drafter(kind, draft_vocab=IDS, candidates=CANDIDATES)
    folder = export(tmp_path / "drafter", drafter, target, dtype="float32")
    assert read_config(folder)["specjax"] == {"draft_vocab": list(IDS), "candidates": CANDIDATES}
    back = load_drafter(edit(folder, specjax={}), target)
    assert back.model == whole.model
    params = dict(whole.params)
    if kind == "dspark_rnn":
        w2_VR = np.zeros_like(params["markov"]["w2"]["weight"])
        w2_VR[list(IDS)] = params["markov"]["w2"]["weight"][np.array(IDS)]
        params["markov"] = {**params["markov"], "w2": {"weight": w2_VR}}
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


def test_a_trained_drafter_in_bfloat16(tmp_path):
    """As the tasks do it: saved, loaded for the target in bfloat16, and exported."""
    made = golden_drafter("dspark_rnn", draft_vocab=IDS, candidates=CANDIDATES)
    save_drafter(tmp_path / "own", made.model, made.params, golden_target())
    coarse = load_target(FOLDER / "target", dtype="bfloat16")
    drafter = load_drafter(tmp_path / "own", coarse)
    back = load_drafter(export(tmp_path / "drafter", drafter, coarse), coarse)
    assert_same(back, drafter)
    stored = safetensors.numpy.load_file(tmp_path / "drafter" / "model.safetensors")
    assert stored["lm_head.weight"].shape == (97, 32)
    assert {str(tensor.dtype) for tensor in stored.values() if tensor.ndim == 2} == {"bfloat16"}
    assert read_config(tmp_path / "drafter")["dtype"] == "bfloat16"


def test_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.numpy, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "drafter", golden_drafter("dflash"), golden_target())
    assert not list(tmp_path.iterdir())


def test_a_drafter_is_replaced_only_when_told_to(tmp_path):
    target, folder = golden_target(), tmp_path / "drafter"
    export(folder, golden_drafter("dflash"), target, dtype="float32")
    with pytest.raises(ValueError, match="exists: remove it"):
        export(folder, golden_drafter("dspark_rnn"), target)
    assert_same(load_drafter(folder, target), golden_drafter("dflash"))
    export(folder, golden_drafter("dspark_rnn"), target, dtype="float32", replace=True)
    assert_same(load_drafter(folder, target), golden_drafter("dspark_rnn"))


def test_what_is_no_drafter_alone_is_not_replaced(tmp_path):
    target, drafter = golden_target(), golden_drafter("dflash")
    folder = export(tmp_path / "drafter", drafter, target)
    (folder / "notes.txt").write_text("mine")
    shutil.copytree(FOLDER / "target", tmp_path / "model")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("drafter", "model", "dangling"):
        with pytest.raises(ValueError, match="exists and is no drafter's folder"):
            export(tmp_path / name, drafter, target, replace=True)
    assert (folder / "notes.txt").exists()
    (folder / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(folder)
    export(tmp_path / "link", golden_drafter("dspark_rnn"), target, dtype="float32", replace=True)
    assert_same(load_drafter(folder, target), golden_drafter("dspark_rnn"))


def test_a_failed_replacement_leaves_the_old_one(tmp_path, monkeypatch):
    target, folder = golden_target(), tmp_path / "drafter"
    export(folder, golden_drafter("dflash"), target, dtype="float32")
    rename = Path.rename

    def fail(path, to):
        if path.name == "new":
            raise OSError(16, "Device or resource busy")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="busy"):
        export(folder, golden_drafter("dspark_rnn"), target, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    assert_same(load_drafter(folder, target), golden_drafter("dflash"))


def test_drafters_that_diverged_are_not_written(tmp_path):
    drafter = golden_drafter("dflash")
    params = {**drafter.params, "fc": {"weight": drafter.params["fc"]["weight"] * np.nan}}
    with pytest.raises(ValueError, match=r"fc\.weight hold NaN or infinite values"):
        export_dspark(tmp_path / "drafter", drafter.model, params, golden_target())
    assert not [*tmp_path.iterdir()]


def test_what_the_format_does_not_hold_is_refused(tmp_path):
    target, drafter = golden_target(), golden_drafter("dspark_rnn")
    config = drafter.model.config
    plain = dataclasses.replace(config.backbone, qk_norm=False)
    model = DSpark(dataclasses.replace(config, backbone=plain))
    for write in (export_dspark, save_drafter):
        with pytest.raises(ValueError, match=r"layers of Qwen3.* qk_norm \(True, now False\)"):
            write(tmp_path / "drafter", model, drafter.params, target)
    with pytest.raises(ValueError, match="dtype must be 'float32' or 'bfloat16', got 'float16'"):
        export(tmp_path / "drafter", drafter, target, dtype="float16")
    with pytest.raises(ValueError, match="it was made for another target"):
        export(tmp_path / "drafter", drafter, tiny_target())
    trimmed = golden_drafter("dspark_rnn", draft_vocab=IDS)
    head = {"weight": trimmed.params["lm_head"]["weight"] + 1}
    other = dataclasses.replace(trimmed, params={**trimmed.params, "lm_head": head})
    with pytest.raises(ValueError, match=r"lm_head is not .*target's"):
        export(tmp_path / "drafter", other, target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([1, 2], r"specjax must be a mapping, got \[1, 2\]"),
        ({"draft_vocab": [1, 97]}, "draft_vocab must be distinct token ids from 0 to 96"),
        ({"draft_vocab": [0, True, 5]}, "draft_vocab must be a list of token ids"),
        ({"draft_vocab": "all"}, "draft_vocab must be a list of token ids, got 'all'"),
        ({"candidates": "7"}, "candidates must be a number, got '7'"),
        ({"candidates": 98}, "candidates"),
    ],
)
def test_a_damaged_restriction_is_named(tmp_path, entry, message):
    folder = export(tmp_path / "drafter", golden_drafter("dflash"), golden_target())
    with pytest.raises(CheckpointError, match=message):
        load_drafter(edit(folder, specjax=entry), golden_target())
