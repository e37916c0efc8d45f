"""Messages and bytes of a round of islands: formulas of docs/explanation/islands.md against the meters."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.device_model import Workload
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Row

STEPS, SHARE = 50, 4
"""Inner steps of a slot in a round on average, and microbatches of each of them."""
#: Bytes a value of contributions and results: 4 or 8 bits, and 2 bytes of scale for each 64 values.
INT4, INT8 = 34 / 64, 66 / 64


def messages(slots: int, relays: int, data_nodes: int, private: bool) -> float:
    """Control messages of a round that is shorter than a heartbeat."""
    peers = relays + data_nodes
    orders = 5 * (peers - 1)
    claims = slots * (2 * data_nodes - 1) / data_nodes
    return orders + claims + 2 * slots + slots * private  # the digest of each contribution


def payload_bytes(slots: int, relays: int, parameters: int, microbatch: int, private: bool) -> float:
    exchanged = (slots - 1) * INT4 * parameters + (relays - 1) * INT8 * parameters
    return exchanged + (slots if private else slots * STEPS * SHARE * microbatch)


def last_round(slots: int, relays: int, changes: dict[str, Any]) -> tuple[Row, Workload]:
    """Last of four calm rounds of whole models on `volunteers` with these changes, and its workload."""
    shared = {
        "model.size": "llama-tiny",
        "model.stages": 0,
        "model.microbatches": SHARE * slots,
        "fleet.relays": relays,
        "fleet.spare": "never",
        "round.slots": slots,
        "round.steps": STEPS,
        "churn.crash": 0.0,
        "run.heartbeat_s": 60.0,
        "run.iterations": 4,
    }
    scenario = load_scenario("volunteers", shared | changes)
    outcome = simulate(scenario, find_profile("wan10"), "auction", 0)
    assert not outcome.failure
    return outcome.rows[-1], scenario.work


@pytest.mark.parametrize(
    ("slots", "relays", "data_nodes", "private"),
    [
        *((4, 4, 2, False), (4, 6, 2, False), (8, 8, 4, False), (4, 4, 2, True)),
        pytest.param(12, 12, 4, False, marks=pytest.mark.soak),
        pytest.param(24, 24, 2, False, marks=pytest.mark.soak),
    ],
)
def test_meters_are_within_two_percent_of_the_formulas(
    slots: int, relays: int, data_nodes: int, private: bool
) -> None:
    more = {"fleet.data_nodes": data_nodes, "fleet.neighbours": 24, "round.private": private}
    row, work = last_round(slots, relays, more)
    assert row.messages == pytest.approx(messages(slots, relays, data_nodes, private), rel=0.02)
    expected = payload_bytes(slots, relays, work.parameters(1), work.activation_bytes, private)
    assert row.payload_bytes == pytest.approx(expected, rel=0.02)


def test_a_round_has_the_sizes_of_precision() -> None:
    """Contributions and results with the sizes of `precision` take as many bytes as the formula says."""
    slots, sums, results = 4, 2.0, 0.25
    row, work = last_round(slots, slots, {"precision.sum_bytes": sums, "precision.reduced_bytes": results})
    tokens = slots * STEPS * SHARE * work.activation_bytes
    expected = (slots - 1) * (sums + results) * work.parameters(1) + tokens
    assert row.payload_bytes == pytest.approx(expected, rel=0.02)
