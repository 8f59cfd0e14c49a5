"""How the shipped drafter smollm2-135m-dspark was made.

Run from the repository's root:

    python -m specjax.main --config=configs/smollm2_dspark.py:data --workdir=runs/smollm2/data &&
    python -m specjax.main --config=configs/smollm2_dspark.py:train --workdir=runs/smollm2/train

The texts are token ids that the target wrote itself: `configs/smollm2_dspark.py:write` writes them
anew. `:smoke` is a small training run.
"""

from ml_collections import ConfigDict

from configs import cache, train

WORK = "runs/smollm2"


def get_config(variant: str = "") -> ConfigDict:
    if variant in ("write", "data"):
        config = cache.get_config()
        config.taps = (1, 10, 19, 28)
        if variant == "data":
            config.tokens = 10**7  # all texts there are
            config.texts = "experiments/smollm2_dspark/texts.npz"
            return config
        config.tokens = 800_000
        # Rows of 256 slots and one program for all batches.
        config.update(batch_size=128, user_tokens=64, answer_tokens=159)
        config.temperatures = (0.0, 0.0, 0.8)
        return config
    if variant not in ("train", "smoke"):
        raise ValueError(
            f"unknown variant {variant!r} of this config: known are 'write', 'data', 'train' and "
            f"'smoke'"
        )
    config = train.get_config("smoke" if variant == "smoke" else "")
    config.cache = f"{WORK}/data/cache"
    config.drafter.update(num_layers=2, layers_from=(28, 29), block_size=5, draft_vocab=8192)
    config.losses.update(cross_entropy=0.0, soft_cross_entropy=1.0, total_variation=0.0)
    if variant == "train":
        config.training.update(
            steps=10_500, max_len=256, learning_rate=2e-3, warmup_ratio=0.02, held_out=128
        )
        config.num_anchors = 8
        config.update(eval_every=500, save_every=1000)
    return config
