"""False reports of a stage's state: they neither become the run's state nor cost an honest replica its seat
(I2)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Members, Rollback, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS = 6


def swarm(seed: int, replicas: int, extra: tuple[str, ...] = ()) -> World:
    """Two stages with `replicas` each, and further peers at stage 1."""
    settings = Settings("false states", 1, 2, 6, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{stage}.{number}", stage) for stage in (1, 2) for number in range(replicas)]
    machines += [Machine(name, 1) for name in extra]
    world = counting_world(settings, machines, seed)
    Invariants(world)
    return world


def altered(world: World, alter: Callable[[str, msg.Message], msg.Message | None]) -> None:
    """Let `alter(sender, message)` change messages on their way to the leader, or drop them (None)."""
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        changed = alter(sender.id, msg.decode(message))
        if changed is not None:
            carry(sender, peer, msg.encode(changed), payload)

    world.carry = on_its_way  # type: ignore[method-assign]


def records(world: World, kind: type) -> list[object]:
    return [record for line in world.log if isinstance(record := decode_entry(line).record, kind)]


def removed(world: World) -> dict[str, str]: return {peer: why for each in records(world, Members) for peer,
    why in each.removed.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("liar", ["r1.0", "r1.1", "r1.2"])
def test_one_of_three_lies(liar: str) -> None:
    """Whatever its id: the two who agree decide."""
    world = swarm(1, 3)

    def lie(sender: str, message: msg.Message) -> msg.Message:
        if sender == liar and isinstance(message, msg.Applied) and message.fence.t == 3:
            return msgspec.structs.replace(message, fingerprint="another")
        return message

    altered(world, lie)
    world.run(until_s=300.0)
    assert set(removed(world)) == {liar}
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_member_that_does_not_serve_has_no_say() -> None:
    """It has the lowest id, says that it applied every step, and gives a state that nobody has."""
    world = swarm(2, 2, ("a0",))
    told: list[int] = []

    def lie(sender: str, message: msg.Message) -> msg.Message | None:
        if sender == "a0" and isinstance(message, msg.Ready):
            return None  # it never comes to serve
        if sender == "r1.1" and isinstance(message, msg.Applied):
            member = world.leading().peer.ctx.run.membership.members.get("a0")
            if member is not None:
                false = msgspec.structs.replace(
                    message,
                    fence=msgspec.structs.replace(message.fence, incarnation=member.incarnation),
                    fingerprint="poison",
                )
                world.carry_raw(world.nodes["a0"], world.leading().id, msg.encode(false), None)
                told.append(message.fence.t)
        return message

    world.carry_raw = world.carry  # type: ignore[attr-defined]
    altered(world, lie)
    world.run(until_s=300.0)
    assert told
    assert not {"r1.0", "r1.1"} & set(removed(world))
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_two_replicas_that_contradict_each_other_twice() -> None:
    """Nobody can say who lies: the run goes back each time, nobody is removed, no false state is accepted."""
    world = swarm(3, 2)
    told: list[str] = []

    def lie(sender: str, message: msg.Message) -> msg.Message:
        if isinstance(message, msg.Applied) and message.stage == 1 and message.fence.t == 3:
            if sender == "r1.0" and len(told) < 2 and message.fence.base not in told:
                told.append(message.fence.base)
            if sender == "r1.0" and message.fence.base in told:
                return msgspec.structs.replace(message, fingerprint="another")
        return message

    altered(world, lie)
    world.run(until_s=300.0)
    reasons = {back.reason for back in records(world, Rollback)}  # type: ignore[attr-defined]
    assert len(told) == 2 and reasons == {
        "r1.0 and r1.1 report different states of stage 1 after iteration 3"
    }
    assert removed(world) == {}
    assert world.history().t == STEPS and wrong_states(world) == {}
