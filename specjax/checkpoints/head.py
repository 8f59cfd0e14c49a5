"""What of a target a drafter's training needs besides its hidden states.

A target cache holds it beside the shards, so that training loads no target: its embedding
and language-model head (target.safetensors), its sizes, end-of-sequence ids and fingerprint
(target.json).
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.huggingface import open_safetensors, read_json
from specjax.files import file_digest, replacing, write_json
from specjax.models.config import TransformerConfig
from specjax.models.target import Target
from specjax.models.transformer import TransformerTarget

_WEIGHTS, _CONFIG = "target.safetensors", "target.json"


@dataclasses.dataclass(frozen=True)
class TargetHead(Target):
    """A target's embedding and head alone: enough for training, but it cannot decode.

    Attributes:
      whole: fingerprint of the whole target.
    """

    whole: str

    def fingerprint(self) -> str:
        """That of the whole target."""
        return self.whole


def save_head(directory: Path, target: Target, mask_token_id: int) -> None:
    """Writes a target's embedding, head and sizes.

    Args:
      directory: exists.
      target: of specjax.
      mask_token_id: for drafters.
    """
    assert isinstance(target.model, TransformerTarget)  # it gave hidden states
    config = target.model.config
    tensors = {name: np.asarray(jax.device_get(array)) for name, array in _head(target).items()}
    with replacing(directory / _WEIGHTS) as path:
        safetensors.numpy.save_file(tensors, path)
        path.chmod(0o644)  # readable by others, as plain files are
    about = {
        "sha256": file_digest(directory / _WEIGHTS),
        "name": target.name,
        "dtype": target.dtype,
        "stop_ids": target.stop_ids,
        "fingerprint": target.fingerprint(),
        "mask_token_id": mask_token_id,
        "config": dataclasses.asdict(config),
    }
    write_json(directory / _CONFIG, about)


def head_bytes(target: Target) -> int:
    """About what `save_head` will write."""
    return sum(array.nbytes for array in _head(target).values())


def _head(target: Target) -> dict[str, jax.Array]:
    assert isinstance(target.model, TransformerTarget)  # it gave hidden states
    return {name: target.params[name]["weight"] for name in _names(target.model.config)}


def _names(config: TransformerConfig) -> tuple[str, ...]:
    return ("embed",) if config.tied_head else ("embed", "lm_head")


def has_head(directory: Path) -> bool:
    """Whether the folder holds them; caches that specjax did not make do not."""
    return (directory / _CONFIG).is_file()


def load_head(directory: Path) -> tuple[TargetHead, int]:
    """A target's embedding and head, and the mask token for drafters.

    Raises:
      CheckpointError: files that are missing or damaged.
    """
    about = read_json(directory / _CONFIG)
    try:
        model = TransformerTarget(TransformerConfig.from_plain(about["config"]))
        stored = open_safetensors(directory / _WEIGHTS)
        if file_digest(directory / _WEIGHTS) != about["sha256"]:
            raise CheckpointError(
                f"{directory / _WEIGHTS} has changed since the cache was made: copy it again"
            )
        arrays = {name: jnp.asarray(tensor.read()) for name, tensor in stored.items()}
        params = {name: {"weight": array} for name, array in arrays.items()}
        expected = set(_names(model.config))
        if set(params) != expected:
            raise ValueError(f"{_WEIGHTS} holds {sorted(params)} instead of {sorted(expected)}")
        target = TargetHead(
            model,
            params,
            tokenizer=None,
            stop_ids=tuple(about["stop_ids"]),
            name=str(about["name"]),
            dtype=str(about["dtype"]),
            whole=str(about["fingerprint"]),
        )
        return target, int(about["mask_token_id"])
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / _CONFIG} is damaged or of an older version ({error!r}): make the cache "
            f"again, from its texts.npz"
        ) from error
