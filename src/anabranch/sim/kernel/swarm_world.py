"""Simulated world: many peers of the real protocol in one process and in virtual time.

Each peer is a `protocol.peer.Peer` with a worker. Messages are encoded and decoded as on a wire and arrive
after a seeded delay. Tasks are really computed; their duration is modelled. The same seed gives the same
history, event by event. Not here: modelled links and devices (`sim.experiment.modelled_world`).
"""

from __future__ import annotations

import gc
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from anabranch.addresses import carrier_ways, direct_addresses
from anabranch.protocol.consensus.log_replay import LogReplay, fold
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.events import NEVER_EXPIRES_S, VerifiedCredential
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Task
from anabranch.protocol.log.records import Genesis, Member
from anabranch.protocol.messages import AnyMessage, Burst, decode, encode
from anabranch.protocol.peer.bootstrap import first_door
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.kernel.network_faults import DIAL_S, LinkDisorder, NetworkFaults
from anabranch.sim.kernel.shared_membership import MembershipPool, SharedMembership
from anabranch.sim.kernel.simulated_peer import Disk, Environment, Link, Node, TaskExecutor
from anabranch.sim.kernel.simulated_signer import SimulatedSigner


@dataclass(frozen=True)
class Model:
    """Durations of messages and tasks in a world.

    latency_s: least and greatest one-way delay of a message, drawn for each. bulk_s: seconds that a payload
    takes longer, and a bandwidth probe in proportion to its size (in activations). task_s: class name of a
    task -> its seconds (others: 0.001), which are multiplied by the node's slowness.
    """

    latency_s: tuple[float, float] = (0.001, 0.02)
    bulk_s: float = 0.005
    task_s: Mapping[str, float] = field(
        default_factory=lambda: {
            "Forward": 0.02,
            "Head": 0.02,
            "InputGradient": 0.02,
            "WeightGradient": 0.02,
            "Embed": 0.002,
        }
    )


#: Alteration of what a process says: the message that is sent instead, or None if nothing is sent.
Mouth = Callable[[AnyMessage], AnyMessage | None]

#: Credentials of nodes without a ticket.
NO_TICKET_RELAY, NO_TICKET_DATA = (VerifiedCredential(role, NEVER_EXPIRES_S) for role in ("relay", "data"))

#: Allocations between two garbage collections of the youngest generation. With Python's default, 700, they
#: took a sixth of the time of a simulation of a thousand peers, which makes many objects and few cycles.
GC_ALLOCATIONS = 100_000


