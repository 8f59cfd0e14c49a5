"""From a target to a trained drafter through the tasks, without loading the target twice."""

import dataclasses
import functools
import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

import configs.cache
import configs.train
import specjax
from configs import smollm2_dspark
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.head import load_head, save_head
from specjax.data.target_cache import CacheError, TargetCache, TokenSequence
from specjax.data.texts import read_texts, save_texts
from specjax.files import matching
from specjax.tasks import cache, train
from specjax.tasks.common import given_texts
from specjax.tasks.plans import make_plan
from tests.evaluation.tiny_target import tiny_target
from tests.toys import MarkovTarget
from tests.toys import tiny_target as two_layers

ROOT = Path(__file__).parents[2]
CACHE = {
    "taps": (-1, 0), "tokens": 600, "user_tokens": 8, "answer_tokens": 30, "mask_token_id": 255,
}  # fmt: skip
TRAIN = {
    "drafter.draft_vocab": 64, "drafter.candidates": 16, "training.held_out": 3,
    "training.steps": 4, "num_anchors": 8, "eval_every": 2, "save_every": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def target(monkeypatch):
    """Two layers, and the byte tokeniser of the tasks' tiny target."""
    bytes_, model = tiny_target(), two_layers(vocab_size=257)
    bytes_.tokenizer.chat_template = "{% for m in messages %}[u]{{ m.content }}{% endfor %}:"
    target = dataclasses.replace(model, tokenizer=bytes_.tokenizer, stop_ids=(256,))
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: target)
    return target


@pytest.mark.slow
def test_cache_then_train_then_decode(target, get_config, tmp_path, capsys, monkeypatch):
    cache.run(get_config("cache", **CACHE), tmp_path / "data")
    printed = capsys.readouterr().out
    assert "600 tokens with 2 taps will take about 0.00 GB" in printed
    report = json.loads((tmp_path / "data/report.json").read_text())
    assert report["tokens"] >= 600
    data = TargetCache(tmp_path / "data/cache")
    assert len(data) == report["samples"]
    assert len({sample.tokens_T.tobytes() for sample in data}) == len(data)

    def no_target(*args, **kwargs):
        raise AssertionError("training needs no target")

    monkeypatch.setattr(specjax, "load_target", no_target)
    config = get_config("train", cache=str(tmp_path / "data/cache"), **TRAIN)
    train.run(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "steps: accepted length" in printed
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert len(report["held_out"]["acceptance_G"]) == 7
    drafter = specjax.load_drafter(str(tmp_path / "run/drafter"), target)
    assert drafter.model.config.draft_vocab_size == 64
    assert drafter.model.config.mask_token_id == 255
    result = specjax.generate(target, drafter, ["ab"], max_new_tokens=12, draft_len=7)
    assert result.tokens == specjax.generate(target, None, ["ab"], max_new_tokens=12).tokens
    train.run(config, tmp_path / "run")  # finished: nothing is left to do, and it says the same
    assert json.loads((tmp_path / "run/report.json").read_text()) == report
    # MTP modules from the same cache, which has no output of the last layer.
    mtp = {**TRAIN, "cache": str(tmp_path / "data/cache"), "algorithm": "mtp"}
    train.run(get_config("train", **mtp), tmp_path / "mtp")
    assert specjax.load_drafter(str(tmp_path / "mtp/drafter"), target).model.config.depth == 1
    with pytest.raises(ValueError, match="which hidden_norm='pre' needs"):
        train.run(get_config("train", **mtp, **{"mtp.hidden_norm": "pre"}), tmp_path / "pre")


@pytest.fixture
def small_shards(monkeypatch):
    """Every batch of a cache ends a shard; the class that writes them."""
    writer = cache.CacheWriter
    monkeypatch.setattr(cache, "CacheWriter", functools.partial(writer, shard_bytes=1))
    return writer


def interrupt_third(monkeypatch, owner, name):
    """Ctrl-C at the third call of that function; the arguments of each call."""
    real, calls = getattr(owner, name), []

    def stop(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, stop)
    return calls


@pytest.mark.slow
def test_cache_goes_on_after_an_interruption(
    target, small_shards, get_config, tmp_path, monkeypatch
):
    config = get_config("cache", **CACHE)
    cache.run(config, tmp_path / "whole")
    monkeypatch.setattr(cache, "CacheWriter", small_shards)  # no shard is full by then
    calls = interrupt_third(monkeypatch, cache, "write_answers")
    with pytest.raises(KeyboardInterrupt):
        cache.run(config, tmp_path / "halves")
    cache.run(config, tmp_path / "halves")
    whole, halves = (TargetCache(tmp_path / name / "cache") for name in ("whole", "halves"))
    assert len(calls) > 4
    assert calls[3][-1] == 2  # the batches that were finished are not written again
    for left, right in zip(whole, halves, strict=True):
        np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
        np.testing.assert_array_equal(left.taps_TMD, right.taps_TMD)


def test_a_complete_cache_lacks_at_most_what_is_beside_it(target, chats, get_config, tmp_path):
    """Its texts and report, if it was stopped then; and it is not made again."""
    cache.run(get_config("cache", **CACHE | chats), tmp_path / "data")
    shard, report, texts = (
        tmp_path / "data" / name for name in ("cache/shard-00000.bin", "report.json", "texts.npz")
    )
    written, before = shard.stat().st_mtime_ns, report.read_text()
    report.unlink()
    texts.unlink()
    cache.run(get_config("cache", **CACHE | chats), tmp_path / "data")
    assert shard.stat().st_mtime_ns == written
    assert report.read_text() == before
    assert texts.exists()
    with pytest.raises(CacheError, match=r"complete cache made with another config\.taps"):
        cache.run(get_config("cache", **CACHE | chats | {"taps": (0,)}), tmp_path / "data")


def test_a_target_that_writes_nothing_new_is_not_waited_for(
    target, get_config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cache, "_PATIENCE", 2)
    stops = tuple(token for token in range(257) if token != CACHE["mask_token_id"])
    silent = dataclasses.replace(target, stop_ids=stops)  # answers are one token
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: silent)
    with pytest.raises(CacheError, match="no samples"):
        cache.run(get_config("cache", **CACHE), tmp_path / "data")
    assert "2 batches in a row gave nothing new" in capsys.readouterr().out
    alike = get_config("cache", **CACHE, user_temperature=0.0, temperatures=(0.0,))
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: target)
    cache.run(alike, tmp_path / "alike")
    assert len(TargetCache(tmp_path / "alike/cache")) == 1


