"""Links over which an activation takes minutes: a run goes on, slowly, and nothing is sent twice."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.net.wan.profile import find_profile
from anabranch.protocol import messages as msg
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.cluster.scenario import fleet_of, load_scenario
from anabranch.sim.experiment.modelled_world import ModelledWorld
from anabranch.sim.experiment.run import Simulation
from anabranch.sim.kernel.simulated_peer import Node
from support.grids import first_of
from support.swarms.small_scenario import SMALL

WAN10 = find_profile("wan10")

#: An activation of 8 MiB at 0.7 to 12 Mbit/s; four of them on one link take longer than a sender asks after
#: the first before it would give it up.
SLOW = SMALL | {"network.loss": 0.01, "run.iterations": 2}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("spare", ["never", "links"])
def test_nothing_is_sent_twice_because_it_is_slow(monkeypatch: pytest.MonkeyPatch, spare: str) -> None:
    """Also where lines are tried before: of every link something is known when the first activation goes."""
    sent: Counter[tuple[str, int, int]] = Counter()
    plain = ModelledWorld.send

    def counted(
        world: ModelledWorld, sender: Node, peer: str, message: msg.AnyMessage, payload: Payload | None
    ) -> None:
        if isinstance(message, msg.Forward | msg.Backward):
            sent[f"{type(message).__name__} of {sender.id}", message.fence.t, message.index] += 1
        plain(world, sender, peer, message, payload)

    monkeypatch.setattr(ModelledWorld, "send", counted)
    scenario = load_scenario("wan10", SLOW | {"fleet.spare": spare})
    simulation = Simulation(fleet_of(scenario, WAN10, 0), "auction", 0)
    outcome = simulation.run()
    assert not outcome.failure
    assert [(what, times) for what, times in sent.items() if times > 1] == []
    assert all(row.seconds > 100.0 for row in outcome.rows)


@pytest.mark.costly
@pytest.mark.parametrize("heartbeat_s", first_of([10.0, 5.0, 1.0]))
def test_who_comes_back_has_each_piece_of_the_state_sent_once(
    monkeypatch: pytest.MonkeyPatch, heartbeat_s: float
) -> None:
    """A relay crashes, returns and pulls its state: each piece takes one to two minutes, and two are asked of
    each source at a time."""
    sent: Counter[tuple[str, int, int]] = Counter()
    plain = ModelledWorld.send

    def counted(
        world: ModelledWorld, sender: Node, peer: str, message: msg.AnyMessage, payload: Payload | None
    ) -> None:
        if isinstance(message, msg.Piece) and peer == "r1.0":
            sent[sender.id, message.t, message.piece] += 1
        plain(world, sender, peer, message, payload)

    monkeypatch.setattr(ModelledWorld, "send", counted)
    changes = {"model.size": "llama-160m", "model.rows": 1, "model.microbatches": 2, "run.iterations": 6}
    changes |= {"run.heartbeat_s": heartbeat_s}
    fleet = fleet_of(load_scenario("wan10", SLOW | changes | {"network.loss": 0.004}), WAN10, 0)
    simulation = Simulation(fleet, "auction", 0)
    clock = simulation.world.clock
    clock.at(1900.0, lambda: simulation.churn._crash("r1.0"))
    clock.at(1910.0, lambda: simulation.churn._back("r1.0"))
    outcome = simulation.run()
    assert not outcome.failure
    assert len({piece for _, _, piece in sent}) == 32
    assert [(what, times) for what, times in sent.items() if times > 1] == []
    assert "r1.0" in simulation.leader.peer.ctx.run.membership.live(1, 6)


@pytest.mark.costly
@pytest.mark.parametrize("heartbeat_s", first_of([10.0, 5.0, 1.0]))
def test_a_gradient_that_is_on_its_way_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, heartbeat_s: float
) -> None:
    """Two of three replicas are enough for a step; the third gets what it missed, in minutes. No reduce is
    begun anew meanwhile."""
    sent: Counter[tuple[str, str, int]] = Counter()
    plain = ModelledWorld.send

    def counted(
        world: ModelledWorld, sender: Node, peer: str, message: msg.AnyMessage, payload: Payload | None
    ) -> None:
        if isinstance(message, msg.Gradient):
            sent[sender.id, peer, message.t] += 1
        plain(world, sender, peer, message, payload)

    monkeypatch.setattr(ModelledWorld, "send", counted)
    changes = {"model.size": "llama-160m", "model.rows": 1, "model.microbatches": 2, "network.loss": 0.004}
    changes |= {"fleet.spare": "never", "run.heartbeat_s": heartbeat_s}
    simulation = Simulation(fleet_of(load_scenario("wan10", SLOW | changes), WAN10, 0), "auction", 0)
    assert not simulation.run().failure
    assert sent
    assert [(what, times) for what, times in sent.items() if times > 1] == []
    assert [fields for _, _, kind, fields in simulation.world.notes if kind == "note"] == []
