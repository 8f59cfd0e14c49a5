"""Every architecture against recorded outputs of transformers, cached and speculative."""

import json
import shutil
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints import CheckpointError, load_target
from specjax.checkpoints.architectures import get_architecture
from specjax.decoding.loop import decode, init_decode_state
from specjax.decoding.types import DecodeConfig
from specjax.drafters import NoDrafter
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget
from tests.toys import ScriptedDrafter

from .conftest import read_golden

DATA = Path(__file__).parents[1] / "data"
MISSING = object()  # a key that is taken out
FAMILIES = ("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gemma4")  # beside Llama
SLIDING = (
    "mistral",
    "gemma3",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma2", "gemma4")),
)
FILES = [
    (family, path.name) for family in FAMILIES for path in sorted((DATA / family).glob("*.json"))
]


def load(family: str, folder: Path, config: str = "config.json", **changes: Any) -> Target:
    """The model of a family with changed entries of its configuration."""
    shutil.copyfile(DATA / family / "model.safetensors", folder / "model.safetensors")
    raw = json.loads((DATA / family / config).read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return load_target(folder, dtype="float32")


@pytest.mark.parametrize(("family", "config"), FILES)
def test_logits_and_hidden_states_equal_transformers(family, config, tmp_path):
    golden = read_golden(DATA / family)
    golden.check(load(family, tmp_path, config))


@pytest.mark.parametrize("family", FAMILIES)
def test_table_of_names_covers_every_parameter(family):
    raw = json.loads((DATA / family / "config.json").read_text())
    architecture = get_architecture(raw)
    config = architecture.config(raw)
    shapes = flax.traverse_util.flatten_dict(TransformerTarget(config).param_shapes(), sep="/")
    unused = set(architecture.layer_weights(config.num_layers)) - set(shapes)
    expected = {"lm_head/weight"} if config.tied_head else set()
    if family == "gemma4":  # its last layer has the keys for values
        expected |= {"layer_5/attention/v_proj/weight"}
    assert unused == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decoding_equals_the_full_pass_at_every_position(family, tmp_path):
    golden, target = read_golden(DATA / family), load(family, tmp_path)
    taps = tuple(range(-1, target.model.config.num_layers - 1))
    tokens = jnp.asarray(golden.outputs["input_ids"])
    apply = jax.jit(target.model.apply, static_argnames="taps")
    cache, outs = target.model.init_cache(2, 24), []
    for t in range(tokens.shape[1]):
        out = apply(target.params, tokens[:, t : t + 1], jnp.full((2, 1), t), cache, taps=taps)
        cache = out.cache
        outs.append(out)
    states = np.moveaxis(np.concatenate([out.taps for out in outs], axis=1), 2, 0)
    close = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(states, golden.outputs["hidden_states"][:-1], **close)
    logits = np.concatenate([out.logits for out in outs], axis=1)
    np.testing.assert_allclose(logits, golden.outputs["logits"], **close)


@pytest.mark.parametrize("family", SLIDING)
def test_rejected_drafts_leave_sliding_windows_alone(family, tmp_path):
    """A window of 8, drafts of 4 that are always wrong, and of which the first two are right."""
    target = load(family, tmp_path, sliding_window=8)
    prompts, new = [[1, 2, 3], list(range(20, 34))], 40

    def run(drafter: Any, params: Any, config: DecodeConfig) -> tuple[list[list[int]], Any]:
        static = {"target": target.model, "drafter": drafter, "config": config}
        state = init_decode_state(target.params, params, prompts, max_new_tokens=new, **static)
        state = decode(target.params, params, state, **static)
        rows = zip(np.asarray(state.tokens_BS), map(len, prompts), strict=True)
        return [row[: length + new].tolist() for row, length in rows], state.stats

    plain, _ = run(NoDrafter(), (), DecodeConfig(0))
    script = np.zeros((2, 64), np.int32)
    for row, text in zip(script, plain, strict=True):
        row[: len(text)] = text
    wrong = (script + 1) % target.model.vocab_size
    positions = np.arange(script.shape[1])[None]
    for drafts in (wrong, np.where(positions % 4 < 2, script, wrong)):
        rows, stats = run(ScriptedDrafter(), jnp.asarray(drafts), DecodeConfig(4))
        assert rows == plain
        assert (stats.accepted_BG.sum() == 0) == (drafts is wrong)


def test_a_language_model_nested_in_a_larger_one(tmp_path):
    """As the hub holds models of images and text."""
    golden = read_golden(DATA / "gemma3")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "eos_token_id": [1, 5], "text_config": golden.config})
    )
    for prefix in ("model.language_model.", "language_model.model."):
        tensors = {
            prefix + name.removeprefix("model."): array for name, array in golden.tensors.items()
        }
        other = {"vision_tower.embeddings.weight": np.ones((3, 3), np.float32)}
        safetensors.numpy.save_file(tensors | other, tmp_path / "model.safetensors")
        target = load_target(tmp_path, dtype="float32")
        golden.check(target)
    assert target.stop_ids == (1, 5)
    twice = {"model.language_model.norm.weight": golden.tensors["model.norm.weight"]}
    safetensors.numpy.save_file(tensors | twice, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of its language model twice"):
        load_target(tmp_path, dtype="float32")


def test_a_nested_language_model_with_a_head_of_its_own(tmp_path):
    golden = read_golden(DATA / "mistral")
    text = golden.config | {"eos_token_id": 0}
    raw = {"model_type": "mistral3", "eos_token_id": 5, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = {
        name if name.startswith("lm_head") else f"model.language_model.{name[6:]}": array
        for name, array in golden.tensors.items()
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    target = load_target(tmp_path, dtype="float32")
    golden.check(target)
    assert target.stop_ids == (0,)


def test_rotary_bases_by_kind_may_stand_at_the_top_level():
    raw = json.loads((DATA / "gemma3" / "config.json").read_text())
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
    raw |= {"rope_parameters": ropes, "rope_theta": 5e5, "rope_local_base_freq": 3e4}
    config = get_architecture(raw).config(raw)
    assert (config.rope.kind, config.rope.theta) == ("linear", 5e5)
    assert config.sliding.rope.theta == 3e4


WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({}, None, ()),
        ({**WINDOWS, "use_sliding_window": False}, None, ()),
        (WINDOWS, 8, (1, 2)),
        ({**WINDOWS, "sliding_window": MISSING, "max_window_layers": 2}, 4096, (2,)),
    ],
)
def test_windows_of_qwen(changes, window, layers):
    raw = json.loads((DATA / "qwen2" / "config_hub.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not MISSING}
    sliding = get_architecture(raw).config(raw).sliding
    assert (sliding.window, sliding.layers) == (window, layers) if layers else sliding is None


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"rope_scaling": {"type": "linear", "factor": 8}}, "and rope_scaling differ"),
        ("mistral", {"rope_parameters": {"full_attention": {}}}, "by kind of layer are not supp"),
        ("qwen2", {"use_sliding_window": "false"}, "use_sliding_window must be true or false"),
        ("gemma2", {"final_logit_softcapping": 1e300}, "a number that float32 holds"),
        ("gemma3", {"query_pre_attn_scalar": 1e-300}, "a number that float32 holds"),
        ("gemma3", {"layer_types": [["x"]] * 3}, "layer_types must name 3 layers"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {}}}, "lacks full_attention"),
        ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 0}, "makes no model.*theta"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        ("gemma2", {"layer_types": "sliding_attention"}, "layer_types must name 3 layers"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "as full_attention or sliding"),
        ("gemma3", {"sliding_window": 0}, "makes no model.*'window': 0"),
        ("gemma3", {"sliding_window": None}, "lacks 'sliding_window'"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ("gemma3", {"use_bidirectional_attention": True}, "decoding is causal"),
        ("gemma3", {"final_logit_softcapping": -1}, "makes no model.*'logit_cap': -1"),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": -1}}, "makes no model"),
        ("gemma4", {"hidden_size_per_layer_input": 256}, "per-layer embeddings"),
        ("gemma4", {"hidden_size_per_layer_input": None}, "per-layer embeddings"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block=True is not supported"),
        ("gemma4", {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 is not supported"),
        ("gemma4", {"attention_k_eq_v": 1}, "attention_k_eq_v must be true or false"),
        ("gemma4", {"attention_k_eq_v": False}, r"missing tensors: .*layers\.5\..*v_proj"),
        ("gemma4", {"layer_types": ["sliding_attention"] * 6}, "last layer of layer_types"),
        ("gemma4", {"rope_parameters": None}, "rope type 'default' of full_attention"),
        ("gemma4", {"global_head_dim": 8}, r"layers\.5\..* has shape"),
    ],
    ids=str,
)
def test_refused_configurations(family, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load(family, tmp_path, **changes)
