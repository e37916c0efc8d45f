"""A relay goes over to the stage that holds the others up: when it pays, and has paid for long enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from anabranch.net.wan.profile import wan10
from anabranch.protocol.core import Core
from anabranch.protocol.detector import Silence
from anabranch.protocol.rebalancing import Rebalancing
from anabranch.protocol.records import Member, Members
from anabranch.protocol.settings import Settings
from anabranch.sim.scenario import fleet_of, load_scenario
from anabranch.sim.simulate import Simulation

AFTER = 3


class Swarm:
    """Stages of relays by their seconds; the leader is linked to all and serves stage 0."""

    def __init__(self, *stages: Sequence[float], steps: int = 1000, after: int = AFTER) -> None:
        settings = Settings("x", 1, len(stages), 8, steps, rebalance=after)
        self.core = Core("d", 1, 0, settings, "d")
        relays = [
            Member(f"r{stage}.{at}", stage, 1, "", 64, forward_s=seconds)
            for stage, each in enumerate(stages, start=1)
            for at, seconds in enumerate(each)
        ]
        members = (Member("d", 0, 1, "", 64), *relays)
        self.core.membership.apply(Members(1, members, {member.id: 1 for member in members}))
        self.core.membership.open(1, len(stages))
        for relay in relays:
            self.core.links[relay.id] = Silence(0.0, 1.0)
        self.rebalancing = Rebalancing(self.core)
        self.t = 0

    def iterations(self, count: int, quiet: bool = True) -> Mapping[str, int] | None:
        """Who moves where within so many of them."""
        for _ in range(count):
            self.t += 1
            record = self.rebalancing.decide(self.t, quiet)
            if record is not None:
                assert record.removed.keys() == {member.id for member in record.joined}
                self.core.membership.apply(record)
                return {member.id: member.stage for member in record.joined}
        return None


def test_a_stage_that_can_spare_one_helps_the_slowest() -> None:
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    assert swarm.iterations(AFTER - 1) is None
    assert swarm.iterations(1) == {"r1.0": 2}
    assert swarm.iterations(100) is None  # the one that moved serves nobody yet, and three are three


def test_the_one_whose_move_helps_most_goes() -> None:
    """In relays of 0.02 s: 2 + 1 + 1 against 2; without the quick one stage 1 would be the slowest."""
    assert Swarm([0.01, 0.02, 0.02], [0.02, 0.02]).iterations(9) == {"r1.1": 2}


def test_two_stages_that_are_as_slow_are_helped_together() -> None:
    """No single move would make the slowest stage any quicker."""
    assert Swarm([0.01] * 6, [0.01] * 3, [0.01] * 6, [0.01] * 3).iterations(9) == {"r1.0": 2, "r3.0": 4}


def test_no_more_move_than_pay() -> None:
    """A second move would leave every stage with three, as the first does."""
    assert Swarm([0.01] * 5, [0.01] * 2, [0.01] * 4).iterations(9) == {"r1.0": 2}


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(([0.01] * 3, [0.01] * 2), id="the other stage would be the slowest"),
        pytest.param(([0.001] * 2, [0.01] * 2), id="nobody can be spared"),
        pytest.param(([0.01] * 24, [0.01] * 22), id="the gain is small"),
    ],
)
def test_nobody_moves_in_vain(stages: tuple[Sequence[float], ...]) -> None:
    assert Swarm(*stages).iterations(50) is None


def test_a_move_must_pay_in_the_steps_that_are_left() -> None:
    assert Swarm([0.01] * 4, [0.01] * 2, steps=AFTER + 2).iterations(AFTER + 2) is None


def test_the_gain_must_have_stood_and_the_moment_must_be_quiet() -> None:
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    assert swarm.iterations(AFTER - 1) is None
    gone = swarm.core.membership.members["r1.0"]
    swarm.core.membership.apply(Members(2, removed={"r1.0": "crashed"}))
    assert swarm.iterations(1) is None
    swarm.core.membership.apply(Members(3, joined=(gone,), active_from={"r1.0": 1}))
    assert swarm.iterations(AFTER - 1) is None
    assert swarm.iterations(2, quiet=False) is None
    assert swarm.iterations(1) is not None


def test_voters_and_those_out_of_reach_stay() -> None:
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    swarm.core.voters = ("r1.0/disk",)
    del swarm.core.links["r1.1"]
    assert swarm.iterations(AFTER) == {"r1.2": 2}


def test_what_was_measured_counts_more_than_what_was_offered() -> None:
    """The heartbeats say that the relays of stage 2 are quicker than they said when they joined."""
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    for at in range(4):
        swarm.core.costs.of(f"r1.{at}").told_speed(0.01, 0.01, 0.0, 0.0)
    for at in range(2):
        swarm.core.costs.of(f"r2.{at}").told_speed(0.004, 0.004, 0.0, 0.0)
    assert swarm.iterations(20) is None


def test_nobody_moves_unless_the_run_wants_that() -> None:
    assert Swarm([0.01] * 4, [0.01] * 2, after=0).iterations(20) is None


@pytest.mark.soak
def test_a_swarm_whose_stages_are_uneven_gets_quicker() -> None:
    """Four relays, three and two: one of the four goes over, and fetches the state."""
    small: dict[str, Any] = {
        "model.size": "llama-tiny",
        "model.stages": 3,
        "model.rows": 16,
        "model.sequence": 64,
        "model.microbatches": 12,
        "fleet.relays": 9,
        "fleet.achieved": 0.01,
        "fleet.speed": [0.01],
        "run.iterations": 7,
    }

    def seconds(rebalance: int) -> list[float]:
        fleet = fleet_of(load_scenario("wan10", small | {"fleet.rebalance": rebalance}), wan10(), 0)
        uneven = {**fleet.hosts, "r3.2": replace(fleet.hosts["r3.2"], stage=1)}
        outcome = Simulation(replace(fleet, hosts=uneven), "auction", 0).run()
        assert not outcome.failure
        return [row.seconds for row in outcome.rows]

    assert sum(seconds(2)[-2:]) < 0.85 * sum(seconds(0)[-2:])


def test_a_stage_without_anybody_is_not_filled_by_moves() -> None:
    """That is for `restoring`; a leader that has just taken over looks at such a swarm first of all."""
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    swarm.core.membership.apply(Members(2, removed={"r2.0": "crashed", "r2.1": "crashed"}))
    assert swarm.iterations(AFTER) is None
