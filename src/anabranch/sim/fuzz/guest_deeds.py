"""Deeds of hostile guests: one lie, silence or flood each, told by a relay or by a stranger with its ticket.

A guest is an honest process that says what it should not: a deed's `mouth` changes or drops what the process
says, and its `talk` says what no honest process would. A (deed, role) pair whose defence has a known limit
has an entry in `OPEN` that names it, and only the profile `undefended` draws it.

In seeds with audits a guest may also compute falsely: its deed's `talk` puts a `LyingWorker` in place of its
worker. There it may also have walked in, with an open ticket.

Pairs that came later than the others (`LATER`) are drawn by lots of their own, so that all other seeds stay
as they were.

Not here: voters that lie (a guest has no disk for the log), and malformed messages (`byzantine_messages`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.coordinator.coordinator import Coordinator
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Task
from anabranch.protocol.messages.state_transfer import Held
from anabranch.protocol.peer.shared_state import Step
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.lying_worker import LIES, LyingWorker

#: Hash that no state and no gradient has. Guests of one seed use the same, so that two of them agree.
FALSE_HASH = "f" * 16
#: Pings to each neighbour, and lines of a report, in one talk (with EVERY_S a hundred pings a second and 160
#: lines; the founder accepts 256 a second).
PINGS, LINES = 10, 16
#: Seconds between two talks of a guest (a choice); it also talks when a step is committed or opened.
EVERY_S = 0.1
#: Seconds between two circuits of others that break until a guest has some to carry. A choice: time to dial.
MOVES_S = 2.0
#: Requests for states or the log to each neighbour in a talk, and messages about past iterations: choices.
ASKED, PAST = 4, 10
#: Keys with which a walk-in comes again, and seconds between two of them. Each of them costs it work at the
#: door, which the simulator does not have.
KEYS, NEXT_KEY_S = 6, 1.0
#: Credential of a walk-in.
OPEN_DOOR = ev.VerifiedCredential("open", ev.NEVER_EXPIRES_S, "door")
#: Seconds after which a guest that keeps its receipt back dies: its parts of the sum have arrived by then.
DIES_S = 0.5


class GuestRole(Enum):
    """Role of a hostile guest in the run. A guest that is only ADMITTED never reports ready, so it gets no
    microbatches; only runs with audits have WALK_INs."""

    SERVES = "a relay that serves"
    ADMITTED = "a relay that is admitted and serves nothing"
    STRANGER = "a stranger with a relay's ticket"
    DATA = "a data node"
    WALK_IN = "a walk-in that serves"


#: Roles of guests that get microbatches of the relays.
SERVING = (GuestRole.SERVES, GuestRole.WALK_IN)


class Guest:
    """Hostile guest of a seed: a process that lies. deed: its hostile act. role: its role in the run. rng:
    draws what it says. told: keys of its lies so far (numbers for those without a key); a lie with a key
    (`say`) is told once."""

    def __init__(self, world: World, name: str, deed: Deed, role: GuestRole, rng: Random) -> None:
        self.world, self.name, self.deed, self.role, self.rng = world, name, deed, role, rng
        self.told: set[object] = set()
        own = Random(f"{world.settings.run} {name}")
        self.audits = own.random() < 0.5
        """True if it lies in its audits of others too."""
        self.lie = own.choice(LIES)
        """Kind of task that it computes falsely, if that is its deed."""
        self.moves_at = 0.0
        """Time (s) at which the next circuit of others breaks, while it waits to carry some."""
        self.begun = False
        """True once it may do its deed; before, it behaves like any newcomer."""

    @property
    def node(self) -> Node:
        return self.world.nodes[self.name]

    @property
    def lead(self) -> Coordinator | None:
        return self.world.leading().peer.lead

    @property
    def stage(self) -> int:
        """Stage in the guest's member record; for a stranger, the stage that it would ask for."""
        member = self.world.leading().peer.ctx.run.membership.members.get(self.name)
        return self.node.member.stage if member is None else member.stage

    @property
    def serves(self) -> bool:
        return self.name in self.world.leading().peer.ctx.run.membership.active_from

    def fence(self, t: int, base: str) -> msg.Fence:
        epoch = self.world.settings.epoch
        return msg.Fence(epoch, self.node.member.incarnation, t, base, self.stage)

    def say(self, peer: str, message: msg.AnyMessage, once: object = None) -> None:
        """Send a message to `peer` as it is, not changed by the deed's `mouth`, and count it in `told`.
        Nothing happens without a link to the peer, or if a message with the key `once` was sent (None: no
        key)."""
        if peer not in self.node.links or (once is not None and once in self.told):
            return
        self.told.add(once if once is not None else len(self.told))
        self.world.carry(self.node, peer, msg.encode(message), None)

    def tell_leader(self, message: msg.AnyMessage, once: object = None) -> None:
        self.say(self.world.leading().id, message, once)

    def mouth(self, message: msg.AnyMessage) -> msg.AnyMessage | None:
        """Message that the guest sends in place of the honest `message` of its process; None: it sends
        nothing. Until its deed begins that is `message` itself. A stranger whose deed does not apply never
        sends a JoinRequest, and a guest that is only ADMITTED never a Ready. A message that the deed changes
        or drops counts in `told`."""
        if self.role is GuestRole.STRANGER and isinstance(message, msg.JoinRequest) and not self.deed.applies:
            return None
        if self.role is GuestRole.ADMITTED and isinstance(message, msg.Ready):
            return None
        if not self.begun or self.deed.mouth is None:
            return message
        said = self.deed.mouth(self, message)
        if said is not message:
            self.told.add(len(self.told))
        return said


