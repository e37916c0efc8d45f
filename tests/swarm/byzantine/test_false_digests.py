"""Replicas that report wrong digests of the reduced gradient: they stop no step, and lose their seat (R8)."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.fleet import standbys
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS = 6


@pytest.mark.parametrize(("replicas", "liar"), [(3, "r1.0"), (3, "r1.2"), (2, "r1.1")])
def test_wrong_digests(replicas: int, liar: str) -> None:
    """All steps are committed with the honest gradient, and the liar leaves. Of three, most decide. Of two,
    the coordinator has all parts sent to itself, and finds out which report is the sum."""
    settings = Settings("false digests", 1, 1, 6, STEPS, min_replicas=replicas)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(replicas))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    carry = world.carry
    told: list[int] = []

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == liar and isinstance(said, msg.Prepared):
            told.append(said.fence.t)
            message = msg.encode(msgspec.structs.replace(said, digest="wrong"))
        carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=300.0)
    entries = [decode_entry(line).record for line in world.log]
    removed = {p: why for e in entries if isinstance(e, Members) for p, why in e.removed.items()}
    assert told and set(removed) == {liar}
    assert world.history().t == STEPS and wrong_states(world) == {}


@pytest.mark.parametrize("spared", [(), ("r1.3", "r1.4"), ("r1.2", "r1.3", "r1.4")])
def test_two_of_five_that_agree_on_a_wrong_digest_do_not_get_it_committed(
    spared: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They report at once, before an honest replica can have the reduced gradient, and long before the honest
    reports arrive. spared: standbys, so that the two are most of those that work, or all of them."""
    monkeypatch.setattr(standbys, "by_chance", lambda *_: dict.fromkeys(spared, 200.0))
    settings = Settings("false digests", 1, 1, 10, STEPS, min_replicas=5, spare="always")
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(5))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    told: list[int] = []

    def lie(node: Node, event: object) -> None:
        """Report as soon as the attempt is known here."""
        reduce = node.peer.iterations.replica.all_reduce
        attempt, iteration = reduce._announced, reduce.iteration
        if node.id not in ("r1.0", "r1.1") or attempt is None or iteration is None:
            return
        if reduce.prepared is None and (node.id, iteration.t) not in done:
            done.add((node.id, iteration.t))
            told.append(iteration.t)
            fence = node.peer.ctx.fence(iteration.t, iteration.base)
            false = msg.Prepared(fence, 1, attempt.attempt, "wrong", {"w": 1.0})
            carry(node, "d0", msg.encode(false), None)

    def late(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        prepared = isinstance(msg.decode(message), msg.Prepared) and sender.stage == 1
        world.clock.after(0.5 * prepared, lambda: carry(sender, peer, message, payload))

    done: set[tuple[str, int]] = set()
    carry, world.carry = world.carry, late  # type: ignore[method-assign]
    world.watchers.append(lie)
    world.run(until_s=300.0)
    entries = [decode_entry(line).record for line in world.log]
    removed = {p for e in entries if isinstance(e, Members) for p in e.removed}
    assert told and removed == {"r1.0", "r1.1"}
    assert world.history().t == STEPS and wrong_states(world) == {}
