import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import specjax
from specjax.evaluation.runner import Measurement
from specjax.files import digest
from specjax.tasks import evaluate


@pytest.fixture
def files(tmp_path):
    """A glob of two files, "a" with three prompts and "b" with one."""
    (tmp_path / "a.jsonl").write_text('{"turns": ["One"]}\n{"turns": ["2"]}\n{"turns": ["3"]}\n')
    (tmp_path / "b.jsonl").write_text('{"turns": ["Four"]}\n')
    return str(tmp_path / "*.jsonl")


@pytest.fixture
def decoded(monkeypatch, tiny):
    """The number of prompts of each call of `specjax.generate`."""
    generate, made = specjax.generate, []

    def record(target, drafter, prompts, **options):
        made.append(len(prompts))
        return generate(target, drafter, prompts, **options)

    monkeypatch.setattr(specjax, "generate", record)
    return made


def interrupt_after(monkeypatch, calls):
    generate, made = specjax.generate, []

    def interrupted(*args, **options):
        made.append(1)
        if len(made) > calls:
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(specjax, "generate", interrupted)


def read_report(folder):
    return json.loads((folder / "report.json").read_text())


def test_reports_each_file_and_all(get_config, files, tmp_path, decoded, capsys):
    evaluate.run(get_config("evaluate", prompts=files, batch_size=2), tmp_path / "w")
    report = read_report(tmp_path / "w")
    runs = [(run["file"], run["name"], run["prompts"]) for run in report["runs"][1::2]]
    assert runs == [
        (None, "speculative", 3),  # the smoke limit of two prompts a file
        ("a", "speculative", 2),
        ("b", "speculative", 1),
    ]
    assert report["identical"] is True
    assert decoded == [2, 2, 2, 2, 1, 1, 1, 1]
    out = capsys.readouterr().out
    assert "speedup" in out
    assert "\nall " in out


def test_a_missing_draft_length_is_what_generate_takes(get_config, files, tmp_path, tiny):
    del tiny
    config = get_config("evaluate", prompts=files, limit=1, check="none", draft_len=None)
    evaluate.run(config, tmp_path / "w")
    report = read_report(tmp_path / "w")
    assert report["config"]["draft_len"] == 7
    assert config.draft_len is None
    assert len(report["runs"][1]["acceptance_by_position"]) == 7


def test_an_interrupted_run_goes_on_where_it_was(
    get_config, files, tmp_path, decoded, monkeypatch, capsys
):
    config = get_config("evaluate", prompts=files, batch_size=2)
    with monkeypatch.context() as patch:
        interrupt_after(patch, calls=5)  # in the middle of the second file
        with pytest.raises(KeyboardInterrupt):
            evaluate.run(config, tmp_path / "w")
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["finished.json"]
    kept = json.loads((tmp_path / "w/finished.json").read_text())["files"]
    assert list(kept) == ["a"]
    decoded.clear()
    evaluate.run(config, tmp_path / "w")
    assert decoded == [1, 1, 1, 1]  # file b only
    assert "Finished before, not decoded again: a\n" in capsys.readouterr().out
    runs = {(run["file"], run["name"]): run for run in read_report(tmp_path / "w")["runs"]}
    before = Measurement.from_json(kept["a"]["comparison"]["speculative"])
    assert runs["a", "speculative"]["seconds"] == before.seconds
    assert runs[None, "speculative"]["prompts"] == 3


def test_a_changed_file_is_decoded_again(get_config, files, tmp_path, decoded):
    config = get_config("evaluate", prompts=files)
    evaluate.run(config, tmp_path / "w")
    (tmp_path / "b.jsonl").write_text('{"turns": ["Five"]}\n')
    decoded.clear()
    evaluate.run(config, tmp_path / "w")
    assert decoded == [1, 1, 1, 1]


def test_results_of_another_config_are_not_mixed_in(get_config, files, tmp_path, decoded):
    evaluate.run(get_config("evaluate", prompts=files), tmp_path / "w")
    report = (tmp_path / "w/report.json").read_text()
    decoded.clear()
    with pytest.raises(ValueError, match=r"config\.seed \(0, now 3\).*Use another --workdir"):
        evaluate.run(get_config("evaluate", prompts=files, seed=3), tmp_path / "w")
    assert not decoded
    assert (tmp_path / "w/report.json").read_text() == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda target: {"params": jax.tree.map(lambda x: x * 1.01, target.params)},
            r"another target\.weights \('\w{64}', now '\w{64}'\)\. Use",
        ),
        (lambda target: {"stop_ids": (7,)}, r"another target\.stop_ids \(\[256\], now \[7\]\)"),
    ],
)
def test_results_of_another_model_of_that_name_are_not_mixed_in(
    get_config, files, tmp_path, tiny, monkeypatch, change, message
):
    config = get_config("evaluate", prompts=files)
    evaluate.run(config, tmp_path / "w")
    other = dataclasses.replace(tiny, **change(tiny))
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: other)
    with pytest.raises(ValueError, match=message):
        evaluate.run(config, tmp_path / "w")


def test_unreadable_results_are_named(get_config, files, tmp_path, tiny):
    config, finished = get_config("evaluate", prompts=files), tmp_path / "w/finished.json"
    evaluate.run(config, tmp_path / "w")
    good = json.loads(finished.read_text())
    for text in (
        *("{", "[]", "[" * 100_000, "{}", '{"sha256": ""}', json.dumps(good | {"files": None})),
        finished.read_text().replace('_seconds": ', '_seconds": 1'),  # well-formed all the same
        *(_sealed(good, files) for files in (None, [], {"a": {}}, {"a": None})),
        _sealed(good, {"a": good["files"]["a"] | {"comparison": {"name": "a"}}}),
    ):
        finished.write_text(text)
        with pytest.raises(ValueError, match=r"cannot read .*finished\.json.*remove it"):
            evaluate.run(config, tmp_path / "w")


