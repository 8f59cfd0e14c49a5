"""Caches of hidden states: DeepSpec's format both ways, interruptions, damage."""

import json
import shutil
from functools import partial

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
    CacheWriter(tmp_path / "cache", shard_bytes=1, **MADE).add(samples(0, 3), 1)
    with pytest.raises(CacheError, match=message):
        CacheWriter(tmp_path / "cache", **{**MADE, **changed})


def test_a_cache_without_a_shard_is_begun_anew(tmp_path):
    """What a run with wrong settings left is in nobody's way."""
    CacheWriter(tmp_path / "cache", **{**MADE, "taps": (0, 1)}).add(samples(0, 3)[:0], 1)
    write(tmp_path / "cache")
    assert TargetCache(tmp_path / "cache").taps == (0, 2)


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
    with pytest.raises(CacheError, match=r"samples\.idx is damaged: it has 672 bytes"):
        TargetCache(damaged)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", "[" * 100_000])
@pytest.mark.parametrize("name", ["manifest.json", "unfinished.json"])
def test_files_that_hold_no_json_object_are_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    read = TargetCache if name == "manifest.json" else partial(CacheWriter, **MADE)
    with pytest.raises(CacheError, match=rf"{name} (is not valid JSON|must hold a JSON object)"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("hidden_size", [True, -1, 3.7, None]),
        ("target_layer_ids", ["x", [], ["x"], {}, [[0]]]),
        ("num_samples", [3.7, 0, "12"]),
        ("num_shards", [-1, "x"]),
        ("made_with", [None, []]),
        ("shards", [3, [3], [{"file_name": "../whole/shard-00000.bin"}]]),
    ],
)
def test_wrong_values_of_the_manifest_are_named(damaged, key, values):
    for value in values:
        edit_manifest(damaged, **{key: value})
        with pytest.raises(CacheError, match=rf"manifest\.json is damaged \(.*{key}"):
            TargetCache(damaged)


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("field", range(8))
def test_a_changed_index_is_found(damaged, field, checksum):
    """Also without a checksum, as in the reference's caches: arrays lie side by side."""
    if not checksum:
        edit_manifest(damaged, index_sha256=None)
    index = bytearray((damaged / "samples.idx").read_bytes())
    start = [0, 8, 12, 16, 24, 32, 40, 48][field]
    index[start] += 1
    (damaged / "samples.idx").write_bytes(index)
    with pytest.raises(CacheError, match=r"samples\.idx is damaged"):
        TargetCache(damaged)


def test_what_was_added_can_be_saved_at_any_time(tmp_path):
    writer = CacheWriter(tmp_path, **MADE)
    writer.save(0)  # nothing yet
    writer.add(samples(0, 2), 1)
    writer.save(1)
    again = CacheWriter(tmp_path, **MADE)
    assert (again.cursor, again.num_samples) == (1, 2)
    again.add(samples(2, 1), 2)
    again.finish(2)
    for left, right in zip(TargetCache(tmp_path), samples(0, 3), strict=True):
        assert_same(left[:4], right[:4])


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_damaged_shards_do_not_go_on(tmp_path, damage):
    writer = CacheWriter(tmp_path, shard_bytes=1, **MADE)
    writer.add(samples(0, 2), 1)
    shard = tmp_path / "shard-00000.bin"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(content[:-1])
    else:
        shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CacheError, match=r"shard-00000\.bin is missing, truncated or changed"):
        CacheWriter(tmp_path, shard_bytes=1, **MADE)


def test_changed_progress_is_refused(tmp_path):
    writer = CacheWriter(tmp_path, shard_bytes=1, **MADE)
    writer.add(samples(0, 2), 1)
    file = tmp_path / "unfinished.json"
    file.write_text(file.read_text().replace('"cursor": 1', '"cursor": 0'))
    with pytest.raises(CacheError, match="was changed by another program"):
        CacheWriter(tmp_path, shard_bytes=1, **MADE)


def test_an_interrupted_first_write_does_not_lock_the_folder(tmp_path):
    (tmp_path / ".unfinished.json.partial").write_text("{")
    assert len(TargetCache(write(tmp_path))) == 12


def test_a_refused_batch_adds_nothing(tmp_path):
    writer = CacheWriter(tmp_path, **MADE)
    good, bad = samples(3, 2)
    with pytest.raises(CacheError, match="where the cache has"):
        writer.add([good, bad._replace(hidden_TD=bad.hidden_TD[:, :2])], 1)
    empty = Sample(*(array[:0] for array in good[:4]))
    with pytest.raises(CacheError, match="where the cache has"):
        writer.add([good, empty], 1)
    with pytest.raises(CacheError, match="tokens must be ids"):
        writer.add([good._replace(tokens_T=good.tokens_T + 0.5)], 1)
    writer.add([bad], 1)
    writer.finish(1)
    assert len(TargetCache(tmp_path)) == 1
    with pytest.raises(CacheError, match="is finished"):
        writer.finish(1)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot make the folder"):
        CacheWriter(tmp_path / "file", **MADE)


def test_keys_of_any_kind_may_say_how_it_was_made(tmp_path):
    made = {"made_with": {"counts": {1: 2}}}
    CacheWriter(tmp_path, **{**MADE, **made})
    CacheWriter(tmp_path, **{**MADE, **made})


def test_no_samples_make_no_batch():
    with pytest.raises(ValueError, match="no samples"):
        collate([])


def test_a_full_disk_is_known_before(tmp_path, monkeypatch):
    check_room(tmp_path / "new" / "cache", 10)
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 10**9)
    monkeypatch.setattr(target_cache.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(CacheError, match=r"will take 6\.00 GB and .* has 5\.00 GB left"):
        check_room(tmp_path / "new" / "cache", 6 * 10**9)
