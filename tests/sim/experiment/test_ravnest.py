"""Preset `ravnest` in simulation: clusters that each hold the model once, and parts that are averaged at the
same time, each by the bytes of a ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from anabranch.net.wan.profile import find_profile
from anabranch.protocol import messages as msg
from anabranch.protocol.log.records import Crew, Slot
from anabranch.sim.cluster.device_model import GRADIENT_BYTES, SUM_WIRE_BYTES
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.modelled_world import ModelledWorld
from anabranch.sim.experiment.run import simulate
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.train.recipes.presets import PRESETS

SETTINGS = PRESETS["ravnest"].settings
STAGES, CLUSTERS = SETTINGS["pipeline.stages"], SETTINGS["round.slots"]


@dataclass(frozen=True)
class Sent:
    """Part of a contribution or of a result on its way."""

    time: float
    t: int
    stage: int
    result: bool
    sender: str
    size: float


def rounds_of_clusters(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], seed: int = 0
) -> tuple[list[Sent], dict[int, tuple[Slot, ...]], ModelledWorld]:
    """Parts that were sent, plans by round, and the world."""
    sent, worlds = list[Sent](), list[ModelledWorld]()
    plain = ModelledWorld.payload_bytes

    def noted(world: ModelledWorld, sender: Node, message: msg.AnyMessage) -> float:
        size = plain(world, sender, message)
        if isinstance(message, msg.ReducePart | msg.ReducedPart):
            result = isinstance(message, msg.ReducedPart)
            sent.append(Sent(world.clock.now, message.fence.t, message.stage, result, sender.id, size))
        worlds[:] = [world]
        return size

    monkeypatch.setattr(ModelledWorld, "payload_bytes", noted)
    rounds = {f"round.{key}": SETTINGS[f"round.{key}"] for key in ("slots", "contributions", "results")}
    changes = {
        **rounds, "round.steps": 4, "round.start": 2,
        "model.stages": STAGES, "model.microbatches": 8 * CLUSTERS,
        "fleet.relays": STAGES * CLUSTERS, "fleet.data_nodes": CLUSTERS, "fleet.device": devices,
        "fleet.speed": [1.0], "fleet.spare": "never", "network.up_bps": [5e8], "network.down_bps": [5e8],
        "churn.crash": 0.0, "run.heartbeat_s": 60.0, "run.iterations": 5,
    }  # fmt: skip
    outcome = simulate(load_scenario("volunteers", changes), find_profile("wan10"), "auction", seed)
    assert not outcome.failure
    [world] = worlds
    return sent, dict(world.history().plans), world


def test_each_part_is_averaged_by_the_bytes_of_a_ring_and_all_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring of N clusters has N - 1 steps to reduce and N - 1 to gather. In each a machine sends 1/N of its
    part of the model."""
    sent, plans, world = rounds_of_clusters(monkeypatch, ["rtx4090"])
    t = max(plans) - 1
    of_round = [each for each in sent if each.t == t]
    for stage in range(STAGES + 1):
        members = {slot.crew[stage - 1] for slot in plans[t]}
        for result, value_bytes in ((False, SUM_WIRE_BYTES), (True, GRADIENT_BYTES)):
            parts = [each for each in of_round if (each.stage, each.result) == (stage, result)]
            assert Counter(each.sender for each in parts) == dict.fromkeys(members, CLUSTERS - 1)
            size = value_bytes * world.work.parameters(stage) / CLUSTERS
            assert all(each.size == pytest.approx(size, rel=0.02) for each in parts)
    spans = [
        (min(times), max(times))
        for stage in range(STAGES + 1)
        for times in [[each.time for each in of_round if each.stage == stage]]
    ]
    assert max(begun for begun, _ in spans) < min(ended for _, ended in spans), spans


def test_a_cluster_holds_the_model_once_and_machines_alike_in_speed_are_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, plans, world = rounds_of_clusters(monkeypatch, ["rtx4090", "rtx3060"], seed=1)
    relays = {node.id for node in world.nodes.values() if node.id.startswith("r")}
    for plan in plans.values():
        crews = [slot.crew for slot in plan if slot.peer]
        assert sorted(peer for crew in crews for peer in crew[:-1]) == sorted(relays)
        stages = [[world.nodes[peer].peer.ctx.run.stage for peer in crew] for crew in crews]
        assert stages == [[*range(1, STAGES + 1), 0]] * CLUSTERS
    quick = {peer: world.fleet.hosts[peer].machine.microbatch_s(1) < 0.1 for peer in relays}
    fewest = abs(sum(quick[peer] * (1 if peer.startswith("r1") else -1) for peer in relays))

    def mixed(crews: Iterable[Crew]) -> int:
        return sum(len({quick[peer] for peer in crew[:-1]}) > 1 for crew in crews)

    by_name = [(*(f"r{stage + 1}.{n}" for stage in range(STAGES)), "d") for n in range(CLUSTERS)]
    assert mixed(by_name) > fewest, "nothing to arrange"
    assert all(mixed(slot.crew for slot in plan) == fewest for plan in plans.values())
