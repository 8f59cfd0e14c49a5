"""A target's hidden states on disk: what a drafter is trained from.

The format is DeepSpec's (version 2), so that either project reads the other's caches:

    manifest.json     what is inside; written last, so that a folder with one is complete
    samples.idx       56 bytes a sample: where its arrays lie
    shard-00000.bin   arrays, one sample after the other, unaligned

specjax adds keys to the manifest: checksums of the shards, and what the cache was made
with. Arrays of a sample: input_ids (int32), attention_mask (uint8, all 1), loss_mask (uint8),
hidden states of the tapped layers (bfloat16 [T, M * D]) and the last hidden state, after
the final norm (bfloat16 [T, D]).
"""

import functools
import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from specjax.files import (
    changes,
    digest,
    file_digest,
    partial_path,
    plain,
    replacing,
    write_json,
)

_RECORD = struct.Struct("<QIIQQQQQ")
_HIDDEN = np.dtype(jnp.bfloat16)
_MANIFEST, _INDEX, _UNFINISHED = "manifest.json", "samples.idx", "unfinished.json"


class CacheError(ValueError):
    """A cache cannot be read or written; the message says why and how to mend it."""


class TokenSequence(NamedTuple):
    """A text to be learnt from.

    Attributes:
      tokens_T: token ids.
      loss_mask_T: tokens to be learnt.
    """

    tokens_T: Int[np.ndarray, " T"]
    loss_mask_T: Bool[np.ndarray, " T"]


class Sample(NamedTuple):
    """One sequence.

    Attributes:
      tokens_T: token ids.
      loss_mask_T: tokens to be learnt.
      taps_TMD: outputs of the tapped layers at each token.
      hidden_TD: the input of the language-model head at each token.
      normalizer_T: log-sum-exp of the head's logits at each token, where they are known.
    """

    tokens_T: Int[np.ndarray, " T"]
    loss_mask_T: Bool[np.ndarray, " T"]
    taps_TMD: Float[np.ndarray, "T M D"]
    hidden_TD: Float[np.ndarray, "T D"]
    normalizer_T: Float[np.ndarray, " T"] | None = None


def are_ids(array: np.ndarray) -> bool:
    """Whether it is a row of at least one token id, as they are stored."""
    integers = np.issubdtype(array.dtype, np.integer)
    return bool(
        integers and array.ndim == 1 and len(array) and array.min() >= 0 and array.max() < 2**31
    )


def cache_bytes(tokens: int, samples: int, num_taps: int, width: int) -> int:
    """The size of a cache on disk."""
    return tokens * (4 + 1 + 1 + _HIDDEN.itemsize * width * (num_taps + 1)) + samples * _RECORD.size


def is_complete(directory: Path, made_with: Mapping[str, Any]) -> bool:
    """Whether a folder holds a complete cache that was made with these values.

    Raises:
      CacheError: it holds a complete cache that was made with others.
    """
    if not (directory / _MANIFEST).exists():
        return False
    found = changes(_read_manifest(directory).get("made_with", {}), plain(dict(made_with)))
    if found:
        raise CacheError(
            f"{directory} holds a complete cache made with another {'; '.join(found)}: give "
            f"another folder"
        )
    return True


