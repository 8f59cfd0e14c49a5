"""Tokenisers from GGUF metadata, as llama.cpp reads it, without PyTorch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specjax.checkpoints.architectures import get_size
from specjax.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# tokenizer.ggml.token_type
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")

# Those that compose letters and their accents first (Unicode's NFC).
_COMPOSED = ("qwen2", "deepseek-r1-qwen")

# tokenizer.ggml.pre: regular expressions that cut the text into words, one after the other.
_SPLITS = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "mpt", "olmo"), (_WORDS,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "minerva-7b"), (r"\p{N}", _WORDS)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_LLAMA3,)
    ),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(_COMPOSED, (_QWEN2,)),
}
# Those whose words may be whole tokens that no sequence of merges reaches, and which
# begin every text with the beginning-of-sequence token unless the file says otherwise.
_WHOLE_WORDS = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))

# What the metadata must be where it is there; of lists, every element.
_TYPES: dict[str, type] = {
    **dict.fromkeys(("model", "pre"), str),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), bool),
}
_ELEMENT_TYPES = {"tokens": str, "merges": str, "token_type": int, "scores": (int, float)}


def build_tokenizer(metadata: Mapping[str, Any]) -> "PreTrainedTokenizerFast | None":
    """The tokeniser and chat template a GGUF file describes; None if it has none.

    Raises:
      CheckpointError: a kind of tokeniser that is not supported, or damaged metadata.
    """
    _check_types(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or not metadata.get("tokenizer.ggml.tokens"):
        return None
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise CheckpointError(
            f"the tokeniser {kind!r} (tokenizer.ggml.model) is not supported: known are "
            f"{', '.join(builders)}; load the model from its Hugging Face directory"
        )
    try:
        tokenizer = builders[kind](metadata)
        _add_tokens(tokenizer, metadata)
        return _wrap(tokenizer, metadata)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"the tokeniser's metadata is damaged: {error!r}") from error


def _check_types(metadata: Mapping[str, Any]) -> None:
    keys = {"tokenizer.chat_template": str}
    keys |= {f"tokenizer.ggml.{key}": kind for key, kind in _TYPES.items()}
    wrong = [key for key, kind in keys.items() if not isinstance(metadata.get(key, kind()), kind)]
    for key, kind in _ELEMENT_TYPES.items():
        value = metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list) or not all(isinstance(x, kind) for x in value):
            wrong.append(f"tokenizer.ggml.{key}")
    if wrong:
        raise CheckpointError(
            f"the metadata {', '.join(wrong)} is of the wrong type: the file is damaged; "
            "download or convert it again"
        )


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise CheckpointError(
            f"the pre-tokeniser {pre!r} (tokenizer.ggml.pre) is not supported: known are "
            f"{', '.join(_SPLITS)}; load the model from its Hugging Face directory"
        )
    merges = metadata["tokenizer.ggml.merges"]
    model = models.BPE(
        vocab=_vocabulary(metadata),
        merges=[tuple(merge.split(" ")) for merge in merges],
        ignore_merges=pre in _WHOLE_WORDS,
    )
    tokenizer = Tokenizer(model)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=_merges_by_score(metadata),
            unk_token=_special_token(metadata, "unknown_token_id"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merges_by_score(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose token scores highest: so are the merges ordered."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    scores = {
        token: score
        for token, kind, score in zip(tokens, types, metadata["tokenizer.ggml.scores"], strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Makes control tokens (special) and user-defined ones match as a whole in any text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))

    def added(wanted: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]

    tokenizer.add_special_tokens(added(_CONTROL, special=True))
    tokenizer.add_tokens(added(_USER_DEFINED, special=False))


def _wrap(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast  # slow to import

    special = {
        name: _special_token(metadata, key)
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    special["pad_token"] = special["pad_token"] or special["eos_token"]
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    add_bos = sentencepiece or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    before = [special["bos_token"]] * bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    after = [special["eos_token"]] * bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    around = [token for token in (*before, *after) if token is not None]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _special_token(metadata: Mapping[str, Any], key: str) -> str | None:
    tokens, key = metadata["tokenizer.ggml.tokens"], f"tokenizer.ggml.{key}"
    if key not in metadata:
        return None
    index = get_size(metadata, key)
    if index >= len(tokens):
        raise CheckpointError(f"{key} is {index}, outside the {len(tokens)} tokens of the file")
    return tokens[index]
