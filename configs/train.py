"""Trains a DSpark drafter: --config.cache=FOLDER, as configs/cache.py made it.

Or online, without a cache: --config.texts=FILE, or conversations with given answers.
"""

from ml_collections import ConfigDict, config_dict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r} of this config: known is 'smoke'")
    smoke = variant == "smoke"
    return config_dict.create(
        task="train",
        cache="",  # a target cache; "" is online, for which the next lines say what to read
        texts="",  # token ids (texts.npz) that configs/cache.py made
        prompts="",  # conversations with answers: JSON-lines files (a glob),
        dataset="",  # or a data set of the package `datasets` (a hub name or a folder)
        dataset_subset=config_dict.placeholder(str),
        dataset_split="train",
        answers="given",
        target="smollm2-135m",  # of online training; a cache has what it needs of its target
        dtype="auto",  # of the target's weights
        mask_token_id=config_dict.placeholder(int),  # None takes the cache's, or chooses one
        start="",  # a drafter to go on from, whose options then hold (but for block_size)
        any_target=False,  # whether that drafter may have been trained for another target
        drafter={
            "num_layers": 1 if smoke else 2,
            "taps": (),  # target layers whose outputs are seen; () takes all that the cache has
            "layers_from": (),  # target layers whose weights the draft layers start with
            "block_size": 7,  # γ, the longest draft
            "markov_rank": 8 if smoke else 64,  # of the sequential head; 0 is DFlash
            "markov_head": "vanilla",  # vanilla, gated or rnn
            "confidence_head": True,
            "confidence_with_markov": True,
            "draft_vocab": 256 if smoke else 12_288,  # the cache's most frequent tokens; 0 is all
            "candidates": 32 if smoke else 64,  # of the sequential head at each position
        },
        losses={
            "cross_entropy": 0.1,
            "soft_cross_entropy": 0.0,  # learns faster at first
            "total_variation": 0.9,
            "confidence": 1.0,
            "decay": 4.0,  # position k of a block counts exp(-k / decay)
        },
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
            "compute_dtype": "auto",  # of the products: auto, float32 or bfloat16
            "held_out": 2 if smoke else 32,  # sequences for evaluation
        },
        eval_every=5 if smoke else 200,
        save_every=5 if smoke else 200,
        seed=0,
        compilation_cache="auto",  # a folder, auto or off
    )