def _sealed(content, files):
    content = {"made_with": content["made_with"], "files": files}
    return json.dumps(content | {"sha256": digest(content)})


@pytest.mark.parametrize("name", ["finished.json", "report.json", ".report.json.partial"])
def test_folders_in_the_place_of_results(get_config, files, tmp_path, monkeypatch, name):
    monkeypatch.setattr(specjax, "load_target", lambda *args, **options: pytest.fail("loaded"))
    (tmp_path / "w" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match="is a folder, where a file is to be written: remove it"):
        evaluate.run(get_config("evaluate", prompts=files), tmp_path / "w")


@pytest.fixture
def words_target(tmp_path, data_dir):
    """A checkpoint whose tokeniser knows a few words, as a folder."""
    folder = tmp_path / "words"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(data_dir / "llama_tied" / name, folder / name)
    words = {"?": 0} | {f"w{i}": i for i in range(1, 96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.slow
def test_killed_runs_go_on_as_if_they_had_not_been(get_config, words_target, tmp_path):
    """Interrupted, then killed, each time soon after a file was saved."""
    for i in range(20):
        (tmp_path / f"{i:02}.jsonl").write_text(f'{{"turns": ["w{i + 1} w5 w6 w{i + 1}"]}}\n')
    values = {"target": str(words_target), "dtype": "float32", "prompts": f"{tmp_path}/*.jsonl"}
    config = get_config("evaluate", **values)
    config.update(max_new_tokens=24, compilation_cache="auto")  # the environment's
    overrides = [f"--config.{k}={config[k]}" for k in (*values, "max_new_tokens", "draft_len")]
    config_file = Path(__file__).parents[2] / "configs/evaluate.py"
    command = [sys.executable, "-m", "specjax.main", f"--config={config_file}:smoke", *overrides]
    same = {
        "JAX_PLATFORMS": jax.default_backend(),
        "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
        # Of its own: a killed process may leave half an entry behind.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    workdir, kept = tmp_path / "killed", 0
    # Python's default, but background jobs of a shell, and their children, ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stop in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            [*command, f"--workdir={workdir}"],
            cwd=config_file.parents[1],
            env=os.environ | same,
            stderr=subprocess.PIPE,
        )
        while process.poll() is None and _saved(workdir) <= kept:
            time.sleep(0.001)
        process.send_signal(stop)
        _, errors = process.communicate()
        assert process.returncode == (130 if stop == signal.SIGINT else -stop), errors
        kept, before = _saved(workdir), kept
        assert before < kept < 20, errors
    evaluate.run(config, workdir)
    evaluate.run(config, tmp_path / "whole")
    resumed, whole = read_report(workdir), read_report(tmp_path / "whole")
    for part in ("config", "completions", "identical", "as_run", "checks"):
        assert resumed[part] == whole[part]
    counts = ("name", "file", "prompts", "tokens", "rounds", "drafted", "rounds_by_accepted")
    for run, other in zip(resumed["runs"], whole["runs"], strict=True):
        assert [run[key] for key in counts] == [other[key] for key in counts]


def _saved(workdir):
    path = workdir / "finished.json"
    return len(json.loads(path.read_text())["files"]) if path.exists() else 0


def test_a_difference_is_reported(get_config, files, tmp_path, decoded, monkeypatch, capsys):
    generate = specjax.generate

    def broken(target, drafter, prompts, **options):
        result = generate(target, drafter, prompts, **options)
        if drafter is not None:
            result.tokens[0][1] += 1
        return result

    monkeypatch.setattr(specjax, "generate", broken)
    evaluate.run(get_config("evaluate", prompts=files, batch_size=2), tmp_path / "w")
    report = read_report(tmp_path / "w")
    assert report["identical"] is False
    assert report["as_run"]["identical"] is False
    ties = [(tie["file"], tie["prompt"], tie["position"]) for tie in report["as_run"]["ties"]]
    assert ties == [("a", 0, 1), ("b", 0, 1)]
    assert "NOT identical" in capsys.readouterr().out


def test_sampled_runs_need_not_be_equal(get_config, files, tmp_path, decoded, capsys):
    evaluate.run(get_config("evaluate", prompts=files, temperature=1.0), tmp_path / "w")
    report = read_report(tmp_path / "w")
    assert report["identical"] is None
    assert report["as_run"] == {"identical": None, "ties": []}
    assert "equal in distribution" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"prompts": ""}, "no prompts given"),
        ({"prompts": "nowhere/*.jsonl"}, "no prompt file matches"),
        ({"limit": -1}, "limit must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 999}, "a: prompt 0 has 4 tokens.*exceeds the target's context of 160"),
        ({"drafter": "oracle"}, "unknown drafter 'oracle'"),
        ({"policy": "hopeful"}, "unknown policy 'hopeful'"),
        ({"check": "float8"}, "unknown check 'float8'"),
        ({"gap_tolerance": float("nan")}, "gap_tolerance must be finite and at least 0, got nan"),
    ],
)
def test_bad_settings(get_config, files, tmp_path, tiny, overrides, message):
    config = get_config("evaluate", prompts=files)
    config.update(overrides)
    with pytest.raises(ValueError, match=message):
        evaluate.run(config, tmp_path / "w")
    assert list((tmp_path / "w").iterdir()) == []
