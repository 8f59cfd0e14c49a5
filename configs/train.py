"""Trains a DSpark drafter: --config.cache=FOLDER, as configs/cache.py made it."""

from ml_collections import ConfigDict, config_dict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r} of this config: known is 'smoke'")
    smoke = variant == "smoke"
    return config_dict.create(
        task="train",
        cache="",  # a target cache
        drafter={
            "num_layers": 1 if smoke else 2,
            "block_size": 7,  # γ, the longest draft
            "markov_rank": 8 if smoke else 64,  # of the sequential head; 0 is DFlash
            "markov_head": "vanilla",  # vanilla, gated or rnn
            "confidence_head": True,
            "confidence_with_markov": True,
            "draft_vocab": 256 if smoke else 12_288,  # the cache's most frequent tokens; 0 is all
            "candidates": 32 if smoke else 64,  # of the sequential head at each position
        },
        losses={"cross_entropy": 0.1, "total_variation": 0.9, "confidence": 1.0, "decay": 4.0},
        training={
            "steps": 10 if smoke else 2000,
            "batch_size": 4 if smoke else 8,  # sequences a step
            "accumulation": 1,  # parts that a batch is run in
            "num_anchors": 16 if smoke else 64,  # of each sequence
            "max_len": 64 if smoke else 384,  # longer sequences are cut off
            "learning_rate": 1e-3,
            "warmup_ratio": 0.04,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "held_out": 2 if smoke else 32,  # sequences for evaluation
        },
        eval_every=5 if smoke else 200,
        save_every=5 if smoke else 200,
        seed=0,
        compilation_cache="auto",  # a folder, auto or off
    )