class World(Environment):
    """Swarm of simulated peers: `add` them, then `run`.

    nodes: peer -> its latest process. trouble: network faults. slow: pair of peers -> factor on the delays of
    their link. unheard: kinds of notes that are not recorded. liars: hostile peers, whose reports of their
    own slots the checks do not believe. mouths: peer -> function that replaces or drops each message of its
    process, for peers that lie. See `Environment` for the rest. Making a world sets the garbage collector's
    threshold of the whole process (GC_ALLOCATIONS).
    """

    def __init__(
        self,
        seed: int,
        settings: Settings,
        genesis: Genesis,
        make_computer: Callable[[int], TaskExecutor],
        model: Model | None = None,
    ) -> None:
        super().__init__(settings, genesis, make_computer)
        gc.set_threshold(GC_ALLOCATIONS)
        self.seed = seed
        self.random = random.Random(seed)
        self.model = model or Model()
        self.nodes: dict[str, Node] = {}
        self._copied: dict[str, Node] = {}
        """Peer whose key a second process has -> its first process, which went on."""
        self.tickets: dict[str, VerifiedCredential] = {}
        """Credentials that nodes show when they dial, by id; by default those without a ticket."""
        self._history: tuple[tuple[int, bytes], LogReplay] | None = None
        self._last: Node | None = None
        """Node that still runs although the founder has stopped (cached)."""
        self.trouble = NetworkFaults(self.random)
        self.slow = self.trouble.slow
        self.unheard: frozenset[str] = frozenset()
        self.liars: set[str] = set()
        self.mouths: dict[str, Mouth] = {}
        self._blocked: dict[frozenset[str], float] = {}
        self._carried: dict[str, list[Link]] = {}
        """Carrier -> links that it forwards."""
        self.circuits_made: Counter[tuple[str, frozenset[str]]] = Counter()
        """Number of links made so far, by (carrier, pair)."""
        self.swallows: set[str] = set()
        """Carriers that drop the bytes of the links that they forward, although their own links are sound."""
        self.ticket: tuple[str, ...] = ()
        """Peers whose addresses a new process knows, as from its ticket; (): it knows everybody's."""
        self._memberships = MembershipPool()

    def add_leader(self, peer: Peer, member: Member, disk: Disk | None = None) -> Node:
        """Add the founder's process and return its node; it starts at the present time, once the clock runs.
        The founder of a new run leads first; one that restarts in a run with several voters also dials one
        that its log names. disk: of its machine (None: an empty one)."""
        node = Node(self, peer, member, 1.0)
        node.disk = disk or Disk(member.disk)
        self.schedule = peer.ctx.run.schedule
        self.nodes[member.id] = node
        door = first_door(peer)

        def begin() -> None:
            node.handle(ev.Started())
            if door is not None:
                self.dial(node, door[0])

        self.clock.after(0.0, begin)
        return node

    def add(self, member: Member, leader: str, at: float = 0.0, slowness: float = 1.0) -> Node:
        """Add a peer's process and return its node; at time `at` (s) it starts and dials the peer `leader` to
        join. `member.stage` is the stage that it asks for (-1: any). A former process of the same id and disk
        (`member.disk`) leaves its disk to this one; if it still runs, both go on with the same key. slowness:
        factor on the seconds of its tasks."""
        former = self.nodes.get(member.id)
        disk = former.disk if former is not None and former.disk.nonce == member.disk else Disk(member.disk)
        kept = disk.kept(self.seed_of(member))
        known = self.ticket or self.nodes
        doors = {i: address for i in known if (address := self.nodes[i].member.address)}
        peer = Peer(
            member.id, member.incarnation, leader, self.settings, member.stage, kept,
            founder=member.id == self.genesis.leader, doors=doors, unheard=self.unheard,
            memberships=partial(SharedMembership, self._memberships), signer=SimulatedSigner(member.id),
        )  # fmt: skip
        node = Node(self, peer, member, slowness)
        node.disk = disk
        if former is not None and former.running:
            self._copied[member.id] = former
        self.nodes[member.id] = node

        def begin() -> None:
            self.trouble.gone.discard(member.id)
            node.handle(ev.Started())
            self.dial(node, leader)

        self.clock.at(at, begin)
        return node

    def seed_of(self, member: Member) -> int:
        """Seed for the random numbers of one process, made of the world's seed, id and incarnation."""
        return zlib.crc32(f"{self.seed} {member.id} {member.incarnation}".encode())

    # --- wires ---------------------------------------------------------------------------------

    def _delay(self, sender: str, receiver: str) -> float:
        least, greatest = self.model.latency_s
        delay_s = least + (greatest - least) * self.random.random()
        return delay_s * self.trouble.factor(sender, receiver) if self.slow else delay_s

    def send(self, sender: Node, peer: str, message: AnyMessage, payload: Payload | None) -> None:
        mouth = self.mouths.get(sender.id)
        said = message if mouth is None else mouth(message)
        if said is not None:
            self.carry(sender, peer, encode(said), payload)

    def carry(self, sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        """Send an encoded message without asking the sender's `mouth`. Nothing happens unless the sender has
        an open link to the peer."""
        link = sender.links.get(peer)
        if link is not None and link.open:
            self._deliver(sender, link, peer, decode(message), len(message), payload)

    def _deliver(
        self, sender: Node, link: Link, peer: str, decoded: AnyMessage, size: int, payload: Payload | None
    ) -> None:
        """Deliver a decoded message to `peer` after a delay; it is lost if the link breaks before (`crash`
        may spare it), or if a carrier swallows it. size: bytes of the encoded message.

        Messages without payload keep their order, and so do those with one, but not one kind with the other;
        a fault may reorder all.
        """
        receiver = link.nodes[peer]
        here, bulky = sender.id, payload is not None
        bulk_s = self._bulk_s(here, peer, decoded, size, bulky, link.via)
        if link.via in self.swallows:
            return
        if link.via:
            planned = self._arrival(here, link.via, self._delay(here, link.via) + bulk_s)
            planned = self.trouble.open_at(link.via, peer, planned) + self._delay(link.via, peer)
        else:
            planned = self._arrival(here, peer, self._delay(here, peer) + bulk_s)
        deliver = partial(self._delivered, here, link, receiver, decoded, payload)
        times = self.trouble.arrivals(link.ends, planned) if self.trouble.disorders else []
        if not times:
            self.clock.at(link.arrival(here, bulky, planned), deliver)
        for at in times:
            link.quiet_at = max(link.quiet_at, at)
            self.clock.at(at, deliver)

    @staticmethod
    def _delivered(
        sender: str, link: Link, receiver: Node, decoded: AnyMessage, payload: Payload | None
    ) -> None:
        arrives = link.open or link.cut_by == sender  # messages in flight from a killed process still do
        if arrives and receiver.links.get(sender) is link:
            receiver.handle(ev.Received(sender, decoded, payload))

    def _bulk_s(
        self, sender: str, receiver: str, message: AnyMessage, size: int, bulky: bool, via: str
    ) -> float:
        """Seconds that the size of a message, or of its payload, adds to its delay; 0 for a message that has
        neither a payload nor padding (a bandwidth probe's). size: bytes of the encoded message. bulky: True
        if it has a payload. via: carrier of the link ("": none)."""
        padding_bytes = len(message.padding) if isinstance(message, Burst) else 0
        if not bulky and not padding_bytes:
            return 0.0
        bulk_s = self.model.bulk_s * self.trouble.factor(sender, receiver)
        return bulk_s if bulky else bulk_s * padding_bytes / max(1, self.settings.activation_bytes)

    def _setup_s(self, one: str, other: str) -> float:
        """Seconds to establish a direct connection between two peers, drawn."""
        return 2 * self._delay(one, other)

    def task_s(self, node: Node, task: Task) -> float:
        return self.model.task_s.get(type(task).__name__, 0.001) * node.slowness

    def _arrival(self, sender: str, receiver: str, delay_s: float) -> float:
        """Arrival time of a message that is sent now and takes `delay_s`, after any fault that holds it back;
        infinite: never."""
        return self.trouble.open_at(sender, receiver, self.clock.now) + delay_s

    def dial(self, node: Node, peer: str, address: str = "") -> None:
        """Dial a peer: directly, or through a carrier that `address` names if nobody answers directly ("":
        the true address). The node gets LinkUp or LinkDown later, or neither if it has ended or another link
        is open by then. A node whose key or ticket the founder refuses gets LinkDown and, if it dialled
        directly, ends."""
        if ways := [way.rpartition("/")[2] for way in carrier_ways(address)]:
            address = direct_addresses(address)
            helps = not self._answers(node, peer, address) and self.carrier_to(node, peer, ways)
            if helps or not address:
                self._dial_via(node, peer, ways)
                return
        self._dial_direct(node, peer, address)

    def _at_door(self, peer: str) -> Node | None:
        """Process that a dial to `peer` comes to: its latest one, or the first one of two with the same key
        if the second has ended. None for an unknown peer."""
        node = self.nodes.get(peer)
        return node if node is None or node.running else self._copied.get(peer, node)

    def _answers(self, node: Node, peer: str, address: str) -> bool:
        """True if a direct dial of a node to `peer` at `address` would be answered now."""
        other, blocked = self._at_door(peer), self._blocked.get(frozenset((node.id, peer)), 0.0)
        open_now = self.trouble.dialled_at(node.id, peer, self.clock.now, 0.0) < math.inf
        listens = other is not None and other.running and address == other.member.address
        return open_now and listens and blocked <= self.clock.now

    def carrier_to(self, node: Node, peer: str, carriers: Collection[str]) -> str:
        """First of these carriers that the node can reach now and that `peer` has itself dialled; "" if there
        is none."""
        other, now = self._at_door(peer), self.clock.now
        for carrier in carriers:
            link = None if other is None or not other.running else other.links.get(carrier)
            if link is None or not link.open or link.via or link.dialled_by != peer:
                continue
            blocked = self._blocked.get(frozenset((node.id, carrier)), 0.0) > now
            reached = self.trouble.dialled_at(node.id, carrier, now, 0.0) < math.inf
            if self.nodes[carrier].running and reached and not blocked:
                return carrier
        return ""

    def _dial_via(self, node: Node, peer: str, carriers: Sequence[str]) -> None:
        """Connect a node to a peer, after the time of a dial, through the first of these carriers to which
        the peer has a link by then. The node gets LinkUp, or LinkDown if there is no such carrier or the peer
        refuses; neither if it has ended or another link is open by then."""
        ready_s = 2 * (self._setup_s(node.id, carriers[0]) + self._setup_s(carriers[0], peer))

        def ready() -> None:
            other = self._at_door(peer)
            if not node.running or (peer in node.links and node.links[peer].open):
                return
            via = self.carrier_to(node, peer, carriers)
            if other is None or not via or node.member.incarnation < other.seen.get(node.id, 0):
                node.handle(ev.LinkDown(peer, "no carrier has a link to it"))
            elif other.peer.ctx.run.revoked.refusal(node.id, self.credential_of(node).ticket):
                node.handle(ev.LinkDown(peer, "refused: revoked"))
            else:
                link = Link(node, other, via)
                self._carried.setdefault(via, []).append(link)
                self.circuits_made[via, link.ends] += 1
                other.link_up(link, node.id, node.member.incarnation, self.credential_of(node))
                node.link_up(link, peer, other.member.incarnation)

        self.clock.after(ready_s, ready)

    def carries(self, carrier: str) -> bool:
        """True if an open link of two other peers goes through this carrier."""
        return any(link.open for link in self._carried.get(carrier, ()))

    def move_circuit(self, carrier: str) -> None:
        """Break one circuit of another carrier whose two ends have both dialled `carrier`, as if a line
        failed; its ends dial again, and may come to `carrier`. Nothing happens if there is none."""
        for other, links in self._carried.items():
            for link in links if other != carrier else ():
                near = [self.nodes[end].links.get(carrier) for end in link.nodes]
                if link.open and all(one is not None and one.dialled_by != carrier for one in near):
                    self._break(link, "connection timed out")
                    return

    def end_circuits(self, carrier: str) -> None:
        """Break all links that the carrier forwards for others."""
        for link in self._carried.pop(carrier, []):
            if link.open:
                self._break(link, "the carrier is gone")

    def _dial_direct(self, node: Node, peer: str, address: str) -> None:
        pair = frozenset((node.id, peer))
        trip_s = self._setup_s(node.id, peer)
        at = self.trouble.dialled_at(node.id, peer, self.clock.now, trip_s)

        def answer() -> None:
            other = self._at_door(peer)
            if not node.running or (peer in node.links and node.links[peer].open):
                return
            if at == math.inf:
                node.handle(ev.LinkDown(peer, f"no answer within {DIAL_S:.0f} s"))
            elif other is None or not other.running or address not in ("", other.member.address):
                node.handle(ev.LinkDown(peer, "connection refused", refused=True))
            elif self._blocked.get(pair, 0.0) > self.clock.now:
                node.handle(ev.LinkDown(peer, "timed out"))
            elif other.id == node.id:  # a second process of a copied key, led to the first one
                node.handle(ev.LinkDown(peer, "refused: the caller uses this peer's own key", refused=True))
            elif node.member.incarnation < other.seen.get(node.id, 0):
                reason = "refused: its key runs on another machine"
                node.handle(ev.LinkDown(peer, reason))
                if peer == self.genesis.leader:
                    node.end(reason, ok=False)
            elif turned_away := other.peer.ctx.run.revoked.refusal(node.id, self.credential_of(node).ticket):
                node.handle(ev.LinkDown(peer, f"refused: {turned_away}"))
                if peer == self.genesis.leader:
                    node.end(turned_away, ok=False)
            else:
                link = Link(node, other)
                other.link_up(link, node.id, node.member.incarnation, self.credential_of(node))
                node.link_up(link, peer, other.member.incarnation)

        self.clock.at(at if at < math.inf else self.clock.now + DIAL_S, answer)

    def credential_of(self, node: Node) -> VerifiedCredential:
        """Credential that a node shows when it dials: that of `tickets`, else one without a ticket for the
        role of its stage."""
        return self.tickets.get(node.id) or (NO_TICKET_RELAY if node.member.stage else NO_TICKET_DATA)

    def hang_up(self, node: Node, peer: str, reason: str) -> None:
        link = node.links.pop(peer, None)
        if link is None:
            return

        def closed() -> None:
            link.open = False
            link.nodes[peer].link_down(link, node.id, f"closed by the peer: {reason}")

        self.clock.at(max(link.quiet_at, self._arrival(node.id, peer, self._delay(node.id, peer))), closed)

    def replace(self, node: Node, peer: str, link: Link) -> None:
        reason, far = "replaced by a new connection", link.nodes[peer]
        link.open = False
        node.link_down(link, peer, reason)
        at = self._arrival(node.id, peer, self._delay(node.id, peer))
        self.clock.at(at, lambda: far.link_down(link, node.id, f"closed by the peer: {reason}"))

    # --- faults --------------------------------------------------------------------------------

    def crash(self, peer: str) -> None:
        """Kill a peer's process (SIGKILL) and reset its links; circuits that it carries break. For each link
        the seed draws whether all messages in flight from the process are lost, or arrive before the
        reset."""
        node = self.nodes[peer]
        node.alive = False
        for other, link in sorted(node.links.items()):
            link.open = False
            at = self._arrival(peer, other, self._delay(peer, other))
            if self.random.random() < 0.5:
                link.cut_by = peer
                at = max(at, link.quiet_at)
            self.clock.at(at, partial(link.nodes[other].link_down, link, peer, "connection reset"))
        self.end_circuits(peer)

    def cut(self, one: str, other: str, seconds: float = 0.0) -> bool:
        """Break the link of two peers, losing what is in flight; True if there was an open one. In either
        case direct dials between them fail for `seconds` from now on."""
        link = self.nodes[one].links.get(other)
        self._blocked[frozenset((one, other))] = self.clock.now + seconds
        if link is None or not link.open:
            return False
        self._break(link, "connection timed out")
        return True

    def _break(self, link: Link, reason: str) -> None:
        """Break a link and lose what is in flight; both ends get LinkDown after a delay."""
        link.open = False
        one, other = link.nodes
        for end, far in ((one, other), (other, one)):
            down = partial(link.nodes[end].link_down, link, far, reason)
            self.clock.after(self._delay(one, other), down)

    def lose(self, sender: str, receiver: str, seconds: float = math.inf) -> None:
        """Hold back everything that one peer sends to another in the next `seconds`, as a black hole
        (`network_faults`): it arrives then, or never if they are infinite. Their link stays open."""
        self.trouble.swallow([(sender, receiver)], self.clock.now + seconds)

    def partition(self, side: Collection[str], seconds: float = math.inf) -> None:
        """Hold back all messages between the peers `side` and all others for `seconds`, as a black hole
        (`network_faults`); no link breaks."""
        others = [peer for peer in self.nodes if peer not in side]
        pairs = [pair for one in side for other in others for pair in ((one, other), (other, one))]
        self.trouble.swallow(pairs, self.clock.now + seconds)

    def vanish(self, peer: str) -> None:
        """Remove a machine without a reset of its links (power failure): nothing reaches it any more, and
        nothing leaves it. Messages that are in flight then may still arrive."""
        self.trouble.gone.add(peer)
        self.nodes[peer].alive = False

    def crawl(self, one: str, other: str, factor: float, seconds: float) -> None:
        """Multiply the delays between two peers by `factor` for `seconds`; then they are as without a fault,
        also if another call for the pair came meanwhile."""
        pair = frozenset((one, other))
        self.slow[pair] = factor
        self.clock.after(seconds, partial(self.slow.pop, pair, None))

    def disorder(
        self, duplicated: float, shaken_s: float, seconds: float, peers: Collection[str] | None = None
    ) -> None:
        """Duplicate and reorder messages for `seconds`. duplicated, shaken_s: as of `LinkDisorder`. peers:
        whose links (None: all)."""
        disorder = LinkDisorder(duplicated, shaken_s, None if peers is None else frozenset(peers))
        self.trouble.disorders.append(disorder)
        self.clock.after(seconds, lambda: self.trouble.disorders.remove(disorder))

    def freeze(self, peer: str, seconds: float) -> None:
        """Stop a process for `seconds` (SIGSTOP, a closed laptop); its links stay open, and its events
        wait."""
        node = self.nodes[peer]
        node.freeze()
        self.clock.after(seconds, node.thaw)

    def leading(self) -> Node:
        """Running leader with the highest term; if nobody leads, the running peer that has followed the log
        furthest; if nobody runs, the founder."""
        running = [node for node in self.nodes.values() if node.running]
        leaders = [node for node in running if node.peer.lead is not None]
        if leaders:
            return max(leaders, key=lambda node: node.peer.ctx.log.leads)
        founder = self.nodes[self.genesis.leader]
        return max(running, key=lambda node: node.peer.progress.position.index, default=founder)

    # --- running -------------------------------------------------------------------------------

    def run(self, until_s: float = 10_000.0, max_events: int = 5_000_000) -> None:
        """Run until the founder has stopped and every other live peer has stopped or has no link to it; if
        the founder was killed or removed, until all steps are committed by the others (of one voter: at
        once). Raises TimeoutError, which names what is missing, after the virtual time `until_s`, after
        `max_events` events of this call, or if no event is planned any more."""
        nodes, founder, clock = self.nodes, self.genesis.leader, self.clock
        for _ in range(max_events):
            leader = nodes[founder]
            if not (leader.alive and leader.stopped is None) and self._over():
                return
            if not clock.step() or clock.now > until_s:
                break
        after = f"step {self.history().t + 1} is not there after {self.clock.now:.0f} virtual seconds"
        waiting = [f"{f.get('reason', f)}" for _, _, kind, f in self.notes if kind == "waiting"][-1:]
        raise TimeoutError(": ".join([after, *waiting]))

    def _over(self) -> bool:
        """True if nothing is left to run for. Only for a founder that was killed or has stopped."""
        leader = self.nodes[self.genesis.leader]
        removed = leader.stopped is not None and not leader.stopped[1]
        if not leader.alive or (removed and self.settings.voters > 1):
            # Others may finish the run; the founder is needed only for the last checkpoint.
            return self.settings.voters == 1 or self._all_committed()
        if self._last is not None and self._goes_on(self._last, leader):
            return False  # cached: a search after each event takes seconds with a thousand peers
        self._last = next((node for node in self.nodes.values() if self._goes_on(node, leader)), None)
        return self._last is None

    def _goes_on(self, node: Node, leader: Node) -> bool:
        return node.running and (leader.stopped is None or leader.id in node.links)

    def _all_committed(self) -> bool:
        done = [node.peer for node in self.nodes.values() if node.peer.committed >= node.peer.ctx.run.steps]
        if not done:
            return False
        steps = done[0].committed
        return not self.settings.evaluates(steps, steps) or steps in self.history().evaluations

    def history(self) -> LogReplay:
        """State of the run after the whole log, which is replayed. It is cached until the log changes, so
        callers must not change it."""
        key = (len(self.log), self.log[-1] if self.log else b"")
        if self._history is None or self._history[0] != key:
            self._history = key, fold(self.log)
        return self._history[1]
