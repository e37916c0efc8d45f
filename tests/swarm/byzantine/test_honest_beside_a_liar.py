"""Honest machines that crash, freeze or are slow while a liar holds the step up (I4): found by the grid of
`benchmarks.byzantine.honest_beside_liar`."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import altered, go_on, removed

SINCE, STEPS = 4, 8


def test_who_comes_back_while_a_step_is_held_up_was_not_sent_its_reduce() -> None:
    """A data node claims nothing, so the step waits while the reduce of stage 1 has ended. A replica crashes,
    comes back and serves in the open step: the reduce had its former process as a member, which the new one
    never heard of. The second time it was expelled, as it "was sent the whole gradient"."""
    settings = Settings("back", 1, 1, 6, STEPS, min_replicas=2)
    machines = [Machine(name, int(name[0] == "r")) for name in ("d0", "d1", "r0", "r1")]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add("d1")

    def claims_nothing(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        withheld = isinstance(said, msg.Claim) and sender.id == "d1" and said.fence.t >= SINCE
        return None if withheld else said

    def crash() -> None:
        node = world.nodes["r0"]
        world.crash("r0")
        world.clock.after(5.0, lambda: world.add(node.next_life(), "d0", world.clock.now))

    altered(world, claims_nothing)
    for at_s in (8.0, 35.0):
        world.clock.at(at_s, crash)
    assert go_on(world, 400.0) == STEPS
    assert "refused" in removed(world)["r0"] and wrong_states(world).keys() <= {"d1"}
    assert not any("stuck" in str(fields.get("text")) for _, _, _, fields in world.notes)
