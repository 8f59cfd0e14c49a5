from collections.abc import Iterator
from pathlib import Path

import pytest

from specjax.checkpoints import CheckpointError, dtype, load_target
from specjax.checkpoints.dtype import resolve_dtype

from .conftest import Golden


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces the measurement by fixed times, in an empty cache; lists what was measured."""
    asked = []
    seconds = {"float32": 0.010, "bfloat16": 0.005}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dtype, "_measure", lambda name: asked.append(name) or seconds[name])
    dtype._faster_dtype.cache_clear()
    yield asked
    dtype._faster_dtype.cache_clear()


def test_given_dtypes_are_not_measured(measured: list[str]) -> None:
    assert resolve_dtype("float32") == "float32"
    assert resolve_dtype("bfloat16") == "bfloat16"
    assert measured == []


def test_auto_measures_once_and_remembers(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_dtype("auto") == resolve_dtype("auto") == "bfloat16"
    first = capsys.readouterr().out
    assert first.count("\n") == 1
    assert "dtype=auto: bfloat16 on" in first
    assert "10.00 ms in float32 and 5.00 ms in bfloat16 (measured now)" in first
    dtype._faster_dtype.cache_clear()  # as in the next process
    assert resolve_dtype("auto") == "bfloat16"
    assert "measured earlier" in capsys.readouterr().out
    assert measured == ["float32", "bfloat16"]


def test_auto_wants_a_clear_gain(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32": 0.010, "bfloat16": 0.0095}
    monkeypatch.setattr(dtype, "_measure", seconds.__getitem__)
    assert resolve_dtype("auto") == "float32"


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\xff"])
def test_damaged_cache_is_measured_again(measured: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "specjax").mkdir()
    (tmp_path / "specjax" / "dtype.json").write_text(text, encoding="latin-1")
    assert resolve_dtype("auto") == "bfloat16"
    assert measured == ["float32", "bfloat16"]


def test_cache_that_cannot_be_written(measured: list[str], tmp_path: Path) -> None:
    (tmp_path / "specjax").touch()  # a file where the folder should be
    assert resolve_dtype("auto") == "bfloat16"


def test_other_flags_are_measured_again(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_dtype("auto")
    dtype._faster_dtype.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--some_flag")
    resolve_dtype("auto")
    assert measured == ["float32", "bfloat16"] * 2


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_measurement(name: str) -> None:
    assert 0 < dtype._measure(name, repeats=1) < 60


@pytest.mark.parametrize("name", ["float16", "fp32", ""])
def test_wrong_dtype(untied: Golden, name: str) -> None:
    with pytest.raises(CheckpointError, match="give 'float32', 'bfloat16' or 'auto'"):
        load_target(untied.directory, dtype=name)
