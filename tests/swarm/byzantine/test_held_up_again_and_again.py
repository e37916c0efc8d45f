"""A member that holds a step up until it loses its seat, and comes back at once, again and again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_review_stalls import go_on

#: More steps than any scene has.
STEPS = 1500
LIAR, BACK_S = "g", 0.5
Deed = Callable[[msg.AnyMessage], msg.AnyMessage | None]


def no_state(said: msg.AnyMessage) -> msg.AnyMessage | None:
    """It works, and keeps its reports of its state back."""
    return None if isinstance(said, msg.Applied) else said


def nothing(said: msg.AnyMessage) -> msg.AnyMessage | None:
    return None if isinstance(said, msg.Applied | msg.Claim | msg.Prepared) else said


def that_comes_back(deed: Deed, keys: int = 1) -> tuple[World, list[int]]:
    """A stage of one replica to which a liar comes, which does its deed once it serves; when it is out, its
    next process comes (or, of several `keys`, the next one). Returns the world and the number of its
    processes so far."""
    settings = Settings("again", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=2, checkpoint_every=50)
    machines = [Machine("d0", 0), Machine("r1.0", 1), *(Machine(f"r2.{k}", 2) for k in range(2))]
    world, lives, due = counting_world(settings, machines, 1), [1], list[bool]()
    Invariants(world)
    names = [f"{LIAR}{key}" for key in range(keys)]

    def comes(name: str) -> None:
        former = world.nodes.get(name)
        world.liars.add(name)
        world.tickets[name] = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, ticket="the liar's")
        member = former.next_life() if former is not None else member_of(Machine(name, 1))
        world.add(member, "d0", world.clock.now)
        world.mouths[name] = lambda said: deed(said) if serves(name) else said
        due.clear()

    def serves(name: str) -> bool:
        return name in world.leading().peer.ctx.run.membership.active_from

    def look(node: Node, event: ev.Event) -> None:
        last = world.nodes.get(names[(lives[0] - 1) % keys])
        if last is not None and not last.running and not due:
            due.append(True)
            lives[0] += 1
            world.clock.after(BACK_S, lambda: comes(names[(lives[0] - 1) % keys]))

    world.clock.after(0.5, lambda: comes(names[0]))
    world.watchers.append(look)
    return world, lives


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("deed", "keys", "scene_s", "least"),
    [(no_state, 1, 300.0, 250), (no_state, 3, 600.0, 600), (nothing, 1, 600.0, 100)],
)
def test_it_is_kept_out_longer_each_time(deed: Deed, keys: int, scene_s: float, least: int) -> None:
    """It lost its seat without a ban: of a thousand steps in ten minutes 70 were left, or ten where it
    reported nothing at all (three minutes each time). Other keys of its ticket come no sooner."""
    world, lives = that_comes_back(deed, keys)
    steps = go_on(world, scene_s)
    assert lives[0] > 2 and steps > least
    assert {peer[0] for peer in wrong_states(world)} <= {LIAR}