def test_prompts_may_be_given(target, get_config, tmp_path, capsys):
    lines = [json.dumps({"turns": [text]}) for text in ("ab", "hello", "x", "yz", "more")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    config = get_config("cache", **{**CACHE, "prompts": str(tmp_path / "*.jsonl"), "tokens": 9999})
    cache.run(config, tmp_path / "data")
    data = TargetCache(tmp_path / "data/cache")
    starts = [bytes(sample.tokens_T[~sample.loss_mask_T].astype(np.uint8)) for sample in data]
    decoded = target.tokenizer.batch_decode([list(start) for start in starts])
    assert set(decoded) <= {f"[u]{text}:" for text in ("ab", "hello", "x", "yz", "more")}
    assert 3 <= len(data) <= 5
    printed = capsys.readouterr().out
    most = sum(len(f"[u]{text}:") + 30 for text in ("ab", "hello", "x", "yz", "more"))
    assert f"{most} tokens with 2 taps" in printed  # there can be no more
    assert "of 5 prompts" in printed


def test_targets_without_a_chat_template_are_told_what_to_do(target, get_config, tmp_path):
    target.tokenizer.chat_template = None
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": ["ab"]}))
    for prompts in ("", str(tmp_path / "*.jsonl")):
        config = get_config("cache", **CACHE | {"prompts": prompts})
        with pytest.raises(ValueError, match=r"give texts \(config\.texts\), or train without"):
            cache.run(config, tmp_path / "data")


def test_another_tasks_results_are_not_replaced(target, chats, get_config, tmp_path):
    cache.run(get_config("cache", **CACHE | chats), tmp_path / "data")
    with pytest.raises(ValueError, match="holds the results of the task 'cache'"):
        train.run(get_config("train", **TRAIN | chats), tmp_path / "data")


def test_head_is_that_of_the_target(target, tmp_path):
    (tmp_path / "cache").mkdir()
    save_head(tmp_path / "cache", target, 255)
    head, mask_token_id = load_head(tmp_path / "cache")
    assert mask_token_id == 255
    assert head.model == target.model
    assert head.stop_ids == (256,)
    for name in ("embed", "lm_head"):
        np.testing.assert_array_equal(head.params[name]["weight"], target.params[name]["weight"])
    tensors = tmp_path / "cache/target.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match=r"target\.safetensors has changed"):
        load_head(tmp_path / "cache")
    (tmp_path / "cache/target.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        load_head(tmp_path / "cache")


def test_a_missing_cache_is_named(get_config, tmp_path):
    with pytest.raises(CacheError, match="is not a target cache"):
        train.run(get_config("train", cache=str(tmp_path / "none"), **TRAIN), tmp_path / "run")


CHATS = (
    "{% for m in messages %}{{ '[u]' if m.role == 'user' else '[a]' }}{{ m.content }}{% endfor %}"
)


@pytest.fixture
def chats(target, tmp_path):
    """Conversations with answers, in a file."""
    target.tokenizer.chat_template = CHATS + "{% if add_generation_prompt %}[a]{% endif %}"
    lines = [{"prompt": f"say {i}", "response": f"{i}, {i} and {i} again"} for i in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "prompts": str(tmp_path / "chats.jsonl"), "answers": "given", "mask_token_id": 255,
    }  # fmt: skip


def test_given_answers_make_a_cache_that_their_texts_make_again(
    target, chats, get_config, tmp_path
):
    cache.run(get_config("cache", **CACHE | chats), tmp_path / "data")
    data = TargetCache(tmp_path / "data/cache")
    answers = [target.tokenizer.decode(s.tokens_T[s.loss_mask_T].tolist()) for s in data]
    assert sorted(answers) == sorted(f"{i}, {i} and {i} again" for i in range(12))
    texts = read_texts(tmp_path / "data/texts.npz")
    for i, part in enumerate((texts[:5], texts[5:])):
        save_texts(tmp_path / f"part_{i}.npz", part)
    texts = {"texts": str(tmp_path / "part_*.npz")}
    cache.run(get_config("cache", **CACHE | texts), tmp_path / "again")
    again = TargetCache(tmp_path / "again/cache")
    for left, right in zip(data, again, strict=True):
        for name in ("tokens_T", "loss_mask_T", "taps_TMD", "hidden_TD"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


@pytest.mark.slow
def test_given_texts_go_on_after_an_interruption(
    target, chats, small_shards, get_config, tmp_path, monkeypatch
):
    config = get_config("cache", **CACHE | chats | {"batch_size": 2})
    cache.run(config, tmp_path / "whole")
    sizes = []
    monkeypatch.setattr(cache, "check_room", lambda folder, size: sizes.append(size))
    interrupt_third(monkeypatch, small_shards, "add")
    with pytest.raises(KeyboardInterrupt):
        cache.run(config, tmp_path / "halves")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "a", "response": "another"}))
    with pytest.raises(CacheError, match=r"made with another made_with\.texts"):
        cache.run(config, tmp_path / "halves")
    lines = [{"prompt": f"say {i}", "response": f"{i}, {i} and {i} again"} for i in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    same = f"{tmp_path.parent}/{tmp_path.name[:-1]}?/chats.jsonl"  # what else matches is the same
    elsewhere = {"prompts": same, "compilation_cache": str(tmp_path / "programs")}
    cache.run(
        get_config("cache", **CACHE | chats | {"batch_size": 2} | elsewhere), tmp_path / "halves"
    )
    whole, halves = (TargetCache(tmp_path / name / "cache") for name in ("whole", "halves"))
    for left, right in zip(whole, halves, strict=True):
        np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
    shards = [shard["bytes"] for shard in whole.manifest["shards"]]
    head = (tmp_path / "whole/cache/target.safetensors").stat().st_size
    expected = sum(shards) + head, sum(shards[2:]) + head  # what is still to be written
    np.testing.assert_allclose(sizes, expected, atol=1000)  # names and sizes of the head's tensors


@pytest.mark.slow
def test_other_prompts_do_not_go_on_with_a_cache(
    target, small_shards, get_config, tmp_path, monkeypatch
):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [text]}) for text in ("ab", "hello", "x")))
    options = {"prompts": str(path), "batch_size": 1, "min_answer_tokens": 1}
    interrupt_third(monkeypatch, cache, "write_answers")
    with pytest.raises(KeyboardInterrupt):
        cache.run(get_config("cache", **CACHE | options), tmp_path / "data")
    path.write_text(json.dumps({"turns": ["another"]}))
    with pytest.raises(CacheError, match=r"made with another made_with\.prompts"):
        cache.run(get_config("cache", **CACHE | options), tmp_path / "data")