Mouth = Callable[[Guest, msg.AnyMessage], msg.AnyMessage | None]
"""(guest, honest message of its process) -> message that is sent in its place; None: nothing."""


@dataclass(frozen=True)
class Deed:
    """Hostile act of a guest; `name` is also the kind under which the fault is counted. roles: roles in which
    guests do it. mouth: changes or drops the honest messages of the process; talk: adds false ones, when a
    step is committed or opened and each EVERY_S. proven: roles in which the leader can prove the act, so that
    the guest must lose its seat. applies: True if a stranger that does it asks to be admitted. early: True if
    a member does it before it serves. audited: True if only audits find the act, so that seeds without audits
    do not draw it. hides: True if it needs relays that others reach through carriers only."""

    name: str
    roles: frozenset[GuestRole]
    mouth: Mouth | None = None
    talk: Callable[[Guest], None] | None = None
    proven: frozenset[GuestRole] = frozenset()
    applies: bool = False
    early: bool = False
    audited: bool = False
    hides: bool = False


# --- the deeds ------------------------------------------------------------------------------------------


def _false_state(guest: Guest, message: msg.AnyMessage) -> msg.AnyMessage | None:
    """Deed: put a false hash into the guest's Applied reports (state after a step) of those iterations in
    which it has a say (`_has_a_say`)."""
    if isinstance(message, msg.Applied) and _has_a_say(guest, message.fence.t):
        return structs.replace(message, fingerprint=FALSE_HASH)
    return message


def _has_a_say(guest: Guest, t: int) -> bool:
    """True if the demands hold the protocol to account for a false report of the guest about iteration t.
    That is so for a guest that is not meant to serve. One that is meant to must serve in t, and its stage's
    honest replicas must be two at least and more than half. Before it serves it would be ignored and lose its
    seat; with fewer honest replicas the step waits for a third or for the owner
    (docs/explanation/trust.md)."""
    if guest.role not in SERVING:
        return True
    live = guest.world.leading().peer.ctx.run.membership.live(guest.stage, t)
    honest = [peer for peer in live if peer not in guest.world.liars]
    return guest.name in live and len(honest) >= 2 and 2 * len(honest) > len(live)


def _tell_false_state(guest: Guest) -> None:
    """Deed: report the leader's last committed step as applied, at once and with a false hash; once a step,
    and nothing while the guest has no say (`_has_a_say`)."""
    lead = guest.lead
    if lead is not None and lead.t > 0 and _has_a_say(guest, lead.t):
        fence = guest.fence(lead.t, lead.base)
        guest.tell_leader(msg.Applied(fence, guest.stage, FALSE_HASH), once=("applied", lead.base))


def _tell_overflows(guest: Guest) -> None:
    """Deed: report to the leader an overflow of every microbatch of the open iteration, once each."""
    lead = guest.lead
    if lead is None or lead.round is None:
        return
    fence = guest.fence(lead.round.t, lead.round.base)
    for index in range(guest.world.settings.microbatches):
        overflow = msg.Overflow(fence, guest.stage, index, "made up")
        guest.tell_leader(overflow, once=("overflow", fence.t, fence.base, index))


def _false_digest(guest: Guest, message: msg.AnyMessage) -> msg.AnyMessage | None:
    return structs.replace(message, digest=FALSE_HASH) if isinstance(message, msg.Prepared) else message


