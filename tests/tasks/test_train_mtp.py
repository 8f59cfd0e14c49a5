"""MTP through the task "train": with a new target, for a given one, and with a given one."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import specjax
from specjax.checkpoints import save_drafter, save_target
from specjax.data.corpus import END, train_tokenizer
from specjax.data.target_cache import TokenSequence
from specjax.data.texts import save_texts
from specjax.drafters import MTP, DSpark
from specjax.drafters.mtp_init import init_mtp
from specjax.files import changes
from specjax.models.transformer import TransformerTarget
from specjax.tasks import train
from specjax.tasks.plans import corpus_rows, make_plan, new_target
from tests.evaluation.tiny_target import tiny_target
from tests.tasks.test_train import CHATS

LOAD = specjax.load_target
SMALL = {"training.steps": 4, "training.held_out": 2, "eval_every": 2, "save_every": 2}


pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def corpus(tmp_path):
    """A few documents, as a glob."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    source = Path(train.__file__).read_text()
    for i in range(8):
        (folder / f"{i}.txt").write_text(source[100 * i : 100 * i + 900])
    return {"corpus": f"{folder}/*.txt"}


def decodes_like_its_target(workdir):
    """The target and the drafter that a run made."""
    target = specjax.load_target(str(workdir / "target"), dtype="float32")
    drafter = specjax.load_drafter(str(workdir / "drafter"), target)
    prompts = ["def run(", "import "]
    result = specjax.generate(target, drafter, prompts, max_new_tokens=12, chat=False)
    plain = specjax.generate(target, None, prompts, max_new_tokens=12, chat=False)
    assert result.tokens == plain.tokens
    assert result.texts == plain.texts
    return target, drafter


@pytest.mark.slow
def test_a_new_target_with_modules_and_the_same_without(get_config, corpus, tmp_path, capsys):
    train.run(get_config("mtp", **SMALL | corpus, **{"mtp.depth": 2}), tmp_path / "with")
    printed = capsys.readouterr().out
    assert "loss of the target" in printed
    assert "by position" in printed
    target, drafter = decodes_like_its_target(tmp_path / "with")
    assert isinstance(drafter.model, MTP)
    assert drafter.model.config.depth == 2
    report = json.loads((tmp_path / "with/report.json").read_text())
    assert len(report["held_out"]["acceptance_K"]) == 2
    assert report["target_bytes"] > report["drafter_bytes"] > 0
    # Stage 2: on from both.
    more = {"start": str(tmp_path / "with/drafter"), "target": str(tmp_path / "with/target")}
    train.run(get_config("mtp", **SMALL | corpus | more), tmp_path / "joint")
    tuned, _ = decodes_like_its_target(tmp_path / "joint")
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), tuned.params, target.params)
    assert all(jax.tree.leaves(moved))
    # Without modules: the same start and the same rows, and no drafter is written.
    both = [
        make_plan(get_config("mtp", **SMALL | corpus, algorithm=name), tmp_path / "plan")
        for name in ("mtp", "none")
    ]
    first, second = (plan.trained["target"] for plan in both)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    first, second = (plan.data.texts for plan in both)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    train.run(get_config("mtp", **SMALL | corpus, algorithm="none"), tmp_path / "without")
    assert not (tmp_path / "without/drafter").exists()
    specjax.load_target(str(tmp_path / "without/target"), dtype="float32")


@pytest.mark.slow
def test_a_dspark_drafter_learns_beside_a_target(get_config, corpus, tmp_path):
    options = {"drafter.taps": (-1, 0), "drafter.markov_rank": 4, "drafter.draft_vocab": 64}
    options |= {"drafter.candidates": 8, "algorithm": "dspark"}
    train.run(get_config("mtp", **SMALL | corpus | options), tmp_path / "run")
    _, drafter = decodes_like_its_target(tmp_path / "run")
    assert isinstance(drafter.model, DSpark)


