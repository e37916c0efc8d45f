"""Messages of a single member that ended the leader or the run, found by review."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import AnyRecord, Commit, Members, decode_entry
from anabranch.protocol.messages import AnyMessage, Claim
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states


def records(world: World) -> list[AnyRecord]:
    return [decode_entry(line).record for line in world.log]


def removed(world: World) -> dict[str, str]:
    return {
        peer: reason
        for record in records(world)
        if isinstance(record, Members)
        for peer, reason in record.removed.items()
    }


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, float("nan")])
def test_a_data_node_whose_losses_have_no_sum_is_out(loss: float) -> None:
    """Two losses of 1.7e308 each are finite, and their sum is not: the step was logged, and ended the leader
    and all volunteers that told of it."""
    settings = Settings("loss", 1, 1, 6, 10, min_replicas=1)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r1.0", 1), Machine("r1.1", 1)]
    world = counting_world(settings, machines, 1)
    send = world.send

    def lie(sender: Node, peer: str, message: AnyMessage, payload: Any = None) -> None:
        if sender.member.id == "d1" and isinstance(message, Claim) and message.fence.t >= 3:
            message = msgspec.structs.replace(message, losses=dict.fromkeys(message.losses, loss))
        send(sender, peer, message, payload)

    world.send = lie  # type: ignore[method-assign, assignment]
    world.run(60.0)
    commits = [record for record in records(world) if isinstance(record, Commit)]
    assert len(commits) == 10 and wrong_states(world).keys() <= {"d1"}
    assert list(removed(world)) == ["d1"]
    assert all(abs(each) < 1e6 for record in commits for each in record.loss_sums)
