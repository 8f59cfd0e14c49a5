import importlib.util
from pathlib import Path

import pytest

import specjax
from tests.evaluation.tiny_target import tiny_target

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def get_config():
    """`get_config` of a config file, by name, with a tiny target's settings."""

    def load(name, **overrides):
        spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config("smoke")
        config.lock()
        if name == "quickstart":
            overrides = {"drafter": "prompt_lookup", **overrides}  # its own is SmolLM2's
        small = {"max_new_tokens": 6, "draft_len": 3, "compilation_cache": "off"}
        config.update({key: value for key, value in small.items() if key in config})
        config.update_from_flattened_dict(overrides)
        return config

    return load


@pytest.fixture
def tiny(monkeypatch):
    """The target that tasks load."""
    target = tiny_target()
    monkeypatch.setattr(specjax, "load_target", lambda source, *, dtype: target)
    return target
