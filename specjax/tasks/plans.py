"""What a training task trains: objective, parameters, data, and how the result is saved."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

import specjax
from specjax.checkpoints.drafters import save_drafter
from specjax.checkpoints.dtype import resolve_dtype
from specjax.checkpoints.files import check_place
from specjax.checkpoints.head import TargetHead, has_head, load_head
from specjax.checkpoints.targets import load_target, save_target, told_config
from specjax.data.corpus import (
    PackedRow,
    begin_token,
    find_documents,
    pack,
    read_documents,
    single_rows,
    train_tokenizer,
)
from specjax.data.target_cache import TargetCache, TokenSequence
from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import (
    attach_target,
    drafters_own,
    language_model_head,
    split_params,
)
from specjax.drafters.dspark import DSpark
from specjax.drafters.dspark_init import init_dspark, with_block_size
from specjax.drafters.mtp import MTP
from specjax.drafters.mtp_init import init_mtp
from specjax.files import digest, replacing
from specjax.models.config import TransformerConfig
from specjax.models.target import Target, fingerprint
from specjax.models.transformer import TransformerTarget
from specjax.tasks.common import check_sources, given_texts
from specjax.training.features import CachedStates, OnlineStates, TextAlone, TrainingData
from specjax.training.losses import LossWeights
from specjax.training.mtp_losses import MTPLossWeights
from specjax.training.objectives import (
    DSparkObjective,
    JointObjective,
    MTPObjective,
    Objective,
    divide,
)

_ALGORITHMS = ("dspark", "mtp", "none")
_NEW = "new"  # config.target of a model that is trained from scratch


class Plan(NamedTuple):
    """A training run.

    Attributes:
      objective: what is minimised.
      trained: its parameters that learn, as they start.
      fixed: its parameters that do not.
      data: the sequences.
      save: writes what was learnt, and returns the folders by what they hold.
    """

    objective: Objective
    trained: PyTree
    fixed: PyTree
    data: TrainingData
    save: Callable[[PyTree], dict[str, Path]]


def make_plan(config: ConfigDict, workdir: Path) -> Plan:
    """What the config asks for: a drafter of a given target, or a target and its drafter.

    Raises:
      ValueError: settings that are wrong or contradict each other, or what cannot be read.
    """
    if config.algorithm not in _ALGORITHMS:
        raise ValueError(f"config.algorithm must be one of {_ALGORITHMS}, got {config.algorithm!r}")
    check_sources(config)
    check_place(workdir / "drafter", replace=True)
    if config.algorithm == "none" and config.start:
        raise ValueError("config.start names a drafter, and algorithm='none' trains none")
    if config.train_target:
        check_place(workdir / "target", replace=True, kind="target")
        return _joint(config, workdir)
    if config.algorithm == "none" or config.target == _NEW:
        raise ValueError(
            "algorithm='none' and target='new' are for training a target: set "
            "config.train_target=True"
        )
    return _alone(config, workdir)


def _alone(config: ConfigDict, workdir: Path) -> Plan:
    """A drafter of a target that stays as it is."""
    cache = TargetCache(Path(config.cache)) if config.cache else None
    if cache is not None:
        target, mask_token_id = _of_cache(config, cache)
        texts, taps = cache.texts, cache.taps
    else:
        target, mask_token_id = specjax.load_target(config.target, dtype=config.dtype), None
        texts, taps = _given(config, target), None
    _check_texts(texts, target, config.training.max_len)
    objective, params = _drafter(config, target, texts, taps, mask_token_id)
    if cache is not None and isinstance(objective, MTPObjective) and objective.model.taps:
        raise ValueError(
            "a cache has no output of the target's last layer, which hidden_norm='pre' needs: "
            "train with 'post', or online, from the cache's texts.npz (config.texts)"
        )
    if isinstance(objective, MTPObjective) and not any(objective.weights.lambdas):
        raise ValueError(
            "mtp_losses.scale is 0, and nothing else is learnt for a target that stays as it is"
        )
    head = language_model_head(target)
    if cache is not None:
        with tqdm(total=sum(cache.lengths), unit=" normalizers", dynamic_ncols=True) as bar:
            data = CachedStates(cache, head, objective.model.taps, bar.update)
        data.identity |= target.identity()
    else:
        data = OnlineStates(texts, target, objective.model.taps)
    trained, fixed = divide(params, head)
    data.identity |= _origin(config, trained | fixed.params)

    def save(trained: PyTree) -> dict[str, Path]:
        params = {**trained, **fixed.params}
        return _save_drafter(workdir, objective.model, params, target)

    return Plan(objective, trained, fixed, data, save)


def _joint(config: ConfigDict, workdir: Path) -> Plan:
    """A target, new or not, and the drafter that learns beside it, if any."""
    if config.cache:
        raise ValueError("a cache holds the states of a target that stays as it is: give texts")
    target, rows = _target_and_rows(config, workdir)
    _check_texts(rows, target, config.training.max_len)
    told_config(target)  # before it is trained: it is to be saved
    assert isinstance(target.model, TransformerTarget)  # it was loaded by us
    objective, own, fixed = None, {}, {}
    if config.algorithm != "none":
        objective, params = _drafter(config, target, rows)
        own, fixed = split_params(params)
        fixed = drafters_own(fixed)
    joint = JointObjective(target.model, objective, _compute_dtype(config))

    def save(trained: PyTree) -> dict[str, Path]:
        folder = workdir / "target"
        save_target(folder, dataclasses.replace(target, params=trained["target"]), replace=True)
        folders = {"target": folder}
        if objective is not None:
            # What the file holds may be rounded, and a drafter records whose it is.
            learnt = load_target(str(folder), dtype="float32")
            params = attach_target({**trained["drafter"], **fixed}, learnt)
            folders |= _save_drafter(workdir, objective.model, params, learnt)
        return folders

    trained, data = {"target": target.params, "drafter": own}, TextAlone(rows)
    if config.target != _NEW:
        data.identity |= target.identity()
    data.identity |= _origin(config, own | fixed)
    return Plan(joint, trained, fixed, data, save)


def _of_cache(config: ConfigDict, cache: TargetCache) -> tuple[Target, int | None]:
    """What a cache has of its target; of one that has nothing, the target that is named.

    Raises:
      ValueError: the target that is named is of another width.
    """
    if has_head(cache.directory):
        return load_head(cache.directory)
    target = specjax.load_target(config.target, dtype=config.dtype)
    named = cache.manifest.get("target_model_name_or_path")
    print(f"{cache.directory}, of {named!r}, has no head: it is trained with that of {target.name}")
    width = language_model_head(target).weight_VD.shape[1]
    if width != cache.width:
        raise ValueError(
            f"{target.name} is {width} wide and the cache {cache.width}: set config.target to "
            f"{named!r}, which the cache is of"
        )
    return target, None


def _origin(config: ConfigDict, params: PyTree) -> dict[str, Any]:
    """How the drafter's parameters start, for the run's identity."""
    if config.start:
        return {"start": fingerprint(drafters_own(params))}
    layers_from = list(config.drafter.layers_from) if config.algorithm == "dspark" else []
    return {"layers_from": layers_from}


def _save_drafter(
    workdir: Path, model: DSpark | MTP, params: PyTree, target: Target
) -> dict[str, Path]:
    folder = workdir / "drafter"
    save_drafter(folder, model, params, target, replace=True)
    return {"drafter": folder}


def _given(config: ConfigDict, target: Target) -> list[TokenSequence]:
    """The texts to train on without a cache."""
    if config.corpus:
        rows = corpus_rows(config, _documents(config), target, apart=True)
        return [TokenSequence(row.tokens_T, row.loss_mask_T) for row in rows]
    named = config.texts or config.prompts or config.dataset
    texts = given_texts(config, target) if named else None
    if texts is None:
        cache = "" if config.train_target else "config.cache, "
        raise ValueError(
            f"nothing to train on: set {cache}config.texts or config.corpus, or "
            f"config.answers='given' with config.prompts or config.dataset"
        )
    return texts


def _check_texts(texts: Sequence[Any], target: Target, max_len: int) -> None:
    """Makes sure that the target can read the texts, and tells which are cut to `max_len` tokens.

    Raises:
      ValueError: ids outside its vocabulary, or more tokens than its context.
    """
    learnt = sum(int(np.sum(text.loss_mask_T[:max_len])) for text in texts)
    print(f"{len(texts)} sequences for {target.name}, with {learnt} tokens to learn")
    largest = max(int(np.max(text.tokens_T, initial=0)) for text in texts)
    if largest >= target.model.vocab_size:
        raise ValueError(
            f"the texts have the token id {largest}, and the vocabulary of {target.name} has "
            f"{target.model.vocab_size} tokens: they are of another tokeniser"
        )
    longer = sum(len(text.tokens_T) > max_len for text in texts)
    if longer:
        print(f"{longer} of {len(texts)} sequences are cut to config.training.max_len={max_len}")
    longest = min(max(len(text.tokens_T) for text in texts), max_len)
    if longest > target.model.max_len:
        raise ValueError(
            f"the texts have up to {longest} tokens, and the context of {target.name} "
            f"{target.model.max_len}: set config.training.max_len to that"
        )


def _target_and_rows(config: ConfigDict, workdir: Path) -> tuple[Target, list[PackedRow]]:
    """The target to train, and the rows to train it on."""
    if config.target != _NEW:
        target = specjax.load_target(config.target, dtype="float32")
        if not config.corpus:
            return target, list(single_rows(_given(config, target)))
        texts = _documents(config)
    else:
        if not config.corpus:
            raise ValueError("target='new' learns from plain text: set config.corpus")
        texts = _documents(config)
        target = new_target(config.model, _tokenizer(config, texts, workdir), seed=config.seed)
    # A DSpark drafter's blocks see all that is before them in the row.
    return target, corpus_rows(config, texts, target, apart=config.algorithm == "dspark")


def _documents(config: ConfigDict) -> list[str]:
    pattern = "" if config.corpus == "stdlib" else config.corpus
    texts = list(read_documents(find_documents(pattern)))
    if not texts:
        raise ValueError(f"no file of the corpus {config.corpus!r} holds text in UTF-8")
    return texts


def _tokenizer(config: ConfigDict, texts: list[str], workdir: Path) -> Any:
    """config.tokenizer's, or one that is trained on the texts and kept in the workdir."""
    from transformers import AutoTokenizer  # slow to import

    count = config.model.vocab_size
    folder = workdir / f"tokenizer-{digest([texts, count])[:8]}"
    if not config.tokenizer and not folder.exists():
        tokenizer = train_tokenizer(texts, count)
        with replacing(folder) as partial:
            tokenizer.save_pretrained(partial)
    source = config.tokenizer or str(folder)
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:  # the libraries raise whatever they like
        raise ValueError(f"cannot load the tokeniser {source!r}: {error}") from error


