"""A relay that gives the data node other bytes for a checkpoint than its state.

Nobody looked at them before the run was resumed or verified: each checkpoint that was kept had zeros for the
stage, the last one too, which is the model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs

from anabranch.audit.verify import verify
from anabranch.protocol import messages as msg
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from support.audited_runs import make_run, small_run


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("offers", ["the true state", "another state"])
def test_a_checkpoint_has_the_states_that_the_log_has(tmp_path: Path, offers: str) -> None:
    """The liar is the first whom the data node asks."""
    given = list[int]()

    def spoil(world: World) -> None:
        carry = world.carry

        def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
            said = msg.decode(message)
            if sender.id == "r1.0" and isinstance(said, msg.StateOffer) and offers == "another state":
                given.append(said.t)
                other = structs.replace(said, fingerprint="0" * len(said.fingerprint), hashes=())
                message = msg.encode(other)
            if sender.id == "r1.0" and isinstance(said, msg.Piece) and isinstance(payload, torch.Tensor):
                given.append(said.t)
                payload = torch.zeros_like(payload)
            carry(sender, peer, message, payload)

        world.carry = lie  # type: ignore[method-assign]

    run = make_run(tmp_path, small_run(fleet__relays_per_stage=(3, 3)), (3, 3), spoil=spoil)
    report = verify(run.path)
    assert {3, 6} <= set(given) and run.checkpoints() == [3, 6]
    assert report.holds, report.problems
