"""Caches of hidden states: DeepSpec's format both ways, interruptions, damage."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from specjax.data import target_cache
from specjax.data.target_cache import (
    CacheError,
    CacheWriter,
    Sample,
    TargetCache,
    cache_bytes,
    check_room,
    collate,
)

MADE = {"taps": (0, 2), "width": 4, "made_with": {"target": "tiny", "seed": 3}}


def samples(start, count):
    """Sample i has i + 2 tokens and values of its own."""
    made = []
    for i in range(start, start + count):
        rng, length = np.random.default_rng(i), i + 2
        made.append(
            Sample(
                rng.integers(0, 50, length).astype(np.int32),
                rng.random(length) < 0.5,
                rng.normal(size=(length, 2, 4)).astype(ml_dtypes.bfloat16),
                rng.normal(size=(length, 4)).astype(ml_dtypes.bfloat16),
            )
        )
    return made


def write(directory, batches=4, **options):
    writer = CacheWriter(directory, shard_bytes=150, **{**MADE, **options})
    for batch in range(writer.cursor, batches):
        writer.add(samples(3 * batch, 3), batch + 1)
    writer.finish(batches)
    return directory


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def gold(data_dir):
    with np.load(data_dir / "misc" / "target_cache_expected.npz") as arrays:
        return dict(arrays)


def test_a_cache_of_the_reference_is_read(data_dir, gold):
    cache = TargetCache(data_dir / "misc" / "target_cache")
    assert len(cache) == gold["num_samples"]
    assert (cache.taps, cache.width) == ((0, 2), 32)
    for i in range(len(cache)):
        sample = cache[i]
        np.testing.assert_array_equal(sample.tokens_T, gold[f"sample{i}__input_ids"])
        np.testing.assert_array_equal(sample.loss_mask_T, gold[f"sample{i}__loss_mask"])
        taps = gold[f"sample{i}__target_hidden_states"]
        np.testing.assert_array_equal(sample.taps_TMD.reshape(taps.shape), taps)
        np.testing.assert_array_equal(
            sample.hidden_TD, gold[f"sample{i}__target_last_hidden_states"]
        )
    batch = collate([cache[i] for i in (0, 3, 4)])
    np.testing.assert_array_equal(batch.tokens_T, gold["batch_0_3_4__input_ids"])
    np.testing.assert_array_equal(batch.loss_mask_T, gold["batch_0_3_4__loss_mask"])
    np.testing.assert_array_equal(
        batch.taps_TMD.reshape(3, 12, 64), gold["batch_0_3_4__target_hidden_states"]
    )


def test_what_the_reference_wrote_is_written_again(data_dir, tmp_path):
    """The same samples, in a shard each, give the same bytes and the manifest its keys."""
    source = data_dir / "misc" / "target_cache"
    cache = TargetCache(source)
    writer = CacheWriter(tmp_path / "copy", taps=(0, 2), width=32, made_with={}, shard_bytes=1)
    for group in ((0, 1), (2,), (3, 4)):
        writer.add([cache[i] for i in group], group[-1] + 1)
    writer.finish(5)
    for name in ("samples.idx", *(f"shard-0000{i}.bin" for i in range(3))):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()
    ours, theirs = (
        json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "copy", source)
    )
    for key in set(theirs) & set(ours) - {"shards", "target_model_name_or_path"}:
        assert ours[key] == theirs[key], key
    shared = [{key: shard[key] for key in ("shard_id", "file_name")} for shard in ours["shards"]]
    assert shared == theirs["shards"]


def test_samples_come_back_and_are_cut_and_padded(tmp_path):
    cache = TargetCache(write(tmp_path / "cache"))
    assert len(cache) == 12
    for got, expected in zip(cache, samples(0, 12), strict=True):
        assert_same(got, expected)
    assert cache.lengths.tolist() == list(range(2, 14))
    batch = collate([cache[0], cache[5]], length=4)
    assert batch.tokens_T.shape == (2, 4)
    assert batch.taps_TMD.shape == (2, 4, 2, 4)
    assert not batch.hidden_TD[0, 2:].any()
    assert not batch.loss_mask_T[0, 2:].any()
    np.testing.assert_array_equal(batch.tokens_T[1], cache[5].tokens_T[:4])
    size = sum(
        (tmp_path / "cache" / s["file_name"]).stat().st_size for s in cache.manifest["shards"]
    )
    assert cache_bytes(int(cache.lengths.sum()), 12, 2, 4) == size + 12 * 56


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 4])
def test_a_killed_run_goes_on(tmp_path, killed_after):
    whole = write(tmp_path / "whole")
    writer = CacheWriter(tmp_path / "killed", shard_bytes=150, **MADE)
    for batch in range(killed_after):
        writer.add(samples(3 * batch, 3), batch + 1)
    # It ends here; what is not in a finished shard is lost.
    with pytest.raises(CacheError, match="unfinished: run the task that makes it again"):
        TargetCache(tmp_path / "killed")
    again = CacheWriter(tmp_path / "killed", shard_bytes=150, **MADE)
    tokens = [list(t) for t in again.read_tokens()]
    assert tokens == [list(s.tokens_T) for s in samples(0, again.num_samples)]
    assert again.num_samples == 3 * again.cursor
    write(tmp_path / "killed")
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == names
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"taps": (0, 1)}, r"taps \(\[0, 2\], now \[0, 1\]\)"),
        ({"width": 8}, r"width \(4, now 8\)"),
        ({"made_with": {"target": "tiny", "seed": 4}}, r"made_with.seed \(3, now 4\)"),
    ],
)
def test_another_configuration_does_not_go_on(tmp_path, changed, message):
    CacheWriter(tmp_path / "cache", **MADE)
    with pytest.raises(CacheError, match=message):
        CacheWriter(tmp_path / "cache", **{**MADE, **changed})


def test_only_new_or_unfinished_folders_are_written_to(tmp_path):
    write(tmp_path / "cache")
    with pytest.raises(CacheError, match="holds a complete cache"):
        CacheWriter(tmp_path / "cache", **MADE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CacheError, match="is not empty and holds no cache"):
        CacheWriter(tmp_path / "other", **MADE)


def test_no_samples_make_no_cache(tmp_path):
    writer = CacheWriter(tmp_path / "cache", **MADE)
    with pytest.raises(CacheError, match="no samples"):
        writer.finish(3)
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_wrong_shapes_are_refused(tmp_path):
    writer = CacheWriter(tmp_path / "cache", **MADE)
    sample = samples(0, 1)[0]
    with pytest.raises(CacheError, match="where the cache has"):
        writer.add([sample._replace(hidden_TD=sample.hidden_TD[:1])], 1)


@pytest.fixture
def damaged(tmp_path):
    return shutil.copytree(write(tmp_path / "whole"), tmp_path / "damaged")


def edit_manifest(folder, **changes):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("check", [False, True])
def test_truncated_shards_are_named(damaged, check):
    shard = damaged / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CacheError, match=r"shard-00001\.bin is truncated"):
        TargetCache(damaged, check=check)
    shard.unlink()
    with pytest.raises(CacheError, match=r"cannot read .*shard-00001\.bin"):
        TargetCache(damaged, check=check)


def test_changed_bytes_are_found(damaged):
    shard = damaged / "shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CacheError, match=r"shard-00001\.bin has changed"):
        TargetCache(damaged)


def test_other_damage_is_named(damaged):
    with pytest.raises(CacheError, match="is not a target cache"):
        TargetCache(damaged / "nowhere")
    edit_manifest(damaged, hidden_dtype="float32")
    with pytest.raises(CacheError, match=r"hidden_dtype \('bfloat16', now 'float32'\)"):
        TargetCache(damaged)
    edit_manifest(damaged, hidden_dtype="bfloat16", num_samples=11)
    with pytest.raises(CacheError, match=r"samples\.idx has 672 bytes"):
        TargetCache(damaged)
    (damaged / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match="not valid JSON"):
        TargetCache(damaged)


def test_a_full_disk_is_known_before(tmp_path, monkeypatch):
    check_room(tmp_path / "new" / "cache", 10)
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 10**9)
    monkeypatch.setattr(target_cache.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(CacheError, match=r"will take 6\.00 GB and .* has 5\.00 GB left"):
        check_room(tmp_path / "new" / "cache", 6 * 10**9)
