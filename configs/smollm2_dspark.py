r"""How the shipped drafter smollm2-135m-dspark was made.

Run from the repository's root:

    for step in data train more_data more; do
        python -m specjax.main --config=configs/smollm2_dspark.py:$step \
            --workdir=runs/smollm2/$step || break
    done

The texts are token ids that the target wrote itself (`:write`, and with `--config.seed=1
--config.tokens=438000`). The drafter learnt from the first file of them, then from both. `:smoke`
is a small training run.
"""

from ml_collections import ConfigDict

from configs import cache, train

WORK = "runs/smollm2"
TEXTS = {"data": "texts_0.npz", "more_data": "texts_[01].npz"}


def get_config(variant: str = "") -> ConfigDict:
    if variant == "write" or variant in TEXTS:
        config = cache.get_config()
        config.taps = (1, 10, 19, 28)
        if variant in TEXTS:
            config.texts = f"experiments/smollm2_dspark/{TEXTS[variant]}"
            return config
        config.tokens = 800_000
        # Rows of 256 slots and one program for all batches.
        config.update(batch_size=128, user_tokens=64, answer_tokens=159)
        config.temperatures = (0.0, 0.0, 0.8)
        return config
    if variant not in ("train", "more", "smoke"):
        raise ValueError(
            f"unknown variant {variant!r} of this config: known are 'write', 'data', 'train', "
            f"'more_data', 'more' and 'smoke'"
        )
    config = train.get_config("smoke" if variant == "smoke" else "")
    config.cache = f"{WORK}/data/cache"
    config.drafter.update(num_layers=2, layers_from=(28, 29), block_size=5, draft_vocab=8192)
    config.losses.update(cross_entropy=0.0, soft_cross_entropy=1.0, total_variation=0.0)
    if variant == "smoke":
        return config
    config.training.update(
        steps=10_500, max_len=256, learning_rate=2e-3, warmup_ratio=0.02, held_out=128
    )
    config.num_anchors = 8
    config.update(eval_every=500, save_every=1000)
    if variant == "more":
        config.update(cache=f"{WORK}/more_data/cache", start=f"{WORK}/train/drafter")
        config.losses.update(soft_cross_entropy=0.3, total_variation=0.7)
        config.training.update(steps=5_500, learning_rate=1e-3)
        config.update(num_anchors=16, seed=1)
    return config
