"""Writes a DSpark drafter in DeepSpec's format, for other engines: --config.drafter=FOLDER."""

from ml_collections import ConfigDict, config_dict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r} of this config: known is 'smoke'")
    return config_dict.create(
        task="export",
        target="smollm2-135m",  # that the drafter was trained for
        dtype="bfloat16",  # of the weights in the file: bfloat16 or float32
        drafter="smollm2-135m-dspark" if variant == "smoke" else "",  # a name or a directory
        candidates=config_dict.placeholder(int),  # of the sequential head, for specjax; 0 is all
        any_target=False,  # whether the drafter may have been trained for another target
        replace=False,  # whether a drafter that is there already makes place
    )
