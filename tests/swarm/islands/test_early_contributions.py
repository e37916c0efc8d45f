"""Contributions to a round that are sent while other machines still compute: whatever happens meanwhile, the
log tells one process how to compute the same bits (I3, I4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from anabranch.config import RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from support.grids import every_value
from swarm.islands.test_rounds import check_replayed, island_run, world_of

#: Round of three slots, after two synchronous steps, in which something happens.
ROUND = 4


class Sent:
    """Record of messages in the rounds of a world: time (s) of the first part of a contribution of each
    machine, and of the last claim of a slot, by iteration. act(sender): called once, when a machine sends
    its first part in ROUND while another one still computes."""

    def __init__(self, world: World, act: Callable[[str], None] = lambda sender: None) -> None:
        self.world, self.act, self.acted = world, act, list[str]()
        self.parts: dict[int, dict[str, float]] = {}
        self.claims: dict[int, float] = {}
        world.watchers.append(self.watch)

    def watch(self, node: Node, event: ev.Event) -> None:
        said = event.message if isinstance(event, ev.Received) else None
        now = self.world.clock.now
        if isinstance(said, msg.Claim) and said.stage and said.units:
            self.claims[said.fence.t] = now
        if isinstance(said, msg.ReducePart) and said.stage and isinstance(event, ev.Received):
            first = self.parts.setdefault(said.fence.t, {})
            first.setdefault(event.peer, now)
            lead = self.world.leading().peer.lead
            current = lead.round if lead is not None else None
            if said.fence.t == ROUND and not self.acted and current is not None and 1 in current.early:
                self.acted.append(event.peer)
                self.act(event.peer)

    def early(self) -> list[int]:
        """Rounds in which a machine sent its contribution before the last slot was claimed."""
        return [t for t, first in self.parts.items() if min(first.values()) < self.claims.get(t, 0.0)]


def uneven_world(run: RunConfig, seed: int = 1, voters: int = 1) -> World:
    """World whose machine r1.0 becomes slower by a third with each round: what it was measured at is never
    true, and it is done after the others."""
    world = world_of(run, seed=seed, voters=voters)
    rounds = [0]

    def watch(node: Node, event: ev.Event) -> None:
        if (t := world.history().t) > rounds[0]:
            rounds[0] = t
            world.nodes["r1.0"].slowness *= 1.3 if t >= 2 else 1.0

    world.bookkeepers.append(watch)
    return world


def test_a_contribution_is_sent_before_all_slots_are_done() -> None:
    run = island_run()
    world = uneven_world(run)
    sent = Sent(world)
    world.run(until_s=2000)
    assert sent.early()
    check_replayed(run, world)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("who", "late"), every_value(["computing", "sending", "leader"], ["drop", "wait"]))
def test_a_machine_dies_while_contributions_are_sent_early(late: str, who: str) -> None:
    """The one that still computes, the one that sends, or the log's leader."""
    run = island_run(late=late)
    world = uneven_world(run, voters=3)

    def act(sender: str) -> None:
        victim = {"computing": "r1.0", "sending": sender, "leader": world.leading().id}[who]
        world.crash(victim)
        if who == "leader":
            world.clock.after(8.0, partial(founder_comes_back, world))

    sent = Sent(world, act)
    world.run(until_s=2000)
    assert sent.acted and sent.acted != ["r1.0"]
    check_replayed(run, world)
