"""A relay that reports digests and losses of contributions in a run whose data are not private."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.rounds import NO_ROUNDS, Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

LIAR, STEPS, FALSE_LOSS = "r1.1", 6, 1e199


@pytest.mark.parametrize(
    "rounds", [NO_ROUNDS, Rounds(start=2, inner=3, slots=3), Rounds(start=4, inner=3, slots=3, private=True)]
)
def test_they_do_not_get_into_the_log(rounds: Rounds) -> None:
    """An empty report had the step logged with digests, which no synchronous step has: `verify` found the
    log of an honest run wrong for ever. In a round the loss of a slot was the relay's word."""
    settings = Settings("digests", 1, 1, 6, STEPS, min_replicas=3, rounds=rounds)
    machines = [Machine("d0", 0), *(Machine(f"r1.{n}", 1) for n in range(3))]
    world, told = counting_world(settings, machines, 1), set[int]()
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        of_liar = sender.id == LIAR and isinstance(said, msg.Claim)
        if of_liar and isinstance(said, msg.Claim) and not (rounds.private and rounds.has(said.fence.t)):
            told.add(said.fence.t)
            units = said.units if rounds.has(said.fence.t) else ()
            digests, losses = dict.fromkeys(units, "d"), dict.fromkeys(units, FALSE_LOSS)
            report = msg.ContributionDigests(said.fence, 1, digests, losses)
            carry(sender, "d0", msg.encode(report), None)
        carry(sender, peer, message, payload)

    world.carry = on_its_way  # type: ignore[method-assign]
    world.run(until_s=300.0)
    commits = world.history().commits
    assert len(commits) == STEPS and wrong_states(world) == {} and len(told) >= 2
    for commit in commits:
        of_private = rounds.private and rounds.has(commit.t)
        assert all(bool(part.contributions) == (of_private and stage == 1)
                   for stage, part in enumerate(commit.stages)), commit.t  # fmt: skip
        assert FALSE_LOSS not in commit.loss_sums