@pytest.fixture
def chats(tiny, monkeypatch, tmp_path):
    """A given target, and conversations with answers."""
    monkeypatch.setattr(
        specjax, "load_target", lambda source, *, dtype: LOAD(source, dtype=dtype)
        if Path(source).exists() else tiny
    )  # fmt: skip
    tiny.tokenizer.chat_template = CHATS + "{% if add_generation_prompt %}[a]{% endif %}"
    lines = [{"prompt": f"say {i}", "response": f"{i}, {i} and {i} again"} for i in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "prompts": str(tmp_path / "chats.jsonl"), "answers": "given", "algorithm": "mtp",
        "mtp.draft_vocab": 64,
    }  # fmt: skip


@pytest.mark.slow
def test_modules_learn_for_a_target_that_stays_as_it_is(tiny, chats, get_config, tmp_path):
    before = jax.tree.map(np.array, tiny.params)
    options = {"mtp_losses.distillation": 1.0, "mtp.depth": 2}
    train.run(get_config("train", **SMALL | chats | options), tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, tiny.params, before)
    drafter = specjax.load_drafter(str(tmp_path / "run/drafter"), tiny)
    assert drafter.model.config.draft_vocab_size == 64
    result = specjax.generate(tiny, drafter, ["ab"], max_new_tokens=12)
    assert result.tokens == specjax.generate(tiny, None, ["ab"], max_new_tokens=12).tokens
    assert not (tmp_path / "run/target").exists()


def given(seed=0):
    """A target of the byte tokeniser, as from a checkpoint."""
    target = tiny_target()
    params = jax.tree.map(lambda x: x + seed, target.params)
    return dataclasses.replace(target, params=params)


def write_texts(path, largest):
    mask = np.ones(12, bool)
    texts = [np.full(12, i, np.int32) for i in range(largest - 5, largest + 1)]
    save_texts(path, [TokenSequence(tokens, mask) for tokens in texts])


@pytest.mark.parametrize("train_target", [True, False])
@pytest.mark.parametrize(
    ("overrides", "largest", "message"),
    [
        ({"mtp.draft_vocab": 8}, 257, "token id 257, and the vocabulary of tiny has 257 tokens"),
        ({"max_len": 4}, 256, "up to 12 tokens, and the context of tiny 4"),
    ],
)
def test_texts_that_a_target_cannot_read_are_refused(
    get_config, monkeypatch, tmp_path, overrides, largest, message, train_target
):
    overrides = dict(overrides)
    target = given()
    config = dataclasses.replace(
        target.model.config, max_len=overrides.pop("max_len", target.model.max_len)
    )
    target = dataclasses.replace(target, model=TransformerTarget(config))
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: target)
    write_texts(tmp_path / "texts.npz", largest)
    config = get_config(
        "mtp", corpus="", texts=str(tmp_path / "texts.npz"), target="given",
        train_target=train_target, **overrides,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        make_plan(config, tmp_path)


def test_modules_without_weight_are_refused_for_a_target_that_stays_as_it_is(
    get_config, monkeypatch, tmp_path
):
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: given())
    write_texts(tmp_path / "texts.npz", 200)
    options = {"corpus": "", "texts": str(tmp_path / "texts.npz"), "target": "given"}
    config = get_config("mtp", train_target=False, **options, **{"mtp_losses.scale": 0.0})
    with pytest.raises(ValueError, match=r"mtp_losses\.scale is 0"):
        make_plan(config, tmp_path)


def test_runs_tell_what_they_start_from(get_config, monkeypatch, tmp_path):
    """So that none goes on with another's checkpoints."""
    write_texts(tmp_path / "texts.npz", 200)
    options = {"corpus": "", "texts": str(tmp_path / "texts.npz"), "target": "given"}
    save_drafter(tmp_path / "a", *init_mtp(given(), jax.random.key(1), dtype="float32"), given())
    save_drafter(tmp_path / "b", *init_mtp(given(), jax.random.key(2), dtype="float32"), given())

    def identity(seed, start="", train_target=True):
        monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: given(seed))
        config = get_config("mtp", **options, start=start, train_target=train_target)
        return make_plan(config, tmp_path).data.identity

    first = identity(0)
    assert first == identity(0)
    assert changes(first, identity(1))[0].startswith("weights")
    for train_target in (True, False):
        a, b = (identity(0, str(tmp_path / name), train_target) for name in "ab")
        (changed,) = changes(a, b)
        assert changed.startswith("start")


