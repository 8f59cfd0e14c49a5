r"""How the shipped drafter smollm2-135m-dspark was made.

Run from the repository's root:

    for step in data_0 train_0 data_1 train_1 data_2 train_2; do
        python -m specjax.main --config=configs/smollm2_dspark.py:$step \
            --workdir=runs/smollm2/$step || break
    done

The texts are token ids that the target wrote itself (`:write_0`, `:write_1` and `:write_2`). The
drafter learns from the first file of them, then goes on with two, then with three. `:smoke` is a
small training run that needs no cache. Beside the texts are logs of the later stages (log.jsonl),
whose evaluations are each on the last sequences of its own texts.
"""

from ml_collections import ConfigDict

from configs import cache, train

WORK = "runs/smollm2"
TEXTS = "experiments/smollm2_dspark/texts_{}.npz"
TOKENS = {"0": 800_000, "1": 438_000, "2": 300_000}  # that each stage adds
STEPS = {"0": 10_500, "1": 5_500, "2": 3_000}
OPENINGS = (  # of the user turns of the last: code, and sums in words
    "",
    "Write a Python function that",
    "Complete this Python function:\n\n```python\ndef",
    "Anna has",
    "",
    "Write Python code to",
    "Write a program that",
    "A shop sells",
)


def get_config(variant: str = "") -> ConfigDict:
    known = ["smoke", *(f"{kind}_{i}" for i in TOKENS for kind in ("write", "data", "train"))]
    if variant not in known:
        raise ValueError(f"unknown variant {variant!r} of this config: known are {known}")
    kind, _, stage = variant.partition("_")
    if kind in ("write", "data"):
        return _data(kind, stage)
    config = train.get_config("smoke" if kind == "smoke" else "")
    config.drafter.update(num_layers=2, layers_from=(28, 29), block_size=5, draft_vocab=8192)
    config.losses.update(cross_entropy=0.0, soft_cross_entropy=1.0, total_variation=0.0)
    if kind == "smoke":
        config.update(texts=TEXTS.format("0"), target="smollm2-135m")
        return config
    config.cache = f"{WORK}/data_{stage}/cache"
    config.training.update(
        steps=STEPS[stage], max_len=256, learning_rate=2e-3, warmup_ratio=0.02, held_out=128
    )
    config.num_anchors = 8
    config.update(eval_every=500, save_every=1000)
    if stage != "0":
        config.start = f"{WORK}/train_{int(stage) - 1}/drafter"
        config.losses.update(soft_cross_entropy=0.3, total_variation=0.7)
        config.training.update(learning_rate=1e-3)
        config.update(num_anchors=16, seed=int(stage))
    return config


def _data(kind: str, stage: str) -> ConfigDict:
    config = cache.get_config()
    config.taps = (1, 10, 19, 28)
    if kind == "data":
        config.texts = TEXTS.format(f"[0-{stage}]")
        return config
    # Rows of 256 slots, without openings, and one program for all batches.
    config.update(batch_size=128, user_tokens=64, answer_tokens=159)
    config.temperatures = (0.0, 0.0, 0.8)
    config.update(tokens=TOKENS[stage], seed=int(stage))
    if stage == "2":
        config.update(user_openings=OPENINGS, user_temperature=0.8)
    return config
