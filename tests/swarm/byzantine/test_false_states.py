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
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import every_value

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


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("first", "slowness"), every_value([1, 3], [1.0, 300.0]))
def test_a_third_replica_settles_a_dispute(first: int, slowness: float) -> None:
    """A liar, one of two, reports false states from the iteration `first` on. A machine joins their stage
    3 s after the beginning. The log goes back at once, not after the 30 s of a dispute that nobody can
    settle, and the newcomer's report decides, also if it serves only later than in the disputed one."""
    world = swarm(2, 2)
    world.add(member_of(Machine("j", 1)), "d0", at=3.0, slowness=slowness)
    out_at: list[float] = []

    def lie(sender: str, message: msg.Message) -> msg.Message:
        if sender == "r1.0" and isinstance(message, msg.Applied) and message.fence.t >= first:
            return msgspec.structs.replace(message, fingerprint=f"another {message.fence.t}")
        return message

    def watch(node: Node, event: object) -> None:
        if not out_at and "r1.0" in removed(world):
            out_at.append(world.clock.now)

    altered(world, lie)
    world.watchers.append(watch)
    world.run(until_s=600.0)
    assert set(removed(world)) == {"r1.0"} and out_at[0] < 10.0
    assert len(records(world, Rollback)) == 2
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_joiners_make_the_log_go_back_once_each() -> None:
    """Both replicas lie, and joiners come whose state nobody can judge: each costs one return of the log at
    most, and after that the wait between two returns is that of any dispute."""
    world = swarm(4, 2)
    for number in range(3):
        world.add(member_of(Machine(f"j{number}", 1)), "d0", at=3.0 + 4.0 * number, slowness=1e4)

    def lie(sender: str, message: msg.Message) -> msg.Message:
        if sender in ("r1.0", "r1.1") and isinstance(message, msg.Applied) and message.fence.t >= 2:
            return msgspec.structs.replace(message, fingerprint=f"{sender} {message.fence.t}")
        return message

    altered(world, lie)
    with pytest.raises(TimeoutError):
        world.run(until_s=28.0)
    assert 2 <= len(records(world, Rollback)) <= 4
