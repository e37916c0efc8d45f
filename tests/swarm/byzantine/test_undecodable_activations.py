"""A relay whose activations cannot be decoded: few of them are computed, and nobody else is blamed."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.pipeline.microbatches import UNUSABLE_MAX
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS = 8


@pytest.mark.parametrize("policy", ["static", "greedy"])
def test_activations_that_cannot_be_decoded(policy: str) -> None:
    """The relay sends them from the third step on. One microbatch of it was sent up to fifty times, and the
    only data node computed nearly all of these."""
    settings = Settings("unusable inputs", 1, 1, 6, STEPS, min_replicas=2, policy=policy)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(3))]
    world = counting_world(settings, machines, 1)
    world.strict = False  # tasks may fail
    Invariants(world)
    carry, sent = world.carry, Counter[tuple[int, int]]()

    def spoil(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == "r1.2" and isinstance(said, msg.Forward) and said.fence.t >= 3 and said.train:
            payload = (1, 2)
            sent[said.fence.t, said.index] += 1
        carry(sender, peer, message, payload)

    world.carry = spoil  # type: ignore[method-assign]
    world.run(until_s=600.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert max(sent.values()) == UNUSABLE_MAX + 1, "the last one is not answered"
    assert {fields["subject"] for _, _, kind, fields in world.notes if kind == "refused"} == {"r1.2"}
