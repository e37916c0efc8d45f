"""Relays that give the leader a false state, or none, when it collects a checkpoint (R14)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_arithmetic import fingerprint, from_pieces, in_pieces
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from anabranch.sim.workers.single_machine import states_after
from support.grids import every_value
from swarm.byzantine.test_review_stalls import removed

LIAR, STEPS = "r1.0", 12

Say = Callable[[msg.AnyMessage, Payload | None], tuple[msg.AnyMessage, Payload | None] | None]
"""Changes a message of the liar to the leader, with its payload; None: it says nothing."""


def false_piece(said: msg.AnyMessage, payload: Payload | None) -> tuple[msg.AnyMessage, Payload | None]:
    """The right offer, and another piece."""
    if isinstance(said, msg.Piece) and said.piece == 1 and isinstance(payload, int):
        return said, payload ^ 1
    return said, payload


def false_state(said: msg.AnyMessage, payload: Payload | None) -> tuple[msg.AnyMessage, Payload | None]:
    """A state that is false and consistent in itself: all pieces are those of zero."""
    state = in_pieces(0)
    if isinstance(said, msg.StateOffer) and said.pieces:
        pieces = tuple(map(str, (said.t, *state)))
        said = msgspec.structs.replace(said, fingerprint=fingerprint(said.t, 0), hashes=pieces)
    elif isinstance(said, msg.Piece) and said.piece:
        payload = state[said.piece - 1]
    return said, payload


def false_pieces(said: msg.AnyMessage, payload: Payload | None) -> tuple[msg.AnyMessage, Payload | None]:
    """The right fingerprint, with hashes and pieces of another state."""
    right = said.fingerprint if isinstance(said, msg.StateOffer) else ""
    said, payload = false_state(said, payload)
    if isinstance(said, msg.StateOffer):
        said = msgspec.structs.replace(said, fingerprint=right)
    return said, payload


def nothing(said: msg.AnyMessage, payload: Payload | None) -> tuple[msg.AnyMessage, Payload | None] | None:
    """An offer, and no piece."""
    return None if isinstance(said, msg.Piece) else (said, payload)


def swarm(say: Say, replicas: int, every: int) -> World:
    """Run whose liar is quicker than all others: what they send the leader of states comes later."""
    settings = Settings("files", 1, 2, 4, STEPS, checkpoint_every=every, min_replicas=1)
    machines = [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(replicas)]
    world = counting_world(settings, [Machine("d0", 0), *machines], 1)
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if peer != "d0" or not isinstance(said, msg.StateOffer | msg.Piece):
            carry(sender, peer, message, payload)
        elif sender.id != LIAR:
            world.clock.after(0.1, lambda: carry(sender, peer, message, payload))
        elif (other := say(said, payload)) is not None:
            carry(sender, peer, msg.encode(other[0]), other[1])

    world.carry = on_its_way  # type: ignore[method-assign]
    return world


@pytest.mark.parametrize(
    ("replicas", "say"), every_value([2, 3], [false_piece, false_state, false_pieces, nothing])
)
def test_a_checkpoint_has_the_agreed_states(say: Say, replicas: int) -> None:
    """The first answer was written, whatever it was: the result of the run was the liar's."""
    world = swarm(say, replicas, 4)
    world.run(until_s=300.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert max(world.checkpoints) == STEPS
    for t, stages in world.checkpoints.items():
        right = states_after(t, world.settings, None)
        written = {stage: from_pieces(t, pieces) for stage, (pieces, _) in stages.items()}
        assert written == dict(enumerate(right)), t
        assert {s: f for s, (_, f) in stages.items()} == {s: fingerprint(t, r) for s, r in enumerate(right)}
    assert removed(world).keys() <= {LIAR}