class CacheWriter:
    """Writes a cache, shard by shard; what is finished survives whatever happens.

    A shard is filled in memory and ends at a call of `add` once it has `shard_bytes`, or of
    `save`.
    `cursor` is the last finished shard's: where to go on after an interruption.
    """

    def __init__(
        self,
        directory: Path,
        *,
        taps: Sequence[int],
        width: int,
        made_with: Mapping[str, Any],
        shard_bytes: int = 1 << 26,
    ):
        """Begins a cache, or goes on with an unfinished one that was made alike.

        Args:
          directory: of the cache.
          taps: tapped layers.
          width: D.
          made_with: plain values that say how the samples are made.
          shard_bytes: a shard ends when it has as many.

        Raises:
          CacheError: the cache is complete, or unfinished but made with something else.
        """
        self._directory, self._shard_bytes = directory, shard_bytes
        self._header = plain({"taps": taps, "width": width, "made_with": dict(made_with)})
        self._shards: list[dict[str, Any]] = []
        self._records: list[bytes] = []  # of finished shards
        self._pending: list[bytes] = []  # of the shard that is being filled
        self._data = bytearray()
        if (directory / _MANIFEST).exists():
            raise CacheError(f"{directory} holds a complete cache: give another folder")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"cannot make the folder {directory}: {error.strerror}") from error
        self._resume()

    @property
    def cursor(self) -> int:
        return self._shards[-1]["cursor"] if self._shards else 0

    @property
    def num_bytes(self) -> int:
        """Of finished shards."""
        return sum(shard["bytes"] for shard in self._shards)

    @property
    def num_samples(self) -> int:
        """Samples of finished shards."""
        return len(self._records)

    def add(self, samples: Sequence[Sample], cursor: int) -> None:
        """Appends samples; going on from `cursor` must give those that follow them.

        Raises:
          CacheError: an empty sample, or arrays of other shapes than the cache's; nothing is
            added then.
        """
        for sample in samples:
            self._check(sample)
        for sample in samples:
            self._append(sample)
        if len(self._data) >= self._shard_bytes:
            self._finish_shard(cursor)

    def save(self, cursor: int) -> None:
        """Finishes the shard that was begun, however short; what was added survives.

        Args:
          cursor: that of the last call of `add`.
        """
        if self._pending:
            self._finish_shard(cursor)

    def read_tokens(self) -> Iterator[np.ndarray]:
        """Token ids of each sample of the finished shards."""
        for record in map(_RECORD.unpack, self._records):
            _, shard, length, offset, *_ = record
            path = self._directory / _shard_name(shard)
            yield np.fromfile(path, np.int32, length, offset=offset)

    def finish(self, cursor: int) -> None:
        """Ends the last shard and makes the cache complete.

        Raises:
          CacheError: there are no samples, or it was finished before.
        """
        if (self._directory / _MANIFEST).exists():
            raise CacheError(f"{self._directory} is finished")
        self.save(cursor)
        if not self._records:
            raise CacheError("no samples: nothing of what was generated or given can be learnt")
        index = b"".join(self._records)
        with replacing(self._directory / _INDEX) as path:
            path.write_bytes(index)
        shards = [
            {"shard_id": i, **{key: shard[key] for key in ("file_name", "sha256", "bytes")}}
            for i, shard in enumerate(self._shards)
        ]
        manifest = {
            "version": 2,
            "num_samples": len(self._records),
            "num_shards": len(shards),
            "target_layer_ids": self._header["taps"],
            "hidden_size": self._header["width"],
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": _RECORD.size,
            "index_sha256": hashlib.sha256(index).hexdigest(),
            "target_model_name_or_path": self._header["made_with"].get("target", ""),
            "shards": shards,
            "made_with": self._header["made_with"],
        }
        write_json(self._directory / _MANIFEST, manifest)
        (self._directory / _UNFINISHED).unlink()

    def _resume(self) -> None:
        path = self._directory / _UNFINISHED
        if not path.exists():
            # Interrupted in its very first write, a cache leaves that file's beginning.
            if any(entry != partial_path(path) for entry in self._directory.iterdir()):
                raise CacheError(f"{self._directory} is not empty and holds no cache")
            self._save_progress()
            return
        state = _read_object(path)
        sealed = {key: value for key, value in state.items() if key != "sha256"}
        if state.get("sha256") != digest(sealed):
            raise CacheError(f"{path} was changed by another program: remove the folder")
        found = changes(state["header"], self._header)
        if found and not state["shards"]:  # nothing is lost
            self._save_progress()
            return
        if found:
            raise CacheError(
                f"{self._directory} holds an unfinished cache made with another "
                f"{'; '.join(found)}. Give another folder, or remove it to start afresh"
            )
        self._shards = state["shards"]
        for i, shard in enumerate(self._shards):
            path = self._directory / _shard_name(i)
            if not path.is_file() or file_digest(path) != shard["sha256"]:
                raise CacheError(
                    f"{path} is missing, truncated or changed: remove {self._directory} to start "
                    f"afresh"
                )
            self._records += _pieces(bytes.fromhex(shard["index"]), _RECORD.size)

    def _check(self, sample: Sample) -> None:
        length, taps, width = len(sample.tokens_T), len(self._header["taps"]), self._header["width"]
        expected = ((length,), (length,), (length, taps, width), (length, width))
        shapes = tuple(array.shape for array in sample[:4])
        if shapes != expected or not length:
            raise CacheError(f"arrays of shapes {shapes} where the cache has {expected}")
        tokens = sample.tokens_T
        if not are_ids(tokens):
            raise CacheError("tokens must be ids: whole numbers from 0 to 2**31 - 1")

    def _append(self, sample: Sample) -> None:
        length = len(sample.tokens_T)
        arrays = (
            sample.tokens_T.astype("<i4"),
            np.ones(length, np.uint8),
            sample.loss_mask_T.astype(np.uint8),
            sample.taps_TMD.astype(_HIDDEN),
            sample.hidden_TD.astype(_HIDDEN),
        )
        offsets = []
        for array in arrays:
            offsets.append(len(self._data))
            self._data += array.tobytes()
        index = len(self._records) + len(self._pending)
        self._pending.append(_RECORD.pack(index, len(self._shards), length, *offsets))

    def _finish_shard(self, cursor: int) -> None:
        name = _shard_name(len(self._shards))
        with replacing(self._directory / name) as path:
            path.write_bytes(self._data)
        entry = {
            "file_name": name,
            "sha256": hashlib.sha256(self._data).hexdigest(),
            "bytes": len(self._data),
            "cursor": cursor,
            "index": b"".join(self._pending).hex(),
        }
        self._shards.append(entry)
        self._records += self._pending
        self._pending, self._data = [], bytearray()
        self._save_progress()

    def _save_progress(self) -> None:
        state = {"header": self._header, "shards": self._shards}
        write_json(self._directory / _UNFINISHED, {**state, "sha256": digest(state)})


