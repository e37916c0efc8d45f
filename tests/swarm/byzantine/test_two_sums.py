"""A replica that sends one other replica another reduced part than it sends the rest of its stage, and itself
reports the gradient of the rest, so that the honest one is outvoted (R8)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anabranch.counter_rng import CounterRng
from anabranch.protocol import messages as msg
from anabranch.protocol.coordinator import reduce_schedule
from anabranch.protocol.coordinator.reduce_schedule import EVEN, ReducePlan
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import removed

#: A step takes so long that reduces are spread.
SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.1))
STEPS, LIAR, VICTIM = 12, "r1.2", "r1.0"


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
    assert told and VICTIM not in removed(world), removed(world)
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_helper_that_sums_falsely_for_one_alone_costs_that_one_no_seat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It serves another stage, sums parts of this one, and sends the others theirs a little later."""

    def dealt(members: Sequence[str], helpers: Sequence[str], rng: CounterRng) -> ReducePlan:
        helped = VICTIM in members and "r2.2" in helpers
        return ReducePlan(("r2.2",), tuple(range(len(members) + 1))) if helped else EVEN

    monkeypatch.setattr(reduce_schedule, "by_chance", dealt)
    settings = Settings("two sums", 1, 2, 8, STEPS, spread="always", min_replicas=3)
    relays = [(f"r{stage}.{number}", stage) for stage in (1, 2) for number in range(3)]
    names = [("d0", 0), ("d1", 0), *relays]
    world = counting_world(settings, [Machine(*name) for name in names], 1, SLOW)
    world.strict = False
    usual, told = world.send, list[int]()

    def send(sender: Node, peer: str, message: msg.AnyMessage, payload: Payload | None) -> None:
        helps = sender.id == "r2.2" and isinstance(message, msg.ReducedPart) and message.stage == 1
        if helps and peer != VICTIM:
            world.clock.after(0.3, lambda: usual(sender, peer, message, payload))
            return
        if helps:
            assert isinstance(payload, tuple)
            told.append(message.fence.t)  # type: ignore[union-attr]
            payload = tuple(word + 1 for word in payload)
        usual(sender, peer, message, payload)

    world.send = send  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert told and VICTIM not in removed(world), removed(world)
    assert world.history().t == STEPS and wrong_states(world) == {}
