"""Training runs: they learn, they resume bitwise, they refuse what does not fit."""

import functools
import json
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import specjax
from specjax.data.corpus import pack
from specjax.data.self_generated import Writing, write_answers
from specjax.data.target_cache import CacheWriter, TargetCache
from specjax.drafters import Drafter, init_dspark
from specjax.models.transformer import Head
from specjax.training.features import CachedStates, TextAlone
from specjax.training.objectives import DSparkObjective, JointObjective, divide
from specjax.training.trainer import Trainer, Training
from tests.toys import tiny_target

SETTINGS = Training(
    steps=10, batch_size=4, accumulation=2, max_len=32, held_out=3,
    learning_rate=3e-3, warmup_ratio=0.2,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def cache(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "cache"
    writing = Writing(batch_size=12, answer_tokens=28, temperatures=(0.0,))
    prompts = [[i + 1, 2 * i + 1] for i in range(12)]
    writer = CacheWriter(folder, taps=(-1, 0), width=32, made_with={"target": "tiny"})
    writer.add(write_answers(target, prompts, (-1, 0), writing, 0), 1)
    writer.finish(1)
    return TargetCache(folder)


@functools.cache
def drafter(**options):
    return init_dspark(
        tiny_target(), jax.random.key(0), num_layers=1, taps=(-1, 0), mask_token_id=60,
        markov_rank=4, block_size=4, **options,
    )  # fmt: skip


def trainer(target, cache, settings=SETTINGS, num_anchors=8, **options):
    model, params = drafter(**options)
    head = Head(target.params["lm_head"]["weight"])
    objective = DSparkObjective(model, num_anchors=num_anchors)
    data = CachedStates(cache, head, model.taps)
    return Trainer(objective, *divide(params, head), data, settings)


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def last_line(folder):
    return json.loads((folder / "log.jsonl").read_text().splitlines()[-1])


def test_ten_steps_equal_five_resumed_and_five_bitwise(target, cache, tmp_path):
    whole = trainer(target, cache)
    whole.run(tmp_path / "whole", eval_every=100, save_every=100)
    half = trainer(target, cache)
    half.run(tmp_path / "halves", until=5, eval_every=2, save_every=3)
    assert int(half.state.step) == 5
    again = trainer(target, cache)
    again.run(tmp_path / "halves", eval_every=3, save_every=100)
    assert int(again.state.step) == 10
    same(again.state, whole.state)
    counted = [last_line(tmp_path / name)["anchors"] for name in ("whole", "halves")]
    assert counted[0] == counted[1] > 10


@pytest.mark.slow
def test_interrupted_runs_go_on_where_they_were(target, cache, tmp_path):
    def interrupt(step, log):
        if step == 4:
            raise KeyboardInterrupt

    first = trainer(target, cache)
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path, on_step=interrupt)
    steps = []
    again = trainer(target, cache)
    assert again.last_step(tmp_path) == 4
    assert again.last_step(tmp_path / "new") == 0
    again.run(tmp_path, on_step=lambda step, log: steps.append(step))
    assert steps == [5, 6, 7, 8, 9, 10, 10]  # the last is an evaluation
    whole = trainer(target, cache)
    whole.run(tmp_path / "whole")
    same(again.state, whole.state)


def test_ctrl_c_waits_until_a_checkpoint_is_written(target, cache, tmp_path, monkeypatch):
    save = ocp.CheckpointManager.save

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return save(*args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", interrupted)
    run = trainer(target, cache)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run.run(tmp_path, save_every=2)
    assert int(run.state.step) == run.last_step(tmp_path) == 2
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
@pytest.mark.parametrize("within", ["_step", "save"])
def test_an_interruption_waits_for_the_end_of_a_step_or_a_checkpoint(
    target, cache, tmp_path, monkeypatch, within
):
    run = trainer(target, cache)
    owner = run if within == "_step" else ocp.CheckpointManager
    done = getattr(owner, within)

    def interrupted(*args, **options):
        result = done(*args, **options)
        if within == "save" or int(result[0].step) == 3:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, within, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run(tmp_path, save_every=3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert int(run.state.step) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_training_is_logged_and_improves_held_out_acceptance(target, cache, tmp_path):
    settings = Training(steps=120, batch_size=4, max_len=32, held_out=3, learning_rate=3e-3)
    run = trainer(target, cache, settings, num_anchors=16)
    before = run.evaluate()
    losses = run.run(tmp_path, eval_every=40, save_every=40)
    assert losses["total"] < float(before["total"])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["set"] == "held_out"] == [40, 80, 120]
    best = run.best(tmp_path)
    by_step = {line["step"]: line for line in lines if line["set"] == "held_out"}
    lengths = {step: line["expected_length"] for step, line in by_step.items()}
    assert best.step == max(lengths, key=lengths.get)
    assert best.losses == {name: by_step[best.step][name] for name in best.losses}
    train = [line for line in lines if line["set"] == "train"]
    assert [line["step"] for line in train] == list(range(10, 121, 10))
    assert train[-1]["expected_length"] > train[0]["expected_length"] + 0.2
    assert train[-1]["tokens_per_second"] > 0
    assert len(train[-1]["acceptance_G"]) == 4
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"held_out/acceptance_G/4" in events.read_bytes()
    steps = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert "120" in steps
    assert len(steps) <= 2
    model, params = drafter()
    trained = Drafter(model, {**params, **run.state.params}, "trained")
    result = specjax.generate(target, trained, [[1, 1]], max_new_tokens=20, draft_len=4)
    assert result.tokens == specjax.generate(target, None, [[1, 1]], max_new_tokens=20).tokens


def test_rates_are_of_the_steps_alone(target, cache, tmp_path, monkeypatch):
    run = trainer(target, cache)
    evaluate, save = run.evaluate, ocp.CheckpointManager.save

    def slowly(function):
        def slow(*args, **options):
            time.sleep(1.0)
            return function(*args, **options)

        return slow

    monkeypatch.setattr(run, "evaluate", slowly(evaluate))
    monkeypatch.setattr(ocp.CheckpointManager, "save", slowly(save))
    run.run(tmp_path, until=4, log_every=1, eval_every=1, save_every=2)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    first, *others = [line for line in lines if line["set"] == "train"]
    assert "steps_per_second" not in first  # it was compiled
    assert all(line["steps_per_second"] > 1 for line in others)
    assert all(line["memory_gb"] > 0 for line in others)
    assert others[-1]["anchors_per_second"] > others[-1]["steps_per_second"]


def test_evaluation_computes_no_more_at_once_than_a_step(target, cache, monkeypatch):
    run = trainer(target, cache)
    evaluate, rows = run._evaluate, []

    def counted(params, fixed, batch, *rest):
        rows.append(len(batch.tokens_BT))
        return evaluate(params, fixed, batch, *rest)

    monkeypatch.setattr(run, "_evaluate", counted)
    run.evaluate()
    assert rows == [2, 2]  # of three sequences; a batch of four has two parts


@pytest.mark.slow
def test_what_is_the_targets_is_not_trained(target, cache, tmp_path):
    run = trainer(target, cache, draft_vocab=range(0, 61, 2))
    before = jax.tree.map(jnp.copy, run.state.params)
    run.run(tmp_path, until=2)
    assert not {"embed", "lm_head", "draft_ids"} & run.state.params.keys()
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), run.state.params, before)
    assert all(jax.tree.leaves(moved["fc"]))