def _tell_false_digest(guest: Guest) -> None:
    """Deed: report PREPARED with a false digest once in every reduce attempt of the guest's stage, whether or
    not the guest is a member of the attempt."""
    lead = guest.lead
    attempt = lead.round.attempts.get(guest.stage) if lead is not None and lead.round is not None else None
    if attempt is not None:
        fence = guest.fence(attempt.fence.t, attempt.fence.base)
        prepared = msg.Prepared(fence, guest.stage, attempt.attempt, FALSE_HASH, {"sum": 1.0})
        guest.tell_leader(prepared, once=("prepared", attempt.attempt))


def _tell_ready(guest: Guest) -> None:
    """Deed: while the guest fetches its state and does not serve, report Ready without the state, at most
    once a second: with the hash that the Welcome message told, and with that of the initial state, which
    anyone can make."""
    joining, announced = guest.node.peer.joining, guest.node.peer.joining.fetching.announced
    if joining.step is Step.FETCHING and not guest.serves:
        ready = msg.Ready(announced.t, guest.stage, announced.fingerprint)
        guest.tell_leader(ready, once=("ready", announced.t, round(guest.world.clock.now)))
        initial = guest.world.genesis.fingerprints[guest.stage]
        guest.tell_leader(msg.Ready(0, guest.stage, initial), once=("initial", round(guest.world.clock.now)))


def _apart(guest: Guest, message: msg.AnyMessage) -> msg.AnyMessage | None:
    """Deed: in Claim and Ready, say that one honest replica of the stage cannot be reached; keep back (None)
    parts of a sum, reduced parts and PREPARED, so that reduces are stuck. Other messages stay as they are."""
    if isinstance(message, msg.ReducePart | msg.ReducedPart | msg.Prepared):
        return None
    if isinstance(message, msg.Claim | msg.Ready):
        live = guest.world.leading().peer.ctx.run.membership.serving(guest.stage)
        honest = [peer for peer in sorted(live) if peer not in guest.world.liars]
        return structs.replace(message, apart=tuple(honest[:1]))
    return message


def _tell_holds(guest: Guest) -> None:
    """Deed: tell the leader that the guest holds the snapshots of all stages of every iteration of which
    snapshots are kept."""
    lead = guest.lead
    if lead is None:
        return
    points = lead.catalog.points.values()
    held = tuple(Held(s, point.t, f) for point in points for s, f in enumerate(point.fingerprints))
    guest.tell_leader(msg.Holds(held, 1_000_000 + len(guest.told)), once=("holds", held))


def _tell_reports(guest: Guest) -> None:
    """Deed: send the leader LINES lines for the event log: events that name another peer, control sequences
    for terminals, and malformed lines."""
    other = guest.rng.choice(sorted(guest.world.nodes))
    line = f'{{"event":"peer_removed","peer":"{other}","subject":"{other}","reason":"\\u001b[2J"}}'.encode()
    lines = tuple(guest.rng.choice((line, b"\x1b]0;owned\x07", b"{", b'{"event":"step","t":1e9}'))
        for _ in range(LINES))  # fmt: skip
    guest.tell_leader(msg.Report(lines, guest.rng.choice(("", other))))


def _ask_stage_0(guest: Guest, message: msg.AnyMessage) -> msg.AnyMessage | None:
    """Deed: turn the guest's join request into that of a data node, with the right hashes of corpus and
    model."""
    if not isinstance(message, msg.JoinRequest):
        return message
    corpus, member = guest.world.genesis.corpus_fingerprint, structs.replace(message.member, stage=0)
    return structs.replace(message, member=member, stage=0, corpus_fingerprint=corpus)


def _ask_again_for_stage_0(guest: Guest) -> None:
    """Deed: ask the leader once a second to join as a data node, although the guest may be a member
    already."""
    member = structs.replace(guest.node.member, stage=0, incarnation=guest.node.member.incarnation + 1)
    corpus = guest.world.genesis.corpus_fingerprint
    request = msg.JoinRequest(member, 0, guest.world.genesis.protocol_version, "", corpus)
    guest.tell_leader(request, once=("stage 0", round(guest.world.clock.now)))


def _ping(guest: Guest) -> None:
    for peer in sorted(guest.node.links):
        for number in range(PINGS):
            guest.say(peer, msg.Ping(number, guest.node.peer.progress.position.index))


def _tell_of_the_past(guest: Guest) -> None:
    """Deed: send each neighbour PAST messages about iteration 1, at every talk once iteration 1 is over."""
    lead = guest.lead
    if lead is not None and lead.t > 1:
        for peer in sorted(guest.node.links):
            for _ in range(PAST):
                guest.say(peer, msg.Backward(guest.fence(1, "0" * 32), 0))


