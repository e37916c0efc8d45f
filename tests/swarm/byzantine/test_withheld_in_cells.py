"""A relay of a large stage, which sums in cells, that withholds what it summed from its cell in each step."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

#: Step from which parts are withheld, last step, replicas, neighbours: three cells of three.
FIRST, STEPS, REPLICAS, PICKS = 4, 14, 9, 2


@pytest.mark.xfail(
    strict=True,
    reason="the others' reports commit the step, so nobody looks for who withheld; its cell fetches the "
    "gradient, and each step takes half as long again",
)
def test_who_withholds_reduced_parts_from_its_cell_slows_no_steps_for_long() -> None:
    settings = Settings("cells", 1, 1, 2 * REPLICAS, STEPS, min_replicas=REPLICAS, neighbours=PICKS)
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{n}", 1) for n in range(REPLICAS))]
    world, times = counting_world(settings, machines, 4), [0.0]
    carry = world.carry

    def withhold(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if not (sender.id == "r1.1" and isinstance(said, msg.ReducedPart) and said.fence.t >= FIRST):
            carry(sender, peer, message, payload)

    def watch(node: Node, event: object) -> None:
        times.extend([world.clock.now] * (world.history().t + 1 - len(times)))

    world.carry = withhold  # type: ignore[method-assign]
    world.watchers.append(watch)
    world.run(until_s=900.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    before_s, after_s = times[FIRST - 1] - times[1], times[STEPS] - times[STEPS - 5]
    assert after_s / 5 < 1.2 * before_s / (FIRST - 2)
