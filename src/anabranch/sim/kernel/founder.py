"""Start of a simulated run: its founder and the machines that join, and the restart of the founder."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.log.records import Member
from anabranch.protocol.log.step_parameters import Schedule
from anabranch.protocol.peer.bootstrap import SavedCheckpoint, lead
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.simulated_signer import SimulatedSigner
from anabranch.sim.kernel.swarm_world import World


def populate(world: World, schedule: Schedule, machines: Iterable[tuple[Member, float]]) -> None:
    """Add (member, slowness) pairs to a world; the first one founds the run, the others begin to join at
    drawn times in its first 0.5 s. Nothing runs yet (`World.run`). slowness: factor on the seconds of the
    node's tasks. schedule: step parameters that the founder logs. `machines` may be a generator that draws
    from `world.random`: a pair is asked for just before its peer is added."""
    every = iter(machines)
    founder, slowness = next(every)
    kept = SavedVoterState(founder.disk, seed=world.seed)
    leader = lead(founder, world.settings, schedule, world.genesis, kept, signer=SimulatedSigner(founder.id))
    world.add_leader(leader, founder).slowness = slowness
    for member, slowness in every:
        world.add(member, founder.id, at=world.random.uniform(0.0, 0.5), slowness=slowness)


def founder_comes_back(world: World) -> Node:
    """Start the founder's next process, as `anabranch resume` does, with its disk and its newest checkpoint,
    and return its node. It joins the run's present leader; if there is none, it can be elected and resumes
    the run."""
    former = world.nodes[world.genesis.leader]
    member = former.next_life()
    saved = None
    if world.checkpoints:
        t = max(world.checkpoints)
        stages = range(world.settings.stages + 1)
        saved = SavedCheckpoint(t, tuple(world.checkpoints[t][stage][1] for stage in stages))
    assert world.schedule is not None
    kept = former.disk.kept(world.seed_of(member))
    world.trouble.gone.discard(member.id)
    settings, schedule, genesis = world.settings, world.schedule, world.genesis
    unheard, signer = world.unheard, SimulatedSigner(member.id)
    peer = lead(member, settings, schedule, genesis, kept, saved, unheard=unheard, signer=signer)
    node = world.add_leader(peer, member, former.disk)
    node.slowness = former.slowness
    return node
