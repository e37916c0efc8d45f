"""Checkpoints that cannot be written."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world

STEPS = 4


@pytest.mark.parametrize("windows", [0, 2])
def test_the_last_steps_checkpoint_is_tried_again(monkeypatch: pytest.MonkeyPatch, windows: int) -> None:
    """The disk has no room when the last step is taken, and has it a moment later. With held-out windows the
    step's states are evaluated meanwhile: the run is not over yet."""
    settings = Settings(
        "disk", 1, 1, 4, STEPS, windows=windows, evaluate_every=2, checkpoint_every=2
    )
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r1.1", 1)])
    refused: list[int] = []
    carry_out = Node._carry_out

    def without_room(node: Node, effect: ev.Effect) -> None:
        if isinstance(effect, ev.WriteCheckpoint) and effect.t == STEPS and not refused:
            refused.append(effect.t)
            world.clock.after(0.0, lambda: node.handle(ev.CheckpointFailed(STEPS, "no room")))
        else:
            carry_out(node, effect)

    monkeypatch.setattr(Node, "_carry_out", without_room)
    world.run(until_s=300)
    assert refused and world.history().t == STEPS and max(world.checkpoints) == STEPS
