"""Trains MTP modules, and the targets that they extend.

    python -m specjax.main --config=configs/mtp.py:VARIANT --workdir=DIR

`scratch` trains a small new target together with its modules, on the Python standard library's
own sources or on --config.corpus. `frozen` (stage 1) trains modules for a target that stays as
it is, on --config.cache or texts as configs/train.py; `joint` (stage 2) goes on with both, from
--config.start (without, from new modules) and --config.target. `beside` trains a new target and
a DSpark drafter beside it, whose gradient stops at the target; its rows hold a document each.
`smoke` is a small `scratch`.
"""

from ml_collections import ConfigDict

from configs import train

VARIANTS = ("scratch", "frozen", "joint", "beside", "smoke")


def get_config(variant: str = "scratch") -> ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r} of this config: known are {VARIANTS}")
    config = train.get_config("smoke" if variant == "smoke" else "")
    config.algorithm = "dspark" if variant == "beside" else "mtp"
    config.train_target = variant != "frozen"
    if variant in ("scratch", "beside", "smoke"):
        smoke = "specjax/**/*.py"  # less to read
        config.update(target="new", corpus=smoke if variant == "smoke" else "stdlib")
        config.drafter.update(num_layers=1, draft_vocab=0)
    if variant == "smoke":
        return config
    config.update(eval_every=100, save_every=200)
    config.training.update(steps=1000, learning_rate=2e-3, max_len=256, held_out=64)
    if variant == "frozen":
        config.mtp.draft_vocab = 8192
        config.mtp_losses.update(scale=1.0, distillation=1.0)
        config.training.update(steps=4000, held_out=128)
    if variant == "joint":
        config.training.update(learning_rate=2e-5)
    return config