def test_ids_of_a_tokenizer_may_have_gaps(get_config):
    """The model's vocabulary then reaches to the largest."""
    tokenizer = train_tokenizer(["a b c"], 258)
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    stored["model"]["vocab"][END] = stored["added_tokens"][0]["id"] = 300
    assert stored["added_tokens"][0]["content"] == END
    gaps = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(stored)), eos_token=END
    )
    target = new_target(get_config("mtp").model, gaps, seed=0)
    assert (len(gaps), target.stop_ids, target.model.vocab_size) == (258, (300,), 301)


def test_a_special_token_that_a_document_spells_out_is_text(get_config):
    config = get_config("mtp")
    target = new_target(config.model, train_tokenizer(["a b c"], 300), seed=0)
    text = f"a {END} b"
    (row,) = corpus_rows(config, [text], target, apart=True)
    ids = row.tokens_T[row.segments_T > 0].tolist()
    assert ids.count(target.stop_ids[0]) == 1
    assert target.tokenizer.decode(ids) == text + END


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algorithm": "medusa"}, "config.algorithm must be one of"),
        ({"corpus": ""}, "set config.corpus"),
        ({"corpus": "nowhere/*.txt"}, "no file matches"),
        ({"train_target": False}, "set config.train_target=True"),
        ({"cache": "somewhere"}, "only one of config.cache, config.corpus"),
        ({"cache": "somewhere", "corpus": ""}, "give texts"),
        ({"model.vocab_size": 100}, "vocab_size must be at least 258"),
        ({"tokenizer": "nowhere"}, "cannot load the tokeniser"),
        ({"model.num_heads": 3}, "must be a multiple of num_kv_heads"),
        ({"mtp.depth": 0}, "depth must be at least 1"),
        ({"mtp_losses.scale": -1.0}, "loss weights"),
        ({"mtp.depth": 63}, "module 63 has nothing to learn from texts of up to 64 tokens"),
        (
            {"mtp.depth": 4000, "training.max_len": 5000, "model.max_len": 64},
            "5000.*context of new",
        ),
        ({"mtp.draft_vocab": -5}, "draft_vocab must be at least 1, or 0 for all"),
        ({"seed": -1}, "seed must be from 0"),
        ({"training.held_out": 500}, "leave none to train on"),
    ],
)
def test_settings_that_cannot_be_are_refused(get_config, corpus, tmp_path, overrides, message):
    config = get_config("mtp", **SMALL | corpus | overrides)
    with pytest.raises(ValueError, match=message):
        train.run(config, tmp_path / "run")
    assert not (tmp_path / "run/target").exists()


@pytest.mark.slow
def test_the_loop_of_the_documents_works(corpus, tmp_path, monkeypatch):
    """The example in docs/mtp.md, as printed."""
    text = (Path(__file__).parents[2] / "docs/mtp.md").read_text(encoding="utf-8")
    [code, _] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").rename(tmp_path / "my_texts")
    texts = [file.read_text() for file in (tmp_path / "my_texts").iterdir()]
    sizes = {"width": 32, "mlp_width": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 8, "max_len": 128, "tied_head": True}
    save_target("run/target", new_target(ConfigDict(sizes), train_tokenizer(texts, 300), seed=0))
    scope: dict = {}
    exec(compile(code, "docs/mtp.md", "exec"), scope)
    assert scope["losses"]["main"] > 0
    target = specjax.load_target("mine/target", dtype="float32")
    drafter = specjax.load_drafter("mine/drafter", target)
    assert isinstance(drafter.model, MTP)
    assert drafter.model.config.depth == 2
