"""Fencing: foreign messages are refused with a counted reason, or ignored; they change nothing (I7)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from anabranch.config import RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import AttemptId, Fence
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from support.grids import first_of
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world

Forged = tuple[str, msg.AnyMessage, Payload | None]
X = torch.ones(1, 8, 16)
#: In a fence: the stage that the sender serves.
OWN = -1
ID = AttemptId(9, 9)


def forward(
    fence: Fence, index: int = 0, path: tuple[str, ...] = ("d0",), train: bool = True, way: int = 9000
) -> msg.Forward:
    return msg.Forward(fence, index, path, train, False, True, way)


def attempt(fence: Fence, owners: tuple[int, ...], stage: int = 1) -> msg.Attempt:
    return msg.Attempt(fence, stage, ID, 1, ("r1.0", "r1.1"), owners)


def other(fence: Fence, **changes: object) -> Fence:
    return msgspec.structs.replace(fence, **changes)  # type: ignore[arg-type]


#: name -> (forged message for r1.0 given a valid fence, part of the reason; None: ignored without a word)
FORGERIES: dict[str, tuple[Callable[[Fence], Forged], str | None]] = {
    "epoch": (lambda f: ("d0", forward(other(f, epoch=9)), X), "epoch 9, not 1"),
    "incarnation": (lambda f: ("d0", forward(other(f, incarnation=7)), X), "incarnation 7, not 1"),
    "base": (lambda f: ("d0", forward(other(f, base="0" * 32)), X), "on another base"),
    "a former role, or a next": (lambda f: ("d0", forward(other(f, stage=1)), X), None),
    "past": (lambda f: ("d0", forward(other(f, t=f.t - 1)), X), None),
    "stranger": (lambda f: ("stranger", forward(f), X), "not a member"),
    "not upstream": (lambda f: ("r2.0", forward(f), X), "does not precede mine"),
    "not downstream": (lambda f: ("d0", msg.Backward(f, 0), X), "does not follow mine"),
    "not my stage": (lambda f: ("r2.0", msg.ReducePart(f, 1, ID, 0), X), "is not mine"),
    "no activation": (lambda f: ("d0", forward(f), None), "without its activation"),
    "no such microbatch": (lambda f: ("d0", forward(f, 999), X), "no microbatch 999"),
    "not a window": (lambda f: ("d0", forward(f, train=False), X), "one to train"),
    "far ahead": (lambda f: ("d0", forward(other(f, t=f.t + 5000)), X), "ahead of the last commit"),
    "no path": (lambda f: ("d0", forward(f, 0, ()), X), "a path that is not one"),
    "long path": (lambda f: ("d0", forward(f, 0, ("d0",) * 9), X), "a path that is not one"),
    "never sent": (lambda f: ("r2.0", msg.Backward(f, 900), X), "which was never sent"),
    "no payload": (lambda f: ("r1.1", msg.ReducePart(f, 1, ID, 0), None), "without its payload"),
    "forged attempt": (lambda f: ("r1.1", attempt(f, (0,) * 6), None), "only the leader says that"),
    "short cover": (lambda f: ("d0", attempt(f, (1,) * 5), None), "not the whole batch"),
    "unknown owner": (lambda f: ("d0", attempt(f, (2,) * 6), None), "not the whole batch"),
    "not held": (lambda f: ("d0", attempt(f, (0,) * 6), None), "I do not hold them"),
    "other stage": (lambda f: ("d0", attempt(f, (0,) * 6, stage=2), None), "I am not to help with"),
    "not in it": (
        lambda f: ("d0", msg.Attempt(f, 1, ID, 1, ("r1.1",), (0,) * 6), None),
        "I am not a member of",
    ),
    "forged release": (lambda f: ("r1.1", msg.Release(f), None), "only the leader says that"),
    "forged record": (lambda f: ("r2.1", msg.Announce((b"{}",)), None), "only the leader says that"),
    "broken record": (lambda f: ("d0", msg.Announce((b"{}", b"\xff")), None), None),
    "forged removal": (lambda f: ("r1.1", msg.Refused("go away"), None), "only the leader says that"),
    "claim to a relay": (lambda f: ("r1.1", msg.Claim(f, 1, (0,)), None), "I am not the leader"),
    "digests to a relay": (
        lambda f: ("r1.1", msg.ContributionDigests(f, 1, {0: "d"}, {0: 1.0}), None),
        "I am not the leader",
    ),
    "gradient not asked for": (lambda f: ("r1.1", msg.Gradient(f.t, 1), X), None),
    "piece not asked for": (lambda f: ("r1.1", msg.Piece(1, f.t, 0), X), None),
    "lack of what is not there": (lambda f: ("r2.0", msg.Lack(f, 77, True, 1), None), None),
    "slots that fall": (lambda f: ("r2.0", msg.Slots(f, 0, 0, 0, 0, 1), None), None),
}


def world_of(run: RunConfig, seed: int = 1) -> World:
    return training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 1, seed, capacity=2)


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """Name of a forgery -> the refusals that are told of it. All of them reach r1.0 at one moment of a run
    that takes every step as the reference does."""
    run = small_run(minimum=2, steps=3)
    world = world_of(run)
    found: dict[str, list[str]] = {}

    def inject(world: World, node: Node) -> None:
        iteration = node.peer.iteration
        assert iteration is not None
        for name, (forge, _) in FORGERIES.items():
            sender, message, payload = forge(Fence(1, 1, iteration.t, iteration.base, OWN))
            fence = getattr(message, "fence", None)
            if fence is not None and fence.stage == OWN and sender in world.nodes:
                fence = other(fence, stage=world.nodes[sender].peer.ctx.run.stage)
                message = msgspec.structs.replace(message, fence=fence)
            before = len(world.notes)
            node.handle(ev.Received(sender, message, payload))
            notes = world.notes[before:]
            found[name] = [str(fields["reason"]) for _, _, kind, fields in notes if kind == "refused"]

    Fault(world, ("r1.0",), faults.received(msg.Forward, 2), inject)
    Invariants(world)
    world.run(until_s=300)
    check_equal(world, run)
    return found


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_change_nothing(told: dict[str, list[str]], name: str) -> None:
    _, reason = FORGERIES[name]
    if reason is None:
        assert told[name] == []
    else:
        assert len(told[name]) == 1 and reason in told[name][0]


def test_a_forward_beyond_its_slots_is_refused_and_told_so() -> None:
    run = small_run(minimum=2, steps=3)
    world = world_of(run)
    refused: list[str] = []

    def flood(world: World, node: Node) -> None:
        iteration = node.peer.iteration
        assert iteration is not None
        fence = Fence(1, 1, iteration.t, iteration.base, 0)
        before = len(world.notes)
        for way in range(9000, 9020):
            node.handle(ev.Received("d0", forward(fence, 5, way=way), X))
        refused.extend(str(f["reason"]) for _, _, kind, f in world.notes[before:] if kind == "refused")
        world.crash(node.id)  # its account with d0 is void, and one of the forgeries may be in its sums

    fault = Fault(world, ("r1.0",), faults.received(msg.Forward, 2), flood)
    Invariants(world)
    world.run(until_s=300)
    check_equal(world, run)
    assert fault.delivered
    assert len(refused) >= 17
    assert all("without a slot" in reason for reason in refused)


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_every_message_twice(seed: int) -> None:
    run = small_run(minimum=2, steps=3, evaluate_every=1)
    world = world_of(run, seed)
    repeated: list[ev.Received] = []

    def again(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and not any(event is former for former in repeated[-1:]):
            repeated.append(event)
            node.handle(event)

    world.watchers.append(again)
    world.run(until_s=300)
    check_equal(world, run)
    assert len(repeated) > 300


def test_tensors_that_cannot_be_computed_with_are_refused_and_made_again() -> None:
    """Wrong shape and non-finite values: the receiver says so, and the microbatch goes elsewhere or again."""
    for kind in (msg.Forward, msg.Backward):
        run = small_run(minimum=2, steps=3)
        world = world_of(run)
        world.strict = False
        spoiled: list[str] = []
        carry = world.carry

        def spoil(
            sender: Node,
            peer: str,
            message: bytes,
            payload: Payload | None,
            kind: type[msg.Message] = kind,
            carry: Callable[[Node, str, bytes, Payload | None], None] = carry,
            spoiled: list[str] = spoiled,
        ) -> None:
            decoded = msg.decode(message)
            if isinstance(decoded, kind) and payload is not None and len(spoiled) < 2 and peer != "d0":
                spoiled.append(peer)
                payload = torch.full((1, 8, 16), float("nan")) if len(spoiled) == 1 else torch.ones(3)
            carry(sender, peer, message, payload)

        world.carry = spoil  # type: ignore[method-assign]
        world.run(until_s=300)
        check_equal(world, run)
        assert len(spoiled) == 2
        assert sum(n == "refused" for _, _, n, _ in world.notes) >= 2
