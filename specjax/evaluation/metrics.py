"""Ratios and histograms from decoding's counts (`RoundStats`, summed over rows).

The definitions are DeepSpec's unless said otherwise. A ratio of nothing is None.
"""

from typing import Any

import numpy as np

from specjax.decoding.types import RoundStats


def mean_accepted_length(stats: RoundStats) -> float | None:
    """Tokens committed a round: (accepted drafts + the target's own tokens) / rounds.

    A round that an accepted stop token ends has no token of the target's own. The
    prefill's token is not counted, and the length limit cuts nothing off.
    """
    return _ratio(np.sum(stats.accepted_BG) + np.sum(stats.bonus_B), np.sum(stats.rounds_B))


def survival_by_position(stats: RoundStats) -> list[float | None]:
    """Of the rounds that verified draft k, the share that accepted it and all before it."""
    return _ratios(np.sum(stats.accepted_BG, 0), np.sum(stats.verified_BG, 0))


def acceptance_by_position(stats: RoundStats) -> list[float | None]:
    """Of the rounds that verified draft k and accepted all before it, the share accepting it."""
    return _ratios(np.sum(stats.accepted_BG, 0), np.sum(stats.reached_BG, 0))


def rounds_by_accepted(stats: RoundStats) -> list[int]:
    """Rounds that accepted exactly 0, 1, ..., γ drafts."""
    rounds = np.sum(stats.rounds_B, keepdims=True)
    at_least = np.concatenate([rounds, np.sum(stats.accepted_BG, 0), [0]])
    return [int(count) for count in at_least[:-1] - at_least[1:]]


def verify_rate(stats: RoundStats) -> float | None:
    """Tokens committed for each position that the target ran on in a round."""
    return _ratio(
        np.sum(stats.accepted_BG) + np.sum(stats.bonus_B),
        np.sum(stats.verified_BG) + np.sum(stats.rounds_B),
    )


def summarize(stats: RoundStats) -> dict[str, Any]:
    """Every metric of this module and the totals, by the names that report.json uses."""
    return {
        "mean_accepted_length": mean_accepted_length(stats),
        "survival_by_position": survival_by_position(stats),
        "acceptance_by_position": acceptance_by_position(stats),
        "rounds_by_accepted": rounds_by_accepted(stats),
        "drafted": int(np.sum(stats.drafted_B)),
        "verified": int(np.sum(stats.verified_BG)),
        "verify_rate": verify_rate(stats),
        "rounds": int(np.sum(stats.rounds_B)),
    }


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None


def _ratios(parts: Any, wholes: Any) -> list[float | None]:
    return [_ratio(part, whole) for part, whole in zip(parts, wholes, strict=True)]
