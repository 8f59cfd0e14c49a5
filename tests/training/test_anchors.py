import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.anchors import anchor_candidates, make_blocks, sample_anchors

sample = jax.jit(sample_anchors, static_argnums=2)
make = jax.jit(make_blocks, static_argnames=("block_size", "mask_token_id"))


@pytest.fixture
def gold(data_dir):
    with np.load(data_dir / "misc" / "anchor_sampler.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("count", [4, 12, 40])
def test_anchors_and_masks_equal_the_reference(gold, count):
    mask = gold["loss_mask"] > 0
    candidates = jax.jit(anchor_candidates)(mask)
    np.testing.assert_array_equal(candidates, gold["candidate_mask"])
    anchors, keep = sample(mask, gold["random_vals"].astype(np.float32), count)
    np.testing.assert_array_equal(keep, gold[f"keep_{count}"])
    np.testing.assert_array_equal(anchors, gold[f"anchors_{count}"])
    blocks = make(
        np.zeros(mask.shape, np.int32), mask, anchors, keep,
        block_size=int(gold["block_size"]), mask_token_id=9,
    )  # fmt: skip
    np.testing.assert_array_equal(blocks.valid_BAG, gold[f"eval_mask_{count}"])


def test_every_candidate_is_drawn_equally_often():
    mask = np.broadcast_to(np.array([0, 1, 1, 1, 0, 1, 1, 0], bool), (4000, 8))
    uniform = jax.random.uniform(jax.random.key(0), (4000, 7))
    anchors, keep = map(np.asarray, sample(mask, uniform, 2))
    assert keep.all()
    assert (anchors[:, 0] < anchors[:, 1]).all()
    counts = np.bincount(anchors.ravel(), minlength=8)
    assert set(np.flatnonzero(counts)) == {1, 2, 5}
    np.testing.assert_allclose(counts[[1, 2, 5]] / 8000, 1 / 3, atol=0.02)


def test_blocks_hold_what_follows_their_anchors():
    tokens = np.arange(10, 18, dtype=np.int32)[None]
    mask = np.arange(8)[None] != 4
    blocks = make(
        tokens, mask, np.array([[1, 5, 0]]), np.array([[True, True, False]]),
        block_size=4, mask_token_id=9,
    )  # fmt: skip
    blocks = jax.device_get(blocks)
    assert blocks.tokens_BAG[0].tolist() == [[11, 9, 9, 9], [15, 9, 9, 9], [9, 9, 9, 9]]
    assert blocks.labels_BAG[0, 0].tolist() == [12, 13, 14, 15]
    assert blocks.previous_BAG[0, 0].tolist() == [11, 12, 13, 14]
    assert blocks.states_BAG[0, 0].tolist() == [1, 2, 3, 4]
    # What the assistant did not write ends a block, and so does the end of the row.
    assert blocks.valid_BAG[0].tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False] * 4,
    ]


def test_no_anchors_are_refused():
    with pytest.raises(ValueError, match="num_anchors must be at least 1"):
        sample_anchors(jnp.ones((2, 4), bool), jnp.zeros((2, 3)), 0)
