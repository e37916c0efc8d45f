"""A relay of two crews that fails one of them while another machine of its stage is away."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.rounds.plan import active, filled
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

STEPS, AWAY = 20, 5
TIMES = Model(task_s={"InnerForward": 0.05, "InnerBackward": 0.1, "Embed": 0.002})


def swarm(others: bool) -> World:
    """Two data nodes, and two stages of three relays, of which r2.2 goes for good in round AWAY. others: True
    if r2.1 can be of two crews, as r2.0 can."""
    rounds = Rounds(2, 8, 3, pipeline=True)
    settings = Settings("seats", 1, 2, 12, STEPS, min_replicas=1, snapshot_every=4)
    settings = replace(settings, rounds=rounds, steps=rounds.iterations(2 + 8 * (STEPS - 2)))
    relays = [Machine(f"r{stage}.{k}", stage) for stage in (1, 2) for k in range(3)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *relays], 1, TIMES)
    Invariants(world)
    if not others:
        able = world.nodes["r2.1"]
        able.member = msgspec.structs.replace(able.member, shared=msgspec.UNSET)

    def go(node: Node, event: ev.Event) -> None:
        if world.nodes["r2.2"].alive and world.history().t >= AWAY - 1:
            world.clock.after(0.5, lambda: world.crash("r2.2"))

    world.watchers.append(go)
    return world


def seats(world: World, peer: str, t: int) -> list[int]:
    """Slots of round t that a machine is to fill."""
    plan = world.history().plans.get(t, ())
    return [slot for slot in active(plan) if peer in plan[slot].crew]


def failed(world: World, peer: str) -> list[int]:
    """Rounds in which a machine was of two crews, and not both slots count."""
    history = world.history()
    counts = {c.t: filled(history.plans.get(c.t, ()), c.stages).keys() for c in history.commits}
    return [t for t in counts if len(own := seats(world, peer, t)) == 2 and not counts[t] >= {*own}]


@pytest.mark.parametrize("others", [True, False])
def test_a_relay_that_withholds_one_of_its_two_slots_has_one_seat(others: bool) -> None:
    """It was in time with the other one, so the relays that shared its second crew counted as late, and had
    no slots for eight rounds."""
    world, withheld = swarm(others), set[int]()
    world.liars.add("r2.0")

    def lose(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        if sender.id == "r2.0" and isinstance(message, msg.InnerActivation | msg.InnerGradient):
            t = message.fence.t
            if len(own := seats(world, "r2.0", t)) == 2 and message.index == own[1]:
                withheld.add(t)
                return None
        return message

    altered(world, lose)
    assert go_on(world, 1000.0) == STEPS and wrong_states(world) == {} and rollbacks(world) == []
    assert withheld and sorted(withheld) == failed(world, "r2.0")
    assert len(withheld) <= (1 if others else 2), withheld
    if others:
        rounds = range(AWAY + 3, STEPS + 1)
        assert all(seats(world, f"r1.{k}", t) for k in range(3) for t in rounds)
    assert removed(world).keys() == {"r2.2"}
