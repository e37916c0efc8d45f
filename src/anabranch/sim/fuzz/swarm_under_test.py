"""Swarm of one seed for fault injectors: its world, random numbers, and machines that join or restart.

Not here: when faults are injected and which progress is demanded (`trial`).
"""

from __future__ import annotations

import random
from collections import defaultdict, deque

from msgspec import structs

from anabranch.protocol.fleet.auditors import ROLE as AUDITOR
from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.records import Member
from anabranch.sim.fuzz.seed_drawing import DrawnSeed
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import shared

#: Messages per peer that are remembered for a replay.
HEARD = 60
#: Credential of auditors, and time (s) at which they join: soon after the start.
AUDITORS_TICKET = ev.VerifiedCredential(AUDITOR, ev.NEVER_EXPIRES_S, "auditors")
AUDITORS_AT_S = 0.5


class SwarmUnderTest:
    """World of a drawn seed, with what fault injectors need of it. rng: random numbers of all that happens
    while the seed runs (the swarm and its planned faults are drawn from another generator). heard: peer ->
    last HEARD messages that it received."""

    def __init__(self, drawn: DrawnSeed, world: World) -> None:
        self.drawn, self.world = drawn, world
        self.rng = random.Random(f"{drawn.seed} {drawn.profile.name} in flight")
        self.heard: defaultdict[str, deque[ev.Received]] = defaultdict(lambda: deque(maxlen=HEARD))
        self._newcomers = 0

    def listen(self, node: Node, event: ev.Event) -> None:
        """Record the message that the peer `node` received, for a later replay. If the event closes a link,
        forget the messages that came from its other end. Other events change nothing."""
        if isinstance(event, ev.Received):
            self.heard[node.id].append(event)
        elif isinstance(event, ev.LinkDown):
            kept = [heard for heard in self.heard[node.id] if heard.peer != event.peer]
            self.heard[node.id] = deque(kept, maxlen=HEARD)

    def neighbour(self, victim: Node) -> Node | None:
        """Random running peer that the victim has a link to; None without one."""
        linked = [peer for peer in sorted(victim.links) if self.world.nodes[peer].running]
        return self.world.nodes[self.rng.choice(linked)] if linked else None

    def newcomer(self, stage: int) -> str:
        """Start a new machine that joins `stage` now; returns its name. It is like the first machine that the
        seed drew for the stage, of which there must be one, with another capacity."""
        self._newcomers += 1
        name = f"n{self._newcomers}"
        template = next(m for m in self.drawn.machines if m.stage == stage)
        like = self.world.nodes[template.id].member
        capacity = self.rng.choice([1, 2, 4])
        member: Member = structs.replace(
            like,
            id=name,
            name=name,
            address=f"{name}:1",
            incarnation=1,
            capacity=capacity,
            stage=stage,
            shared=shared(capacity, self.world.settings),
        )
        self.world.add(member, self._door(), self.world.clock.now)
        return name

    def _door(self) -> str:
        """Id of the peer that a new process dials first: one that its ticket names, at random, or the leader
        if tickets name nobody."""
        return self.rng.choice(self.world.ticket) if self.world.ticket else self.world.leading().id

    def add_auditors(self) -> None:
        """Let the auditors that the seed drew (if any) join AUDITORS_AT_S after the start, with auditors'
        tickets of the owner."""
        like = next(self.world.nodes[m.id].member for m in self.drawn.machines if m.stage)
        for machine in self.drawn.auditors:
            name = machine.id
            member = structs.replace(like, id=name, name=name, address=f"{name}:1", stage=machine.stage)
            self.world.tickets[name] = AUDITORS_TICKET
            self.world.add(member, self.world.genesis.leader, AUDITORS_AT_S, machine.slowness)

    def newcomer_later(self, stage: int, wait_s: float) -> None:
        self.world.clock.after(wait_s, lambda: self.newcomer(stage))

    def restart(self, node: Node, without_disk: bool = False) -> None:
        """Start the next process of a node's machine, which joins the run; that of the founder leads it on,
        as `anabranch resume` does. without_disk: True if the log and votes on its disk are lost; then the
        founder, too, only joins, and does so ever after: the run's directory is gone."""
        member = self.world.nodes[node.id].next_life(without_disk)
        if node.id == self.world.genesis.leader and not member.disk.endswith("+"):
            founder_comes_back(self.world)
            return
        self.world.add(member, self._door(), self.world.clock.now, node.slowness)
