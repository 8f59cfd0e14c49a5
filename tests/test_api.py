"""generate and stream_text: prompts of every kind in; tokens, text and reasons out."""

import dataclasses
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specjax
from specjax.api import encode_prompts
from specjax.decoding.types import TargetOutput
from specjax.text import TextRow
from tests.reference import softmax
from tests.toys import ScriptedDrafter, jitted_step, tiny_target

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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and the end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words, and bytes that are decoded a run at a time."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "▁a"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@dataclasses.dataclass(frozen=True)
class ScriptedTarget:
    """Says the text in its parameters: the token of each position."""

    vocab_size: int
    max_len: int = 128

    def init_cache(self, batch, slots):
        return jnp.zeros((batch, slots))

    def apply(self, params, tokens, positions, cache, *, taps=(), logits="all"):
        del taps
        said = jnp.take(params, positions + 1, mode="clip")
        return TargetOutput(
            logits=None if logits == "none" else 9.0 * jax.nn.one_hot(said, self.vocab_size),
            hidden=jnp.zeros((*tokens.shape, 1)),
            taps=None,
            cache=cache,
        )


def saying(text: str) -> tuple[specjax.Target, specjax.Drafter]:
    """A target that says the text after one token, and a drafter that mostly knows it."""
    tokenizer = byte_tokenizer()
    script = np.array([0, *tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    drafts = np.where(np.arange(len(script)) % 5 == 4, 0, script)[None]
    vocab_size = tokenizer.eos_token_id + 1
    target = specjax.Target(
        ScriptedTarget(vocab_size),
        jnp.asarray(script, jnp.int32),
        tokenizer,
        (vocab_size - 1,),
        "scripted",
        "float32",
    )
    drafter = specjax.Drafter(ScriptedDrafter(), jnp.asarray(drafts, jnp.int32), "scripted")
    return target, drafter


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(tiny_target(), tokenizer=word_tokenizer())


def test_prompts_may_be_text_messages_or_ids(target):
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    ids = encode_prompts(target, ["w2 w3", messages, [5, 6], np.array([7]), jnp.array([8])])
    assert ids == [[1, 7, 8, 2], [3, 6, 1, 7, 2], [5, 6], [7], [8]]
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
            target, method, [[5, 6], [5, 6]], max_new_tokens=[8, 2], stop_ids=[new[4]], draft_len=3
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
        ([np.array([0.5])], {}, "prompt 0 must be"),
        (["a \ud800"], {}, "prompt 0 is not valid Unicode"),
        ([[{"role": "user"}]], {}, "prompt 0 has a message without text"),
        ([np.array([[1]])], {}, "prompt 0 must be"),
        ([[1]], {"policy": "some"}, "unknown policy 'some'"),
        ([[1]], {"acceptance": "typical"}, "unknown acceptance"),
        ([[1]], {"draft_len": -1}, "draft_len"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1] * 256], {}, "leaves no room"),
        ([[1]], {"n": 0}, "n must be at least 1"),
        ([[1]], {"stop": ""}, "stop string is empty"),
        ([[1]], {"stop": ["w1", ""]}, "stop string is empty"),
        ([[1], [2]], {"n": 2, "max_new_tokens": [3] * 4}, "max_new_tokens has 4 entries"),
        (
            [[1]],
            {"n": 2, "sampling": specjax.SamplingParams(temperature_B=np.ones(2))},
            "temperature has 2 entries",
        ),
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
    with pytest.raises(ValueError, match="no tokeniser, so stop strings"):
        specjax.generate(bare, None, [[1]], stop="w1")
    with pytest.raises(ValueError, match="no tokeniser"):
        specjax.stream_text(bare, None, [1])
    assert specjax.generate(bare, None, [[1]], max_new_tokens=2).texts is None
    plain = word_tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        specjax.generate(dataclasses.replace(bare, tokenizer=plain), None, ["w1"])


def test_unknown_drafter_is_named(target):
    with pytest.raises(ValueError, match="unknown drafter 'x'"):
        specjax.load_drafter("x", target)


