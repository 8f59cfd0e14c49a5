import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from specjax import main
from specjax.files import alone_in

# How ml_collections loads config files.
pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")

ROOT = Path(__file__).parents[1]
QUICKSTART = f"--config={ROOT / 'configs/quickstart.py'}"


@pytest.fixture
def run(monkeypatch):
    """Runs the command line in this process and gives the exit code."""

    def run(*arguments):
        argv = ["main", *arguments]
        monkeypatch.setattr(sys, "argv", argv)  # where ml_collections looks for overrides
        try:
            return main.main(main.parse_flags(argv))
        except SystemExit as exit_:
            return exit_.code

    yield run
    for name in list(flags.FLAGS):
        if name.startswith("config."):
            delattr(flags.FLAGS, name)
    flags.FLAGS["config"].unparse()
    flags.FLAGS["workdir"].unparse()
    flags.FLAGS.unparse_flags()


@pytest.fixture
def tasks(monkeypatch):
    """What the tasks were called with, instead of running them."""
    calls = []
    for name in main.TASKS:
        monkeypatch.setattr(f"specjax.tasks.{name}.run", lambda *call: calls.append(call))
    return calls


def test_runs_the_task_of_the_config(run, tasks, tmp_path):
    code = run(f"{QUICKSTART}:smoke", f"--workdir={tmp_path}", "--config.max_new_tokens=5")
    [(config, workdir)] = tasks
    assert code == 0
    assert (config.task, config.max_new_tokens, config.prompts) == ("generate", 5, ("rewrite",))
    assert config.is_locked
    assert workdir == tmp_path


def test_a_workdir_is_one_process_alone(run, tasks, tmp_path, capsys):
    with alone_in(tmp_path):
        assert run(f"{QUICKSTART}:smoke", f"--workdir={tmp_path}") == 2
    assert "another process works in" in capsys.readouterr().err
    assert not tasks
    assert run(f"{QUICKSTART}:smoke", f"--workdir={tmp_path}") == 0


def test_default_workdir_is_new_and_named_after_the_config(run, tasks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(f"{QUICKSTART}:smoke") == 0
    assert re.fullmatch(r"runs/quickstart-smoke-\d{8}-\d{6}", tasks[0][1].as_posix())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([QUICKSTART, "--config.max_new_tokns=5"], ["max_new_tokns", "max_new_tokens"]),
        ([QUICKSTART, "--config.task.x=5"], ["no such config key"]),
        ([QUICKSTART, "--config.prompts[0]=chat"], ["no such config key", "prompts[0]"]),
        ([QUICKSTART, "--config.prompts.0=chat"], ["no such config key", "prompts.0"]),
        ([QUICKSTART, "--config.max_new_tokens=many"], ["config.max_new_tokens", "many"]),
        ([QUICKSTART, "--config.task=genrate"], ["'genrate'", "known are generate, evaluate"]),
        ([QUICKSTART + ":smok"], ["unknown variant 'smok'", "'smoke'"]),
        ([QUICKSTART, "--wrkdir=x"], ["wrkdir", "workdir"]),
        ([QUICKSTART, "max_new_tokens=5"], ["unexpected arguments max_new_tokens=5"]),
        (["--config=nowhere.py"], ["existing config file"]),
        ([], ["existing config file"]),
    ],
)
def test_bad_command_lines_end_in_one_line(run, tasks, capsys, arguments, parts):
    assert run(*arguments) == 2
    assert not tasks
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_errors_of_use_end_in_one_line(run, monkeypatch, capsys, kind):
    def fail(config, workdir):
        raise kind("no such target;\n give another")

    monkeypatch.setattr("specjax.tasks.generate.run", fail)
    assert run(QUICKSTART) == 2
    assert capsys.readouterr().err == "error: no such target; give another\n"


def test_faults_are_not_hidden(run, monkeypatch):
    def fail(config, workdir):
        raise TypeError("a fault of ours")

    monkeypatch.setattr("specjax.tasks.generate.run", fail)
    with pytest.raises(TypeError, match="a fault of ours"):
        run(QUICKSTART)


@pytest.mark.parametrize("where", ["importlib.import_module", "specjax.tasks.generate.run"])
def test_interrupt(run, monkeypatch, capsys, where):
    def interrupt(*args):
        raise KeyboardInterrupt

    importlib.import_module("specjax.tasks.generate")
    monkeypatch.setattr(where, interrupt)
    assert run(QUICKSTART) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_interrupted_tasks_say_how_they_go_on(run, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    assert run(f"--config={ROOT / 'configs/train.py'}") == 130
    line = capsys.readouterr().err.strip()
    assert line.startswith("Interrupted. It goes on where it was with --workdir=runs/train-")


def test_misspelt_key_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "specjax.main", QUICKSTART, "--config.temprature=1"]
    result = subprocess.run(
        [*command, f"--workdir={tmp_path / 'w'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "temprature" in result.stderr.splitlines()[-1]
    assert "temperature" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "w").exists()
