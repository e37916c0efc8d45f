"""Messages that come twice on one link, or in any order: nothing is counted, granted or computed twice.

Rules: R6.
"""

from __future__ import annotations

import math

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value

#: Steps of a second or two: a trial is cheap.
SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.25))
END_S = 30.0


def swarm(seed: int, policy: str, capacity: int) -> World:
    """Two data nodes, two stages of two; the run is stopped after END_S."""
    settings = Settings(f"disorder {seed}", 1, 2, 6, 10_000, min_replicas=2, policy=policy)
    machines = [Machine(f"d{n}", 0, capacity) for n in range(2)]
    machines += [Machine(f"r{s}.{n}", s, capacity) for s in (1, 2) for n in range(2)]
    world = counting_world(settings, machines, seed, SLOW)
    Invariants(world)
    world.clock.at(END_S, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("policy", "disorder"),
    every_value(["greedy", "auction", "static", "swarm", "gwtf"], [(1.0, 0.0), (0.5, 0.5)]),
)
def test_nothing_is_done_twice(policy: str, disorder: tuple[float, float]) -> None:
    twice, late_s = disorder
    """With room for one microbatch at each peer, so that a slot that is counted twice would be missed."""
    world = swarm(1, policy, capacity=1)
    world.disorder(twice, late_s, math.inf)
    world.run(END_S + 60.0)
    assert world.history().t >= 2
    assert not wrong_states(world)
    trouble = [note for note in world.notes if note[2] in ("refused", "repair", "double") and note[0] < END_S]
    assert trouble == []


def test_what_is_said_again_much_later_changes_nothing() -> None:
    """Every message about an iteration comes again when its receiver has taken the next step, or when it
    takes the next message of that kind."""
    world = swarm(2, "greedy", capacity=2)
    heard: dict[tuple[str, str, type], ev.Received] = {}
    again: list[type] = []

    def repeat(node: Node, event: ev.Event) -> None:
        if not isinstance(event, ev.Received) or node.peer.exit.stopped:
            return
        if isinstance(event.message, msg.Report):
            return
        key = (node.id, event.peer, type(event.message))
        before, heard[key] = heard.get(key), event
        if before is not None and event is not before and event.peer in node.links:
            again.append(type(before.message))
            world.watchers.remove(repeat)
            node.handle(before)
            world.watchers.append(repeat)

    world.watchers.append(repeat)
    world.run(END_S + 60.0)
    assert world.history().t >= 5
    assert not wrong_states(world)
    assert {msg.Forward, msg.Backward, msg.Claim, msg.Attempt, msg.ReducePart, msg.Prepared} <= set(again)
    assert not [note for note in world.notes if note[2] == "repair" and note[0] < END_S]


def test_a_claim_that_comes_late_takes_nothing_back() -> None:
    """Claims are cumulative (R6)."""
    world = swarm(3, "greedy", capacity=4)
    first: dict[str, ev.Received] = {}
    shrunk: list[str] = []

    def late(node: Node, event: ev.Event) -> None:
        current = node.peer.lead.round if node.peer.lead is not None else None
        if current is None or not isinstance(event, ev.Received) or not isinstance(event.message, msg.Claim):
            return
        peer, message = event.peer, event.message
        if first.setdefault(peer, event).message.fence.t != message.fence.t:  # type: ignore[union-attr]
            first[peer] = event
        held = current.claims.get(message.stage, {}).get(peer, frozenset())
        node.peer.handle(first[peer], world.clock.now)
        now = current.claims.get(message.stage, {}).get(peer, frozenset())
        if not held <= now:
            shrunk.append(peer)

    world.watchers.append(late)
    world.run(END_S + 60.0)
    assert first and not shrunk
    assert not wrong_states(world)
