"""A relay goes over to the stage that holds the others up: when it pays, and has paid for long enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.net.wan.profile import find_profile
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.fleet.rebalancing import KEEPS, Rebalancing
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.sim.cluster.scenario import Fleet, fleet_of, load_scenario
from anabranch.sim.experiment.run import Simulation
from anabranch.sim.kernel.simulated_peer import Node

AFTER = 3


class Swarm:
    """Stages of relays by their seconds; the leader is linked to all and serves stage 0."""

    def __init__(self, *stages: Sequence[float], steps: int = 1000, after: int = AFTER) -> None:
        settings = Settings("x", 1, len(stages), 8, steps, rebalance=after)
        self.ctx = make_context("d", 1, 0, settings, "d")
        relays = [
            Member(f"r{stage}.{at}", stage, 1, "", 64, forward_s=seconds)
            for stage, each in enumerate(stages, start=1)
            for at, seconds in enumerate(each)
        ]
        members = (Member("d", 0, 1, "", 64), *relays)
        self.ctx.run.membership.apply(Members(1, members, {member.id: 1 for member in members}))
        self.ctx.run.membership.open(1, len(stages))
        for relay in relays:
            self.ctx.links.up[relay.id] = AdaptiveTimeout(0.0, 1.0)
        self.rebalancing = Rebalancing(self.ctx)
        self.t = 0

    def removes(self, *peers: str) -> None:
        """They crashed."""
        number = self.ctx.run.membership.number + 1
        self.ctx.run.membership.apply(Members(number, removed=dict.fromkeys(peers, "crashed")))

    def iterations(self, count: int, quiet: bool = True) -> Mapping[str, int] | None:
        """Moves within so many iterations: peer -> stage."""
        for _ in range(count):
            self.t += 1
            live, stages = self.ctx.run.membership.live, self.ctx.run.settings.stages
            applied = {stage: live(stage, self.t + 1) for stage in range(stages + 1)}
            record = self.rebalancing.decide(self.t, quiet, applied)
            if record is not None:
                assert record.removed.keys() == {member.id for member in record.joined}
                self.ctx.run.membership.apply(record)
                return {member.id: member.stage for member in record.joined}
        return None

    def serve(self) -> None:
        """Relays that moved have their state and serve."""
        since, members = self.ctx.run.membership.active_from, self.ctx.run.membership.members
        begins = {peer: self.t + 2 for peer in members if peer not in since}
        self.ctx.run.membership.apply(Members(self.ctx.run.membership.number + 1, active_from=begins))


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


def test_who_is_gone_is_gone_at_the_first_look() -> None:
    """A measurement may be noise and must persist; the absence of a replica is certain."""
    swarm = Swarm([0.01] * 4, [0.01] * 3)
    assert swarm.iterations(5) is None
    swarm.removes("r2.0")
    assert swarm.iterations(1) == {"r1.0": 2}


def test_after_a_round_even_that_waits() -> None:
    swarm = Swarm([0.01] * 8, [0.01] * 3)
    assert swarm.iterations(AFTER) is not None
    swarm.removes("r2.0", "r2.1")
    assert swarm.iterations(AFTER - 1) is None
    assert swarm.iterations(1) is not None


def test_a_loss_that_asked_for_no_move_is_not_kept_in_mind() -> None:
    """When a stage seems slow later, that must stand."""
    swarm = Swarm([0.01] * 6, [0.01] * 5)
    assert swarm.iterations(2) is None
    swarm.removes("r1.0")
    assert swarm.iterations(1) is None
    for at in range(5):
        swarm.ctx.costs.of(f"r2.{at}").told_speed(0.02, 0.04, 0.0, 0.0)
    assert swarm.iterations(AFTER - 1) is None
    assert swarm.iterations(1) is not None


def test_one_that_leaves_and_comes_back_again_and_again_moves_few() -> None:
    swarm, rounds = Swarm([0.01] * 6, [0.01] * 3), 0
    for look in range(60):
        flapping = swarm.ctx.run.membership.members["r2.0"]
        swarm.removes("r2.0")
        new = msgspec.structs.replace(flapping, incarnation=2 + look)
        swarm.ctx.run.membership.apply(Members(0, (new,), {new.id: swarm.t + 2}))
        rounds += swarm.iterations(1) is not None
    assert 0 < rounds <= 60 // AFTER


def test_a_move_must_pay_in_the_steps_that_are_left() -> None:
    assert Swarm([0.01] * 4, [0.01] * 2, steps=AFTER + 2).iterations(AFTER + 2) is None


def test_the_gain_must_have_stood_and_the_moment_must_be_quiet() -> None:
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    assert swarm.iterations(AFTER - 1) is None
    gone = swarm.ctx.run.membership.members["r1.0"]
    swarm.ctx.run.membership.apply(Members(2, removed={"r1.0": "crashed"}))
    assert swarm.iterations(1) is None
    swarm.ctx.run.membership.apply(Members(3, joined=(gone,), active_from={"r1.0": 1}))
    assert swarm.iterations(AFTER - 1) is None
    assert swarm.iterations(2, quiet=False) is None
    assert swarm.iterations(1) is not None


def test_voters_and_those_out_of_reach_stay() -> None:
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    swarm.ctx.log.elect(("r1.0/disk",))
    del swarm.ctx.links.up["r1.1"]
    assert swarm.iterations(AFTER) == {"r1.2": 2}


def test_what_was_measured_counts_more_than_what_was_offered() -> None:
    """The heartbeats say that the relays of stage 2 are quicker than they said when they joined."""
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    for at in range(4):
        swarm.ctx.costs.of(f"r1.{at}").told_speed(0.01, 0.01, 0.0, 0.0)
    for at in range(2):
        swarm.ctx.costs.of(f"r2.{at}").told_speed(0.004, 0.004, 0.0, 0.0)
    assert swarm.iterations(20) is None


def test_nobody_moves_unless_the_run_wants_that() -> None:
    assert Swarm([0.01] * 4, [0.01] * 2, after=0).iterations(20) is None


def uneven_fleet(rebalance: int, iterations: int) -> Fleet:
    """Four relays, three and two."""
    small: dict[str, Any] = {
        "model.size": "llama-tiny",
        "model.stages": 3,
        "model.rows": 16,
        "model.sequence": 64,
        "model.microbatches": 12,
        "fleet.relays": 9,
        "fleet.achieved": 0.01,
        "fleet.speed": [0.01],
        "run.iterations": iterations,
        "fleet.rebalance": rebalance,
    }
    fleet = fleet_of(load_scenario("wan10", small), find_profile("wan10"), 0)
    return replace(fleet, hosts={**fleet.hosts, "r3.2": replace(fleet.hosts["r3.2"], stage=1)})


@pytest.mark.soak
def test_a_swarm_whose_stages_are_uneven_gets_quicker() -> None:
    """A relay of the four moves, and fetches the state."""

    def seconds(rebalance: int) -> list[float]:
        outcome = Simulation(uneven_fleet(rebalance, 7), "auction", 0).run()
        assert not outcome.failure
        return [row.seconds for row in outcome.rows]

    assert sum(seconds(2)[-2:]) < 0.85 * sum(seconds(0)[-2:])


def test_a_stage_without_anybody_is_not_filled_by_moves() -> None:
    """Stage recovery fills it; a leader that has just taken over sees such a swarm first of all."""
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    swarm.ctx.run.membership.apply(Members(2, removed={"r2.0": "crashed", "r2.1": "crashed"}))
    assert swarm.iterations(AFTER) is None


def test_a_relay_without_the_last_step_does_not_keep_a_stage() -> None:
    """Two relays of stage 1 serve only from the next iteration on, and get step t from the other two."""
    swarm = Swarm([0.01] * 4, [0.01] * 3)
    swarm.t = AFTER
    for newcomer in ("r1.0", "r1.1"):
        swarm.ctx.run.membership.active_from[newcomer] = swarm.t + 1
    swarm.ctx.run.membership.apply(Members(swarm.ctx.run.membership.number + 1))
    plan = {"r1.2": 2, "r1.3": 2, "r2.2": 1}
    applied = {1: ["r1.2", "r1.3"], 2: ["r2.0", "r2.1", "r2.2"]}
    assert swarm.rebalancing._possible(swarm.t, plan, applied) == {"r2.2": 1}
    applied[1] += ["r1.0", "r1.1"]
    assert swarm.rebalancing._possible(swarm.t, plan, applied) == plan


def test_those_who_served_are_waited_for() -> None:
    swarm = Swarm([0.01] * 4, [0.01] * 2)
    swarm.iterations(AFTER - 1)
    swarm.t += 1
    short = {1: ["r1.0", "r1.1", "r1.3"], 2: ["r2.0", "r2.1"]}
    assert swarm.rebalancing.decide(swarm.t, True, short) is None
    record = swarm.rebalancing.decide(swarm.t, True, {**short, 1: ["r1.0", "r1.1", "r1.2", "r1.3"]})
    assert record is not None and record.removed.keys() == {"r1.0"}


@pytest.mark.slow
@given(st.data())
def test_whatever_is_told_few_move_and_every_stage_keeps_two(data: st.DataObject) -> None:
    """In each iteration every relay reports any speed. Rounds of moves are at least AFTER iterations apart; a
    voter stays; and every stage keeps KEEPS replicas that serve."""
    counts = data.draw(st.lists(st.integers(2, 6), min_size=2, max_size=4))
    anything = st.sampled_from([0.0, 1e-17, 1e-6, 0.01, 0.02, 1.0, 1e6, 1e17, math.inf, math.nan])
    swarm = Swarm(*([0.01] * count for count in counts))
    ctx = swarm.ctx
    keeper = data.draw(st.sampled_from(sorted(p for p, m in ctx.run.membership.members.items() if m.stage)))
    ctx.log.elect((f"{keeper}/disk",))
    rng = data.draw(st.randoms(use_true_random=False))
    told = data.draw(st.lists(anything, min_size=1, max_size=9))
    looks, rounds, last = data.draw(st.integers(1, 14)), 0, -AFTER
    for look in range(looks):
        for one in ctx.run.membership.members:
            ctx.costs.of(one).told_speed(rng.choice(told), rng.choice(told), 0.0, 0.0)
        before = {s: ctx.run.membership.live(s, swarm.t + 2) for s in range(1, len(counts) + 1)}
        moves = swarm.iterations(1)
        if moves is None:
            if rng.random() < 0.5:
                swarm.serve()
            continue
        rounds += 1
        assert look - last >= AFTER and keeper not in moves
        last = look
        for there in before.values():
            left = [peer for peer in there if peer not in moves]
            assert len(left) >= min(KEEPS, len(there))
    assert rounds <= looks // AFTER


@pytest.mark.soak
def test_one_that_crashes_in_mid_download_does_no_harm() -> None:
    """It comes back as a joiner; nobody waits for it, and no stage had fewer replicas than it should."""
    simulation = Simulation(uneven_fleet(1, 12), "auction", 0)
    world, struck, least = simulation.world, list[str](), 9

    def watch(node: Node, event: ev.Event) -> None:
        nonlocal least
        if not node.running or node.peer.ctx.run.stage == node.member.stage:
            return
        live = simulation.leader.peer.ctx.run.membership.live
        least = min(least, *(len(live(stage, simulation._t + 1)) for stage in (1, 2, 3)))
        download = node.peer.joining.fetching.download
        if not struck and download is not None and download._chosen is not None:
            if not 0 < len(download._pieces) < download._chosen.pieces:
                return
            struck.append(node.id)
            world.clock.after(0.0, lambda: simulation._crash(node.id))
            world.clock.after(5.0, lambda: simulation._back(node.id))

    world.watchers.append(watch)
    outcome = simulation.run()
    assert not outcome.failure and len(outcome.rows) == 12 and outcome.rollbacks == 0
    assert struck and least >= KEEPS
