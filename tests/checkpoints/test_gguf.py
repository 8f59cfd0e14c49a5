import sys
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import CheckpointError, load_target, targets
from specjax.checkpoints.gguf import open_gguf

from .conftest import Golden, read_golden
from .gguf_files import llama3_divisors, write_gguf


def load(source: Path) -> Any:
    return load_target(source, dtype="float32")


def write(path: Path, golden: Golden, **options: Any) -> Path:
    rope = golden.config["rope_parameters"]
    length = {"original_max_len": rope["original_max_position_embeddings"]}
    return write_gguf(path, golden.config, golden.tensors, **length | options)


def test_equals_the_hugging_face_model(golden: Golden, tmp_path: Path) -> None:
    golden.check(load(write(tmp_path / "model.gguf", golden)))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_equals_the_hugging_face_model(family: str, data_dir: Path, tmp_path: Path) -> None:
    model = read_golden(data_dir / family)
    path = tmp_path / "model.gguf"
    model.check(load(write_gguf(path, model.config, model.tensors, architecture=family)))


@pytest.fixture
def gemma3(data_dir: Path) -> Golden:
    """As a file can tell it: queries have the scale of their width, the norm makes up for it."""
    model = read_golden(data_dir / "gemma3")
    scale = (model.config["head_dim"] / model.config["query_pre_attn_scalar"]) ** 0.5
    tensors = {
        name: scale * (1 + tensor) - 1 if "q_norm" in name else tensor
        for name, tensor in model.tensors.items()
    }
    return model._replace(tensors=tensors)


def write_gemma3(path: Path, model: Golden, **extra: Any) -> Path:
    pattern = {"sliding_window": model.config["sliding_window"], "sliding_window_pattern": 3}
    extra = {f"gemma3.attention.{name}": value for name, value in pattern.items()} | extra
    return write_gguf(path, model.config, model.tensors, architecture="gemma3", extra=extra)


def test_gemma3_equals_the_hugging_face_model(gemma3: Golden, tmp_path: Path) -> None:
    gemma3.check(load(write_gemma3(tmp_path / "model.gguf", gemma3)))