def test_samples_of_a_prompt_are_rows_with_seeds_of_their_own(target):
    prompts, drafter = [[5, 6], [7, 8, 9]], specjax.load_drafter("prompt_lookup", target)
    options = {"draft_len": 3, "acceptance": "coupled"}
    sampling = specjax.SamplingParams(temperature_B=np.array([1.0, 0.8]), seed_B=4)
    result = specjax.generate(
        target, drafter, prompts, n=3, max_new_tokens=[6, 4], sampling=sampling, **options
    )
    rows = specjax.generate(
        target,
        drafter,
        [prompts[0]] * 3 + [prompts[1]] * 3,
        max_new_tokens=[6] * 3 + [4] * 3,
        sampling=specjax.SamplingParams(
            temperature_B=np.array([1.0] * 3 + [0.8] * 3), seed_B=np.arange(4, 10)
        ),
        **options,
    )
    assert result.tokens == rows.tokens
    assert len(set(map(tuple, result.tokens))) > 2
    assert len(result.texts) == len(result.finish_reasons) == len(result.stats.rounds_B) == 6

    chosen = dataclasses.replace(sampling, seed_B=np.array([4, 7], np.uint32))
    assert result.tokens == (
        specjax.generate(
            target, drafter, prompts, n=3, max_new_tokens=[6, 4], sampling=chosen, **options
        ).tokens
    )


def test_biases_of_each_prompt_serve_its_samples(target):
    sampling = specjax.SamplingParams(logit_bias=[{7: 1e3}, {8: 1e3}])
    result = specjax.generate(target, None, [[5], [6]], n=2, max_new_tokens=2, sampling=sampling)
    assert result.tokens == [[7, 7], [7, 7], [8, 8], [8, 8]]


def log_softmax_along(target, prompt, new, scale=1.0):
    logits = np.asarray(target.forward(np.array([prompt + new])).logits)[0, len(prompt) - 1 : -1]
    return np.log(softmax(logits * scale))[np.arange(len(new)), new]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_log_probabilities_are_those_of_the_tokens(target, temperature):
    sampling = specjax.SamplingParams(temperature_B=temperature, seed_B=3)
    options = {"max_new_tokens": 9, "sampling": sampling, "draft_len": 3}
    drafter = specjax.load_drafter("prompt_lookup", target)
    plain = specjax.generate(target, drafter, [[5, 6], [7]], **options)
    assert plain.logprobs is None
    end = plain.tokens[0][5]
    result = specjax.generate(
        target, drafter, [[5, 6], [7]], logprobs=True, stop_ids=[end], **options
    )
    assert result.tokens[0] == plain.tokens[0][: plain.tokens[0].index(end)]
    for prompt, new, logprobs in zip([[5, 6], [7]], result.tokens, result.logprobs, strict=True):
        assert len(logprobs.raw) == len(logprobs.processed) == len(new)
        np.testing.assert_allclose(logprobs.raw, log_softmax_along(target, prompt, new), atol=2e-5)
        processed = log_softmax_along(target, prompt, new, 1 / temperature) if temperature else 0
        np.testing.assert_allclose(logprobs.processed, processed, atol=2e-5)


def test_stop_strings_cut_text_tokens_and_log_probabilities(target):
    prompts, options = [[5, 6], [7, 8, 9], [5]], {"max_new_tokens": 16, "logprobs": True}
    free = specjax.generate(target, None, prompts, **options)
    # Spans three words of the first row, and cuts the first and the last of them.
    stop = re.search(r"\d w\d+ w", free.texts[0][9:]).group()
    drafter = specjax.load_drafter("prompt_lookup", target)
    for method in (None, drafter):
        got = specjax.generate(
            target, method, prompts, stop=[stop, "never"], draft_len=3, **options
        )
        for row, text in enumerate(free.texts):
            cut = text.find(stop)
            reason = "stop" if cut >= 0 else "length"
            cut = len(text) if cut < 0 else cut
            ends = np.cumsum([len(word) + 1 for word in text.split(" ")]) - 1
            count = 1 + int(np.sum(ends[:-1] < cut))
            assert got.texts[row] == text[:cut]
            assert got.tokens[row] == free.tokens[row][:count]
            assert got.finish_reasons[row] == reason
            for kind in ("raw", "processed"):
                mine, all_of_it = (getattr(r.logprobs[row], kind) for r in (got, free))
                np.testing.assert_allclose(mine, all_of_it[:count], atol=2e-5)
    assert got.finish_reasons[0] == "stop"
    assert got.stats.emitted_B[0] < free.stats.emitted_B[0]  # the row ended on the device


TEXT = "né 😀😀 and 日本\n\nthen END it, ENDED"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), TEXT),
        ("absent", TEXT),
        ("n", ""),
        ("é 😀", "n"),
        ("😀 a", "né 😀"),
        (("ENDED", "END", "本\n\nq"), "né 😀😀 and 日本\n\nthen "),
        (("本\n\nthe", "\n\nt"), "né 😀😀 and 日本"),  # the second is complete before
        (("\n", "本\n"), "né 😀😀 and 日"),  # both at once: the longer
        ("ED", TEXT[:-2]),
        ("it, ENDEX", TEXT),
    ],
)
def test_streamed_and_stopped_text_depends_on_neither_rounds_nor_drafts(stop, expected):
    target, drafter = saying(TEXT)
    results = [
        specjax.generate(target, method, [[0]], draft_len=3, stop=stop, max_new_tokens=80)
        for method in (None, drafter)
    ]
    for result in results:
        assert result.texts == [expected]
        assert result.tokens == [target.tokenizer(expected)["input_ids"]]
        assert result.finish_reasons == ["stop"]
    for method in (None, drafter):
        pieces = list(
            specjax.stream_text(target, method, [0], draft_len=3, stop=stop, max_new_tokens=80)
        )
        assert "".join(pieces) == expected
        assert all(pieces)
        assert "�" not in "".join(pieces)
    if not stop:
        assert len(pieces) > 10
        assert pieces[0] == "n"


