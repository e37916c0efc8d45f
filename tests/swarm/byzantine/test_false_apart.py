"""A relay that claims not to reach an honest one of its stage, and withholds its parts of the sum (R8)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS, FIRST = 8, 4
OF_A_REDUCE = (msg.ReducePart, msg.ReducedPart, msg.Prepared)


def swarm(withholds: bool, late_s: float = 0.0, seed: int = 1) -> tuple[World, list[float]]:
    """Stage of three, in which r1.2 claims not to reach r1.0 from iteration FIRST on, and withholds its parts
    and reports if told to. Those of r1.1 in iteration FIRST come `late_s` seconds after the first one was
    sent at the earliest. Returns the times of the steps, too."""
    settings = Settings("false apart", 1, 1, 6, STEPS, min_replicas=3, policy="static")
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(3))]
    world = counting_world(settings, machines, seed)
    Invariants(world)
    carry, begun, times = world.carry, list[float](), [0.0]

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said, wait_s = msg.decode(message), 0.0
        if sender.id == "r1.2" and isinstance(said, msg.Claim) and said.fence.t >= FIRST:
            message = msg.encode(structs.replace(said, apart=("r1.0",)))
        if isinstance(said, OF_A_REDUCE) and said.fence.t >= FIRST:
            begun.append(world.clock.now)
            if sender.id == "r1.2" and withholds:
                return
            if sender.id == "r1.1" and said.fence.t == FIRST:
                wait_s = max(0.0, begun[0] + late_s - world.clock.now)
        world.clock.after(wait_s, partial(carry, sender, peer, message, payload))

    def watch(node: Node, event: object) -> None:
        times.extend([world.clock.now] * (world.history().t + 1 - len(times)))

    world.carry = deliver  # type: ignore[method-assign]
    world.watchers.append(watch)
    return world, times


def removed(world: World) -> set[str]:
    records = [r for line in world.log if isinstance(r := decode_entry(line).record, Members)]
    return {peer for record in records for peer in record.removed}


def test_its_stage_does_not_wait_for_two_whole_stalls() -> None:
    """The reduce cannot end, as it says itself: it is repeated after a quarter of the usual time. What
    follows is the time that a repeated reduce gets. Two whole stalls are 12.5 s at least."""
    world, times = swarm(withholds=True)
    world.run(until_s=600.0)
    assert removed(world) == {"r1.2"}
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"r1.2"}
    assert 7.0 < times[FIRST] - times[FIRST - 1] < 12.0


def test_an_honest_replica_keeps_its_seat_although_another_hurries_the_reduce() -> None:
    """It is late by about as much as two whole stalls."""
    for seed in range(3):
        world, times = swarm(withholds=False, late_s=12.0, seed=seed)
        world.run(until_s=600.0)
        assert removed(world) == set()
        assert world.history().t == STEPS and wrong_states(world) == {}
        assert 12.0 < times[FIRST] - times[FIRST - 1] < 25.0


def test_a_false_claim_alone_costs_no_time() -> None:
    """The reduce ends although one of its members says that it cannot."""
    world, times = swarm(withholds=False)
    world.run(until_s=600.0)
    assert removed(world) == set() and world.history().t == STEPS and wrong_states(world) == {}
    assert max(after - before for before, after in pairwise(times)) < 1.5


def test_the_leader_survives_two_reports_that_differ_while_the_last_step_is_not_released() -> None:
    """A replica of two claims not to reach the other, reports another gradient, late, and keeps its report of
    the step before back for three seconds (a KeyError at the leader)."""
    settings = Settings("false apart", 1, 1, 6, STEPS, min_replicas=2, policy="static")
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r1.1", 1)], seed=1)
    Invariants(world)
    carry = world.carry

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said, wait_s = msg.decode(message), 0.0
        if sender.id == "r1.1" and isinstance(said, msg.Claim) and said.fence.t == FIRST:
            message = msg.encode(structs.replace(said, apart=("r1.0",)))
        if sender.id == "r1.1" and isinstance(said, msg.Prepared) and said.fence.t == FIRST:
            message, wait_s = msg.encode(structs.replace(said, digest="another")), 0.5
        if sender.id == "r1.1" and isinstance(said, msg.Applied) and said.fence.t == FIRST - 1:
            wait_s = 3.0
        world.clock.after(wait_s, partial(carry, sender, peer, message, payload))

    world.carry = deliver  # type: ignore[method-assign]
    world.run(until_s=600.0)
    assert removed(world) == {"r1.1"}
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"r1.1"}