def test_config_of_gemma3(gemma3: Golden, tmp_path: Path) -> None:
    def config(options: dict[str, Any], **sizes: int) -> dict[str, Any]:
        extra = {f"gemma3.{name}": value for name, value in options.items()}
        path = tmp_path / "model.gguf"
        write_gguf(path, gemma3.config | sizes, {}, architecture="gemma3", extra=extra)
        return dict(open_gguf(path).config)

    plain = config({})
    assert (plain["sliding_window"], plain["sliding_window_pattern"]) == (None, 1)
    assert (plain["query_pre_attn_scalar"], plain["rope_local_base_freq"]) == (16, 10_000.0)
    assert plain["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    windowed = config({"attention.sliding_window": 512, "rope.freq_base_swa": 5e4})
    assert (windowed["sliding_window"], windowed["sliding_window_pattern"]) == (512, 6)
    assert windowed["rope_local_base_freq"] == 5e4
    assert config({"final_logit_softcapping": 30.0})["final_logit_softcapping"] == 30.0
    # The largest model's scale is another, of which the metadata tell nothing.
    assert config({}, num_hidden_layers=62, hidden_size=48)["query_pre_attn_scalar"] == 12


# The rounding of each kind, relative to the largest number of a block of 32.
@pytest.mark.parametrize(
    ("kind", "rounding"), [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", 1 / 254), ("Q4_1", 2 / 30)]
)
def test_quantised_weights(golden: Golden, tmp_path: Path, kind: str, rounding: float) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    target = load(write(tmp_path / "model.gguf", golden, quantization=quantization))
    exact = load(golden.directory)
    for weight, wanted in zip(*map(jax.tree.leaves, (target.params, exact.params)), strict=True):
        if weight.ndim == 1:
            np.testing.assert_array_equal(weight, wanted)
            continue
        error, size = (np.abs(np.asarray(x)).reshape(-1, 32) for x in (weight - wanted, wanted))
        # The scale of a block is itself rounded to float16.
        bound = (rounding + 2**-10) * size.max(axis=1, keepdims=True)
        assert np.all(error <= bound)


def test_q8_logits(golden: Golden, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType.Q8_0
    target = load(write(tmp_path / "model.gguf", golden, quantization=quantization))
    logits = target.forward(jnp.asarray(golden.outputs["input_ids"])).logits
    wanted = golden.outputs["logits"]
    # Weights move by up to 1/254 of their block's largest; heads in a wrong order by 1.
    assert np.sqrt(np.mean((logits - wanted) ** 2) / np.mean(wanted**2)) < 0.05


def test_heads_share_the_width_where_the_file_does_not_say(data_dir: Path, tmp_path: Path) -> None:
    config = read_golden(data_dir / "gemma3").config
    raw = {key: value for key, value in config.items() if key != "head_dim"}
    opened = open_gguf(write_gguf(tmp_path / "m.gguf", raw, {}, architecture="gemma3"))
    model = opened.architecture.config(opened.config)
    assert model.head_dim == 8
    assert model.attention_scale == pytest.approx(8**-0.5)


def test_default_rope(untied: Golden, tmp_path: Path) -> None:
    target = load(write(tmp_path / "model.gguf", untied, original_max_len=None))
    assert target.model.config.rope.kind == "default"
    assert target.model.config.rope.theta == 10_000.0


def test_rope_of_llama_3_2(untied: Golden, tmp_path: Path) -> None:
    rope = {
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = untied.config | {"head_dim": 64, "rope_parameters": rope}
    heads = {"q_proj": (256, 32), "k_proj": (128, 32), "v_proj": (128, 32), "o_proj": (32, 256)}
    shapes = {f"{part}.weight": shape for part, shape in heads.items()}
    tensors = {
        name: np.zeros(shapes.get(".".join(name.split(".")[-2:]), tensor.shape), np.float32)
        for name, tensor in untied.tensors.items()
    }
    path = write_gguf(tmp_path / "model.gguf", config, tensors, original_max_len=8192)
    loaded = load(path).model.config.rope
    assert (loaded.kind, loaded.theta, loaded.factor) == ("llama3", 500_000.0, 32.0)
    assert (loaded.low_freq_factor, loaded.high_freq_factor) == (1.0, 4.0)
    assert loaded.original_max_len == 8192


def test_linear_rope(untied: Golden, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = untied.config | {"rope_parameters": rope}
    loaded = load(write_gguf(tmp_path / "model.gguf", config, untied.tensors)).model.config.rope
    assert (loaded.kind, loaded.theta, loaded.factor) == ("linear", 5e5, 2.0)


def test_unknown_rope_divisors(untied: Golden, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", untied, original_max_len=8192)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's rescaling"):
        load(path)


def test_divisors_that_do_not_fit(untied: Golden, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", untied)
    path.write_bytes(path.read_bytes().replace(b"rope_freqs.weight", b"else_freqs.weight"))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: else_freqs\.weight"):
        load(path)
    config = untied.config | {"head_dim": 8}
    path = write_gguf(tmp_path / "model.gguf", config, untied.tensors, original_max_len=16)
    data = path.read_bytes()
    for key in (b"attention.key_length", b"rope.dimension_count"):
        start = data.index(key) + len(key) + 4  # after the type
        data = data[:start] + (16).to_bytes(4, "little") + data[start + 4 :]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"shape \(4,\), which does not fit heads of 16"):
        load(path)


def test_divisors_are_those_of_the_golden_model(untied: Golden) -> None:
    divisors = llama3_divisors(16, untied.config["rope_parameters"])
    assert divisors[0] < 2.0 < divisors[1] == 4.0  # one interpolated, the others slowed down


def test_sizes_left_out_by_older_files(untied: Golden, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(96)]}
    path = write(tmp_path / "model.gguf", untied, extra=extra)
    data = path.read_bytes().replace(b"llama.vocab_size", b"other.vocab_size")
    path.write_bytes(data.replace(b"llama.attention.key_length", b"other.attention.key_length"))
    untied.check(load(path))


def test_stop_ids(untied: Golden, tmp_path: Path) -> None:
    ids = {"eos_token_id": 2, "eot_token_id": 9, "eom_token_id": 2}
    extra = {f"tokenizer.ggml.{key}": value for key, value in ids.items()}
    assert load(write(tmp_path / "model.gguf", untied, extra=extra)).stop_ids == (2, 9)
    assert load(write(tmp_path / "model.gguf", untied)).stop_ids == ()


def test_stop_ids_of_gemma(gemma3: Golden, tmp_path: Path) -> None:
    """Both ends, of a text and of a turn, whichever of them the file names."""
    tokens = ["<pad>", "<eos>", "<bos>", "<end_of_turn>"]
    ends = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3}
    assert load(write_gemma3(tmp_path / "model.gguf", gemma3, **ends)).stop_ids == (3, 1)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count=8 is not supported"),
        ({"llama.attention.sliding_window": 4096}, r"attention\.sliding_window=4096"),
        ({"split.count": 2}, r"one of 2 parts: join them with `llama-gguf-split --merge`"),
        ({"split.count": "2"}, r"split\.count must be a number, got '2'"),
        ({"split.count": [2]}, r"split\.count must be a number, got \[2\]"),
        ({"tokenizer.ggml.tokens": 3}, r"metadata tokenizer\.ggml\.tokens is of the wrong type"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope scaling 'yarn'"),
        ({"llama.rope.scaling.factor": 2.0}, r"rope scaling 'linear' by 2\.0"),  # and Llama 3's
        ({"llama.attention.value_length": 8}, r"attention\.value_length=8 .*width of a head, 16"),
        ({"tokenizer.ggml.eos_token_id": 96}, r"\[96\] lie outside the vocabulary of 96"),
        (
            {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]},
            r"tokeniser 'bert'.*known are gpt2, llama",
        ),
    ],
)
def test_refused_metadata(
    untied: Golden, tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path / "model.gguf", untied, extra=extra))


