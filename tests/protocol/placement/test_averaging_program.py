"""DeDLOC's program of shares, against cases calculated by hand and a solver of linear programs."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from scipy.optimize import linprog

from anabranch.protocol.placement.averaging_program import Averager, AveragingProgram, averaging_s

S, G = 6e9, 4e9
"""Bits of a whole sum and of the whole result."""


def solved(peers: list[Averager]) -> float:
    """Seconds of the optimum by HiGHS: variables w, T1, T2."""
    count, rows, right = len(peers), [], []
    senders, receivers = sum(p.sends for p in peers), sum(p.receives for p in peers)

    def bound(k: int, share: float, constant: float, phase: int) -> None:
        row = np.zeros(count + 2)
        row[k], row[count + phase] = share, -1.0
        rows.append(row)
        right.append(-constant)

    for k, p in enumerate(peers):
        if p.sends:
            bound(k, -S / p.up_bps, S / p.up_bps, 0)
        if p.receives:
            bound(k, -G / p.down_bps, G / p.down_bps, 1)
        bound(k, (senders - p.sends) * S / p.down_bps, 0.0, 0)
        bound(k, (receivers - p.receives) * G / p.up_bps, 0.0, 1)
        if senders > p.sends:
            bound(k, S / p.link_in_bps, 0.0, 0)
        if receivers > p.receives:
            bound(k, G / p.link_out_bps, 0.0, 1)
    goal = np.zeros(count + 2)
    goal[count:] = 1.0
    whole = np.ones((1, count + 2))
    whole[0, count:] = 0.0
    found = linprog(goal, np.array(rows), np.array(right), whole, [1.0], method="highs")
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_equal_lines_get_equal_shares(count: int) -> None:
    """Each sends (n - 1)/n of its sum, then (n - 1) times its n-th of the result."""
    found = AveragingProgram([Averager(1e8, 1e8)] * count, S, G).optimum()
    assert found.shares == pytest.approx([1.0 / count] * count)
    assert found.seconds == pytest.approx((count - 1) / count * (S + G) / 1e8)


def test_a_line_that_is_busy_with_its_own_sum_gets_next_to_no_share() -> None:
    """The thin uplink takes 300 s for its whole sum, its downlink 4 s for the result. With the share w it
    sends for 300 (1 - w) s there and 3 w 200 s back, while the result comes down for 4 (1 - w) s: w is
    4 / 604."""
    thin, quick = Averager(2e7, 1e9), Averager(1e9, 1e9)
    program = AveragingProgram([thin, quick, quick, quick], S, G)
    found, share = program.optimum(), 4.0 / 604.0
    assert found.shares[0] == pytest.approx(share, rel=1e-4)
    assert found.shares[1:] == pytest.approx([(1.0 - share) / 3.0] * 3, rel=1e-4)
    assert found.seconds == pytest.approx(304.0 * (1.0 - share))
    assert program.seconds([0.25] * 4) == pytest.approx(0.75 * 300.0 + 0.75 * 200.0)
    assert program.in_parts(16)[0] == 0


def test_a_thin_line_that_is_not_the_bottleneck_gets_its_bandwidth_s_part() -> None:
    """Helpers alone: of three that neither send nor receive, each sums in proportion to its line."""
    ends = [Averager(1e10, 1e10)] * 2
    helpers = [Averager(bps, bps, sends=False, receives=False) for bps in (1e8, 2e8, 5e8)]
    shares = AveragingProgram([*ends, *helpers], S, G).optimum().shares
    assert shares[2] < shares[3] < shares[4]
    assert shares[3] / shares[2] == pytest.approx(2.0, rel=1e-3)
    assert shares[4] / shares[2] == pytest.approx(5.0, rel=1e-3)


def test_a_peer_that_only_sums_takes_what_its_line_carries() -> None:
    """Two senders halve the work best by themselves: (1 - w) (60 + 40) s are least at one half, 50 s. If
    their link takes a tenth of their lines' rate, nearly all goes by way of the helper. Of eight, the helper
    with a line ten times as quick sums more than a member."""
    ends, helper = [Averager(1e8, 1e8)] * 2, Averager(1e9, 1e9, sends=False, receives=False)
    assert AveragingProgram([*ends, helper], S, G).optimum().seconds == pytest.approx(50.0)
    far = [Averager(1e8, 1e8, link_in_bps=1e7, link_out_bps=1e7)] * 2
    assert AveragingProgram([*far, helper], S, G).optimum().shares[2] > 0.8
    many = AveragingProgram([Averager(1e8, 1e9)] * 8 + [helper], S, G).optimum()
    assert many.shares[8] > 2 * many.shares[0]


def test_the_optimum_is_a_solver_s() -> None:
    for seed in range(60):
        rng = Random(seed)
        peers = [
            Averager(
                10 ** rng.uniform(7, 9),
                10 ** rng.uniform(7, 9),
                10 ** rng.uniform(6, 9) if rng.random() < 0.3 else math.inf,
                10 ** rng.uniform(6, 9) if rng.random() < 0.3 else math.inf,
                sends=number == 0 or rng.random() < 0.8,
                receives=rng.random() < 0.8,
            )
            for number in range(rng.randint(2, 12))
        ]
        found = AveragingProgram(peers, S, G).optimum()
        assert sum(found.shares) == pytest.approx(1.0) and min(found.shares) >= 0.0
        assert found.seconds == pytest.approx(solved(peers), rel=1e-5), seed


def test_parts_are_dealt_as_the_shares_are() -> None:
    assert AveragingProgram([Averager(1e8, 1e8)] * 4, S, G).in_parts(16) == (4, 4, 4, 4)
    thin, quick = Averager(2e7, 1e9), Averager(1e9, 1e9)
    counts = AveragingProgram([thin, quick, quick, quick], S, G).in_parts(16)
    assert counts[0] == 0 and sorted(counts[1:]) == [5, 5, 6]


@pytest.mark.parametrize(
    "lines",
    [
        [(1e8, 1e8)] * 2,
        [(1e8, 1e8)] * 12,
        [(1e8, 1e8), (2e8, 2e8), (5e8, 5e8), (5e8, 5e8)],
        [(2e7, 1e9), (5e7, 5e8), (5e8, 1e8), (1e9, 1e9)],
    ],
)
def test_the_estimate_is_near_the_optimum(lines: list[tuple[float, float]]) -> None:
    """It leaves out what a peer keeps of its own share: half of all among two."""
    best = AveragingProgram([Averager(*line) for line in lines], S, G).optimum().seconds
    assert 0.8 * best <= averaging_s(lines, S, G) <= 2.0 * best * (1 + 1e-6)