@pytest.mark.slow
def test_online_training_and_going_on_from_a_drafter(
    target, chats, get_config, tmp_path, monkeypatch
):
    """Without a cache; then shorter blocks, from the drafter that the first run made."""
    train.run(get_config("train", **TRAIN | chats), tmp_path / "run")
    first = specjax.load_drafter(tmp_path / "run/drafter", target)
    assert first.model.config.block_size == 7
    more = {"start": str(tmp_path / "run/drafter"), "training.learning_rate": 1e-9}
    same = make_plan(get_config("train", **TRAIN | chats | more), tmp_path / "same")
    assert same.objective.model == first.model
    more |= {"drafter.block_size": 3}
    train.run(get_config("train", **TRAIN | chats | more), tmp_path / "more")
    second = specjax.load_drafter(tmp_path / "more/drafter", target)
    assert second.model.config.block_size == 3
    np.testing.assert_allclose(
        second.params["fc"]["weight"], first.params["fc"]["weight"], atol=1e-6
    )
    worse = more | {"training.learning_rate": 9.0}
    train.run(get_config("train", **TRAIN | chats | worse), tmp_path / "worse")
    report = json.loads((tmp_path / "worse/report.json").read_text())
    assert report["best_step"] == 0  # none is better than what it began with
    third = specjax.load_drafter(tmp_path / "worse/drafter", target)
    np.testing.assert_array_equal(third.params["fc"]["weight"], first.params["fc"]["weight"])
    params = jax.tree.map(lambda x: x * 1.01, target.params)
    other = dataclasses.replace(target, params=params)
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: other)
    with pytest.raises(CheckpointError, match="any_target=True"):
        train.run(get_config("train", **TRAIN | chats | more), tmp_path / "other")
    more |= {"any_target": True}
    train.run(get_config("train", **TRAIN | chats | more), tmp_path / "other")
    specjax.load_drafter(tmp_path / "other/drafter", other)


