"""The only replica of a stage that serves does nothing, while others are to serve from the next iteration."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states

LIAR, STEPS = "x", 12


def begun_with_liar(returns_nothing: bool) -> tuple[World, Counter[str]]:
    """A run whose first iteration begins while the liar alone serves stage 1. returns_nothing: it refuses all
    microbatches (True), or sends back no gradient (False). Returns the world after its run, and what the liar
    did."""
    settings = Settings("lone", 1, 2, 12, STEPS, min_replicas=1)
    relays = [Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(2)]
    machines = [Machine("d0", 0), Machine("d1", 0), *relays, Machine(LIAR, 1)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add(LIAR)
    carry, did = world.carry, Counter[str]()

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if peer == LIAR and isinstance(said, msg.Forward) and returns_nothing:
            did["refused"] += 1
            liar = world.nodes[LIAR]
            lack = msg.Lack(liar.peer.ctx.fence(said.fence.t, said.fence.base), said.index, True, said.way)
            world.clock.after(0.02, lambda: carry(liar, sender.id, msg.encode(lack), None))
            return
        if sender.id == LIAR and isinstance(said, msg.Backward) and not returns_nothing:
            did["empty"] += 1
            payload = None
        carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=120.0)
    return world, did


NOTHING_LEFT = "its claims end the stage's work, so no other is called in"
CLAIMED = pytest.mark.xfail(raises=TimeoutError, strict=True, reason=NOTHING_LEFT)


@pytest.mark.parametrize("returns_nothing", [True, pytest.param(False, marks=CLAIMED)])
def test_others_serve_in_the_step_that_it_holds_up(returns_nothing: bool) -> None:
    """They were to serve from the second iteration, and the first one never ended."""
    world, did = begun_with_liar(returns_nothing)
    assert did and world.history().t == STEPS and wrong_states(world) == {}
    assert world.history().removals == 0


def test_who_comes_after_the_first_stall_serves_from_the_next_one() -> None:
    """A relay that does one microbatch in several seconds stalls the step between two of them. Another one
    that came after the first such stall had to wait for the iteration's end, ten times as long."""
    settings = Settings("lone", 1, 2, 12, 3, min_replicas=1)
    relays = [Machine("r1.0", 1, 4, 300.0), Machine("r2.0", 2)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *relays], 1)
    Invariants(world)
    world.add(member_of(Machine("r1.1", 1)), "d0", 10.0)
    world.run(until_s=100.0)
    assert world.history().t == 3 and wrong_states(world) == {} and world.history().removals == 0
    assert world.clock.now < 40.0
