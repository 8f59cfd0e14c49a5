"""generate: prompts of every kind in, tokens and reasons out."""

import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specjax
from specjax.api import encode_prompts
from tests.toys import tiny_target

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<user>", "<assistant>", "<system>", "", *[f"w{i}" for i in range(56)]]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(tiny_target(), tokenizer=word_tokenizer())


def test_prompts_may_be_text_messages_or_ids(target):
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    ids = encode_prompts(target, ["w2 w3", messages, [5, 6], np.array([7])])
    assert ids == [[1, 7, 8, 2], [3, 6, 1, 7, 2], [5, 6], [7]]
    assert encode_prompts(target, ["w2 w3"], chat=False) == [[7, 8]]


def test_empty_text_is_valid_through_a_chat_template(target):
    long = " ".join(["w4"] * 40)
    result = specjax.generate(target, None, ["", "w1", long], max_new_tokens=3)
    assert [len(row) for row in result.tokens] == [3, 3, 3]
    alone = specjax.generate(target, None, [""], max_new_tokens=3)
    assert alone.tokens == result.tokens[:1]


def test_result_leaves_out_prompt_and_end_token(target):
    free = specjax.generate(target, None, [[5, 6]], max_new_tokens=8, stop_ids=())
    assert free.finish_reasons == ["length"]
    [new] = free.tokens
    drafter = specjax.load_drafter("prompt_lookup", target)
    for method in (None, drafter):
        result = specjax.generate(
            target, method, [[5, 6], [5, 6]], max_new_tokens=[8, 2], stop_ids=[new[4]]
        )
        assert result.tokens == [new[: new.index(new[4])], new[:2]]
        assert result.finish_reasons == ["stop", "length"]
        assert result.texts == [target.tokenizer.decode(row) for row in result.tokens]
        assert result.stats.rounds_B.shape == (2,)
        assert result.prefill_seconds > 0
        assert result.decode_seconds > 0


def test_the_targets_own_stop_ids_are_the_default(target):
    [new] = specjax.generate(target, None, [[5, 6]], max_new_tokens=8).tokens
    stopping = dataclasses.replace(target, stop_ids=(new[2],))
    result = specjax.generate(stopping, None, [[5, 6]], max_new_tokens=8)
    assert result.tokens == [new[: new.index(new[2])]]
    assert result.finish_reasons == ["stop"]


def test_equal_room_shares_one_program(target):
    drafter = specjax.load_drafter("prompt_lookup", target)
    options = {"max_len": 200, "draft_len": 3}
    long = specjax.generate(target, drafter, [[5, 6]], max_new_tokens=20, **options)
    short = specjax.generate(target, drafter, [[5, 6]], max_new_tokens=7, **options)
    assert short.tokens[0] == long.tokens[0][:7]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ("w1", {}, "one string"),
        ([[]], {}, "row 0 has no tokens"),
        ([""], {"chat": False}, "row 0 has no tokens"),
        ([[True]], {}, "prompt 0 must be"),
        ([np.array([[1]])], {}, "prompt 0 must be"),
        ([[1]], {"policy": "some"}, "unknown policy 'some'"),
        ([[1]], {"acceptance": "typical"}, "unknown acceptance"),
        ([[1]], {"draft_len": -1}, "draft_len"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1] * 256], {}, "leaves no room"),
    ],
)
def test_bad_input_is_named(target, prompts, options, message):
    drafter = specjax.load_drafter("prompt_lookup", target)
    with pytest.raises(ValueError, match=message):
        specjax.generate(target, drafter, prompts, **options)


def test_text_needs_a_tokeniser_and_chat_a_template():
    bare = tiny_target()
    with pytest.raises(ValueError, match="no tokeniser"):
        specjax.generate(bare, None, ["w1"])
    assert specjax.generate(bare, None, [[1]], max_new_tokens=2).texts is None
    plain = word_tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        specjax.generate(dataclasses.replace(bare, tokenizer=plain), None, ["w1"])


def test_unknown_drafter_is_named(target):
    with pytest.raises(ValueError, match="unknown drafter 'x'"):
        specjax.load_drafter("x", target)
