"""Attacks on who is offered the lead: a founder that yields, and leaders that step aside."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms.fault_points import Fault
from support.swarms.voters import leads_three


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("snapshot_every", [0, 4])
def test_only_a_relay_is_left_and_the_checkpoint_is_with_the_founder(snapshot_every: int) -> None:
    """All but one voter, a relay, die. The founder is back, with its checkpoint, and a majority with it. The
    relay can lead, and has no point to go back to (none in memory is complete): the founder has one."""
    machines = [Machine(f"d{n}", 0) for n in range(2)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2, 3) for n in range(3)]
    settings = Settings("site", 3, 1, 4, 400, voters=3, snapshot_every=snapshot_every, checkpoint_every=10)
    world = counting_world(settings, machines, 0)
    Invariants(world)

    def strike(world: World, node: Node) -> None:
        stays = next(v.partition("/")[0] for v in node.peer.ctx.log.voters if v.startswith("r"))
        dead = [peer for peer in world.nodes if peer != stays]
        for peer in dead:
            world.crash(peer)

        def back() -> None:
            founder_comes_back(world)
            for peer in dead:
                if peer != "d0":
                    member = msgspec.structs.replace(world.nodes[peer].member, incarnation=2)
                    world.add(member, "d0", at=world.clock.now + world.random.uniform(0.1, 0.6))

        world.clock.after(30.0, back)

    struck = Fault(world, ("d0",), leads_three(27), strike)
    while not struck.delivered:
        world.clock.step()
    began = world.clock.now
    progress = False
    while world.clock.now < began + 200.0 and not progress:
        world.clock.step()
        progress = world.nodes["d0"].peer.committed > 29
    assert progress
    assert not wrong_states(world)


def test_a_founder_at_the_end_of_the_run_does_not_step_aside() -> None:
    """All steps are committed, and the founder, which alone can end the run, cannot reach the last of a
    stage. Whom it gave the lead would give it back at once: it went to and fro every twenty seconds, and
    with each turn the wait for that member began anew, so that it had no end."""
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("d2", 0), Machine("x", 1)]
    machines += [Machine(f"s{n}", 2) for n in range(3)]
    settings = Settings("end", 2, 1, 4, 20, voters=3, snapshot_every=2, checkpoint_every=8)
    world = counting_world(settings, machines, 0)
    Invariants(world)
    cut = Fault(world, ("d0",), leads_three(20), lambda world, node: world.cut("d0", "x", 5000.0))
    while not cut.delivered:
        world.clock.step()
    term, began = world.history().term, world.clock.now
    while world.clock.now < began + 130.0:
        world.clock.step()
    assert world.history().term <= term + 1


def test_a_leader_steps_aside_for_a_voter_of_a_far_stage() -> None:
    """The leader loses its link to the last replica of a stage for good, and no carrier helps. Enough members
    that hear the replica stand at adjacent stages, and none of these votes: the voters are asked as well
    (I4)."""
    machines = [Machine(f"d{n}", 0) for n in range(3)] + [Machine("x", 2), Machine("last", 4)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 3) for n in range(2)]
    settings = Settings("far", 1, 4, 4, 400, voters=3, checkpoint_every=8)
    world = counting_world(settings, machines, 0)
    Invariants(world)
    world.carrier_to = lambda node, peer, carriers: ""  # type: ignore[method-assign]
    cut = Fault(world, ("d0",), leads_three(6), lambda world, node: world.cut("d0", "x", 5000.0))
    while not cut.delivered:
        world.clock.step()
    began, t = world.clock.now, world.nodes["d1"].peer.committed
    while world.clock.now < began + 200.0 and world.nodes["d1"].peer.committed < t + 4:
        world.clock.step()
    assert world.leading().id in ("d1", "d2")
    assert world.nodes["d1"].peer.committed >= t + 4
    assert not wrong_states(world)