class TargetCache:
    """A complete cache, mapped into memory: samples by index, as Grain's data sources."""

    def __init__(self, directory: Path, *, check: bool = True):
        """Opens a cache of specjax's or DeepSpec's.

        Args:
          directory: of the cache.
          check: compare the shards with their checksums, where the manifest has them.

        Raises:
          CacheError: an unfinished, damaged or unsupported cache; names the file.
        """
        self.directory, self.manifest = directory, _read_manifest(directory)
        self.taps = tuple(self.manifest["target_layer_ids"])
        self.width = self.manifest["hidden_size"]
        paths = [directory / shard["file_name"] for shard in self.manifest["shards"]]
        self._maps = [_map(path) for path in paths]
        self._records = self._read_index(directory / _INDEX, paths)
        self.lengths = np.array([record[2] for record in self._records])
        for path, shard in zip(paths, self.manifest["shards"], strict=True):
            if check and "sha256" in shard and file_digest(path) != shard["sha256"]:
                raise CacheError(f"{path} has changed since it was written: copy it again")

    def _read_index(self, path: Path, shards: list[Path]) -> list[tuple[int, ...]]:
        """The records, which must be in order, and lie side by side within their shards."""
        data = path.read_bytes() if path.is_file() else b""
        checksum = self.manifest.get("index_sha256")
        changed = checksum is not None and hashlib.sha256(data).hexdigest() != checksum
        if changed or len(data) != self.manifest["num_samples"] * _RECORD.size:
            raise CacheError(f"{path} is damaged: it has {len(data)} bytes; copy it again")
        records = [_RECORD.unpack(piece) for piece in _pieces(data, _RECORD.size)]
        hidden_size = _HIDDEN.itemsize * self.width
        last_shard, end = 0, 0
        for i, (sample, shard, length, *offsets) in enumerate(records):
            start = end if shard == last_shard else 0
            sizes = (4 * length, length, length, hidden_size * len(self.taps) * length)
            expected = [start + sum(sizes[:j]) for j in range(5)]
            right = sample == i and shard - last_shard in (0, 1) and shard < len(shards)
            if not right or not length or offsets != expected:
                raise CacheError(f"{path} is damaged at sample {i}: copy it again")
            last_shard, end = shard, offsets[-1] + hidden_size * length
            if end > len(self._maps[shard]):
                raise CacheError(
                    f"{shards[shard]} is truncated: sample {i} ends past it; copy the file "
                    f"again, or make the cache anew"
                )
        return records

    @functools.cached_property
    def texts(self) -> list[TokenSequence]:
        """The sequences without their hidden states."""
        return [TokenSequence(sample.tokens_T, sample.loss_mask_T) for sample in self]

    @property
    def fingerprint(self) -> str:
        """The same for equal files; "" where the manifest has no checksums."""
        shards = [shard.get("sha256", "") for shard in self.manifest["shards"]]
        return digest([self.manifest.get("index_sha256", ""), shards]) if all(shards) else ""

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Sample:
        _, shard, length, ids, _, mask, taps, hidden = self._records[index]

        def read(offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return self._maps[shard][offset : offset + size].view(dtype).reshape(shape)

        return Sample(
            read(ids, (length,), "<i4"),
            read(mask, (length,), np.uint8) > 0,
            read(taps, (length, len(self.taps), self.width), _HIDDEN),
            read(hidden, (length, self.width), _HIDDEN),
        )


def collate(samples: Sequence[Any], length: int | None = None) -> Any:
    """One batch [B, T, ...], padded at the end with zeros (False in the mask).

    Args:
      samples: NamedTuples of one kind, `Sample`, `TokenSequence` or `PackedRow`; what is
        longer than `length` is cut off.
      length: T; None takes the longest sample's.

    Raises:
      ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples to make a batch of")
    length = max(len(s.tokens_T) for s in samples) if length is None else length

    def pad(array: np.ndarray) -> np.ndarray:
        array = array[:length]
        return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))

    return type(samples[0])(
        *(
            None if arrays[0] is None else np.stack([pad(array) for array in arrays])
            for arrays in zip(*samples, strict=True)
        )
    )


def check_room(directory: Path, size: int) -> None:
    """Makes sure that the disk can hold a cache.

    Raises:
      CacheError: it cannot.
    """
    folder = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise CacheError(
            f"the cache will take {size / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB left: "
            f"ask for fewer tokens or taps, give another folder, or train online"
        )


def _read_manifest(directory: Path) -> dict[str, Any]:
    if not (directory / _MANIFEST).is_file():
        unfinished = (directory / _UNFINISHED).exists()
        raise CacheError(
            f"the cache {directory} is unfinished: run the task that makes it again to go on"
            if unfinished
            else f"{directory} is not a target cache: it has no {_MANIFEST}"
        )
    manifest = _read_object(directory / _MANIFEST)
    expected = {
        "version": 2,
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": _RECORD.size,
    }
    wrong = changes(expected, {key: manifest.get(key) for key in expected})
    if wrong:
        raise CacheError(f"{directory / _MANIFEST}: not supported: {'; '.join(wrong)}")
    taps, shards = manifest.get("target_layer_ids"), manifest.get("shards")
    right = {
        "target_layer_ids": (
            isinstance(taps, list) and taps and all(type(tap) is int for tap in taps)
        ),
        "hidden_size": _is_size(manifest.get("hidden_size")),
        "num_samples": _is_size(manifest.get("num_samples")),
        "made_with": isinstance(manifest.get("made_with", {}), dict),
        "shards": isinstance(shards, list) and all(map(_is_shard, shards)),
        "num_shards": isinstance(shards, list) and manifest.get("num_shards") == len(shards),
    }
    damaged = [key for key, fine in right.items() if not fine]
    if damaged:
        raise CacheError(
            f"{directory / _MANIFEST} is damaged ({', '.join(damaged)}): copy it again, or make "
            f"the cache anew"
        )
    return manifest


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_shard(value: Any) -> bool:
    name = value.get("file_name") if isinstance(value, dict) else None
    return isinstance(name, str) and Path(name).name == name


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CacheError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CacheError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def _map(path: Path) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise CacheError(f"cannot read {path}: {error}; copy the file again") from error


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}.bin"