def corpus_rows(
    config: ConfigDict, texts: Sequence[str], target: Target, *, apart: bool
) -> list[PackedRow]:
    """Documents, shuffled and packed; `apart`, no two in a row.

    Raises:
      ValueError: a target without tokeniser or end token.
    """
    tokenizer: Any = target.tokenizer
    if tokenizer is None or not target.stop_ids:
        raise ValueError(f"a corpus needs a tokeniser and an end token, which {target.name} lacks")
    order = np.random.default_rng(config.seed).permutation(len(texts))
    # A special token that a document spells out is text like any other.
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    ids = (tokenizer(texts[i], **plain)["input_ids"] for i in order)
    options = target.stop_ids[0], config.training.max_len, begin_token(tokenizer)
    if apart:
        return [row for document in ids for row in pack([document], *options)]
    return list(pack(ids, *options))


def new_target(sizes: ConfigDict, tokenizer: Any, *, seed: int) -> Target:
    """A model of Llama's kind with random weights.

    Args:
      sizes: fields of `TransformerConfig`, whose `vocab_size` gives way to the tokeniser's.
      tokenizer: its largest id gives the model's vocabulary, its end token the only one that ends.
      seed: of the weights.

    Raises:
      ValueError: sizes that make no model, or a tokeniser without an end token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokeniser has no end token (eos_token)")
    largest = max(tokenizer.get_vocab().values())  # ids may have gaps: there can be fewer tokens
    options = {**sizes, "vocab_size": largest + 1}
    model = TransformerTarget(TransformerConfig(architecture="llama", norm_eps=1e-5, **options))
    make = jax.jit(lambda key: nn.unbox(model.init_params(key)))
    return Target(
        model, make(jax.random.key(seed)), tokenizer, (tokenizer.eos_token_id,), _NEW, "float32"
    )


def _compute_dtype(config: ConfigDict) -> str:
    try:
        return resolve_dtype(config.compute_dtype)
    except ValueError as error:
        raise ValueError(f"config.compute_dtype: {error}") from error


def _drafter(
    config: ConfigDict,
    target: Target,
    texts: Sequence[Any],
    taps: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
) -> tuple[DSparkObjective | MTPObjective, PyTree]:
    """The objective and all parameters of a new drafter, or of the one to go on from."""
    if config.algorithm == "mtp":
        weights = MTPLossWeights(**config.mtp_losses)
        model, params = _mtp(config, target, texts)
        return MTPObjective(model, weights, _compute_dtype(config)), params
    weights = LossWeights(**config.losses)
    if config.mask_token_id is not None:
        mask_token_id = config.mask_token_id
    model, params = _dspark(config, target, texts, taps, mask_token_id)
    return DSparkObjective(model, weights, config.num_anchors, _compute_dtype(config)), params


def _mtp(config: ConfigDict, target: Target, texts: Sequence[Any]) -> tuple[MTP, PyTree]:
    if config.start:
        model, params = _start(config, target, MTP)
        _check_depth(model.config.depth, texts, config.training.max_len)
        return model, params
    options = dict(config.mtp)
    _check_depth(options["depth"], texts, config.training.max_len)
    return init_mtp(
        target,
        jax.random.key(config.seed + 1),
        draft_vocab=_draft_vocab(config, texts, options.pop("draft_vocab"), target),
        dtype="float32",
        **options,
    )


def _check_depth(depth: int, texts: Sequence[Any], max_len: int) -> None:
    longest = min(max(len(text.tokens_T) for text in texts), max_len)
    if depth > longest - 2:
        raise ValueError(
            f"module {depth} has nothing to learn from texts of up to {longest} tokens: reduce "
            f"config.mtp.depth, or give longer texts (config.training.max_len is {max_len})"
        )


def _dspark(
    config: ConfigDict,
    target: Target,
    texts: Sequence[Any],
    taps: tuple[int, ...] | None,
    mask_token_id: int | None,
) -> tuple[DSpark, PyTree]:
    """`taps` are those to choose where none are named."""
    options = dict(config.drafter)
    if config.start:
        model, params = _start(config, target, DSpark)
        block_size = options["block_size"]
        return model if block_size is None else with_block_size(model, block_size), params
    draft_vocab = _draft_vocab(config, texts, options.pop("draft_vocab"), target)
    layers_from = options.pop("layers_from")
    if options["block_size"] is None:
        del options["block_size"]
    options["candidates"] = options["candidates"] or None  # all
    options["confidence_with_markov"] &= options["markov_rank"] > 0
    if layers_from and isinstance(target, TargetHead):
        target = _whole(config, target)
    return init_dspark(
        target,
        jax.random.key(config.seed + 1),  # a new target has the seed itself
        taps=options.pop("taps") or taps,
        mask_token_id=mask_token_id,
        draft_vocab=draft_vocab,
        layers_from=layers_from,
        dtype="float32",
        **options,
    )


def _whole(config: ConfigDict, head: TargetHead) -> Target:
    """The target that a cache is of, with its layers.

    Raises:
      ValueError: `config.target` is another.
    """
    target = specjax.load_target(config.target, dtype=head.dtype)
    if target.fingerprint() != head.fingerprint():
        raise ValueError(
            f"drafter.layers_from takes layers of config.target={config.target!r}, and the cache "
            f"{config.cache} is of other weights ({head.name}): set config.target to the cache's"
        )
    return target


def _start(config: ConfigDict, target: Target, kind: type[Any]) -> tuple[Any, PyTree]:
    """The drafter to go on from."""
    drafter = specjax.load_drafter(config.start, target, any_target=config.any_target)
    if not isinstance(drafter.model, kind):
        raise ValueError(
            f"config.start {config.start!r} is no drafter for config.algorithm={config.algorithm!r}"
        )
    ignored = "config.drafter but for block_size" if kind is DSpark else "config.mtp"
    print(f"Starting from {config.start}, whose options hold: {ignored} is not used")
    # Checkpoints that have an embedding and a head may have rounded them.
    return drafter.model, attach_target(drafter.params, target)


def _draft_vocab(
    config: ConfigDict, texts: Sequence[Any], count: int, target: Target
) -> list[int] | None:
    """The most frequent tokens of what is trained on."""
    if count < 0:
        raise ValueError(f"draft_vocab must be at least 1, or 0 for all tokens, got {count}")
    trained_on = texts[: len(texts) - config.training.held_out]
    if not count:
        return None
    return frequent_tokens(trained_on, count, target.model.vocab_size, config.training.max_len)


def frequent_tokens(
    texts: Sequence[Any], count: int, vocab_size: int, max_len: int | None = None
) -> list[int]:
    """The tokens that the texts' answers have most of; low ids first among equals.

    Args:
      texts: to count in, as `TokenSequence` names their fields.
      count: how many tokens.
      vocab_size: V.
      max_len: what is longer is cut; None cuts nothing.
    """
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        learnt = text.tokens_T[:max_len][text.loss_mask_T[:max_len]]
        counts += np.bincount(learnt, minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:count].tolist()
