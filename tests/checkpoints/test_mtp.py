"""MTP modules in specjax's own format, and as layers of a model's directory."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax.checkpoints import CheckpointError, load_drafter, load_target, save_drafter
from specjax.checkpoints.mtp import open_mtp
from specjax.drafters import PromptLookup, init_dspark
from specjax.drafters.borrowed import drafters_own
from specjax.drafters.mtp import MTP, MTPConfig
from specjax.drafters.mtp_init import init_mtp
from tests.toys import MarkovTarget, call, tiny_target

DATA = Path(__file__).parents[1] / "data"
IDS = (1, 5, 9, 60)
PINNED = {"hidden_source": "pinned", "hidden_norm": "pre", "concat": "h_emb"}
equal = functools.partial(np.testing.assert_array_equal, strict=True)  # dtypes too


@functools.cache
def golden(family: str = "llama_untied") -> specjax.Target:
    return load_target(DATA / family, dtype="float32")


@functools.cache
def made(family: str = "", **options):
    target = golden(family) if family else tiny_target()
    return target, *init_mtp(target, jax.random.key(1), **options)


def save(folder, family="", dtype="float32", **options):
    target, model, params = made(family, **options)
    save_drafter(folder, model, params, target, dtype=dtype)
    return target, model, params


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def edit(folder, **changes):
    """Changes entries of config.json; None takes the entry out."""
    config = read_config(folder) | changes
    kept = {key: value for key, value in config.items() if key not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def edit_tensors(folder, **changes):
    """Changes tensors; None takes one out."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file) | changes
    kept = {name: array for name, array in tensors.items() if array is not None}
    safetensors.numpy.save_file(kept, file)


# --- specjax's own format ----------------------------------------------------------------


def test_the_folder_of_a_run_is_not_its_drafter(tmp_path):
    (tmp_path / "config.json").write_text('{"task": "train"}')
    (tmp_path / "drafter").mkdir()
    with pytest.raises(CheckpointError, match=r"folder of a run: give .*drafter$"):
        load_drafter(tmp_path, tiny_target())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("", {"depth": 2}),
        ("", {"depth": 3, "shared_module": True, "draft_vocab": IDS}),
        ("", {"depth": 2, **PINNED}),
        ("llama_tied", {"depth": 1}),
        ("mistral", {"depth": 1}),
        ("qwen2", {"depth": 1}),
        ("gemma2", {"depth": 1}),
        ("gemma3", {"depth": 1}),
        ("gemma4", {"depth": 1}),
    ],
    ids=str,
)
def test_what_was_saved_is_loaded(tmp_path, family, options):
    target, model, params = save(tmp_path / "a" / "mtp", family, **options)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mtp"]
    assert {path.name for path in (tmp_path / "a" / "mtp").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    stored = safetensors.numpy.load_file(tmp_path / "a" / "mtp" / "model.safetensors")
    assert not [name for name in stored if "embed." in name or "lm_head" in name]
    loaded = load_drafter(tmp_path / "a" / "mtp", target)
    assert loaded.model == model
    jax.tree.map(equal, loaded.params, params)


def test_matrices_are_stored_in_bfloat16_unless_told(tmp_path):
    target, _, params = save(tmp_path / "mtp", dtype="bfloat16", depth=2)
    stored = safetensors.numpy.load_file(tmp_path / "mtp" / "model.safetensors")
    kinds = {(str(array.dtype), array.ndim) for array in stored.values()}
    assert kinds == {("bfloat16", 2), ("float32", 1)}
    loaded = load_drafter(tmp_path / "mtp", target).params["module_1"]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2**-8, atol=0),
        loaded,
        params["module_1"],
    )


