"""A relay that sends false gradients to a replica that lacks the step's, and says that its line is quick."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

LIAR, VICTIM = "r1.3", "r1.2"
STEPS, FIRST, LAST = 20, 5, 14
LINE_BPS, CLAIMED_BPS = 1e8, 1e12


def test_who_sent_a_false_gradient_is_not_asked_again() -> None:
    """The quickest line was asked each time: 28 false gradients came for each that lacked, then the state of
    the whole stage was fetched."""
    plain = Settings("gradients", 1, 2, 12, STEPS, min_replicas=2, spread="never")
    settings = replace(plain, activation_bytes=1000, block_bytes=100_000, ends_bytes=100_000)
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{k}", 1) for k in range(4))]
    world = counting_world(settings, [*machines, *(Machine(f"r2.{k}", 2) for k in range(3))], 1)
    Invariants(world)
    carry, seen = world.carry, Counter[str]()

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        lost = isinstance(said, msg.ReducedPart) and peer == VICTIM and FIRST <= said.fence.t <= LAST
        seen["lost"] += lost
        if isinstance(said, msg.Pong):
            claimed = CLAIMED_BPS if sender.id == LIAR else LINE_BPS
            message = msg.encode(msgspec.structs.replace(said, bandwidth_bps=claimed))
        elif isinstance(said, msg.Gradient) and peer == VICTIM:
            seen[sender.id] += 1
            if sender.id == LIAR and isinstance(payload, tuple):
                payload = tuple(value + 1 for value in payload)
        elif isinstance(said, msg.FetchState) and sender.id == VICTIM and said.t >= FIRST:
            seen["states"] += 1
        if not lost:
            carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert world.history().t == STEPS and wrong_states(world) == {} and world.history().removals == 0
    right = sum(seen[f"r1.{k}"] for k in range(2))
    assert seen["lost"] and right >= LAST - FIRST and seen["states"] == 0
    assert seen[LIAR] == 1
