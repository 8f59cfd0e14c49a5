"""Targets written as Hugging Face directories."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from specjax.checkpoints import load_drafter, load_target, save_drafter, save_target
from specjax.checkpoints.architectures import get_architecture
from specjax.checkpoints.gguf_tokenizer import build_tokenizer
from specjax.checkpoints.head import load_head, save_head
from specjax.checkpoints.raw_config import lost, raw_config
from specjax.drafters.mtp_init import init_mtp
from specjax.models.config import RopeConfig, SlidingConfig
from specjax.models.target import Target
from tests.toys import MarkovTarget, tiny_target

from .conftest import read_golden
from .gguf_files import write_gguf
from .test_gguf_tokenizer import byte_level

DATA = Path(__file__).parents[1] / "data"
FAMILIES = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "llama_tied", "llama_untied")
equal = functools.partial(np.testing.assert_array_equal, strict=True)  # dtypes too


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same(target: Target, other: Target) -> None:
    assert target.model == other.model
    assert (target.stop_ids, target.dtype) == (other.stop_ids, other.dtype)
    jax.tree.map(equal, target.params, other.params)
    assert target.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_is_the_same_again(family, tmp_path):
    target = dataclasses.replace(load_target(DATA / family, dtype="float32"), stop_ids=(5, 7))
    save_target(tmp_path / "a" / "model", target)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]
    assert_same(load_target(tmp_path / "a" / "model", dtype="float32"), target)
    given, written = read_golden(DATA / family), read_config(tmp_path / "a" / "model")
    keys = ("architectures", "model_type", "dtype", "layer_types", "hidden_size", "sliding_window")
    same = [key for key in keys if key in given.config and key in written]
    assert [written[key] for key in same] == [given.config[key] for key in same]
    assert written["eos_token_id"] == [5, 7]
    stored = safetensors.numpy.load_file(tmp_path / "a" / "model" / "model.safetensors")
    assert stored.keys() == given.tensors.keys()
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "a" / "model")
    assert theirs.model_type == given.config["model_type"]
    assert theirs.num_hidden_layers == target.model.config.num_layers
    for name, array in stored.items():
        np.testing.assert_allclose(array, given.tensors[name], rtol=0, atol=2**-24)


def test_a_target_in_bfloat16(tmp_path):
    target = load_target(DATA / "gemma3", dtype="bfloat16")
    save_target(tmp_path / "model", target)
    assert read_config(tmp_path / "model")["dtype"] == "bfloat16"
    assert_same(load_target(tmp_path / "model", dtype="bfloat16"), target)
    fine = load_target(DATA / "gemma3", dtype="float32")
    save_target(tmp_path / "model", fine, dtype="bfloat16", replace=True)
    loaded = load_target(tmp_path / "model", dtype="bfloat16")
    assert_same(loaded, target)
    assert loaded.fingerprint() == fine.fingerprint()  # drafters of one are the other's


@pytest.mark.parametrize("family", ["qwen3", "llama_untied"])
def test_a_gguf_file_as_a_directory(family, tmp_path):
    golden = read_golden(DATA / family)
    options = {"architecture": golden.config["model_type"]}
    if family == "llama_untied":
        options["original_max_len"] = 16
    path = write_gguf(tmp_path / "model.gguf", golden.config, golden.tensors, **options)
    target = load_target(path, dtype="float32")
    save_target(tmp_path / "model", target)
    assert_same(load_target(tmp_path / "model", dtype="float32"), target)


def test_the_tokenizer_is_written_too(tmp_path):
    template = {"tokenizer.chat_template": "{{ messages }}"}
    tokenizer = build_tokenizer(byte_level(pre="llama-bpe") | template)
    target = load_target(DATA / "llama_tied", dtype="float32")
    target = dataclasses.replace(target, tokenizer=tokenizer, stop_ids=(3,))
    save_target(tmp_path / "model", target)
    save_target(tmp_path / "model", target, replace=True)  # its files are known
    loaded = load_target(tmp_path / "model", dtype="float32")
    assert (loaded.stop_ids, read_config(tmp_path / "model")["eos_token_id"]) == ((3,), 3)
    assert loaded.tokenizer is not None
    for text in ("hello</s> <think>", "It's 12345!\n\n x"):
        assert loaded.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.tokenizer.chat_template == "{{ messages }}"
    assert loaded.tokenizer.eos_token == "</s>"
    # Several templates make a folder of their own.
    tokenizer.chat_template = {"default": "{{ messages }}", "tool": "{{ messages }}"}
    for _ in range(2):
        save_target(tmp_path / "model", target, replace=True)


def test_norms_below_a_half_change_by_less_than_a_rounding(tmp_path):
    target = load_target(DATA / "gemma3", dtype="float32")
    scale = jnp.linspace(-0.4, 0.49, 32, dtype=jnp.float32)
    target = dataclasses.replace(target, params={**target.params, "final_norm": {"scale": scale}})
    save_target(tmp_path / "model", target)
    loaded = load_target(tmp_path / "model", dtype="float32")
    np.testing.assert_allclose(loaded.params["final_norm"]["scale"], scale, rtol=0, atol=2**-24)


def test_a_saved_target_has_its_drafters(tmp_path):
    target = tiny_target()
    save_target(tmp_path / "model", target)
    model, params = init_mtp(target, jax.random.key(0))
    save_drafter(tmp_path / "mtp", model, params, target)
    assert load_drafter(tmp_path / "mtp", load_target(tmp_path / "model", dtype="float32"))


CONFIG = tiny_target().model.config
SLIDING = SlidingConfig((0,), 8, 2, 8, RopeConfig(theta=500.0))
GEMMA = {"activation": "gelu_tanh", "sandwich_norms": True, "embed_scale": 32**0.5}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"rope": RopeConfig("linear", 5e5, 4.0)}),
        ("mistral", {}),
        ("mistral", {"sliding": SlidingConfig((0, 1), 8, 2, 8, RopeConfig())}),
        ("qwen2", {"qkv_bias": True, "sliding": SlidingConfig((1,), 8, 2, 8, RopeConfig())}),
        ("qwen3", {"qk_norm": True, "sliding": SlidingConfig((0,), 8, 2, 8, RopeConfig())}),
        ("gemma2", {**GEMMA, "attention_scale": 8**-0.5}),
        ("gemma3", {**GEMMA, "qk_norm": True, "attention_scale": 168**-0.5}),
        ("gemma3", {**GEMMA, "qk_norm": True, "attention_scale": 0.5, "sliding": SLIDING}),
    ],
    ids=str,
)
def test_new_models_have_a_config_json(architecture, changes):
    config = dataclasses.replace(CONFIG, architecture=architecture, **changes)
    raw = json.loads(json.dumps(raw_config(config)))
    assert get_architecture(raw).config(raw) == config
    assert not lost(raw, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"qk_norm": True},
            r"LlamaForCausalLM cannot tell all of tiny: .*qk_norm \(False, now Tru",
        ),
        ({"logit_cap": 3.0, "window": 8}, r"logit_cap \(None, now 3.0\); window \(None, now 8\)"),
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"architecture": "mistral", "sliding": SLIDING}, r"sliding.layers .*sliding.rope.theta"),
        ({"architecture": "gemma2", "attention_scale": 0.3, **GEMMA}, r"attention_scale \(0.3015"),
        ({"architecture": "gemma4_text"}, "rope type 'default' of full_attention"),
    ],
    ids=str,
)
def test_what_config_json_cannot_tell_is_refused(tmp_path, changes, message):
    target = tiny_target()
    config = dataclasses.replace(CONFIG, **changes)
    model = dataclasses.replace(target.model, config=config)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), model.param_shapes())
    with pytest.raises(ValueError, match=message):
        save_target(tmp_path / "model", dataclasses.replace(target, model=model, params=params))
    assert not list(tmp_path.iterdir())


def test_parts_and_diverged_models_are_refused(tmp_path):
    target = tiny_target()
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match="not loaded by specjax"):
        save_target(folder, dataclasses.replace(target, model=MarkovTarget(61)))
    save_head(tmp_path, target, 60)
    with pytest.raises(ValueError, match="are not those of a whole model"):
        save_target(folder, load_head(tmp_path)[0])
    broken = {**target.params, "final_norm": {"scale": jnp.full(32, jnp.inf)}}
    with pytest.raises(ValueError, match=r"model\.norm\.weight hold NaN or infinite values"):
        save_target(folder, dataclasses.replace(target, params=broken))
    with pytest.raises(ValueError, match="dtype must be 'float32' or 'bfloat16', got 'float16'"):
        save_target(folder, target, dtype="float16")
    assert not folder.exists()


def test_only_targets_that_specjax_wrote_are_replaced(tmp_path):
    target, folder = tiny_target(), tmp_path / "model"
    save_target(folder, target)
    with pytest.raises(ValueError, match=r"exists: .*have its target replaced"):
        save_target(folder, target)
    other = tiny_target(seed=1)
    save_target(str(folder), other, replace=True)
    assert_same(load_target(folder, dtype="float32"), other)
    shutil.copytree(DATA / "mistral", tmp_path / "theirs")
    (tmp_path / "theirs" / "golden.npz").unlink()
    (tmp_path / "theirs" / "config_hub.json").unlink()
    (folder / "notes.txt").write_text("mine")
    for path in (folder, tmp_path / "theirs"):
        with pytest.raises(ValueError, match="is no target that specjax wrote"):
            save_target(path, target, replace=True)
