"""Overflows that a few make up: a report counts while its peer serves, and its input's sender once."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import msgspec

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from swarm.byzantine.test_review_stalls import go_on, overflowing, removed, swarm

FALSE = 666


def forging(world: World, payload_for: Callable[[msg.Forward, str, Payload], Payload]) -> None:
    """Let r1.0 send `payload_for(message, receiver, payload)` with its activations. FALSE overflows."""
    overflowing(world, 2, lambda task, inputs: isinstance(task, tasks.Forward) and FALSE in inputs)
    carry = world.carry

    def forge(sender: Node, peer: str, data: bytes, payload: Payload | None) -> None:
        said = msg.decode(data)
        sends = sender.id == "r1.0" and peer[:2] == "r2" and isinstance(said, msg.Forward)
        if sends and payload is not None:
            payload = payload_for(cast(msg.Forward, said), peer, payload)
        carry(sender, peer, data, payload)

    world.carry = forge  # type: ignore[method-assign]


def skips(world: World) -> list[int]:
    return [commit.t for commit in world.history().commits if commit.verdict == "skip"]


def test_a_forger_and_an_accomplice_that_names_another_sender_skip_no_step() -> None:
    """Two of three find the overflow, both with the forger's inputs. The third, which lies, says that it had
    an honest relay's."""
    world = swarm(3, stages=2, steps=8)
    forging(world, lambda message, peer, payload: FALSE if message.fence.t >= 3 else payload)
    told: set[tuple[int, int]] = set()

    def lie(node: Node, event: object) -> None:
        lead = world.leading().peer.lead
        if node.id != "r2.2" or lead is None or lead.round is None or lead.round.t < 3:
            return
        for stage, index in lead.round.witnesses:
            if (lead.round.t, index) not in told and stage == 2:
                told.add((lead.round.t, index))
                fence = node.peer.ctx.fence(lead.round.t, lead.round.base)
                world.carry(node, "d0", msg.encode(msg.Overflow(fence, 2, index, "made up", "r1.1")), None)

    world.watchers.append(lie)
    assert go_on(world, 900.0) == 8
    assert told and skips(world) == []
    assert not {"r2.0", "r2.1", "r1.1", "r1.2"} & set(removed(world))


def test_inputs_of_a_forger_that_left_skip_no_step() -> None:
    """It sends the same false activation to all replicas of the next stage, and is gone before they report
    that it overflows."""
    world = swarm(2, stages=2, steps=6)
    task_s, victims = world.task_s, list[str]()
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        1.0 if isinstance(task, tasks.Forward) and node.stage == 2 and task.t == 3 else task_s(node, task)
    )

    def payload_for(message: msg.Forward, peer: str, payload: Payload) -> Payload:
        if message.fence.t != 3:
            return payload
        if not victims:
            victims.extend(("r2.0", "r2.1"))
            [other] = {"r2.0", "r2.1"} - {peer}
            world.carry(world.nodes["r1.0"], other, msg.encode(message), FALSE)
            world.clock.after(0.1, lambda: world.crash("r1.0"))
        return FALSE

    forging(world, payload_for)
    assert go_on(world, 900.0) == 6
    found = {peer for _, peer, kind, _ in world.notes if kind == "overflow"}
    assert found == {"r2.0", "r2.1"} and skips(world) == []


def test_a_forger_that_starts_anew_after_each_forgery_costs_its_victim_no_seat() -> None:
    """The victim shares no more work with a process that sent false inputs; the owner of that process starts
    another one."""
    world = swarm(3, stages=2, steps=60)
    forged: list[int] = []

    def again() -> None:
        node = world.nodes["r1.0"]
        world.crash("r1.0")
        member = msgspec.structs.replace(node.member, incarnation=node.member.incarnation + 1)
        world.clock.after(1.0, lambda: world.add(member, "d0", world.clock.now) and None)

    def payload_for(message: msg.Forward, peer: str, payload: Payload) -> Payload:
        if peer != "r2.1" or message.fence.incarnation in forged:
            return payload
        forged.append(message.fence.incarnation)
        world.clock.after(1.5, again)
        return FALSE

    forging(world, payload_for)
    assert go_on(world, 900.0) == 60
    assert len(forged) > 1 and "r2.1" not in removed(world)
