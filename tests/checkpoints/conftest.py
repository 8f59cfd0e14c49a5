"""Small Llama models with recorded outputs of transformers, tied and untied."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.models.target import Target


class Golden(NamedTuple):
    directory: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def check(self, target: Target, tolerance: float = 1e-4) -> None:
        """Compares the logits and every hidden state."""
        num_layers = self.config["num_hidden_layers"]
        tokens = jnp.asarray(self.outputs["input_ids"])
        out = target.forward(tokens, taps=tuple(range(-1, num_layers - 1)))
        assert out.taps is not None
        # The last recorded state is the output of the last layer after the final norm.
        states = [*np.moveaxis(np.asarray(out.taps), 2, 0), out.hidden]
        close = {"atol": tolerance, "rtol": tolerance}
        for state, wanted in zip(states, self.outputs["hidden_states"], strict=True):
            np.testing.assert_allclose(state, wanted, **close)
        np.testing.assert_allclose(out.logits, self.outputs["logits"], **close)


def read_golden(directory: Path) -> Golden:
    with np.load(directory / "golden.npz") as outputs:
        return Golden(
            directory,
            json.loads((directory / "config.json").read_text()),
            safetensors.numpy.load_file(directory / "model.safetensors"),
            dict(outputs),
        )


@pytest.fixture(params=["llama_tied", "llama_untied"])
def golden(request: pytest.FixtureRequest, data_dir: Path) -> Golden:
    return read_golden(data_dir / request.param)


@pytest.fixture
def tied(data_dir: Path) -> Golden:
    return read_golden(data_dir / "llama_tied")


@pytest.fixture
def untied(data_dir: Path) -> Golden:
    return read_golden(data_dir / "llama_untied")


@pytest.fixture
def model_dir(untied: Golden, tmp_path: Path) -> Path:
    """A copy of the untied model that a test may damage."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(untied.directory / name, directory / name)
    return directory


@pytest.fixture
def edit_config(model_dir: Path) -> Callable[..., Path]:
    """Changes entries of the copy's config.json; None takes the entry out."""

    def edit(**changes: Any) -> Path:
        file = model_dir / "config.json"
        config = json.loads(file.read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not None}
        file.write_text(json.dumps(kept))
        return model_dir

    return edit
