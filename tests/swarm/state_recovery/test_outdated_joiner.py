"""A joiner whose state is outdated between its report and the record that says from when it serves (R14)."""

from __future__ import annotations

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.peer.shared_state import Step
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states

STEPS = 6


def test_who_lost_its_state_before_the_log_says_that_it_serves_goes_on_fetching() -> None:
    """It had reported a state, and fell behind: the next try to fetch one was forgotten with the reports
    when the record came, and all waited for it."""
    model = Model(task_s={"Forward": 0.5, "InputGradient": 0.5, "WeightGradient": 0.5})
    settings = Settings("joiner", 1, 1, 12, STEPS, min_replicas=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r1.1", 1)], 3, model)
    world.add(member_of(Machine("late", 1)), "d0", at=1.0)
    lost: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        late = world.nodes["late"].peer
        if node.id == "d0" and "late" in node.peer.ctx.run.membership.active_from and not lost:
            assert late.joining.step is Step.READY and "late" not in late.ctx.run.membership.active_from
            lost.append(world.clock.now)
            late.replica.roll_back()
            late.joining.fetching._fetch_failed("lost, for this test")

    world.watchers.append(look)
    world.run(300.0)
    late = world.nodes["late"].peer
    assert lost and late.ctx.run.membership.active_from["late"] <= STEPS
    assert late.replica.t == STEPS and not wrong_states(world)
