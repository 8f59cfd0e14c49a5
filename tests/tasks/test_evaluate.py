import json

import pytest

import specjax
from specjax.evaluation.runner import Measurement
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


def test_unreadable_results_are_named(get_config, files, tmp_path, decoded):
    (tmp_path / "w").mkdir()
    (tmp_path / "w/finished.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*finished\.json.*remove it"):
        evaluate.run(get_config("evaluate", prompts=files), tmp_path / "w")


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
    ],
)
def test_bad_settings(get_config, files, tmp_path, tiny, overrides, message):
    config = get_config("evaluate", prompts=files)
    config.update(overrides)
    with pytest.raises(ValueError, match=message):
        evaluate.run(config, tmp_path / "w")
    assert list((tmp_path / "w").iterdir()) == []
