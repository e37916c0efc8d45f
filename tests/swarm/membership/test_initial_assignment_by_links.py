"""Stages dealt by links before the first step, in virtual time: the run begins, and trains to its end,
whatever happens meanwhile."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.tensor_world import MadeUpBatches
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from anabranch.sim.workers.torch_world import node_member
from support.grids import first_of
from support.swarms.fault_points import Fault
from support.swarms.small_swarm import check_equal, small_model, small_run
from support.swarms.training_world import training_world
from support.swarms.voters import restart_later

SETTINGS = Settings(
    "dealt", 1, 2, 6, 6, checkpoint_every=3, min_replicas=2, voters=3, deal="links", activation_bytes=1 << 16,
    block_bytes=1 << 24, ends_bytes=1 << 16, spare="never",
)  # fmt: skip
#: Two places; between them links are so much slower.
PLACES = {"x0": "x", "y0": "y", "x1": "x", "y1": "y"}
FAR = 20.0


def swarm(seed: int, settings: Settings = SETTINGS) -> World:
    """Relays that ask for any stage; the data node is between the places."""
    machines = [Machine("d0", 0), *(Machine(name, -1, capacity=6) for name in PLACES)]
    world = counting_world(settings, machines, seed)
    apart(world)
    Invariants(world)
    return world


def apart(world: World) -> None:
    for one, other in combinations(PLACES, 2):
        if PLACES[one] != PLACES[other]:
            world.slow[frozenset((one, other))] = FAR


def deals(world: World) -> list[Members]:
    """Records that move somebody before the first step."""
    records = [decode_entry(line).record for line in world.log]
    return [r for r in records if isinstance(r, Members) and r.removed and r.joined]


def stages(world: World) -> dict[str, int]:
    members = world.leading().peer.ctx.run.membership.members.values()
    return {member.id: member.stage for member in members if member.stage}


def check_counted(world: World) -> None:
    assert [commit.t for commit in world.history().commits] == list(range(1, world.settings.steps + 1))
    assert wrong_states(world) == {}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("seed", first_of(range(6), 2))
def test_far_pairs_are_dealt_each_to_one_stage_and_the_run_trains(seed: int) -> None:
    world = swarm(seed)
    world.run(until_s=600)
    check_counted(world)
    assert len(deals(world)) <= 1
    assert all(not record.active_from for record in deals(world))
    at = stages(world)
    assert at["x0"] == at["x1"] != at["y0"] == at["y1"]
    lines = [decode_entry(line).record for line in world.log]
    first = next(n for n, r in enumerate(lines) if isinstance(r, Members) and r.active_from)
    assert all(lines.index(record) < first for record in deals(world))


def test_without_the_setting_nobody_measures_or_moves() -> None:
    world = swarm(0, replace(SETTINGS, deal="arrival"))
    tried: list[str] = []

    def watch(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Burst) and event.payload:
            tried.append(node.id)

    world.watchers.append(watch)
    world.run(until_s=600)
    check_counted(world)
    assert not deals(world) and not tried


def measuring(node: Node, event: ev.Event) -> bool:
    """Members try their links."""
    tries = isinstance(event, ev.Received) and isinstance(event.message, msg.Burst)
    return tries and len(node.peer.ctx.run.membership.members) == 1 + len(PLACES)


def moving(node: Node, event: ev.Event) -> bool:
    """It has just been dealt to another stage, and builds that."""
    return any(
        kind == "note" and who == node.id and str(fields.get("text")).startswith("going over")
        for _, who, kind, fields in node.world.notes[-4:]
    )


@pytest.mark.parametrize("when", [measuring, moving])
@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_a_relay_that_crashes_meanwhile(seed: int, when: object) -> None:
    world = swarm(seed)

    def dies(world: World, node: Node) -> None:
        world.crash(node.id)
        restart_later(world, node.id, "d0", 3.0)

    fault = Fault(world, tuple(PLACES), when, dies)  # type: ignore[arg-type]
    world.run(until_s=900)
    check_counted(world)
    assert fault.delivered or when is moving
    assert len(deals(world)) <= 1


def test_one_that_never_comes_back_and_one_that_comes_meanwhile() -> None:
    """The crash leaves a stage with one; who comes instead is given that stage."""
    world = swarm(1)

    def dies(world: World, node: Node) -> None:
        world.crash(node.id)
        world.add(member_of(Machine("z0", -1, capacity=6)), "d0", at=world.clock.now + 2.0)

    fault = Fault(world, ("y1",), measuring, dies)
    world.run(until_s=900)
    check_counted(world)
    assert fault.delivered


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("when", [measuring, moving])
def test_the_founder_is_started_again_meanwhile(when: object) -> None:
    """Nobody else keeps the log yet: who was there is told so, comes again, and is dealt again."""
    world = swarm(2)

    def dies(world: World, node: Node) -> None:
        world.crash("d0")
        world.clock.after(2.0, lambda: founder_comes_back(world))
        for peer in PLACES:
            world.clock.after(1.0, lambda peer=peer: world.crash(peer))
            restart_later(world, peer, "d0", 4.0)

    fault = Fault(world, tuple(PLACES), when, dies)  # type: ignore[arg-type]
    world.run(until_s=900)
    check_counted(world)
    assert fault.delivered
    at = stages(world)
    assert at["x0"] == at["x1"] != at["y0"] == at["y1"]


def test_one_that_says_nothing_keeps_nobody_from_beginning() -> None:
    """The link reports of a relay get lost: the run begins within a few heartbeats all the same."""
    world = swarm(3)
    carry = world.carry

    def lost(sender: Node, peer: str, message: bytes, payload: object) -> None:
        said = msg.decode(message)
        if sender.id == "x0" and isinstance(said, msg.Ready):
            message = msg.encode(msg.Ready(said.t, said.stage, said.fingerprint, said.apart))
        carry(sender, peer, message, payload)

    world.carry = lost  # type: ignore[method-assign]
    world.run(until_s=600)
    check_counted(world)
    served = next(at for at, _, kind, _ in world.notes if kind == "peer_active")
    assert served < 20.0


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("policy", ["greedy", "auction"])
def test_every_committed_value_equals_the_reference(policy: str) -> None:
    run = small_run(steps=3, policy=policy, minimum=2)
    run = replace(run, fleet=replace(run.fleet, deal="links"))
    world = training_world(run, small_model(run), MadeUpBatches(run), [], 1, seed=0, capacity=3)
    assert world.settings.deal == "links" and world.settings.ends_bytes > 0
    for name in PLACES:
        world.add(node_member(name, -1, 3), "d0", at=world.random.uniform(0.0, 0.5))
    apart(world)
    Invariants(world)
    world.run(until_s=600)
    check_equal(world, run)
