import builtins
import json

import jax
import pytest

import specjax
from specjax.data import prompts
from specjax.tasks import common, generate


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch, tiny):
    monkeypatch.setattr(prompts, "BUILTIN", {"code": "Write code.", "chat": "Hello there!"})


def test_prints_and_reports(get_config, tmp_path, capsys):
    config = get_config("quickstart", prompts=("code", "chat"))
    generate.run(config, tmp_path / "new" / "folder")
    printed = capsys.readouterr()
    report = json.loads((tmp_path / "new/folder/report.json").read_text())
    assert report["task"] == "generate"
    assert [run["prompt_name"] for run in report["runs"][::2]] == [None, "code", "chat"]
    assert report["identical"] is True
    assert json.loads((tmp_path / "new/folder/config.json").read_text()) == report["config"]
    assert report["config"]["prompts"] == ["code", "chat"]
    for part in ("Hello there!", "mean accepted length", "draft position", "are identical"):
        assert part in printed.out
    assert "outputs" in printed.err  # the progress bar
    assert (tmp_path / "new/folder/report.png").exists()


def test_without_matplotlib_there_is_no_figure(get_config, tmp_path, capsys, monkeypatch):
    real_import = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    generate.run(get_config("quickstart", prompts=("code",)), tmp_path)
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "report.json"]


def test_a_figure_that_fails_costs_no_report(get_config, tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such\nfont")

    monkeypatch.setattr(common, "plot_report", fail)
    generate.run(get_config("quickstart", prompts=("code",)), tmp_path)
    assert "No figure: no such font\n" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "report.json"]


def test_settings_that_no_file_can_hold(get_config, tmp_path):
    with pytest.raises(ValueError, match=r"config\.target is not valid UTF-8: 'caf\\udce9'"):
        generate.run(get_config("quickstart", target="caf\udce9"), tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_an_interrupted_run_leaves_no_report(get_config, tmp_path, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(specjax, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate.run(get_config("quickstart", prompts=("code",)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_prompt_names_are_checked_before_loading(get_config, tmp_path, monkeypatch):
    monkeypatch.setattr(specjax, "load_target", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="unknown built-in prompt 'poem'"):
        generate.run(get_config("quickstart", prompts=("poem",)), tmp_path)
    with pytest.raises(ValueError, match=r"config\.prompts is empty"):
        generate.run(get_config("quickstart", prompts=()), tmp_path)


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_workdir_that_is_a_file(get_config, tmp_path, inside, monkeypatch):
    monkeypatch.setattr(specjax, "load_target", lambda *args, **options: pytest.fail("loaded"))
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match=r"cannot write to the workdir .*--workdir"):
        generate.run(get_config("quickstart"), tmp_path / "file" / inside)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_workdir_without_permission(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(common.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"cannot write to the workdir .* \(Permission denied\)"):
        common.open_workdir(tmp_path, "generate")


@pytest.fixture
def cache_dir():
    before = jax.config.jax_compilation_cache_dir
    yield lambda: jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before)


def test_compilation_cache(tmp_path, monkeypatch, cache_dir):
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    common.enable_compilation_cache("off")
    assert cache_dir() is None
    common.enable_compilation_cache("auto")
    assert cache_dir() == str(tmp_path / "specjax" / "compiled")
    common.enable_compilation_cache(str(tmp_path / "mine"))
    assert cache_dir() == str(tmp_path / "mine")
    common.enable_compilation_cache("auto")  # JAX has a folder already
    assert cache_dir() == str(tmp_path / "mine")
