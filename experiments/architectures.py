"""Every architecture beside transformers: the largest errors of logits and hidden states.

    python experiments/architectures.py --out=docs/results/architectures.json

The models are tiny and random, with outputs of transformers recorded in float32
(tests/record_golden.py); each is run in one pass and, cached, token by token. Prints a table
and writes JSON; exits with 1 if an error exceeds 1e-4, absolute and relative together.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser, provenance

import specjax
from specjax.evaluation.report import format_table
from specjax.files import write_json

MODELS = Path(__file__).parent.parent / "tests" / "data"
TOLERANCE = 1e-4


def main() -> int:
    """Runs the experiment; the process's exit code."""
    parser = argument_parser(__doc__, "the first model alone, to see that all works")
    arguments = parser.parse_args()
    folders = sorted(path.parent for path in MODELS.glob("*/golden.npz"))
    with jax.default_matmul_precision("highest"):
        errors = {
            folder.name: measure(folder) for folder in folders[: 1 if arguments.smoke else None]
        }
    write_json(arguments.out, {**provenance(), "tolerance": TOLERANCE, "errors": errors})
    rows = [[name, *(f"{value:.1e}" for value in row.values())] for name, row in errors.items()]
    print(format_table(["model", *next(iter(errors.values()))], rows))
    return int(any(max(row.values()) > TOLERANCE for row in errors.values()))


def measure(folder: Path) -> dict[str, float]:
    """The largest |ours - recorded| / (1 + |recorded|) of a model."""
    target = specjax.load_target(folder, dtype="float32")
    with np.load(folder / "golden.npz") as golden:
        tokens, logits, states = (golden[k] for k in ("input_ids", "logits", "hidden_states"))
    taps = tuple(range(-1, len(states) - 2))
    whole = target.forward(tokens, taps)
    assert whole.taps is not None
    apply = jax.jit(target.model.apply, static_argnames="taps")
    cache, cached = target.model.init_cache(*tokens.shape), []
    for t in range(tokens.shape[1]):
        positions = jnp.full((len(tokens), 1), t, jnp.int32)
        out = apply(target.params, tokens[:, t : t + 1], positions, cache, taps=taps)
        cache = out.cache
        cached.append(out.logits)
    ours = [*np.moveaxis(np.asarray(whole.taps), 2, 0), whole.hidden]
    return {
        "logits": _error(whole.logits, logits),
        "hidden states": _error(np.stack(ours), states),
        "cached logits": _error(np.concatenate(cached, axis=1), logits),
    }


def _error(ours: Any, recorded: np.ndarray) -> float:
    return float(np.max(np.abs(ours - recorded) / (1 + np.abs(recorded))))


if __name__ == "__main__":
    sys.exit(main())