def test_missing_metadata(untied: Golden, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", untied)
    path.write_bytes(path.read_bytes().replace(b"llama.context_length", b"other.context_length"))
    with pytest.raises(CheckpointError, match=r"lacks llama\.context_length"):
        load(path)


def test_unknown_architecture(untied: Golden, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", untied, architecture="rwkv7")
    with pytest.raises(
        CheckpointError, match=r"architecture 'rwkv7'.*known are llama, qwen2, qwen3, gemma3"
    ):
        load(path)


def test_unsupported_quantisation(untied: Golden, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", untied, quantization=gguf.GGMLQuantizationType.Q8_0)
    data, name = bytearray(path.read_bytes()), b"blk.1.ffn_up.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8  # after the rank and two sizes
    data[kind] = gguf.GGMLQuantizationType.Q8_1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has the quantisation Q8_1"):
        load(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 2000, -1])
def test_truncated_file(untied: Golden, tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "model.gguf", untied)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a whole GGUF file"):
        load(path)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" * 64)
    with pytest.raises(CheckpointError, match=r"is not a whole GGUF file.*magic"):
        load(tmp_path / "model.gguf")


# As the package of Gemma 3 270M, with a sum that is looked at.
PACKAGE = """
import pathlib
EXPECTED_SHA256 = "0123456789abcdef"
def assemble(path):
    path.write_bytes(pathlib.Path({part!r}).read_bytes())
    if not path.read_bytes().startswith(b"GGUF"):
        raise ValueError("the sum did not match")
    return path
"""


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The part that the package of the known name "parted" makes its file of."""
    part = tmp_path / "model.part00"
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "parted_model.py").write_text(PACKAGE.format(part=str(part)))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "parted_model", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(targets._KNOWN, "parted", ("parted_model", "owner/name"))
    return part


def test_model_in_parts(untied: Golden, part: Path, tmp_path: Path) -> None:
    write(part, untied)
    untied.check(load_target("parted", dtype="float32"))
    part.unlink()
    untied.check(load_target("parted", dtype="float32"))  # as put together before
    names = [path.name for path in (tmp_path / "cache" / "specjax").iterdir()]
    assert names == ["parted_model-01234567.gguf"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, r"No such file"), (b"else", r"the sum did not match")]
)
def test_missing_or_damaged_part(
    part: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        part.write_bytes(content)
    with pytest.raises(CheckpointError, match=message + r".*; install it again, with the packages"):
        load_target("parted", dtype="float32")
    assert not [*(tmp_path / "cache" / "specjax").iterdir()]
