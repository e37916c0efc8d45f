"""Relays that claim their units one after the other, each just before the step stalls (I4)."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import go_on, removed

LIAR, SINCE, STEPS, LOOK_S = "r1.1", 3, 12, 0.05


def unit_by_unit(world: World) -> None:
    """From iteration SINCE on LIAR claims one more unit each time that the step is about to stall."""
    carry, told = world.carry, dict[tuple[int, str], list[int]]()
    last = dict[tuple[int, str], msg.Claim]()

    def say(key: tuple[int, str]) -> None:
        lead = world.leading()
        current = lead.peer.lead.round if lead.peer.lead is not None else None
        if lead.peer.lead is None or current is None or current.t != key[0]:
            return
        more = [unit for unit in last[key].units if unit not in told[key]]
        due = current.progress_at + 0.85 * lead.peer.lead.reducing.patience_s(current)
        if more and world.clock.now >= due:
            told[key].append(more[0])
            claim = msgspec.structs.replace(last[key], units=tuple(sorted(told[key])))
            carry(world.nodes[LIAR], lead.id, msg.encode(claim), None)
        world.clock.after(LOOK_S, lambda: say(key))

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id != LIAR or not isinstance(said, msg.Claim) or said.fence.t < SINCE or not said.units:
            carry(sender, peer, message, payload)
            return
        key = said.fence.t, said.fence.base
        last[key] = said
        if key not in told:
            told[key] = []
            say(key)

    world.carry = on_its_way  # type: ignore[method-assign]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("replicas", [2, 3])
def test_they_do_not_make_steps_ever_longer(replicas: int) -> None:
    """Each claim put the stall off and counted in the step's duration: steps of 0.85 s took 27, 38, 75, 33
    and 214 s."""
    settings = Settings("claims", 1, 2, 12, STEPS, min_replicas=2)
    machines = [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(replicas)]
    world, at = counting_world(settings, [Machine("d0", 0), *machines], 1), dict[int, float]()
    Invariants(world)
    unit_by_unit(world)
    world.watchers.append(lambda node, event: at.setdefault(world.history().t, world.clock.now))
    assert go_on(world, 900.0) == STEPS
    took_s = [at[t + 1] - at[t] for t in range(STEPS)]
    assert 4.0 < max(took_s) < 14.0 and max(took_s[-6:]) < 7.0, took_s
    assert wrong_states(world) == {} and not removed(world)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("liar", ["r1.1", "d1"])
def test_claims_that_come_when_they_are_missed_are_late_too(liar: str) -> None:
    """The stall was news, after which the claims were in time: each step of 0.3 s took 5.4 s."""
    settings = Settings("missed", 1, 2, 12, STEPS, min_replicas=2)
    machines = [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(2)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *machines], 1)
    missed, at, carry = set[str](), dict[int, float](), world.carry
    kept = list[tuple[Node, str, bytes, Payload | None]]()

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Missing) and peer == liar:
            missed.add(said.fence.base)
            for each in kept:
                world.clock.after(0.01, partial(carry, *each))
            kept.clear()
        late = isinstance(said, msg.Claim) and said.fence.t >= SINCE and said.fence.base not in missed
        if late and sender.id == liar:
            kept.append((sender, peer, message, payload))
        else:
            carry(sender, peer, message, payload)

    world.carry = on_its_way  # type: ignore[method-assign]
    world.watchers.append(lambda node, event: at.setdefault(world.history().t, world.clock.now))
    assert go_on(world, 900.0) == STEPS
    took_s = [at[t + 1] - at[t] for t in range(STEPS)]
    assert len(missed) >= STEPS - SINCE and max(took_s) > 4.0 and max(took_s[-6:]) < 2.5, took_s
    assert wrong_states(world) == {} and not removed(world)
