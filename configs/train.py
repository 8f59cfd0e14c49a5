"""Trains a drafter: --config.cache=FOLDER, as configs/cache.py made it.

Or online, without a cache: --config.texts=FILE, or conversations with given answers. Here a
DSpark drafter; configs/mtp.py is for MTP, and for targets that learn too.
"""

from ml_collections import ConfigDict, config_dict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r} of this config: known is 'smoke'")
    smoke = variant == "smoke"
    return config_dict.create(
        task="train",
        algorithm="dspark",  # dspark, mtp, or none (with train_target)
        train_target=False,  # the target learns too, and its drafter beside it
        cache="",  # a target cache; "" is online, for which the next lines say what to read
        texts="",  # token ids that configs/cache.py made: texts.npz, or a glob of such files
        prompts="",  # conversations with answers: JSON-lines files (a glob),
        dataset="",  # or a data set of the package `datasets` (a hub name or a folder)
        dataset_subset=config_dict.placeholder(str),
        dataset_split="train",
        answers="given",
        corpus="",  # plain text: files (a glob), or "stdlib", Python's own
        tokenizer="",  # of a new target: a folder; "" trains one on the corpus
        # A cache has what it needs of its target. "new" is one that is trained from scratch.
        target="smollm2-135m",
        model={  # sizes of a new target, of Llama's kind
            "vocab_size": 300 if smoke else 4096,
            "width": 32 if smoke else 192,
            "mlp_width": 64 if smoke else 512,
            "num_layers": 2 if smoke else 12,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8 if smoke else 48,
            "max_len": 2048,
            "tied_head": True,
        },
        dtype="auto",  # of the target's weights; of one that learns, float32
        mask_token_id=config_dict.placeholder(int),  # None takes the cache's, or chooses one
        start="",  # a drafter to go on from, whose options then hold
        any_target=False,  # whether that drafter may have been trained for another target
        drafter={  # DSpark
            "num_layers": 1 if smoke else 2,
            "taps": (),  # target layers seen, from 0 (-1: the embedding); () is all of the cache
            "layers_from": (),  # target layers whose weights the draft layers start with
            "block_size": config_dict.placeholder(int),  # γ; None is 7, or that of `start`
            "markov_rank": 8 if smoke else 64,  # of the sequential head; 0 is none: DFlash
            "markov_head": "vanilla",  # vanilla, gated or rnn
            "confidence_head": True,
            "confidence_with_markov": True,  # it sees the token before, as the sequential head
            "draft_vocab": 256 if smoke else 12_288,  # the cache's most frequent tokens; 0 is all
            "candidates": 32 if smoke else 64,  # of the sequential head at each position; 0 is all
        },
        mtp={
            "depth": 1,  # D, modules: how many tokens ahead of the target they predict
            "hidden_source": "chain",  # what depth k > 1 sees: that of depth k - 1, or "pinned"
            "hidden_norm": "post",  # hidden states are taken after the final norm, or "pre"
            "concat": "emb_h",  # order of embedding and hidden state, or "h_emb"
            "shared_module": False,  # one module serves all depths
            "draft_vocab": 0,  # most frequent tokens that may be drafted; 0 is all
        },
        mtp_losses={
            "scale": 0.3,  # λ
            "late_scale": config_dict.placeholder(float),  # λ after `late`; None leaves it
            "late": 0.67,  # part of the steps
            "depth_decay": 1.0,  # β; module k counts β^(k-1)
            "distillation": 0.0,  # part of the loss that is to the target's distribution
        },
        losses={  # of DSpark
            "cross_entropy": 0.1,
            "soft_cross_entropy": 0.0,  # to the target's distribution; not in the paper
            "total_variation": 0.9,
            "confidence": 1.0,
            "decay": 4.0,  # position k of a block counts exp(-k / decay)
        },
        training={
            "steps": 10 if smoke else 2000,
            "batch_size": 4 if smoke else 8,  # sequences a step
            "accumulation": 1,  # parts that a batch is run in
            "max_len": 64 if smoke else 384,  # longer sequences are cut off
            "learning_rate": 1e-3,
            "warmup_ratio": 0.04,  # part of the steps; then a cosine to 0
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "held_out": 2 if smoke else 32,  # sequences for evaluation
        },
        num_anchors=16 if smoke else 64,  # blocks of each sequence, for DSpark
        compute_dtype="auto",  # of the products: auto, float32 or bfloat16
        eval_every=5 if smoke else 200,  # steps between evaluations on the held-out sequences
        save_every=5 if smoke else 200,  # steps between checkpoints; the last and the best stay
        seed=0,
        compilation_cache="auto",  # a folder, auto or off
    )
