"""States of a stage go to members that need them: not to strangers, and not to newcomers of other stages."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world


def asks_for_all(role: str) -> tuple[World, set[int]]:
    """A swarm of two stages that "guest" comes to, which asks everybody for the states of all stages all the
    time; returns the world after its run, and the stages whose pieces the guest got. role: "stranger" (it
    never applies), or "newcomer" of stage 1 (it never becomes ready)."""
    settings = Settings("states", 1, 2, 6, 8, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(2))]
    world = counting_world(settings, machines, 1)
    got, carry = set[int](), world.carry

    def watched(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if peer == "guest" and isinstance(said, msg.Piece):
            got.add(said.stage)
        carry(sender, peer, message, payload)

    def mouth(message: msg.AnyMessage) -> msg.AnyMessage | None:
        silent = (msg.JoinRequest, msg.Ready) if role == "stranger" else (msg.Ready,)
        return None if isinstance(message, silent) else message

    def ask() -> None:
        guest = world.nodes["guest"]
        for peer in list(guest.links):
            for stage in range(3):
                for wish in (msg.FetchState(stage, -1), msg.FetchPiece(stage, world.history().t, 0)):
                    carry(guest, peer, msg.encode(wish), None)
        world.clock.after(0.05, ask)

    def come() -> None:
        like = world.nodes["r1.0"].member
        member = msgspec.structs.replace(like, id="guest", name="guest", address="guest:1", disk="")
        world.mouths["guest"] = mouth
        world.liars.add("guest")
        world.add(member, "d0", world.clock.now)
        world.clock.after(0.05, ask)

    world.carry = watched  # type: ignore[method-assign]
    world.clock.after(1.0, come)
    world.run(until_s=300.0)
    return world, got


@pytest.mark.parametrize(("role", "stages"), [("stranger", set[int]()), ("newcomer", {1})])
def test_a_guest_gets_no_states_of_other_stages(role: str, stages: set[int]) -> None:
    world, got = asks_for_all(role)
    assert world.history().t == 8 and got <= stages
