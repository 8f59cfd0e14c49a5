import json
from pathlib import Path

import numpy as np
import pytest

from specjax.decoding.types import RoundStats
from specjax.evaluation import metrics

GOLDEN = Path(__file__).parents[1] / "data" / "eval_metrics.json"


def stats_of(rows, draft_len):
    """Counts of rows of rounds (verified, accepted, ended without a token of the target's)."""

    def count(index, row, k):
        return sum(round_[index] > k for round_ in row)

    def grid(index):
        counts = [[count(index, row, k) for k in range(draft_len)] for row in rows]
        return np.asarray(counts, np.int32).reshape(len(rows), draft_len)

    rows = [[(v, a, stopped, min(v, a + 1)) for v, a, stopped in row] for row in rows]

    def per_row(values):
        return np.asarray(list(values), np.int32)

    bonus = [sum(not stopped for _, _, stopped, _ in row) for row in rows]
    accepted = [sum(accepted for _, accepted, _, _ in row) for row in rows]
    return RoundStats(
        rounds_B=per_row(map(len, rows)),
        drafted_B=per_row(draft_len * len(row) for row in rows),
        verified_BG=grid(0),
        reached_BG=grid(3),
        accepted_BG=grid(1),
        bonus_B=per_row(bonus),
        emitted_B=per_row(a + b for a, b in zip(accepted, bonus, strict=True)),
    )


def test_golden_rounds():
    golden = json.loads(GOLDEN.read_text())
    rows = [
        [
            (proposed, accepted, length == accepted)
            for proposed, accepted, length in zip(
                response["proposal_lengths"],
                response["accepted_draft_lengths"],
                response["acceptance_lengths"],
                strict=True,
            )
        ]
        for response in golden["responses"]
    ]
    summary = metrics.summarize(stats_of(rows, golden["block_size"]))
    expected = golden["metrics_row"]
    assert summary["mean_accepted_length"] == pytest.approx(expected["acceptance_length"])
    assert summary["verify_rate"] == pytest.approx(expected["verify_rate"])
    assert summary["survival_by_position"] == pytest.approx(expected["accept_rates_by_position"])
    assert summary["verified"] == golden["summary"]["proposal_length_sum"]
    assert summary["rounds"] == golden["summary"]["proposal_count"]
    lengths = [accepted for row in rows for _, accepted, _ in row]
    assert summary["rounds_by_accepted"] == np.bincount(lengths, minlength=6).tolist()


def test_acceptance_is_conditional_and_allows_for_stop_tokens(rng):
    draft_len = 4
    rows = []
    for _ in range(200):
        rounds = [(draft_len, int(n), False) for n in rng.integers(0, draft_len + 1, 3)]
        if rng.random() < 0.7:  # the row ends in an accepted stop token, somewhere in a block
            place = int(rng.integers(1, draft_len + 1))
            rounds.append((place, place, True))
        rows.append(rounds)
    rounds = [round_ for row in rows for round_ in row]
    tried = [sum(v > k and a >= k for v, a, _ in rounds) for k in range(draft_len)]
    kept = [sum(a > k for _, a, _ in rounds) for k in range(draft_len)]
    expected = [a / t for a, t in zip(kept, tried, strict=True)]
    assert metrics.acceptance_by_position(stats_of(rows, draft_len)) == pytest.approx(expected)


def test_acceptance_after_cut_drafts():
    stats = stats_of([[(3, 3, False), (1, 1, False), (1, 0, False), (3, 1, False)]], 3)
    assert metrics.acceptance_by_position(stats) == [0.75, 0.5, 1.0]
    assert metrics.survival_by_position(stats) == [0.75, 0.5, 0.5]


def test_a_stop_token_brings_no_token_of_the_targets_own():
    assert metrics.mean_accepted_length(stats_of([[(2, 2, False), (1, 1, True)]], 2)) == 2.0


def test_ratios_of_nothing_are_none():
    summary = metrics.summarize(stats_of([[]], 2))
    assert summary["mean_accepted_length"] is None
    assert summary["verify_rate"] is None
    assert summary["survival_by_position"] == [None, None]
    assert summary["acceptance_by_position"] == [None, None]
    assert summary["rounds_by_accepted"] == [0, 0, 0]


def test_autoregressive_rounds():
    summary = metrics.summarize(stats_of([[(0, 0, False)] * 5], 0))
    assert summary["mean_accepted_length"] == 1.0
    assert summary["survival_by_position"] == summary["acceptance_by_position"] == []
    assert summary["rounds_by_accepted"] == [5]