def test_modules_of_another_target_are_refused_unless_told(tmp_path):
    target, _, _ = save(tmp_path / "mtp", depth=2)
    other = dataclasses.replace(tiny_target(seed=1), name="other")
    with pytest.raises(CheckpointError, match=r"'tiny' \(fingerprint .*any_target=True"):
        load_drafter(tmp_path / "mtp", other)
    drafter = load_drafter(tmp_path / "mtp", other, any_target=True)
    equal(drafter.params["embed"]["weight"], other.params["embed"]["weight"])
    assert load_drafter(tmp_path / "mtp", target).name == str(tmp_path / "mtp")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": None}, "the configuration has no 'depth': the file is damaged"),
        ({"depth": 0}, "makes no modules: depth must be at least 1"),
        ({"depth": "2"}, "the configuration has depth='2'"),
        ({"depth": 3}, r"missing tensors: module_2\."),
        ({"depth": 1}, r"unexpected tensors: module_1\."),
        ({"depth": 200}, "cannot make 200 layers"),
        ({"depth": 10**6, "shared_module": True}, "exceeds the context of tiny"),
        ({"tap": 0}, r"another target than tiny: tap \(0, now 1\)"),
        ({"hidden_source": "free"}, "hidden_source must be 'chain' or 'pinned'"),
        ({"hidden_norm": ["pre"]}, r"has hidden_norm=\['pre'\]"),
        ({"concat": 1}, "has concat=1"),
        ({"shared_module": 0}, "has shared_module=0"),
        ({"shared_module": True}, r"unexpected tensors: module_1\."),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be from 1 to 61, got 0"),
        ({"draft_vocab_size": 4}, "missing tensors: draft_ids"),
        ({"gate": "open"}, "has the unknown 'gate': .*another version"),
        ({"block": 3}, "has 3 for a mapping"),
        ({"block": {}}, "has no 'activation', no 'architecture', "),
        ({"target_fingerprint": None}, "no target_fingerprint"),
        ({"architectures": ["MTPModel"]}, "'MTPModel', which is not a drafter.*SpecjaxMTPModel"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_named(tmp_path, changes, message):
    target, _, _ = save(tmp_path / "mtp", depth=2)
    edit(tmp_path / "mtp", **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        load_drafter(tmp_path / "mtp", target)
    assert "cannot load the drafter" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 4.0}, r"has num_heads=4\.0: the file is damaged"),
        ({"num_heads": 2**31}, "has num_heads=2147483648"),
        ({"tied_head": "no"}, "has tied_head='no'"),
        ({"activation": "relu"}, "has activation='relu'"),
        ({"window": True}, "has window=True"),
        ({"rope": {"kind": "yarn"}}, "kind='yarn'"),
        ({"rope": {"base": 2.0}}, "the unknown 'base'"),
        ({"sliding": {}}, "has sliding={}"),
        ({"num_kv_heads": 3}, "makes no modules: .*multiple of num_kv_heads"),
        ({"norm_eps": float("nan")}, "makes no modules: .*finite"),
        ({"num_layers": 2}, "a module has one layer, got 2"),
        ({"experts": 8}, "has the unknown 'experts'"),
        ({"vocab_size": 62}, r"another target than tiny: vocab_size \(62, now 61\)"),
        ({"width": 64}, r"width \(64, now 32\)"),
        ({"embed_scale": 2.0}, r"embed_scale \(2.0, now 1.0\)"),
        ({"logit_cap": 30.0}, r"logit_cap \(30.0, now None\)"),
        ({"mlp_width": 32}, r"gate_proj.weight has shape \(64, 32\), expected \(32, 32\)"),
        ({"qk_norm": True}, r"missing tensors: module_0\.block\.attention\.k_norm"),
    ],
    ids=str,
)
def test_a_block_of_another_kind_is_named(tmp_path, changes, message):
    target, _, _ = save(tmp_path / "mtp", depth=2)
    edit(tmp_path / "mtp", block=read_config(tmp_path / "mtp")["block"] | changes)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path / "mtp", target)


@pytest.mark.parametrize("ids", [[-1, 1, 2, 3], [9, 5, 3, 1], [3, 5, 9, 61]], ids=str)
def test_damaged_tensors_are_refused(tmp_path, ids):
    target, _, _ = save(tmp_path / "mtp", depth=1, draft_vocab=IDS)
    edit_tensors(tmp_path / "mtp", draft_ids=np.array(ids, np.int32))
    with pytest.raises(CheckpointError, match="draft_ids must be increasing"):
        load_drafter(tmp_path / "mtp", target)
    broken = np.full((32, 64), np.nan, np.float32)
    edit_tensors(tmp_path / "mtp", **{"module_0.projection.weight": broken})
    with pytest.raises(CheckpointError, match=r"module_0\.projection\.weight holds NaN"):
        load_drafter(tmp_path / "mtp", target)


