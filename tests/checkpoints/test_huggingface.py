import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.traverse_util
import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from specjax.checkpoints import CheckpointError, load_target
from specjax.checkpoints.architectures import get_architecture
from specjax.models.transformer import TransformerTarget

from .conftest import Golden


def load(source: Any) -> Any:
    return load_target(source, dtype="float32")


@pytest.mark.parametrize("config", ["config.json", "config_hub.json"])
def test_logits_and_hidden_states_equal_transformers(
    golden: Golden, config: str, tmp_path: Path
) -> None:
    shutil.copyfile(golden.directory / "model.safetensors", tmp_path / "model.safetensors")
    shutil.copyfile(golden.directory / config, tmp_path / "config.json")
    target = load(tmp_path)
    golden.check(target)
    assert target.name == str(tmp_path)
    assert target.tokenizer is None
    assert target.stop_ids == ()


def test_shards_equal_one_file(golden: Golden, tmp_path: Path) -> None:
    names = sorted(golden.tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, inside in shards.items():
        safetensors.numpy.save_file({n: golden.tensors[n] for n in inside}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, inside in shards.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(golden.directory / "config.json", tmp_path / "config.json")
    golden.check(load(str(tmp_path)))


def test_the_index_says_which_shard_has_a_tensor(untied: Golden, tmp_path: Path) -> None:
    stale = {"model.norm.weight": np.full(32, 7.0, np.float32)}
    for name, tensors in (("a.safetensors", untied.tensors), ("b.safetensors", stale)):
        safetensors.numpy.save_file(tensors, tmp_path / name)
    index = {"weight_map": dict.fromkeys(untied.tensors, "a.safetensors") | {"x": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(untied.directory / "config.json", tmp_path / "config.json")
    untied.check(load(tmp_path))


def test_params_have_the_declared_structure_and_dtypes(golden: Golden) -> None:
    target = load_target(golden.directory, dtype="bfloat16")
    assert isinstance(target.model, TransformerTarget)
    shapes = target.model.param_shapes()
    assert jax.tree.structure(target.params) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(target.params), jax.tree.leaves(shapes), strict=True):
        assert isinstance(array, jax.Array)
        assert array.shape == shape.shape
        assert array.dtype == (jnp.bfloat16 if array.ndim == 2 else jnp.float32)
    assert target.dtype == "bfloat16"


def test_table_of_names_covers_every_parameter(golden: Golden) -> None:
    architecture = get_architecture(golden.config)
    config = architecture.config(golden.config)
    shapes = flax.traverse_util.flatten_dict(TransformerTarget(config).param_shapes(), sep="/")
    unused = set(architecture.layer_weights(config.num_layers)) - set(shapes)
    assert unused == ({"lm_head/weight"} if config.tied_head else set())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_stored_dtypes(model_dir: Path, untied: Golden, dtype: Any) -> None:
    stored = {name: tensor.astype(dtype) for name, tensor in untied.tensors.items()}
    safetensors.numpy.save_file(stored, model_dir / "model.safetensors")
    params = load(model_dir).params
    wanted = stored["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["layer_1"]["mlp"]["up_proj"]["weight"], wanted)


def test_harmless_tensors_are_ignored(tied: Golden, tmp_path: Path) -> None:
    extra = {
        "lm_head.weight": np.zeros((96, 32), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    safetensors.numpy.save_file(tied.tensors | extra, tmp_path / "model.safetensors")
    shutil.copyfile(tied.directory / "config.json", tmp_path / "config.json")
    tied.check(load(tmp_path))


@pytest.mark.parametrize(
    ("rope", "kind", "theta"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, "default", 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "default", 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "factor": None}}, "default", 5e5),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 5e5}, "default", 5e5),
        ({}, "default", 1e4),
    ],
)
def test_rope_spellings(
    edit_config: Callable[..., Path], rope: dict[str, Any], kind: str, theta: float
) -> None:
    target = load(edit_config(**{"rope_parameters": None} | rope))
    assert target.model.config.rope.kind == kind
    assert target.model.config.rope.theta == theta


@pytest.mark.parametrize(
    ("generation", "config", "stop_ids"),
    [
        (None, None, ()),
        (None, 2, (2,)),
        (None, [2, 5], (2, 5)),
        ({"eos_token_id": [7, 8]}, 2, (7, 8)),
        ({"eos_token_id": 7}, 2, (7,)),
        ({"eos_token_id": None}, 2, ()),
        ({"temperature": 0.7}, 2, (2,)),
    ],
)
def test_stop_ids(
    edit_config: Callable[..., Path], generation: Any, config: Any, stop_ids: tuple[int, ...]
) -> None:
    directory = edit_config(eos_token_id=config)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert load(directory).stop_ids == stop_ids


def test_tokenizer_of_the_directory(model_dir: Path) -> None:
    words = tokenizers.models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load(model_dir).tokenizer
    assert loaded("hello world")["input_ids"] == [0, 1]
    assert loaded.chat_template == "{{ messages }}"


def test_hub_id(untied: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.append(repo_id)
        assert not any(".bin" in pattern for pattern in kwargs["allow_patterns"])
        return str(untied.directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    untied.check(load("owner/name"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert load("smollm2-135m").name == "smollm2-135m"
    assert asked == ["owner/name", "HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **kwargs: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"'owner/name' cannot be fetched: no route.*network"):
        load("owner/name")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"architecture 'mamba'.*known are llama"),
        ({"model_type": None}, r"architecture None"),
        ({"attention_bias": True}, r"attention_bias=True is not supported"),
        ({"mlp_bias": True}, r"mlp_bias=True is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported: only 'silu'"),
        ({"residual_multiplier": 0.22}, r"residual_multiplier=0.22 is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope type 'yarn'.*default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"lacks 'factor'"),
        ({"rope_parameters": 3}, r"rope_parameters must be a mapping"),
        ({"hidden_size": None}, r"lacks 'hidden_size'"),
        ({"hidden_size": "32"}, r"hidden_size must be a number, got '32'"),
        ({"hidden_size": 32.5}, r"hidden_size must be a whole number"),
        ({"hidden_size": 10**400}, r"hidden_size must be a finite number"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps must be a finite number, got nan"),
        ({"rms_norm_eps": -1e-5}, r"makes no model.*'norm_eps': -1e-05"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, r"rope_theta must be a finite number"),
        ({"rope_parameters": {"rope_theta": 0}}, r"makes no model.*'theta': 0.0"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings must be true or false"),
        ({"vocab_size": 2**31}, r"vocab_size must be a whole number from 0 to 2\*\*31 - 1"),
        ({"num_hidden_layers": 10**6}, r"missing tensors: 30 cannot make 1000000 layers"),
        ({"num_attention_heads": 0, "head_dim": None}, r"makes no model.*at least 1"),
        ({"num_key_value_heads": 3}, r"makes no model.*multiple"),
        ({"head_dim": 15}, r"makes no model.*even head_dim"),
        ({"eos_token_id": "2"}, r"eos_token_id .*token id.*got '2'"),
        ({"eos_token_id": 96}, r"\[96\] lie outside the vocabulary of 96"),
        ({"num_hidden_layers": 2}, r"unexpected tensors: model\.layers\.2\..* and 3 more"),
        ({"num_hidden_layers": 4}, r"missing tensors: .*model\.layers\.3\."),
        ({"intermediate_size": 48}, r"up_proj.weight has shape \(64, 32\), expected \(48, 32\)"),
    ],
)
def test_refused_configurations(
    edit_config: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(edit_config(**changes))


def test_errors_name_the_source(edit_config: Callable[..., Path]) -> None:
    directory = edit_config(mlp_bias=True)
    with pytest.raises(CheckpointError, match=f"cannot load the target '{directory}': mlp_bias"):
        load(directory)


@pytest.mark.parametrize(
    "source", ["nowhere", "./no/where", "/no/where", "owner/name.gguf", "x" * 5000, "x\0"]
)
def test_missing_path(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such file or directory.*smollm2-135m"):
        load(source)


def test_a_path_object_is_never_a_hub_id() -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        load(Path("owner/name"))


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        load(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json.*its path \(model\.gguf\)"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_file_that_is_no_gguf(model_dir: Path, name: str) -> None:
    (model_dir / name).touch()
    with pytest.raises(CheckpointError, match=r"not a \.gguf file.*give the directory"):
        load(model_dir / name)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", b"\xff", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_invalid_json(model_dir: Path, name: str, text: str | bytes) -> None:
    (model_dir / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=rf"{name} (is not valid JSON|must hold a JSON obj)"):
        load(model_dir)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_weights(model_dir: Path, keep: int) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors"):
        load(model_dir)


def test_pickled_weights_are_not_opened(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model\.bin\).*convert"):
        load(model_dir)


def test_no_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights: expected model\.safetensors or"):
        load(model_dir)


def test_the_folder_of_a_run_is_not_its_target(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "target").mkdir()
    with pytest.raises(CheckpointError, match=r"folder of a run: give .*target$"):
        load(model_dir)


def test_integer_weights(model_dir: Path, untied: Golden) -> None:
    tensors = untied.tensors | {"model.norm.weight": np.ones(32, np.int8)}
    safetensors.numpy.save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .*stored as I8"):
        load(model_dir)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_weights_that_are_not_finite(model_dir: Path, untied: Golden, value: float) -> None:
    weight = untied.tensors["model.layers.1.mlp.up_proj.weight"].astype(np.float64)
    weight[3, 5] = value
    tensors = untied.tensors | {"model.layers.1.mlp.up_proj.weight": weight}
    safetensors.numpy.save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or inf"):
        load(model_dir)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "model-00002.safetensors"}}, r"'model-00002\.safetensors'.*missing"),
        ({"weight_map": {"a": "../model.safetensors"}}, r"outside its directory"),
        ({"weight_map": {}}, r"has no 'weight_map'"),
        ({}, r"has no 'weight_map'"),
    ],
)
def test_unusable_index(model_dir: Path, index: dict[str, Any], message: str) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load(model_dir)


def test_unusable_tokenizer(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokeniser files of .* are unusable"):
        load(model_dir)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_one_tensor_is_in_memory_beside_the_parameters(
    untied: Golden, edit_config: Callable[..., Path], stored: Any
) -> None:
    """NumPy holds the largest tensor as it is stored and as it becomes, and little more."""
    directory = edit_config(vocab_size=2**18)
    large = np.ones((2**18, 32), stored)
    tensors = untied.tensors | {"model.embed_tokens.weight": large, "lm_head.weight": large}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    tracemalloc.start()
    try:
        load_target(directory, dtype="bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    as_parameter = large.size * 2
    assert peak < 1.2 * (large.nbytes + as_parameter)
