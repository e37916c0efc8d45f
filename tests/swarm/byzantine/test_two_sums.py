"""A replica that sends one other replica another reduced part than it sends the rest of its stage, and itself
reports the gradient of the rest, so that the honest one is outvoted (R8)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS, LIAR, VICTIM = 12, "r1.2", "r1.0"


@pytest.mark.xfail(
    strict=True,
    reason="most reports decide, and who differs from them in two iterations loses its seat, although nobody "
    "knows what it was sent",
)
@pytest.mark.parametrize("replicas", [3, 5])
def test_who_sums_falsely_for_one_alone_costs_that_one_no_seat(replicas: int) -> None:
    """Its own report comes after the others', so that these contradict each other."""
    settings = Settings("two sums", 1, 1, 2 * replicas, STEPS, min_replicas=replicas)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(replicas))]
    world = counting_world(settings, machines, 1)
    world.strict = False
    usual, told = world.send, list[int]()

    def send(sender: Node, peer: str, message: msg.AnyMessage, payload: Payload | None) -> None:
        if sender.id == LIAR and peer == VICTIM and isinstance(message, msg.ReducedPart):
            assert isinstance(payload, tuple)
            told.append(message.fence.t)
            payload = tuple(word + 1 for word in payload)
        late = 0.3 * (sender.id == LIAR and isinstance(message, msg.Prepared))
        if late:
            world.clock.after(late, lambda: usual(sender, peer, message, payload))
        else:
            usual(sender, peer, message, payload)

    world.send = send  # type: ignore[method-assign]
    world.run(until_s=300.0)
    entries = [decode_entry(line).record for line in world.log]
    removed = {p: why for e in entries if isinstance(e, Members) for p, why in e.removed.items()}
    assert told and VICTIM not in removed, removed
    assert world.history().t == STEPS and wrong_states(world) == {}
