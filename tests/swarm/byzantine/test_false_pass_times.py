"""A relay that calls itself far quicker than it is, so that no others come to its stage, or stay there."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import every_value, first_of

LIAR, QUICK_S, SLOW_S = "x", 1e-6, 1000.0


def finished(world: World, steps: int) -> dict[int, list[str]]:
    """Replicas of each stage at the end."""
    Invariants(world)
    world.run(until_s=600.0)
    assert world.history().t == steps and wrong_states(world) == {} and world.history().removals == 0
    membership = world.leading().peer.ctx.run.membership
    return {stage: membership.serving(stage) for stage in (1, 2)}


@pytest.mark.costly
@pytest.mark.parametrize("pass_s", first_of([QUICK_S, SLOW_S]))
def test_who_says_so_when_it_joins_is_not_taken_for_a_whole_stage(pass_s: float) -> None:
    """Seven of eight that came later were put into the other stage, and its own was left with one more."""
    settings = Settings("joins", 1, 2, 24, 30, min_replicas=1)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine(LIAR, 1), Machine("r2.0", 2)]
    world = counting_world(settings, machines, 1)

    def lie(said: msg.AnyMessage) -> msg.AnyMessage:
        if isinstance(said, msg.JoinRequest):
            seconds = {"forward_s": pass_s, "backward_s": pass_s}
            member = msgspec.structs.replace(said.member, capacity=1 << 10, **seconds)
            said = msgspec.structs.replace(said, member=member)
        return said

    world.mouths[LIAR] = lie
    for k in range(8):
        world.add(member_of(Machine(f"r{k}", -1)), "d0", 4.0 + 0.3 * k)
    stages = finished(world, 30)
    assert len(stages[1]) == len(stages[2]) == 5


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("toggles", "liars"), every_value([False, True], [1, 2]))
def test_who_says_so_all_the_time_has_nobody_moved_away(liars: int, toggles: bool) -> None:
    """Stages of five became one of eight and one of the liar and an honest replica: steps took 1.6 times as
    long; where it said now the one and now the other, relays moved to and fro."""
    settings = Settings("moves", 1, 2, 12, 20, min_replicas=2, rebalance=3)
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"{LIAR}{k}", 1) for k in range(liars))]
    machines += [*(Machine(f"r1.{k}", 1) for k in range(5)), *(Machine(f"r2.{k}", 2) for k in range(4))]
    world = counting_world(settings, machines, 1)

    def lie(said: msg.AnyMessage) -> msg.AnyMessage:
        if isinstance(said, msg.Pong):
            slow = toggles and world.history().t // 8 % 2 == 0
            seconds = 50.0 if slow else QUICK_S
            said = msgspec.structs.replace(said, forward_s=seconds, backward_s=seconds)
        return said

    world.mouths |= {f"{LIAR}{k}": lie for k in range(liars)}
    stages = finished(world, 20)
    assert min(map(len, stages.values())) >= 4
