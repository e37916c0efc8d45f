"""Joiners of the open iteration, attacked."""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Member
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import ONE_CLASS, Machine, counting_world
from support.swarms.lost_stages import go_on
from support.swarms.open_iteration import MODEL, SETTINGS, again, swarm


def strike_between(world: World, peer: str, after_s: float) -> list[int]:
    """`peer` is a new process as soon as an iteration is open of which nothing is done."""
    struck: list[int] = []

    def look(node: Node, event: ev.Event) -> None:
        lead = node.peer.lead
        if struck or world.clock.now < after_s or lead is None or lead.t < 3:
            return
        if lead.round is not None and not lead.round.claims:
            struck.append(lead.t)
            again(world, peer)

    world.watchers.append(look)
    return struck


def test_slots_of_a_former_process_that_were_told_to_the_next_one() -> None:
    """r1.1 is a new process when r2.0 opens the iteration, which hears later than others that the log removed
    the former one: it deals out slots to that, and they are told to the new process, which serves in the same
    iteration. They are gone with the removal."""
    world = swarm(SETTINGS, [2, 1])
    world.slow[frozenset(("d0", "r2.0"))] = 40.0
    struck = strike_between(world, "r1.1", 15.0)
    go_on(world, 60.0)
    assert struck
    refused = [fields for _, _, kind, fields in world.notes if kind == "refused"]
    assert [fields for fields in refused if "without a slot" in str(fields["reason"])] == []
    stalls = [fields for _, _, kind, fields in world.notes if kind == "waiting" and "lacks" in str(fields)]
    assert stalls == []


def test_a_relay_that_leads_without_a_data_node_lets_a_joiner_in() -> None:
    """The founder is gone, and a relay leads; some steps later the other data node dies, too. The run waits
    for a data node; who comes is a relay."""
    settings = replace(SETTINGS, voters=3, activation_bytes=1024, block_bytes=4096)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(2)]
    world = counting_world(settings, machines, 0, MODEL, disks={"d1": ""})
    Invariants(world)
    dead: list[str] = []

    def look(node: Node, event: ev.Event) -> None:
        lead = node.peer.lead
        if not dead and node.id == "d0" and lead is not None and lead.t == 3:
            dead.append("d0")
            world.crash("d0")
        elif dead == ["d0"] and node.id != "d0" and lead is not None and lead.t == 6:
            dead.append("d1")
            world.crash("d1")
            at = world.clock.now + 5.0
            member = Member("x", -1, 1, ONE_CLASS, 4, name="x", address="x:1", forward_s=0.02)
            world.clock.at(at, lambda: world.add(member, node.id, at))

    world.watchers.append(look)
    while world.clock.now < 60.0:
        world.clock.step()
    assert dead == ["d0", "d1"]
    members = world.leading().peer.ctx.run.membership.members
    assert not {"d0", "d1"} & members.keys()
    assert members["x"].stage in (1, 2)


def test_who_comes_for_a_settled_stage_does_not_unsettle_it() -> None:
    """The only replica of stage 2 dies when stage 1 has reduced, and somebody who has stage 2's state is let
    in for the open iteration. So is who comes to stage 1 at the same moment, which nobody asked to reduce
    again: one PREPARED of one was enough, of two it is not."""
    model = replace(MODEL, task_s={**MODEL.task_s, "WeightGradient": 0.3})
    machines = [Machine("d0", 0), Machine("r1.0", 1, slowness=0.1), Machine("r2.0", 2)]
    world = counting_world(SETTINGS, machines, 0, model)
    Invariants(world)
    lead = world.nodes["d0"].peer.lead
    assert lead is not None
    for name, stage in (("n1", 1), ("n2", 2)):
        member = Member(name, stage, 1, ONE_CLASS, 4, name=name, address=f"{name}:1", forward_s=0.02)
        world.add(member, "d0", 5.0)
    struck: list[float] = []
    reported: list[str] = []
    carry = world.carry

    def but_ready(sender: Node, peer: str, message: bytes, payload: tasks.Payload | None) -> None:
        if sender.id in ("n1", "n2") and isinstance(msg.decode(message), msg.Ready):
            if not struck or (sender.id == "n2" and "n1" not in reported):
                return
            reported.append(sender.id)
        carry(sender, peer, message, payload)

    def look(node: Node, event: ev.Event) -> None:
        current = lead.round
        if struck or current is None or world.clock.now < 6.0:
            return
        if any(world.nodes[name].peer.replica.t != current.t - 1 for name in ("n1", "n2")):
            return
        if lead.reducing.prepared(current, 1) is not None and 2 not in current.attempts:
            struck.append(world.clock.now)
            world.crash("r2.0")

    world.carry = but_ready  # type: ignore[method-assign]
    world.watchers.append(look)
    go_on(world, 40.0)
    assert struck and {"n1", "n2"} <= set(reported)
    notes = [str(fields) for _, who, kind, fields in world.notes if (who, kind) == ("d0", "note")]
    assert [text for text in notes if "stuck" in text] == []
