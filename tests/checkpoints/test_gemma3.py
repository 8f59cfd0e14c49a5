"""A second real model: Gemma 3 of 270 million parameters, pretrained alone (it has no chat)."""

import jax
import pytest

import specjax
from specjax.checkpoints import load_target
from specjax.evaluation.metrics import mean_accepted_length
from specjax.models.target import Target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(gemma3_package: None) -> Target:
    return load_target("gemma3-270m", dtype="float32")


def test_model(target: Target) -> None:
    assert target.stop_ids == (1, 106)
    assert (target.model.vocab_size, target.model.max_len) == (262144, 32768)
    assert target.tokenizer is not None
    assert target.tokenizer.convert_ids_to_tokens([1, 106]) == ["<eos>", "<end_of_turn>"]


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox isn't here, she said.",
        "def f(x):\n\tif x  >= 10:\n        return {'a': [x**2]}\n\n\n",
        "12345 and 3.14 <h1>",
        "😀 naïve 漢字 \u200d\x00 \U000e0001",
        "  leading and trailing  ",
    ],
)
def test_encoding_round_trips(target: Target, text: str) -> None:
    assert target.tokenizer is not None
    ids = target.tokenizer(text)["input_ids"]
    assert ids[0] == target.tokenizer.bos_token_id == 2
    assert target.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_pieces(target: Target) -> None:
    """As the tokeniser of the Hugging Face model cuts the text."""
    assert target.tokenizer is not None
    ids = target.tokenizer("Naïve 42\n\n    😀\U000e0001 漢字")["input_ids"]
    assert target.tokenizer.convert_ids_to_tokens(ids) == [
        *("<bos>", "Na", "ï", "ve", "▁", "4", "2", "\n\n", "    ", "😀"),
        *("<0xF3>", "<0xA0>", "<0x80>", "<0x81>", "▁", "漢字"),
    ]


def test_text_is_sensible_and_the_same_with_speculation(target: Target) -> None:
    prompts = ["Q: What is the capital of France?\nA:", "Germany: Berlin\nItaly: Rome\nFrance:"]
    drafter = specjax.load_drafter("prompt_lookup", target)
    options = {"max_new_tokens": 32, "chat": False}
    with jax.default_matmul_precision("highest"):
        plain, drafted = (
            specjax.generate(target, part, prompts, **options) for part in (None, drafter)
        )
    assert "Paris." in plain.texts[0]
    assert plain.texts[1].startswith(" Paris\nSpain: Madrid\n")
    assert drafted.tokens == plain.tokens
    assert mean_accepted_length(drafted.stats) > 1.5
