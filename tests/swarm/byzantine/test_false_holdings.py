"""A member that says that it holds copies of all states, and gives none away when a stage is lost."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import go_on, rollbacks

STEPS, NEWEST, LOST_AT, COPY_S = 40, 10, 12, 30.0
LIAR, LAST = "g", "r2.0"


def lost_while_copied(lies: bool) -> World:
    """Three relay stages, the second one of a single replica. That is lost while the copies of its newest
    snapshot are under way over slow lines. lies: True if the liar says that it holds everything that the log
    names."""
    settings = Settings("held", 1, 3, 6, STEPS, min_replicas=1, snapshot_every=5)
    names = [("r1.0", 1), ("r1.1", 1), ("r1.2", 1), (LAST, 2), ("r3.0", 3), (LIAR, 3)]
    world = counting_world(settings, [Machine("d0", 0), *(Machine(*each) for each in names)], 1)
    Invariants(world)
    lost, said, carry = list[float](), list[int](), world.carry

    def slowly(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        piece = msg.decode(message)
        late = isinstance(piece, msg.Piece) and piece.t >= NEWEST and not lost
        world.clock.after(COPY_S if late else 0.0, lambda: carry(sender, peer, message, payload))

    def is_silent(message: msg.AnyMessage) -> msg.AnyMessage | None:
        of_others = isinstance(message, msg.StateOffer | msg.Piece) and message.stage != 3
        return None if of_others or isinstance(message, msg.Holds) else message

    def look(node: Node, event: ev.Event) -> None:
        commits = world.history().commits
        if not lost and len(commits) >= LOST_AT:
            lost.append(world.clock.now)
            world.crash(LAST)
        if lies and commits and commits[-1].t not in said:
            said.append(commits[-1].t)
            held = [
                msg.Held(stage, commit.t - 1, part.fingerprint_before)
                for commit in commits[-8:]
                for stage, part in enumerate(commit.stages)
            ]
            report = msg.Holds(tuple(held), 1000 + len(said))
            carry(world.nodes[LIAR], "d0", msg.encode(report), None)

    world.carry = slowly  # type: ignore[method-assign]
    if lies:
        world.mouths[LIAR] = is_silent
    world.watchers.append(look)
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("lies", [False, True])
def test_the_log_goes_back_to_a_snapshot_that_more_than_one_keeper_has(lies: bool) -> None:
    """By the liar's word alone it went back to the newest one, of which nobody could get the lost stage's
    state, and the run stood still."""
    world = lost_while_copied(lies)
    assert go_on(world, 300.0) == STEPS and wrong_states(world) == {}
    assert [record.t for record in rollbacks(world)] == [5]