def _ask_for_the_log(guest: Guest) -> None:
    for peer in sorted(guest.node.links):
        for _ in range(ASKED):
            guest.say(peer, msg.FetchLog(0))


def _ask_for_states(guest: Guest) -> None:
    """Deed: ask every neighbour, at every talk, for the state of every stage."""
    t = guest.world.leading().peer.committed
    for peer in sorted(guest.node.links):
        for stage in range(guest.world.settings.stages + 1):
            guest.say(peer, msg.FetchState(stage, -1))
            guest.say(peer, msg.FetchPiece(stage, t, 0))


def _blame(guest: Guest) -> None:
    """Deed: report one made-up overflow in each iteration, and name a peer of another stage as its cause,
    another one each time."""
    lead = guest.lead
    if lead is None or lead.round is None:
        return
    members = guest.world.leading().peer.ctx.run.membership.members
    others = sorted(peer for peer in members if members[peer].stage != guest.stage)
    fence = guest.fence(lead.round.t, lead.round.base)
    overflow = msg.Overflow(fence, guest.stage, 0, "made up", others[fence.t % len(others)])
    guest.tell_leader(overflow, once=("blame", fence.t, fence.base))


def _carries(guest: Guest) -> bool:
    """True if the guest carries circuits. Pairs of peers have chosen their carriers before the guest comes;
    so until it has a circuit, a call breaks one circuit of another carrier each MOVES_S seconds, for the pair
    to choose again."""
    now, world = guest.world.clock.now, guest.world
    if not guest.told and not world.carries(guest.name) and now >= guest.moves_at:
        guest.moves_at = now + MOVES_S
        world.move_circuit(guest.name)
    return world.carries(guest.name)


def _break_circuits(guest: Guest) -> None:
    """Deed: as a carrier, flip, repeat or drop bytes. All of its circuits break at each talk, as TLS of their
    ends refuses the bytes."""
    if _carries(guest):
        guest.told.add(("broke", round(guest.world.clock.now, 3)))
        guest.world.end_circuits(guest.name)


def _swallow_circuits(guest: Guest) -> None:
    """Deed: as a carrier, forward no more bytes of any circuit, and keep the circuits open."""
    if _carries(guest):
        guest.told.add("swallows")
        guest.world.swallows.add(guest.name)


def _come_again(guest: Guest) -> None:
    """Deed: walk in with further keys, up to KEYS, one each NEXT_KEY_S seconds. Each process works honestly
    if it gets a seat."""
    world, number = guest.world, len(guest.told) + 1
    if number > KEYS or ("key", int(world.clock.now / NEXT_KEY_S)) in guest.told:
        return
    guest.told.add(("key", int(world.clock.now / NEXT_KEY_S)))
    name = f"{guest.name}.key{number}"
    member = structs.replace(guest.node.member, id=name, name=name, address=f"{name}:1", incarnation=1)
    world.liars.add(name)
    world.tickets[name] = OPEN_DOOR
    world.add(member, world.leading().id, world.clock.now)


def _compute_falsely(guest: Guest, signs: bool = True) -> None:
    """Deed: put a `LyingWorker` in place of the guest's worker, if none is there yet. It gives false results
    of one kind of task (`Guest.lie`) in iterations in which it has a say (`_has_a_say`); in audits of others
    only with `Guest.audits` and as the only liar. signs: True to sign the false results, False to sign the
    right ones."""
    node, world = guest.node, guest.world
    if node.computer is None or isinstance(node.computer, LyingWorker):
        return

    def lies_now(task: Task) -> bool:
        audits = isinstance(task, tasks.SumPart) and task.t <= node.peer.replica.t
        if (audits and (not guest.audits or len(world.liars) > 1)) or not _has_a_say(guest, task.t):
            return False
        guest.told.add(("false work", task.t))
        return True

    node.computer = LyingWorker(node.computer, guest.lie, lies_now, signs)


def _send_unsigned(guest: Guest) -> None:
    """Deed: sign what the guest should have computed, and send something else."""
    _compute_falsely(guest, signs=False)


def _keep_receipt(guest: Guest, message: msg.AnyMessage) -> msg.AnyMessage | None:
    """Deed: keep back (None) the PREPARED message, with its receipt, of a step that the guest computed
    falsely; the first time, its process dies DIES_S seconds later. Other messages stay as they are."""
    lied = ("false work", message.fence.t) in guest.told if isinstance(message, msg.Prepared) else False
    if not lied or "gone" in guest.told:
        return None if lied else message
    guest.told.add("gone")
    guest.world.clock.after(DIES_S, lambda: guest.world.crash(guest.name))
    return None