def test_an_interrupted_run_leaves_its_best_drafter(
    target, chats, get_config, tmp_path, monkeypatch, capsys
):
    evaluate, signals = train.Trainer.evaluate, [signal.SIGINT]

    def interrupted(trainer):
        if int(trainer.state.step) == 2 and signals:
            signal.raise_signal(signals.pop())
        return evaluate(trainer)

    monkeypatch.setattr(train.Trainer, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.run(get_config("train", **TRAIN | chats), tmp_path / "run")
    assert "The best so far" in capsys.readouterr().out
    plan = make_plan(get_config("train", **TRAIN | chats), tmp_path / "run")
    settings = get_config("train", **TRAIN).training
    trainer = train.Trainer(
        plan.objective, plan.trained, plan.fixed, plan.data, train.Training(**settings)
    )
    best = trainer.best(tmp_path / "run")
    assert best.step == 2
    saved = specjax.load_drafter(tmp_path / "run/drafter", target).params["fc"]["weight"]
    np.testing.assert_allclose(saved, best.params["fc"]["weight"], rtol=2**-8)  # bfloat16
    assert not (tmp_path / "run/report.json").exists()


@pytest.fixture
def cached(target, chats, get_config, tmp_path):
    """Settings that train from a cache."""
    cache.run(get_config("cache", **CACHE | chats), tmp_path / "data")
    return TRAIN | {"cache": str(tmp_path / "data/cache")}


@pytest.mark.slow
def test_a_cache_without_a_head_takes_that_of_the_target(cached, target, get_config, tmp_path):
    """DeepSpec's have none."""
    train.run(get_config("train", **cached), tmp_path / "with")
    for name in ("target.json", "target.safetensors"):
        (tmp_path / "data/cache" / name).unlink()
    train.run(get_config("train", **cached, mask_token_id=255), tmp_path / "without")
    plan = make_plan(get_config("train", **cached, mask_token_id=255), tmp_path / "plan")
    assert plan.data.identity.items() >= target.identity().items()
    left, right = (
        specjax.load_drafter(tmp_path / name / "drafter", target).params
        for name in ("with", "without")
    )
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.slow
def test_a_target_other_than_the_caches_gives_no_layers(
    cached, target, get_config, tmp_path, monkeypatch
):
    other = dataclasses.replace(target, params=jax.tree.map(lambda x: x * 1.01, target.params))
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: other)
    with pytest.raises(ValueError, match="is of other weights"):
        train.run(get_config("train", **cached, **{"drafter.layers_from": (1,)}), tmp_path / "run")


def test_dflash_and_all_candidates_take_one_setting_each(
    target, chats, get_config, tmp_path, capsys
):
    options = {"drafter.markov_rank": 0, "drafter.candidates": 0, "training.max_len": 20}
    plan = make_plan(get_config("train", **TRAIN | chats | options), tmp_path)
    assert not plan.objective.model.config.confidence_with_markov
    assert plan.objective.model.config.candidates is None
    assert "12 of 12 sequences are cut to config.training.max_len=20" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("source", ["online", "cache"])
