"""Dialling: a peer that nobody can dial works with those that it can dial."""

from __future__ import annotations

import pytest

from anabranch.node.lifecycle.addresses import reachable_address
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value
from support.swarms.fault_points import Fault, ended, kill

STEPS = 4


@pytest.mark.parametrize(("hidden", "seed"), every_value(["r1.0", "r2.0"], range(3)))
def test_one_of_two_that_can_be_dialled_is_enough(hidden: str, seed: int) -> None:
    """Whichever of them joins first."""
    settings = Settings("run", 1, 2, 4, STEPS)
    names = [("d0", 0), ("r1.0", 1), ("r2.0", 2)]
    machines = [Machine(name, stage, reachable=name != hidden) for name, stage in names]
    world = counting_world(settings, machines, seed)
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == STEPS
    assert not wrong_states(world)


def test_loopback_is_announced_only_to_a_run_of_this_machine() -> None:
    assert reachable_address("127.0.0.1", 7700, "127.0.0.1") == "127.0.0.1:7700"
    assert reachable_address("127.0.0.1", 7700, "203.0.113.5") == ""
    assert reachable_address("localhost", 7700, "my.host") == ""
    assert reachable_address("10.0.0.7", 7700, "203.0.113.5") == "10.0.0.7:7700"


@pytest.mark.parametrize("resets", [1, 3])
def test_a_door_that_a_dying_process_still_holds_open_is_tried_again_at_once(resets: int) -> None:
    """The kernel resets a killed process's connections before it closes the port: whoever dials between is
    not refused but reset. That must not cost the patience that silence is given."""
    settings = Settings("run", 1, 2, 4, 12, checkpoint_every=0, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(2))]
    world = counting_world(settings, machines)
    fault = Fault(world, ("r1.0", "r1.1"), ended(tasks.WeightGradient, 4), kill())
    dial, answered = world.dial, []

    def dying(node: Node, peer: str, address: str = "") -> None:
        if peer not in (victim for _, victim, _ in fault.delivered) or len(answered) == resets:
            dial(node, peer, address)
        else:
            answered.append(node.id)
            world.clock.after(0.001, lambda: node.handle(ev.LinkDown(peer, "connection reset")))

    world.dial = dying  # type: ignore[method-assign]
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == settings.steps and not wrong_states(world)
    removed = [at for at, who, kind, f in world.notes if kind == "peer_removed" and who == "d0"]
    assert len(answered) == resets and len(removed) == 1
    assert removed[0] - fault.delivered[0][0] < 1.0
