"""Time to the synchronous loss: steps from a curve, seconds from a simulation, and plan's tokens."""

from __future__ import annotations

from itertools import product

import pytest

from anabranch.sim.planning.wire_choice import CANDIDATES, DELAYED_TOKENS, ROUNDED_TOKENS
from benchmarks.wire import time_to_loss
from benchmarks.wire.time_to_loss import LINES, WIRES, cell_of, counted, mean_s, reached, tokens_factor

CURVE = [(100, 4.0), (200, 3.0), (300, 2.8)]


@pytest.mark.parametrize(
    ("loss", "step"), [(4.5, 100.0), (4.0, 100.0), (3.5, 150.0), (2.9, 250.0), (2.8, 300.0), (2.7, None)]
)
def test_a_loss_is_reached_between_two_points_in_proportion(loss: float, step: float | None) -> None:
    found = reached(CURVE, loss)
    assert found == step or found == pytest.approx(step)


def test_a_snapshot_counts_once_in_the_period_of_the_wire() -> None:
    rows = [10.0, 10.0, 25.0, 10.0, 10.0]
    assert mean_s(rows, 5) == pytest.approx(13.0)
    assert mean_s(rows, 15) == pytest.approx(11.0)
    pairs = [4.0, 28.0, 3.0, 29.0, 24.0, 28.0, 4.0, 28.0, 2.0, 30.0]
    assert mean_s(pairs, 10, together=2) == pytest.approx(17.0)


def test_a_delay_of_iterations_that_end_in_pairs_is_the_mean_of_a_pair() -> None:
    assert mean_s([27.0, 4.0, 28.0, 3.0], 5, together=2) == pytest.approx(15.5)


def test_each_cell_has_snapshots_once_a_period_and_its_own_line() -> None:
    for wire, bps in product(WIRES, LINES.values()):
        scenario = cell_of(wire, bps).load()
        run = scenario.run
        rows = [row + 1 for row in counted(wire)]
        assert rows[-1] == run.iterations - run.delay
        sent = [t for t in rows if (t - 1) % run.snapshot_every == 0]  # in the iteration after it
        assert len(sent) == 1 + run.delay
        assert scenario.network.up_bps == scenario.network.down_bps == (bps,)


def test_plan_weighs_the_tokens_that_were_measured() -> None:
    """Codecs that `plan` may choose cost no more tokens, over all seeds, than it reckons with."""
    found = {trial.result: trial for trial in time_to_loss.trials()}
    doubling = time_to_loss.doubling_nats([*found.values()])
    three_seeds = found["wire-loss-1024"]
    for wire in ("int8", "int8, coarse sums"):
        factor = tokens_factor(three_seeds, wire, doubling)
        assert factor and factor.mean <= ROUNDED_TOKENS + 0.005
    assert len(CANDIDATES) == 3  # no codec, and these two
    delayed = tokens_factor(three_seeds, "delay 1", doubling)
    assert delayed and round(delayed.mean, 2) == DELAYED_TOKENS