def test_a_character_cut_by_the_limit_is_streamed_as_it_is_decoded():
    target, drafter = saying("né 😀")
    for limit in range(1, 9):
        options = {"max_new_tokens": limit, "draft_len": 3}
        [text] = specjax.generate(target, drafter, [[0]], **options).texts
        assert "".join(specjax.stream_text(target, drafter, [0], **options)) == text
    assert text == "né 😀"


def test_streamed_words_are_those_of_generate(target):
    drafter = specjax.load_drafter("prompt_lookup", target)
    options = {
        "max_new_tokens": 16,
        "sampling": specjax.SamplingParams(temperature_B=1.0, seed_B=5),
        "acceptance": "coupled",
        "draft_len": 3,
    }
    result = specjax.generate(target, drafter, ["w1 w2"], **options)
    assert "".join(specjax.stream_text(target, drafter, "w1 w2", **options)) == result.texts[0]


def test_one_prompt_is_streamed_at_a_time(target):
    unchecked = inspect.unwrap(specjax.stream_text)
    for prompts in (["w1", "w2"], [[1, 2], [3]]):
        with pytest.raises(ValueError, match="one prompt"):
            unchecked(target, None, prompts)
    message = [{"role": "user", "content": "w2"}]
    assert "".join(specjax.stream_text(target, None, message, max_new_tokens=2))
    with pytest.raises(ValueError, match="stop string is empty"):
        specjax.stream_text(target, None, "w1", stop="")


def test_text_is_settled_only_when_no_token_can_change_it(rng):
    emoji = list("😀".encode())
    fallback = fallback_tokenizer()
    end = fallback.eos_token_id
    row, shown = TextRow(fallback), []
    for token in [256, *emoji, end, *emoji[:2], 257, 256, *emoji[:3]]:
        row.add([token])
        shown.append(row.take())
    row.finish()
    assert shown[0] == "a"
    assert shown[8] == "������ b"  # one run, and it is not UTF-8
    assert set(shown[1:8] + shown[10:]) == {""}
    assert row.text == "a������ b a���"

    for tokenizer in (fallback, byte_tokenizer(), word_tokenizer()):
        for _ in range(20):
            tokens = rng.choice([*emoji, 1, 2, 3, 50, len(tokenizer) - 1], 30).tolist()
            tokens = [token for token in tokens if token < len(tokenizer)]
            row, pieces = TextRow(tokenizer), []
            for start in range(0, len(tokens), 3):
                row.add(tokens[start : start + 3])
                pieces.append(row.take())
            row.finish()
            pieces.append(row.take())
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            assert "".join(pieces) == row.text == text
            assert row.token_count == len(tokens)


def test_the_drafter_of_the_documents_works(target):
    """The example in docs/design.md, as printed."""
    text = (Path(__file__).parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict = {"__name__": "repeat"}
    exec(compile(code, "docs/design.md", "exec"), scope)
    drafter = specjax.Drafter(scope["Repeat"](), (), "repeat")
    for temperature in (0.0, 0.9):
        sampling = specjax.SamplingParams(temperature_B=temperature)
        options = {"max_new_tokens": 20, "sampling": sampling, "acceptance": "coupled"}
        expected = specjax.generate(target, None, [[5, 6]], **options)
        result = specjax.generate(target, drafter, [[5, 6]], draft_len=3, **options)
        assert result.tokens == expected.tokens


def test_a_rounds_output_outlives_its_state(target):
    drafter = specjax.load_drafter("prompt_lookup", target)
    config = specjax.DecodeConfig(2)
    static = {"target": target.model, "drafter": drafter.model, "config": config}
    state = specjax.init_decode_state(target.params, (), [[5, 6]], max_new_tokens=9, **static)
    state, output = jitted_step(target.params, (), state, **static)
    specjax.decode(target.params, (), state, **static)
    assert [leaf.tolist() for leaf in jax.tree.leaves(output)]


def test_printing_a_model_shows_no_weights(target):
    assert len(repr(target)) < 1000