def test_the_log_has_no_lines_of_lost_steps(target, cache, tmp_path):
    """The run was killed after its last checkpoint; or the checkpoints are removed."""
    log = tmp_path / "log.jsonl"

    def steps():
        return [json.loads(line)["step"] for line in log.read_text().splitlines()]

    trainer(target, cache).run(tmp_path, until=2, log_every=1)
    with open(log, "a") as file:
        file.write('{"step": 3, "set": "train"}\n{"step": 1, "set": "train", "tot')
    trainer(target, cache).run(tmp_path, until=3, log_every=1)
    assert steps() == [1, 2, 2, 3, 3]  # each run ends with an evaluation
    shutil.rmtree(tmp_path / "checkpoints")
    trainer(target, cache).run(tmp_path, until=1, log_every=1)
    assert steps() == [1, 1]


def test_damaged_checkpoints_are_named(target, cache, tmp_path):
    trainer(target, cache).run(tmp_path, until=1)
    shutil.rmtree(tmp_path / "checkpoints/1/settings")
    with pytest.raises(ValueError, match=r"cannot read the checkpoint .*checkpoints/1 .*remove it"):
        trainer(target, cache).run(tmp_path)


def test_checkpoints_of_other_settings_are_refused(target, cache, tmp_path):
    trainer(target, cache).run(tmp_path, until=1)
    with pytest.raises(ValueError, match=r"objective.num_anchors \(8, now 9\)"):
        trainer(target, cache, num_anchors=9).run(tmp_path)
    other = Training(**{**vars(SETTINGS), "learning_rate": 1e-4})
    with pytest.raises(ValueError, match=r"training.learning_rate \(0.003, now 0.0001\)"):
        trainer(target, cache, other).run(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 12}, "leave none to train on"),
        ({"max_len": 2}, "no sequence has two tokens in a row to learn"),
    ],
)
def test_caches_with_too_little_are_refused(target, cache, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer(target, cache, Training(**{**vars(SETTINGS), **settings}))


def test_held_out_sequences_without_anything_to_learn_are_refused():
    objective, trained = JointObjective(tiny_target().model, None), {"target": {}, "drafter": {}}
    rows = list(pack([[1] * 7, [2] * 8], 0, 8))  # the last row has an end token alone
    settings = Training(steps=2, max_len=8, held_out=1)
    with pytest.raises(ValueError, match="none of the 1 sequences held out has two tokens"):
        Trainer(objective, trained, {}, TextAlone(rows), settings)


@pytest.mark.slow
def test_checkpoints_of_diverged_parameters_are_not_the_best(target, cache, tmp_path, monkeypatch):
    run, nan = trainer(target, cache), float("nan")
    scores = {2: nan, 4: 2.0, 6: nan, 8: 1.0, 10: nan}
    losses = run.evaluate()
    monkeypatch.setattr(
        run, "evaluate",
        lambda: losses | {"expected_length": jnp.float32(scores[int(run.state.step)])},
    )  # fmt: skip
    run.run(tmp_path, eval_every=2, save_every=2)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()}
    assert names == {"4", "10"}


def test_caches_of_other_taps_are_refused(target, cache):
    with pytest.raises(ValueError, match=r"holds layers \(-1, 0\)"):
        CachedStates(cache, Head(target.params["lm_head"]["weight"]), (0, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": 3, "accumulation": 2}, "multiple of accumulation"),
        ({"max_len": 1}, "max_len"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**70}, "seed must be from 0"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Training(**{"steps": 5, **changes})


@pytest.mark.parametrize("name", ["eval_every", "save_every", "log_every"])
def test_no_number_of_steps_between_two_is_refused(target, cache, tmp_path, name):
    with pytest.raises(ValueError, match=f"at least 1, got .*{name}"):
        trainer(target, cache).run(tmp_path / "run", **{name: 0})
    assert not (tmp_path / "run").exists()
