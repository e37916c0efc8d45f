"""Attacks of a review on who keeps the log, and on those who want to go (R9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol.log.records import Voters, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.swarms.leaving_voters import (
    SETTINGS,
    SLOW,
    ask_to_go,
    gone_after,
    keepers,
    leader_without_founder,
    until,
)


def few_doors(seed: int, doors: int = 3) -> World:
    """`doors` data nodes can be dialled, and nobody else."""
    machines = [Machine(f"d{n}", 0) for n in range(doors)]
    machines += [Machine("r1.0", 1, reachable=False)]
    world = counting_world(replace(SETTINGS, stages=1, min_replicas=1), machines, seed, SLOW)
    Invariants(world)
    until(world, 6.0)
    return world


def test_two_voters_of_whom_the_founder_leads_become_one() -> None:
    """Nobody else can be dialled: with the same swarm from the beginning the founder alone would keep it."""
    world = few_doors(1)
    assert sorted(keepers(world)) == ["d0", "d1", "d2"]
    gone_after(world, ask_to_go(world, "d2"), "d2")
    until(world, world.clock.now + 10.0)
    world.crash("d1")
    then = world.history().t
    assert until(world, world.clock.now + 40.0) > then + 5


@pytest.mark.costly
def test_the_founder_is_back_and_three_keep_the_log() -> None:
    world, _ = leader_without_founder(3, data_nodes=4)
    assert "d0" not in keepers(world)
    world.add(world.nodes["d0"].next_life(), "d1", world.clock.now)
    until(world, world.clock.now + 40.0)
    assert world.leading().id == "d0"
    assert len(keepers(world)) == 3, keepers(world)


@pytest.mark.costly
def test_who_leads_does_not_go_for_a_link_that_is_dialled_again() -> None:
    """A voter of three has just died. The link to the other breaks and is dialled again within half a
    second; in that moment the leader is asked to go. Went it at once, the log would be without a majority."""
    world, leader = leader_without_founder(7, data_nodes=5)
    dies, stays = (peer for peer in keepers(world) if peer != leader.id)
    world.crash(dies)
    while dies in leader.links:
        world.clock.step()
    world.cut(leader.id, stays, 0.4)
    while stays in leader.links:
        world.clock.step()
    since = ask_to_go(world, leader.id)
    gone_after(world, since, leader.id)
    then = world.history().t
    assert until(world, world.clock.now + 30.0) > then, (world.clock.now - since, leader.stopped)


def three_without_heirs() -> World:
    """Three voters, one of them the only replica of its stage; nobody else can be dialled."""
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r1.0", 1), Machine("r2.0", 2, reachable=False)]
    world = counting_world(replace(SETTINGS, min_replicas=1), machines, 3, SLOW)
    Invariants(world)
    until(world, 6.0)
    assert sorted(keepers(world)) == ["d0", "d1", "r1.0"]
    return world


def test_a_frozen_voter_is_left_out_while_the_vote_of_one_that_goes_is_there() -> None:
    """A voter is frozen, and as the only replica of its stage it stays a member; another voter wants to go,
    and nobody else could vote: with its vote the log is left to the founder."""
    world = three_without_heirs()
    world.freeze("r1.0", 1000.0)
    until(world, 9.0)
    gone_after(world, ask_to_go(world, "d1"), "d1")
    until(world, world.clock.now + 15.0)
    assert keepers(world) == ["d0"]
    assert world.nodes["d0"].peer.ctx.log.leads


@pytest.mark.costly
def test_a_slow_candidate_holds_up_nobody() -> None:
    """The first candidate is a data node whose line is slow."""
    machines = [Machine(f"d{n}", 0) for n in range(4)]
    machines += [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(3)]
    world = counting_world(SETTINGS, machines, 3, SLOW)
    Invariants(world)
    for m in machines:
        world.slow[frozenset(("d1", m.id))] = 150.0
    until(world, 60.0)
    assert len(keepers(world)) == 3, keepers(world)


def test_of_two_allowed_voters_the_founder_alone_keeps_the_log() -> None:
    """`fleet.voters = 2` is allowed: two bear no loss, so the founder alone keeps the log."""
    machines = [Machine(f"d{n}", 0) for n in range(3)]
    machines += [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(3)]
    world = counting_world(replace(SETTINGS, voters=2), machines, 3, SLOW)
    Invariants(world)
    until(world, 6.0)
    assert keepers(world) == ["d0"]


def test_the_founder_comes_back_to_one_that_keeps_the_log_alone() -> None:
    """Others cannot be dialled: the founder gets the log back from the one that had it, alone again."""
    world = few_doors(2)
    world.crash("d0")
    until(world, world.clock.now + 8.0)
    leader = world.leading().id
    other = next(peer for peer in ("d1", "d2") if peer != leader)
    gone_after(world, ask_to_go(world, other), other)
    until(world, world.clock.now + 4.0)
    assert keepers(world) == [leader]
    world.add(world.nodes["d0"].next_life(), leader, world.clock.now)
    until(world, world.clock.now + 30.0)
    assert world.leading().id == "d0"
    world.crash(leader)
    then = world.history().t
    assert until(world, world.clock.now + 40.0) > then + 3


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("latency_s", [(1.2, 1.4), (0.1, 3.0)])
def test_far_voters_change_and_the_run_ends(latency_s: tuple[float, float]) -> None:
    """Round trips of more than two heartbeats, even ones and uneven ones."""
    machines = [Machine(f"d{n}", 0) for n in range(3)]
    machines += [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(2)]
    model = replace(SLOW, latency_s=latency_s)
    world = counting_world(replace(SETTINGS, steps=6), machines, 3, model)
    Invariants(world)
    until(world, 60.0)
    assert len(keepers(world)) == 3
    world.vanish(next(peer for peer in keepers(world) if peer != "d0"))
    world.run(until_s=1200)
    changes = [r.ids for line in world.log if isinstance(r := decode_entry(line).record, Voters)]
    assert world.history().t == 6 and len(changes) < 16, changes
