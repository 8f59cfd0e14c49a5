"""Measures a drafter on files of prompts: --config.prompts='folder/*.jsonl'."""

from ml_collections import ConfigDict, config_dict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r} of this config: known is 'smoke'")
    smoke = variant == "smoke"
    return config_dict.create(
        task="evaluate",
        target="smollm2-135m",  # a known name, a Hugging Face directory or hub id, or a .gguf file
        dtype="auto",  # of the weights: auto, float32 or bfloat16
        drafter="prompt_lookup",  # a name (README, "Drafters"), a directory or a hub id
        candidates=config_dict.placeholder(int),  # of DSpark's sequential head; 0 is all
        any_target=False,  # whether the drafter may have been trained for another target
        prompts="tests/data/prompts.jsonl" if smoke else "",  # a glob of JSON-lines files
        limit=2 if smoke else 0,  # prompts of each file; 0 is all
        chat=True,  # whether prompts go through the target's chat template
        max_new_tokens=16 if smoke else 128,
        temperature=0.0,  # 0 is greedy
        seed=0,
        draft_len=config_dict.placeholder(int),  # γ, tokens drafted a round; None suits the drafter
        batch_size=1,
        acceptance="rejection",  # or coupled: sampled output equals plain sampling of the same seed
        policy="full",  # how many drafts to verify: full or threshold:T
        check="float32",  # of identical output: float32, gap or none
        gap_tolerance=0.5,  # in logits, for the check "gap"
        compilation_cache="auto",  # a folder, auto or off
    )
