"""Training data that the target writes itself: text, and its hidden states."""

from ml_collections import ConfigDict, config_dict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r} of this config: known is 'smoke'")
    smoke = variant == "smoke"
    return config_dict.create(
        task="cache",
        target="smollm2-135m",  # a known name, a Hugging Face directory or hub id, or a .gguf file
        dtype="auto",  # of the weights: auto, float32 or bfloat16
        taps=(),  # layers whose outputs are kept, from 0; -1 is the embedding, () chooses five
        mask_token_id=config_dict.placeholder(int),  # for drafters; None chooses one
        # User turns: JSON-lines files (a glob), or a data set of the package `datasets` (a hub
        # name or a folder). Without either the target writes them.
        prompts="",
        dataset="",
        dataset_subset=config_dict.placeholder(str),
        dataset_split="train",
        answers="target",  # who answers prompts: target, or given, the conversations' own
        texts="",  # token ids of earlier runs (texts.npz, or a glob), instead of all these
        tokens=500 if smoke else 300_000,  # to write at least, unless the prompts end; given texts
        # and answers are taken whole
        max_len=config_dict.placeholder(int),  # of given ones; None is the model's context
        batch_size=4 if smoke else 32,
        user_tokens=16 if smoke else 96,
        answer_tokens=32 if smoke else 256,
        user_openings=("",),  # words that written user turns begin with, in turn
        user_temperature=1.0,
        temperatures=(0.0, 0.8),  # of the answers, in turn
        top_k=0,  # these of user turns and answers alike
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        min_answer_tokens=14,  # shorter answers are dropped
        seed=0,
        compilation_cache="auto",  # a folder, auto or off
    )