def test_options_of_layers_that_are_missing_are_not_guessed(tmp_path):
    """Mistral's layers without their window would see everything."""
    target, _, _ = save(tmp_path / "mtp", "mistral", depth=1)
    block = read_config(tmp_path / "mtp")["block"]
    for part, name in ((block, "window"), (block["rope"], "theta")):
        value = part.pop(name)
        edit(tmp_path / "mtp", block=block)
        with pytest.raises(CheckpointError, match=f"has no '{name}': the file is damaged"):
            load_drafter(tmp_path / "mtp", target)
        part[name] = value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": True}, "depth must be int, got True"),
        ({"tap": False}, "tap must be int, got False"),
        ({"draft_vocab_size": True}, "draft_vocab_size must be int, got True"),
    ],
    ids=str,
)
def test_what_could_not_be_read_again_is_no_option(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(made(depth=2)[1].config, **changes)


def test_what_cannot_be_saved_is_named(tmp_path):
    target, model, params = made(depth=2)
    folder = tmp_path / "mtp"
    broken = {**params, "module_1": jax.tree.map(lambda x: x * jnp.nan, params["module_1"])}
    with pytest.raises(ValueError, match="hold NaN or infinite values: training diverged"):
        save_drafter(folder, model, broken, target)
    with pytest.raises(ValueError, match="dtype must be 'float32' or 'bfloat16', got 'float16'"):
        save_drafter(folder, model, params, target, dtype="float16")
    with pytest.raises(ValueError, match="not those of the drafter's configuration"):
        save_drafter(folder, model, made(depth=1)[2], target)
    head = {"weight": params["lm_head"]["weight"] + 1}
    with pytest.raises(ValueError, match="lm_head is not tiny's"):
        save_drafter(folder, model, {**params, "lm_head": head}, target)
    with pytest.raises(CheckpointError, match=r"another target than .*vocab_size \(61, now 96\)"):
        save_drafter(folder, model, params, golden())
    foreign = dataclasses.replace(target, model=MarkovTarget(61))
    with pytest.raises(CheckpointError, match="tiny was not loaded by specjax"):
        save_drafter(folder, model, params, foreign)
    with pytest.raises(ValueError, match="DSpark drafters and MTP modules can be saved, got"):
        save_drafter(folder, PromptLookup(), (), target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ids", [None, IDS])
def test_what_is_the_targets_may_be_missing(tmp_path, ids):
    """As in what a training loop has in hand."""
    target, model, params = made(depth=1, draft_vocab=ids)
    own = drafters_own(params)
    save_drafter(tmp_path / "own", model, own, target, dtype="float32")
    jax.tree.map(equal, load_drafter(tmp_path / "own", target).params, params)


def test_only_drafters_are_replaced(tmp_path):
    target, model, params = made(depth=2)
    folder = tmp_path / "drafter"
    dspark = init_dspark(target, jax.random.key(1), num_layers=1, mask_token_id=60)
    save_drafter(folder, *dspark, target)
    with pytest.raises(ValueError, match="exists: remove it"):
        save_drafter(folder, model, params, target)
    save_drafter(folder, model, params, target, replace=True)
    assert load_drafter(folder, target).model == model
    shutil.copytree(DATA / "mistral", tmp_path / "model")
    with pytest.raises(ValueError, match="exists and is no drafter's folder"):
        save_drafter(tmp_path / "model", model, params, target, replace=True)


def test_modules_are_no_target_and_not_composed(tmp_path):
    target, _, _ = save(tmp_path / "mtp", depth=2)
    with pytest.raises(CheckpointError, match="holds a drafter: load it with load_drafter"):
        load_target(tmp_path / "mtp", dtype="float32")
    with pytest.raises(ValueError, match="composed with DSpark drafters, not with"):
        load_drafter(f"prompt_lookup+{tmp_path / 'mtp'}", target)
    with pytest.raises(ValueError, match=r"options of DSpark, not of .*draft_vocab alone"):
        load_drafter(tmp_path / "mtp", target, candidates=3)
    edit(tmp_path / "mtp", architectures=["SpecjaxDSparkModel"])
    with pytest.raises(CheckpointError, match="expected SpecjaxMTPModel: load it with load_draft"):
        open_mtp(tmp_path / "mtp", target)


def test_a_vocabulary_can_be_trimmed(tmp_path):
    target, model, params = save(tmp_path / "mtp", depth=2)
    drafter = load_drafter(tmp_path / "mtp", target, draft_vocab=IDS[::-1])
    assert drafter.model == MTP(dataclasses.replace(model.config, draft_vocab_size=4))
    equal(drafter.params["draft_ids"], np.array(IDS, np.int32))
    equal(drafter.params["lm_head"]["weight"], params["lm_head"]["weight"][np.array(IDS)])
    save_drafter(tmp_path / "trimmed", drafter.model, drafter.params, target, dtype="float32")
    again = load_drafter(tmp_path / "trimmed", target)
    jax.tree.map(equal, again.params, drafter.params)
    with pytest.raises(ValueError, match="trimmed already"):
        load_drafter(tmp_path / "trimmed", target, draft_vocab=IDS)


# --- Layers of a model's directory -------------------------------------------------------

SHAPES = {
    "enorm.weight": (32,),
    "hnorm.weight": (32,),
    "eh_proj.weight": (32, 64),
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (64, 32),
    "self_attn.k_proj.weight": (32, 32),
    "self_attn.v_proj.weight": (32, 32),
    "self_attn.o_proj.weight": (32, 64),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
    "shared_head.norm.weight": (32,),
}


def write_layers(folder, depth, copies=True):
    """The untied Llama with MTP layers of random numbers, by layer; both in one file."""
    rng = np.random.default_rng(depth)
    layers = [
        {
            name: (rng.normal(size=shape) / 4 + (len(shape) == 1)).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        for _ in range(depth)
    ]
    stored = safetensors.numpy.load_file(DATA / "llama_untied" / "model.safetensors")
    shared = {
        "embed_tokens.weight": stored["model.embed_tokens.weight"],
        "shared_head.head.weight": stored["lm_head.weight"],
    }
    for j, layer in enumerate(layers):
        both = layer | (shared if copies else {})
        stored |= {f"model.layers.{3 + j}.{name}": array for name, array in both.items()}
    folder.mkdir()
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    config = read_config(DATA / "llama_untied") | {"num_nextn_predict_layers": depth}
    (folder / "config.json").write_text(json.dumps(config))
    return layers


def by_hand(layers, target):
    """The modules of which a test knows each array."""
    block = dataclasses.replace(target.model.config, num_layers=1)
    params = {"embed": target.params["embed"], "lm_head": target.params["lm_head"]}
    for j, layer in enumerate(layers):
        attention = {
            f"{x}_proj": {"weight": layer[f"self_attn.{x}_proj.weight"]}
            for x in ("q", "k", "v", "o")
        }
        mlp = {
            f"{x}_proj": {"weight": layer[f"mlp.{x}_proj.weight"]} for x in ("gate", "up", "down")
        }
        params[f"module_{j}"] = {
            "embedding_norm": {"scale": layer["enorm.weight"]},
            "hidden_norm": {"scale": layer["hnorm.weight"]},
            "projection": {"weight": layer["eh_proj.weight"]},
            "block": {
                "attention_norm": {"scale": layer["input_layernorm.weight"]},
                "attention": attention,
                "mlp_norm": {"scale": layer["post_attention_layernorm.weight"]},
                "mlp": mlp,
            },
            "final_norm": {"scale": layer["shared_head.norm.weight"]},
        }
    return MTP(MTPConfig(block, len(layers), tap=2)), params


@pytest.mark.parametrize(("depth", "copies"), [(1, True), (2, False)])
def test_layers_are_the_modules_with_their_arrays(tmp_path, depth, copies):
    layers = write_layers(tmp_path / "model", depth, copies)
    target = load_target(tmp_path / "model", dtype="float32")
    drafter = load_drafter(tmp_path / "model", target)
    model, params = by_hand(layers, target)
    config = drafter.model.config
    assert (config.hidden_source, config.hidden_norm, config.concat) == ("chain", "post", "emb_h")
    assert (config.depth, config.shared_module) == (depth, False)
    assert drafter.model == model
    jax.tree.map(equal, drafter.params, jax.tree.map(jnp.asarray, params))
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8) * 5
    inputs = (tokens, target.forward(tokens).hidden, jnp.tile(jnp.arange(8), (2, 1)))
    seen = call(drafter.model, "forward", drafter.params, *inputs)
    logits = np.asarray(call(drafter.model, "head_logits", drafter.params, seen))
    head = np.asarray(target.params["lm_head"]["weight"])
    np.testing.assert_allclose(logits, np.asarray(seen) @ head.T, rtol=1e-4, atol=1e-4)


def test_the_projection_takes_the_embedding_first(tmp_path):
    """Module 1 by hand, with a block that adds nothing."""
    layers = write_layers(tmp_path / "model", 1)
    zero = {"self_attn.o_proj.weight": (32, 64), "mlp.down_proj.weight": (32, 64)}
    edit_tensors(
        tmp_path / "model",
        **{f"model.layers.3.{name}": np.zeros(s, np.float32) for name, s in zero.items()},
    )
    target = golden()
    drafter = load_drafter(tmp_path / "model", target)
    tokens = np.arange(6, dtype=np.int32)[None] * 7
    hidden = np.asarray(target.forward(tokens).hidden)

    def normed(x, name):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * layers[0][name]

    embedded = np.asarray(target.params["embed"]["weight"])[tokens[:, 1:]]
    parts = [normed(embedded, "enorm.weight"), normed(hidden[:, :-1], "hnorm.weight")]
    x = np.concatenate(parts, axis=-1) @ layers[0]["eh_proj.weight"].T
    inputs = (jnp.asarray(tokens), jnp.asarray(hidden), jnp.arange(6)[None])
    seen = call(drafter.model, "forward", drafter.params, *inputs)
    expected = normed(x, "shared_head.norm.weight")
    np.testing.assert_allclose(seen[:, :-1, 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_greedy_output_with_layers_is_the_targets_own(tmp_path):
    write_layers(tmp_path / "model", 2)
    drafter = load_drafter(tmp_path / "model", golden())
    prompts = [[5, 6, 7], [20, 3]]
    plain, drafted = (
        specjax.generate(golden(), part, prompts, max_new_tokens=12, draft_len=3)
        for part in (None, drafter)
    )
    assert plain.tokens == drafted.tokens


def test_a_target_without_its_mtp_layers(tmp_path):
    """They are not even read: these could not be."""
    write_layers(tmp_path / "model", 2)
    file = tmp_path / "model" / "model.safetensors"
    stored = safetensors.numpy.load_file(file)
    unreadable = {
        name: array.astype(np.uint8)
        if name.startswith(("model.layers.3.", "model.layers.4."))
        else array
        for name, array in stored.items()
    }
    unreadable["model.layers.4.mlp.experts.0.up_proj.weight"] = np.zeros(3, np.uint8)
    safetensors.numpy.save_file(unreadable, file)
    target = load_target(tmp_path / "model", dtype="float32")
    assert target.model == golden().model
    jax.tree.map(equal, target.params, golden().params)
    assert target.fingerprint() == golden().fingerprint()
    tokens = np.arange(10, dtype=np.int32)[None]
    equal(target.forward(tokens).logits, golden().forward(tokens).logits)
    edit(tmp_path / "model", num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.4\."):
        load_target(tmp_path / "model", dtype="float32")
    edit(tmp_path / "model", num_nextn_predict_layers=-1)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers must be a whole number"):
        load_target(tmp_path / "model", dtype="float32")


def test_copies_must_be_the_targets(tmp_path):
    write_layers(tmp_path / "model", 1)
    other = np.ones((96, 32), np.float32)
    for name in ("shared_head.head", "embed_tokens"):
        edit_tensors(tmp_path / "model", **{f"model.layers.3.{name}.weight": other})
        message = rf"model\.layers\.3\.{name}\.weight is not .*llama_untied's, which would"
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path / "model", golden())
    drafter = load_drafter(tmp_path / "model", golden(), any_target=True)
    equal(drafter.params["embed"]["weight"], golden().params["embed"]["weight"])
    nones = dict.fromkeys(
        ("model.layers.3.shared_head.head.weight", "model.layers.3.embed_tokens.weight")
    )
    edit_tensors(tmp_path / "model", **nones)
    load_drafter(tmp_path / "model", golden())
    changed = {**golden().params, "embed": {"weight": golden().params["embed"]["weight"] * 2}}
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is not"):
        load_drafter(tmp_path / "model", dataclasses.replace(golden(), params=changed))


@pytest.mark.parametrize("name", ["lm_head", "layers.2.mlp.up_proj"])
def test_layers_of_another_model_are_refused(tmp_path, name):
    """A fine-tuned model's, with the same embedding."""
    write_layers(tmp_path / "model", 1, copies=False)
    name = f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"
    stored = safetensors.numpy.load_file(tmp_path / "model/model.safetensors")
    edit_tensors(tmp_path / "model", **{name: stored[name] * 2})
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is not .*llama_untied's"):
        load_drafter(tmp_path / "model", golden())
    load_drafter(tmp_path / "model", golden(), any_target=True)


def test_tensors_without_parameters_do_no_harm(tmp_path):
    write_layers(tmp_path / "model", 1)
    frequencies = np.ones(4, np.float32)
    name = "model.layers.3.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path / "model", **{name: frequencies})
    load_drafter(tmp_path / "model", load_target(tmp_path / "model", dtype="float32"))


def test_copies_equal_a_target_in_bfloat16(tmp_path):
    write_layers(tmp_path / "model", 1)
    target = load_target(tmp_path / "model", dtype="bfloat16")
    drafter = load_drafter(tmp_path / "model", target)
    assert drafter.params["module_0"]["projection"]["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({"self_attn.kv_a_proj_with_mqa.weight": 3}, {}, r"latent attention \(MLA\) \(model\.l"),
        ({"self_attn.q_b_proj.weight": 3}, {"model_type": "deepseek_v3"}, r"attention \(MLA\)"),
        ({"mlp.experts.7.up_proj.weight": 3}, {}, r"have experts \(model\.layers\.3\.mlp\.exp"),
        ({"mlp.gate.weight": 3}, {"model_type": "glm4_moe"}, r"have experts"),
        ({"extra.weight": 3}, {}, r"unexpected tensors: model\.layers\.3\.extra\.weight"),
        ({"eh_proj.weight": None}, {}, r"missing tensors: model\.layers\.3\.eh_proj\.weight"),
        ({}, {"num_nextn_predict_layers": 2}, r"missing tensors: model\.layers\.4\."),
        ({}, {"num_nextn_predict_layers": 10**6}, "cannot make 1000000 layers"),
        ({}, {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers must be a number"),
        ({}, {"num_hidden_layers": 4}, "has no MTP layers: config.json tells of 1"),
        ({}, {"hidden_size": 64}, r"another target than .*: width \(64, now 32\)"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_loaded_are_named(tmp_path, tensors, changes, message):
    write_layers(tmp_path / "model", 1)
    arrays = {
        f"model.layers.3.{name}": None if size is None else np.zeros(size, np.float32)
        for name, size in tensors.items()
    }
    edit_tensors(tmp_path / "model", **arrays)
    edit(tmp_path / "model", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path / "model", golden())


def test_a_model_without_mtp_layers_is_no_drafter():
    with pytest.raises(
        CheckpointError, match=r"'LlamaForCausalLM', which is not a drafter.*MTP la"
    ):
        load_drafter(DATA / "llama_untied", golden())
