"""Relays that are all of their stage and fill no slot, in rounds of pipeline islands: each crew has one of
them, and each round was skipped after two minutes, for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

STEPS, SINCE = 12, 5


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("stage", "liars", "others"), [(1, 1, 2), (1, 2, 3), (2, 1, 3), (2, 2, 3)])
def test_a_relay_of_another_stage_makes_a_crew_without_them(stage: int, liars: int, others: int) -> None:
    rounds = Rounds(2, 4, 3, pipeline=True)
    settings = Settings("stranded", 1, 2, 12, STEPS, min_replicas=1, snapshot_every=2)
    settings = replace(settings, rounds=rounds, steps=rounds.iterations(2 + 4 * (STEPS - 2)))
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"x{k}", stage) for k in range(liars))]
    world = counting_world(settings, [*machines, *(Machine(f"r{k}", 3 - stage) for k in range(others))], 1)
    Invariants(world)
    world.liars.update(f"x{k}" for k in range(liars))

    def lose(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        work = isinstance(message, msg.Forward | msg.Backward | msg.InnerActivation | msg.InnerGradient)
        return None if sender.id in world.liars and work and message.fence.t >= SINCE else message  # type: ignore[attr-defined]

    altered(world, lose)
    assert go_on(world, 1000.0) == STEPS and wrong_states(world) == {} and rollbacks(world) == []
    skipped = [commit.t for commit in world.history().commits if commit.verdict == "skip"]
    # The round in which the relay moves may be skipped at once, as the relay was of its crews.
    assert skipped and len(skipped) <= 4 and world.clock.now < 400.0
    assert all("no crew filled its slot" in why for why in removed(world).values())