def test_draft_layers_may_start_as_the_targets(
    request, target, chats, get_config, tmp_path, source
):
    options = {"drafter.layers_from": (1,), "training.learning_rate": 1e-9}
    settings = request.getfixturevalue("cached") if source == "cache" else TRAIN | chats
    train.run(get_config("train", **settings | options), tmp_path / "run")
    drafter = specjax.load_drafter(tmp_path / "run/drafter", target)
    for name in ("gate_proj", "up_proj", "down_proj"):
        np.testing.assert_allclose(
            drafter.params["layer_0"]["mlp"][name]["weight"],
            target.params["layer_1"]["mlp"][name]["weight"], rtol=2**-8,  # saved in bfloat16
        )  # fmt: skip
    config = get_config("train", **TRAIN | chats | {"drafter.layers_from": (0, 1)})
    with pytest.raises(ValueError, match="layers_from must name 1 layers of tiny"):
        train.run(config, tmp_path / "other")


def test_texts_are_distinct_and_have_something_to_learn(get_config, tmp_path, capsys):
    first, second = (
        TokenSequence(np.array(ids, np.int32), np.array([False, True, True]))
        for ids in ((1, 2, 3), (1, 2, 4))
    )
    save_texts(tmp_path / "a.npz", [first, second])
    save_texts(tmp_path / "b.npz", [second, first, second])
    config = get_config("cache", texts=str(tmp_path / "*.npz"))
    texts = given_texts(config, tiny_target())
    assert [text.tokens_T.tolist() for text in texts] == [[1, 2, 3], [1, 2, 4]]
    assert "3 of 5 texts repeat others and are left out" in capsys.readouterr().out
    nothing = TokenSequence(first.tokens_T, np.zeros(3, bool))
    save_texts(tmp_path / "c.npz", [nothing])
    with pytest.raises(ValueError, match=r"c\.npz have no token to learn"):
        given_texts(config, tiny_target())


def test_models_without_hidden_states_are_refused(get_config, tmp_path, monkeypatch):
    closed = dataclasses.replace(tiny_target(), model=MarkovTarget(257))
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: closed)
    with pytest.raises(ValueError, match="gives no hidden states to train a drafter from"):
        cache.run(get_config("cache", **CACHE), tmp_path / "run")


def test_the_shipped_drafters_recipe_has_known_settings():
    known = {"cache": configs.cache.get_config(), "train": configs.train.get_config()}
    for variant in (
        "smoke",
        *(f"{kind}_{i}" for kind in ("write", "data", "train") for i in "012"),
    ):
        config = smollm2_dspark.get_config(variant)
        assert config.keys() == known[config.task].keys()
        for group in ("drafter", "losses", "training"):
            assert config.get(group, {}).keys() == known[config.task].get(group, {}).keys()
        if config.texts:
            assert matching(str(ROOT / config.texts))
    with pytest.raises(ValueError, match="unknown variant 'train_3'"):
        smollm2_dspark.get_config("train_3")


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        ("train", {}, "nothing to train on"),
        ("train", {"answers": "target", "prompts": "chats.jsonl"}, "nothing to train on"),
        ("cache", {"answers": "mine"}, "config.answers must be 'target' or 'given'"),
        ("cache", {"answers": "given"}, "needs config.prompts or config.dataset"),
        ("cache", {"texts": "a", "prompts": "b"}, "only one of config.texts, config.prompts"),
        ("cache", {"texts": "nowhere.npz"}, "cannot read the texts nowhere.npz"),
        ("cache", {"prompts": "a", "dataset": "b"}, "only one of config.prompts, config.dataset"),
        ("train", {"cache": "a", "texts": "b.npz"}, "only one of config.cache, config.texts"),
        ("train", {"cache": "a", "prompts": "b.jsonl"}, "only one of config.cache, config.prompts"),
        ("cache", {"tokens": 0}, "config.tokens must be at least 1"),
        ("cache", {"taps": (0.0,)}, "taps must be increasing layers"),
        ("cache", {"taps": (False,)}, "taps must be increasing layers"),
        ("cache", {"taps": ("a",)}, "taps must be increasing layers"),
        ("cache", {"mask_token_id": -7}, "mask_token_id -7 lies outside the vocabulary"),
        ("cache", {"mask_token_id": 256}, "is an end-of-sequence token"),
        ("cache", {"user_tokens": 10**5}, "reduce user_tokens"),
    ],
)
def test_sources_and_settings_that_contradict_or_lack_are_named(
    target, get_config, tmp_path, task, overrides, message
):
    base, run = (CACHE, cache.run) if task == "cache" else (TRAIN, train.run)
    with pytest.raises(ValueError, match=message):
        run(get_config(task, **base | overrides), tmp_path / "run")
