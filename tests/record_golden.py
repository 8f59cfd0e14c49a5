"""Records outputs of transformers on tiny random models, for the tests of new architectures.

    pip install torch transformers && python tests/record_golden.py tests/data mistral gemma2

A model's folder gets config.json, the same in the older spelling of most files on the hub
(config_hub.json), model.safetensors, and golden.npz: token ids [B, T], logits [B, T, V] and
hidden states [L + 1, B, T, D], the embedding first and the last one normed.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": 6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# What differs from SIZES; soft caps low enough to matter.
MODELS = {
    "mistral": {"rope_theta": 1e4, "head_dim": 8},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    },
}


def main() -> None:
    """Records the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="+", choices=MODELS)
    arguments = parser.parse_args()
    for name in arguments.models:
        record(name, arguments.folder / name)


def record(name: str, folder: Path) -> None:
    """Makes one model, and writes it with its outputs."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES | MODELS[name], attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            # Every parameter counts, norms too: those that are 1 or 0 would hide a mistake.
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.3 if "embed" in path else parameter.shape[1] ** -0.5))
        tokens = torch.randint(config.vocab_size, (2, 22))
        out = model(tokens, output_hidden_states=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    raw = json.loads((folder / "config.json").read_text())
    if "rope_theta" in raw["rope_parameters"]:  # else each kind of layers has its own
        raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
        raw["torch_dtype"] = raw.pop("dtype")
        raw.pop("layer_types", None)
        (folder / "config_hub.json").write_text(json.dumps(raw, indent=2))
    arrays = {
        "input_ids": tokens.numpy().astype(np.int32),
        "logits": out.logits.numpy(),
        "hidden_states": torch.stack(out.hidden_states).numpy(),
    }
    np.savez_compressed(folder / "golden.npz", **arrays)


if __name__ == "__main__":
    main()
