"""DeepSpec's drafter directories, and specjax's own."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints import CheckpointError, load_drafter, load_target, save_drafter
from specjax.checkpoints.dspark import export_dspark
from specjax.drafters import DSpark, init_dspark
from tests.drafters.golden import FOLDER, golden_target
from tests.toys import tiny_target


@pytest.fixture
def directory(tmp_path):
    shutil.copytree(FOLDER / "dspark_gated", tmp_path / "drafter")
    return tmp_path / "drafter"


def edit(directory, **changes):
    """Changes entries of config.json; None takes the entry out."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory


@pytest.mark.parametrize(
    ("kind", "head", "rank", "confidence"),
    [
        ("dspark_vanilla", "vanilla", 8, (True, True)),
        ("dspark_gated", "gated", 8, (True, False)),
        ("dspark_rnn", "rnn", 8, (True, True)),
        ("dflash", "vanilla", 0, (False, False)),
    ],
)
def test_options_are_read(kind, head, rank, confidence):
    config = load_drafter(FOLDER / kind, golden_target()).model.config
    assert (config.markov_head, config.markov_rank) == (head, rank)
    assert (config.confidence_head, config.confidence_with_markov) == confidence
    assert (config.taps, config.block_size, config.mask_token_id) == ((0, 2), 5, 96)
    assert (config.draft_vocab_size, config.candidates) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3Eagle3Model"]}, "'Qwen3Eagle3Model', which is not a drafter"),
        ({"architectures": None}, "architectures names None"),
        ({"model_type": "gpt2"}, "architecture 'gpt2'"),
        ({"block_size": None}, "lacks 'block_size'"),
        ({"mask_token_id": None}, "lacks 'mask_token_id'"),
        ({"mask_token_id": 97}, "mask_token_id 97 lies outside the vocabulary of 97"),
        ({"target_layer_ids": None}, "target_layer_ids must be a list"),
        ({"target_layer_ids": [0, 3]}, "reach beyond layer 2"),
        ({"target_layer_ids": [2, 0]}, "increasing layer indices"),
        ({"markov_rank": None}, "lacks 'markov_rank'"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "needs a head"),
        ({"markov_head_type": None}, "lacks 'markov_head_type'"),
        ({"markov_head_type": "lstm"}, "unknown markov_head 'lstm'"),
        ({"markov_head_type": "vanilla"}, "unexpected tensors: markov_head.gate_proj"),
        ({"markov_head_type": "rnn"}, "missing tensors: markov_head.joint_proj"),
        ({"enable_confidence_head": None}, "enable_confidence_head must be true or false"),
        ({"confidence_head_with_markov": None}, "confidence_head_with_markov must be true"),
        ({"confidence_head_with_markov": True}, "confidence_head.proj.weight has shape"),
        ({"num_hidden_layers": 3}, "missing tensors: layers.2"),
        ({"num_hidden_layers": 1}, "unexpected tensors: layers.1"),
        ({"num_hidden_layers": 10**7}, "cannot make 10000000 layers"),
        ({"block_size": 2**31 - 1}, "at most the target's context of 512"),
        ({"rope_parameters": []}, "rope_parameters must be a mapping"),
        ({"rope_parameters": {"rope_type": []}}, r"rope type \[\] is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"vocab_size": 96, "mask_token_id": 95}, "vocabulary has 96 tokens and that of .* 97"),
        ({"hidden_size": 64}, "is 64 wide and .* 32"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_named(directory, changes, message):
    with pytest.raises(CheckpointError, match=message) as error:
        load_drafter(edit(directory, **changes), golden_target())
    assert "cannot load the drafter" in str(error.value)


def test_mask_token_that_ends_sequences_is_refused(directory):
    target = dataclasses.replace(golden_target(), stop_ids=(96,))
    with pytest.raises(CheckpointError, match="mask_token_id 96 is an end-of-sequence token"):
        load_drafter(directory, target)


def test_a_drafter_is_no_target(directory):
    with pytest.raises(CheckpointError, match="holds a drafter: load it with load_drafter"):
        load_target(directory, dtype="float32")


def test_damaged_files_are_named(directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_drafter(directory, golden_target())
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json|not a folder"):
        load_drafter(directory, golden_target())


@pytest.mark.parametrize("trimmed", [False, True])
def test_own_format_gives_back_what_was_saved(tmp_path, trimmed):
    target = tiny_target()
    ids = [1, 5, 9, 60] if trimmed else None
    model, params = init_dspark(
        target, jax.random.key(1), num_layers=1, mask_token_id=60, markov_rank=4, candidates=3,
        draft_vocab=ids, block_size=4,
    )  # fmt: skip
    save_drafter(tmp_path / "a" / "drafter", model, params, target, dtype="float32")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["drafter"]
    stored = safetensors.numpy.load_file(tmp_path / "a" / "drafter" / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(stored)
    for path in (tmp_path / "a" / "drafter").iterdir():
        assert path.stat().st_mode & 0o444 == 0o444, path  # readable by all
    loaded = load_drafter(tmp_path / "a" / "drafter", target)
    assert loaded.model == model
    assert isinstance(loaded.model, DSpark)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    with pytest.raises(ValueError, match="exists: remove it"):
        save_drafter(str(tmp_path / "a" / "drafter"), model, params, target)


@pytest.mark.parametrize(
    "ids",
    [[-1, 1, 2], [3, 3, 9], [9, 5, 3], [3, 5, 97], [3.0, 5.0, 9.0], [np.nan, 5, 9]],
    ids=str,
)
def test_damaged_draft_ids_are_refused(tmp_path, ids):
    """They decide where q is zero: a wrong one would change the output."""
    target = golden_target()
    drafter = load_drafter(FOLDER / "dspark_rnn", target, draft_vocab=[5, 3, 9])
    save_drafter(tmp_path / "drafter", drafter.model, drafter.params, target)
    file = tmp_path / "drafter" / "model.safetensors"
    stored = safetensors.numpy.load_file(file)
    kind = np.float32 if isinstance(ids[0], float) else np.int32
    safetensors.numpy.save_file({**stored, "draft_ids": np.array(ids, kind)}, file)
    with pytest.raises(CheckpointError, match="draft_ids"):
        load_drafter(tmp_path / "drafter", target)


def test_numpys_integers_can_be_saved(tmp_path):
    target = tiny_target()
    model, params = init_dspark(
        target, jax.random.key(0), num_layers=1, mask_token_id=5, candidates=np.int64(3),
        markov_rank=np.int32(4),
    )  # fmt: skip
    save_drafter(tmp_path / "drafter", model, params, target)
    assert load_drafter(tmp_path / "drafter", target).model == model


def test_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    target = tiny_target()
    model, params = init_dspark(
        target, jax.random.key(1), num_layers=1, mask_token_id=60, markov_rank=4
    )

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.numpy, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(tmp_path / "drafter", model, params, target)
    assert not list(tmp_path.iterdir())


def test_what_the_format_leaves_out_must_be_the_targets(tmp_path):
    drafter = load_drafter(FOLDER / "dflash", golden_target())
    params = dict(drafter.params)
    params["lm_head"] = {"weight": params["lm_head"]["weight"] + 1}
    with pytest.raises(ValueError, match=r"lm_head is not .*target's"):
        save_drafter(tmp_path / "drafter", drafter.model, params, golden_target())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [export_dspark, save_drafter])
def test_a_drafter_of_another_target_is_refused_unless_told(tmp_path, write):
    target, other = tiny_target(), dataclasses.replace(tiny_target(seed=1), name="other")
    model, params = init_dspark(
        target, jax.random.key(1), num_layers=1, mask_token_id=60, markov_rank=4
    )
    write(tmp_path / "drafter", model, params, target)
    found = {part.name: part.fingerprint()[:12] for part in (target, other)}
    message = rf"'tiny' \(fingerprint {found['tiny']}\), and 'other' \({found['other']}\)"
    for source in (tmp_path / "drafter", f"prompt_lookup+{tmp_path / 'drafter'}"):
        with pytest.raises(CheckpointError, match=message + ".*any_target=True"):
            load_drafter(source, other)
        load_drafter(source, other, any_target=True)
        load_drafter(source, target)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nonsense", "unknown drafter 'nonsense'"),
        ("early_exit:x", "needs a number of layers"),
    ],
)
def test_unknown_names_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(source, golden_target())


def test_options_of_dspark_are_refused_elsewhere():
    with pytest.raises(ValueError, match="options of DSpark, not of prompt_lookup"):
        load_drafter("prompt_lookup", golden_target(), candidates=4)
