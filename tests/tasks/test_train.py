"""From a target to a trained drafter through the tasks, without loading the target twice."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import specjax
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.head import load_head, save_head
from specjax.data.target_cache import CacheError, TargetCache
from specjax.tasks import cache, train
from tests.evaluation.tiny_target import tiny_target
from tests.toys import tiny_target as two_layers

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


@pytest.mark.slow
def test_cache_goes_on_after_an_interruption(
    target, small_shards, get_config, tmp_path, monkeypatch
):
    config = get_config("cache", **CACHE)
    cache.run(config, tmp_path / "whole")
    calls, real = [], cache.write_answers

    def stop(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(cache, "write_answers", stop)
    with pytest.raises(KeyboardInterrupt):
        cache.run(config, tmp_path / "halves")
    cache.run(config, tmp_path / "halves")
    whole, halves = (TargetCache(tmp_path / name / "cache") for name in ("whole", "halves"))
    assert len(calls) > 4
    assert calls[3][-1] == 2  # the batches of finished shards are not written again
    for left, right in zip(whole, halves, strict=True):
        np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
        np.testing.assert_array_equal(left.taps_TMD, right.taps_TMD)
    with pytest.raises(CacheError, match="holds a complete cache"):
        cache.run(config, tmp_path / "halves")


def test_prompts_may_be_given(target, get_config, tmp_path):
    lines = [json.dumps({"turns": [text]}) for text in ("ab", "hello", "x", "yz", "more")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    config = get_config("cache", **{**CACHE, "prompts": str(tmp_path / "*.jsonl"), "tokens": 9999})
    cache.run(config, tmp_path / "data")
    data = TargetCache(tmp_path / "data/cache")
    starts = [bytes(sample.tokens_T[~sample.loss_mask_T].astype(np.uint8)) for sample in data]
    decoded = target.tokenizer.batch_decode([list(start) for start in starts])
    assert set(decoded) <= {f"[u]{text}:" for text in ("ab", "hello", "x", "yz", "more")}
    assert 3 <= len(data) <= 5


def test_head_is_that_of_the_target(target, tmp_path):
    (tmp_path / "cache").mkdir()
    save_head(tmp_path / "cache", target, 255)
    head, mask_token_id = load_head(tmp_path / "cache")
    assert mask_token_id == 255
    assert head.model == target.model
    assert head.stop_ids == (256,)
    for name in ("embed", "lm_head"):
        np.testing.assert_array_equal(head.params[name]["weight"], target.params[name]["weight"])
    (tmp_path / "cache/target.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        load_head(tmp_path / "cache")
    (tmp_path / "cache/target.json").unlink()
    with pytest.raises(ValueError, match="holds no head"):
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
    texts = {"texts": str(tmp_path / "data/texts.npz")}
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
    real, calls = small_shards.add, []

    def stop(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(small_shards, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        cache.run(config, tmp_path / "halves")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "a", "response": "another"}))
    with pytest.raises(CacheError, match=r"made with another made_with\.texts"):
        cache.run(config, tmp_path / "halves")
    lines = [{"prompt": f"say {i}", "response": f"{i}, {i} and {i} again"} for i in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    cache.run(config, tmp_path / "halves")
    whole, halves = (TargetCache(tmp_path / name / "cache") for name in ("whole", "halves"))
    for left, right in zip(whole, halves, strict=True):
        np.testing.assert_array_equal(left.tokens_T, right.tokens_T)


@pytest.mark.slow
def test_online_training_and_going_on_from_a_drafter(
    target, chats, get_config, tmp_path, monkeypatch
):
    """Without a cache; then shorter blocks, from the drafter that the first run made."""
    train.run(get_config("train", **TRAIN | chats), tmp_path / "run")
    first = specjax.load_drafter(tmp_path / "run/drafter", target)
    assert first.model.config.block_size == 7
    more = {"start": str(tmp_path / "run/drafter"), "drafter.block_size": 3}
    more |= {"training.learning_rate": 1e-9}
    train.run(get_config("train", **TRAIN | chats | more), tmp_path / "more")
    second = specjax.load_drafter(tmp_path / "more/drafter", target)
    assert second.model.config.block_size == 3
    np.testing.assert_allclose(
        second.params["fc"]["weight"], first.params["fc"]["weight"], atol=1e-6
    )
    params = jax.tree.map(lambda x: x * 1.01, target.params)
    other = dataclasses.replace(target, params=params)
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: other)
    with pytest.raises(CheckpointError, match="any_target=True"):
        train.run(get_config("train", **TRAIN | chats | more), tmp_path / "other")
    more |= {"any_target": True}
    train.run(get_config("train", **TRAIN | chats | more), tmp_path / "other")
    specjax.load_drafter(tmp_path / "other/drafter", other)


@pytest.mark.slow
def test_draft_layers_may_start_as_the_targets(target, chats, get_config, tmp_path):
    options = {"drafter.layers_from": (1,), "training.learning_rate": 1e-9}
    train.run(get_config("train", **TRAIN | chats | options), tmp_path / "run")
    drafter = specjax.load_drafter(tmp_path / "run/drafter", target)
    for name in ("gate_proj", "up_proj", "down_proj"):
        np.testing.assert_allclose(
            drafter.params["layer_0"]["mlp"][name]["weight"],
            target.params["layer_1"]["mlp"][name]["weight"], rtol=2**-8,  # saved in bfloat16
        )  # fmt: skip
    config = get_config("train", **TRAIN | chats | {"drafter.layers_from": (0, 1)})
    with pytest.raises(ValueError, match="layers_from must name 1 layers of tiny"):
        train.run(config, tmp_path / "other")


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        ("train", {}, "nothing to train on"),
        ("train", {"answers": "target", "prompts": "chats.jsonl"}, "nothing to train on"),
        ("cache", {"answers": "mine"}, "config.answers must be 'target' or 'given'"),
        ("cache", {"answers": "given"}, "needs config.prompts or config.dataset"),
        ("cache", {"texts": "a.npz", "prompts": "b.jsonl"}, "give config.texts, or"),
        ("cache", {"texts": "nowhere.npz"}, "cannot read the texts nowhere.npz"),
        ("cache", {"prompts": "a", "dataset": "b", "answers": "given"}, "not both"),
    ],
)
def test_sources_that_contradict_or_lack_are_named(
    target, get_config, tmp_path, task, overrides, message
):
    base, run = (CACHE, cache.run) if task == "cache" else (TRAIN, train.run)
    with pytest.raises(ValueError, match=message):
        run(get_config(task, **base | overrides), tmp_path / "run")
