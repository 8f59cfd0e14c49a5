import itertools
from typing import Any

import pytest

from specjax.checkpoints import CheckpointError
from specjax.checkpoints.gguf_tokenizer import build_tokenizer

from .gguf_files import BYTES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def metadata(**entries: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def byte_level(**entries: Any) -> dict[str, Any]:
    tokens = [*BYTES, "he", "ll", "hello", "<s>", "</s>", "<think>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    ids = {"bos_token_id": len(tokens) - 3, "eos_token_id": len(tokens) - 2}
    fixed = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": ["h e", "l l"]}
    return metadata(**fixed | ids | entries)


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", "!)", " \n", "\n", "x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "!)", " \n", "\n", "x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "!)", " \n\n", "x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "!)", " \n\n", "x"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", "!)", " \n\n", "x"]),
        ("default", ["It", "'", "s", " ", "123", "45", "!)", " \n", "\n", "x"]),
    ],
)
def test_words(pre: str, words: list[str]) -> None:
    tokenizer: Any = build_tokenizer(byte_level(pre=pre))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("".join(words))
    assert [tokenizer.backend_tokenizer.decoder.decode([word]) for word, _ in split] == words


def test_merges_and_special_tokens() -> None:
    tokenizer: Any = build_tokenizer(byte_level(pre="gpt-2"))
    assert pieces(tokenizer, "hello</s> <think>") == ["he", "ll", "o", "</s>", "Ġ", "<think>"]
    ids = tokenizer("hello</s><think>é")["input_ids"]
    assert tokenizer.decode(ids) == "hello</s><think>é"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<think>é"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        *("<s>", "</s>"),
        "</s>",  # no padding token in the file
    )


def test_llama_3_takes_whole_words_and_begins_with_bos() -> None:
    tokenizer: Any = build_tokenizer(byte_level(pre="llama-bpe"))
    assert pieces(tokenizer, "hello") == ["<s>", "hello"]
    tokenizer = build_tokenizer(byte_level(pre="llama-bpe", add_bos_token=False))
    assert pieces(tokenizer, "hello") == ["hello"]
    tokenizer = build_tokenizer(byte_level(pre="gpt-2", add_bos_token=True, add_eos_token=True))
    assert pieces(tokenizer, "he") == ["<s>", "he", "</s>"]


def test_qwen_composes_letters() -> None:
    tokenizer: Any = build_tokenizer(byte_level(pre="qwen2"))
    assert pieces(tokenizer, "e\u0301") == pieces(tokenizer, "\u00e9") == ["Ã", "©"]


PIECES = {"▁": -1.0, "▁he": -2.0, "he": -3.0, "llo": -4.0, "ll": -5.0, "lo": -6.0, "▁hello": -7.0}
LETTERS = {letter: -100.0 - i for i, letter in enumerate("helo, wrd")}


def sentencepiece(**entries: Any) -> dict[str, Any]:
    first = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    scores = PIECES | {letter.replace(" ", "▁"): s for letter, s in LETTERS.items()} | {"▁": -1.0}
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scores)]
    fixed = {
        "model": "llama",
        "tokens": [*first, *scores],
        "token_type": types,
        "scores": [0.0] * len(first) + list(scores.values()),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return metadata(**fixed | entries)


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: always the best-scored neighbours, the leftmost of equals."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        best = max((s for s in joined if s in scores), key=scores.__getitem__, default=None)
        if best is None:
            return symbols
        i = joined.index(best)
        symbols[i : i + 2] = [best]


@pytest.mark.parametrize("text", ["hello", "hello, world", "  hell lo", "ohello he"])
def test_sentencepiece(text: str) -> None:
    entries = sentencepiece()
    tokenizer: Any = build_tokenizer(entries)
    tokens = entries["tokenizer.ggml.tokens"]
    types = entries["tokenizer.ggml.token_type"]
    every = zip(tokens, types, entries["tokenizer.ggml.scores"], strict=True)
    scores = {token: score for token, kind, score in every if kind == NORMAL}
    assert pieces(tokenizer, text) == ["<s>", *merge_by_score(text, scores)]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_sentencepiece_bytes_and_specials() -> None:
    tokenizer: Any = build_tokenizer(sentencepiece(add_bos_token=False))
    assert pieces(tokenizer, "é\n")[1:] == ["<0xC3>", "<0xA9>", "<0x0A>"]
    assert pieces(tokenizer, "he</s>")[-1] == "</s>"
    assert tokenizer.decode(tokenizer("é\nhe")["input_ids"]) == "é\nhe"
    plain: Any = build_tokenizer(sentencepiece(add_bos_token=False, add_space_prefix=False))
    assert pieces(plain, "he") == ["he"]
    assert plain.decode(plain(" he")["input_ids"]) == " he"


def test_sentencepiece_user_defined_runs() -> None:
    """Gemma's runs of spaces and newlines are tokens that no merge takes apart."""
    runs = ["  ", "   ", "\n", "\n\n", "<h1>"]
    entries = sentencepiece(add_bos_token=True, add_space_prefix=False)
    for key, more in {
        "tokens": runs,
        "scores": [-1000.0] * 5,
        "token_type": [USER_DEFINED] * 5,
    }.items():
        entries[f"tokenizer.ggml.{key}"] += more
    tokenizer: Any = build_tokenizer(entries)
    text = "he   he he\n\n\n    he<h1>\n"
    assert pieces(tokenizer, text) == [
        *("<s>", "he", "   ", "he", "▁he", "\n\n", "\n"),
        *("   ", "▁he", "<h1>", "\n"),
    ]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_chat_template() -> None:
    entries = byte_level(pre="gpt-2") | {
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    }
    tokenizer: Any = build_tokenizer(entries)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<s>hello</s>"


def test_no_tokenizer() -> None:
    assert build_tokenizer({}) is None
    assert build_tokenizer(metadata(model="no_vocab")) is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (byte_level(pre="poro-chat"), r"pre-tokeniser 'poro-chat'.*known are default, gpt-2"),
        (byte_level(model="t5"), r"tokeniser 't5'.*known are gpt2, llama"),
        (byte_level(merges=["h zz"]), r"metadata is damaged"),
        (byte_level(merges=["h"]), r"metadata is damaged"),
        (byte_level(eos_token_id=999), r"eos_token_id is 999, outside the \d+ tokens"),
        (sentencepiece(scores=[0.0]), r"metadata is damaged"),
        (sentencepiece(unknown_token_id=-1), r"unknown_token_id must be a whole number"),
        (byte_level(token_type=[1]), r"metadata is damaged"),
        (byte_level(model=[1]), r"tokenizer\.ggml\.model is of the wrong type"),
        (byte_level(pre=[]), r"tokenizer\.ggml\.pre is of the wrong type"),
        (byte_level(token_type=3), r"tokenizer\.ggml\.token_type is of the wrong type"),
        (byte_level(tokens=[1, 2]), r"tokenizer\.ggml\.tokens is of the wrong type"),
        (byte_level(add_bos_token="no"), r"tokenizer\.ggml\.add_bos_token is of the wrong type"),
        (
            byte_level() | {"tokenizer.chat_template": ["a"]},
            r"tokenizer\.chat_template is of the wrong type",
        ),
    ],
)
def test_refused_tokenizers(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(entries)