def _drops(*kinds: type[msg.AnyMessage]) -> Mouth:
    """Mouth of a deed that sends no messages of these kinds, and all others as they are."""
    return lambda guest, message: None if isinstance(message, kinds) else message


_FETCHES = (msg.FetchState, msg.FetchPiece, msg.FetchGradient, msg.WhoHas, msg.Behind, msg.Ready)
_SERVES, _ADMITTED = frozenset({GuestRole.SERVES}), frozenset({GuestRole.ADMITTED})
_STRANGER, _DATA = frozenset({GuestRole.STRANGER}), frozenset({GuestRole.DATA})
_WALK_IN = frozenset({GuestRole.WALK_IN})
_RELAYS = _SERVES | _ADMITTED | _STRANGER
#: A data node is trusted with the data and the losses; what it says about others, and how often, is not.
_ALL = _RELAYS | _DATA
_SEATED = _SERVES | _WALK_IN

DEEDS = {
    deed.name: deed
    for deed in (
        Deed("false state", _RELAYS | _WALK_IN, _false_state, _tell_false_state, proven=_SEATED),
        Deed("false overflow", _RELAYS | _WALK_IN, None, _tell_overflows, proven=_SEATED),
        Deed("black hole", _SEATED, _drops(msg.Forward, msg.Backward)),
        Deed("wrong digest", _RELAYS, _false_digest, _tell_false_digest),
        Deed("empty member", _SERVES, _drops(*_FETCHES), _tell_ready, early=True),
        Deed("false apart", _SERVES, _apart),
        Deed("false holds", _ALL, _drops(msg.StateOffer, msg.Piece, msg.Holds), _tell_holds),
        Deed("false reports", _ALL, None, _tell_reports),
        Deed("stage 0", _RELAYS | _WALK_IN, _ask_stage_0, _ask_again_for_stage_0, applies=True),
        Deed("ping flood", _ALL | _WALK_IN, None, _ping),
        Deed("false work", _SEATED, None, _compute_falsely, proven=_SEATED, audited=True),
        Deed("false work, then gone", _SEATED, _keep_receipt, _compute_falsely, audited=True),
        Deed("no iteration", _SERVES, _drops(msg.Slots, msg.Have, msg.Lack)),
        Deed("blame", _SERVES, None, _blame),
        Deed("all states", _ADMITTED | _STRANGER, None, _ask_for_states),
        Deed("flood about the past", _ALL, None, _tell_of_the_past),
        Deed("log flood", _ALL, None, _ask_for_the_log),
        Deed("broken circuits", _SERVES, None, _break_circuits, hides=True),
        Deed("silent circuits", _SERVES, None, _swallow_circuits, hides=True),
        Deed("unsigned work", _SERVES, None, _send_unsigned, audited=True),
        Deed("many keys", _WALK_IN, None, _come_again),
    )
}

#: Deeds that came later than the others; all deeds of WALK_INs did, too.
LATER = frozenset(
    ("no iteration", "blame", "all states", "flood about the past", "log flood",
     "broken circuits", "silent circuits", "unsigned work", "many keys")
)  # fmt: skip

#: Pairs of a deed and a role whose defence has a limit, with the limit.
OPEN: dict[tuple[str, GuestRole], str] = {
    ("wrong digest", GuestRole.SERVES): "not told apart in stages too large for the coordinator to sum",
    ("false apart", GuestRole.SERVES): "the first reduce of fifty may stall for a dozen steps; large stages",
}


def cells(undefended: bool, audits: bool = False, later: bool = False) -> list[tuple[Deed, GuestRole]]:
    """Pairs (deed, role) that seeds may draw. undefended: True for only those in OPEN, against which the
    defence has a known limit; False for only the others. audits: True adds those that only audits find, and
    walk-ins. later: True for only those that came later (deeds in LATER, and walk-ins); False for only the
    others."""
    pairs = [(deed, role) for deed in DEEDS.values() for role in GuestRole if role in deed.roles]
    pairs = [(d, role) for d, role in pairs if (d.name in LATER or role is GuestRole.WALK_IN) == later]
    pairs = [(d, role) for d, role in pairs if audits or not (d.audited or role is GuestRole.WALK_IN)]
    return [(deed, role) for deed, role in pairs if ((deed.name, role) in OPEN) == undefended]
