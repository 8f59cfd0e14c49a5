"""Runs a task: python -m specjax.main --config=configs/NAME.py[:variant] [--config.key=value].

Every key of the config can be overridden on the command line. The task writes its report
to --workdir and prints it.
"""

import importlib
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from specjax.files import alone_in

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file of the run, FILE[:variant].")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for the results. By default a new one: runs/NAME-DATE-TIME."
)

# Modules of specjax.tasks.
TASKS = ("generate", "evaluate", "cache", "train", "export")
GO_ON = ("evaluate", "cache", "train")  # those that go on where they were


def main(argv: Sequence[str]) -> int:
    """Runs the task of the parsed flags; the process's exit code."""
    if len(argv) > 1:
        return _fail(f"unexpected arguments {' '.join(argv[1:])}: overrides are --config.key=value")
    if not isinstance(_CONFIG.value, ConfigDict):
        return _fail("give an existing config file, as in --config=configs/quickstart.py")
    config = _CONFIG.value
    if config.get("task") not in TASKS:
        return _fail(f"unknown config.task {config.get('task')!r}: known are {', '.join(TASKS)}")
    workdir = Path(_WORKDIR.value) if _WORKDIR.value else _default_workdir()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it may not be UTF-8; outputs are
    # transformers says that it found no PyTorch, which it is not needed for here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        # Imported here because that takes seconds, in which it may be interrupted.
        task = importlib.import_module(f"specjax.tasks.{config.task}")
        with alone_in(workdir):
            task.run(config, workdir)
    except (ValueError, OSError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        how = f" It goes on where it was with --workdir={workdir}" if config.task in GO_ON else ""
        print(f"\nInterrupted.{how}", file=sys.stderr)
        return 130
    return 0


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line; one line and exit code 2 for what it does not allow."""
    flags.FLAGS.verbosity = logging.WARNING  # unless the flag says otherwise
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        # An error inside the config file comes with its traceback; the last line says what.
        sys.exit(_fail(str(error).strip().splitlines()[-1]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = error.args[0]
        if isinstance(reason, KeyError):  # its own text would be quoted a second time
            reason = reason.args[0]
        sys.exit(_fail(f"no such config key: {reason}"))


def _default_workdir() -> Path:
    file, _, variant = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    name = "-".join(filter(None, (Path(file).stem, variant, time.strftime("%Y%m%d-%H%M%S"))))
    return Path("runs") / name


def _fail(message: object) -> int:
    print("error:", *str(message).split(), file=sys.stderr)  # on one line
    return 2


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
