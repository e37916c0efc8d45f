"""Deeds of hostile members in live runs: a lie or a silence each, told by a peer that is honest otherwise.

A deed's `swap` changes or drops what the peer says, and its `talk` says what no honest peer would.

Not here: false computing, which only audits find (a deed of tests), attacks of strangers, which have no peer
(`stranger_attacks`), and the process (`guest_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.events import Send
from anabranch.protocol.messages.state_transfer import Held
from anabranch.protocol.peer.peer import Peer
from anabranch.protocol.peer.shared_state import Step

#: Hash that no state and no gradient has.
FALSE_HASH = "f" * 16
#: Seconds between two talks of a member. In each: pings to each neighbour (a hundred a second, of which 64
#: are allowed), and lines of a report (160 a second). Plain choices.
EVERY_S = 0.1
PINGS, LINES = 10, 16
#: Seconds between two repetitions of a false report of being ready; an honest joiner takes two.
AGAIN_S = 1.0


class Role(Enum):
    """Role that a guest must have come to in the run before it does its deed."""

    SERVES = "a serving replica"
    MEMBER = "a member"
    STRANGER = "a stranger"


@dataclass
class Guest:
    """Hostile peer, as its deed sees it. told: subjects (such as a step) of its lies, each told once."""

    peer: Peer
    told: set[object] = field(default_factory=set)

    def in_role(self, role: Role) -> bool:
        membership, me = self.peer.ctx.run.membership, self.peer.ctx.me
        seated = membership.active_from if role is Role.SERVES else membership.members
        return role is Role.STRANGER or me in seated

    def to_leader(self, message: msg.Message) -> Send:
        return Send(self.peer.ctx.log.leader, message)

    def once(self, *what: object) -> bool:
        """True if the guest has told no lie about `what` yet; from now on it has."""
        new = what not in self.told
        self.told.add(what)
        return new

    @property
    def fence(self) -> msg.Fence:
        """Fence of a message about the last committed step."""
        progress = self.peer.progress
        return self.peer.ctx.fence(progress.committed, progress.base)


Swap = Callable[[Guest, Send], list[Send]]
Talk = Callable[[Guest], Iterator[Send]]


@dataclass(frozen=True)
class Deed:
    """Hostile deed of a guest, by its name. role: in which the guest does it. swap(guest, send): gets each
    message that the guest is about to send, returns the messages sent instead ([]: none; no swap: all are
    sent as they are). talk(guest): makes further messages, every EVERY_S seconds."""

    name: str
    role: Role
    swap: Swap | None = None
    talk: Talk | None = None


def _false_state(guest: Guest, send: Send) -> list[Send]:
    """Replace the hash in each report of an applied step, if the guest served in that step, by FALSE_HASH;
    other messages stay."""
    message, ctx = send.message, guest.peer.ctx
    if not isinstance(message, msg.Applied):
        return [send]
    if ctx.me not in ctx.run.membership.live(message.stage, message.fence.t):
        return [send]
    return [structs.replace(send, message=structs.replace(message, fingerprint=FALSE_HASH))]


def withhold(*kinds: type[msg.Message]) -> Swap:
    """Make a swap (see `Deed`) that drops all messages of these kinds; others are sent as they are."""
    return lambda guest, send: [] if isinstance(send.message, kinds) else [send]


def _tell_false_state(guest: Guest) -> Iterator[Send]:
    """Report a false state hash of each committed step, once a step, as soon as the guest learns of it."""
    fence = guest.fence
    if fence.t > 0 and guest.once("applied", fence.base):
        yield guest.to_leader(msg.Applied(fence, guest.peer.ctx.run.stage, FALSE_HASH))


def _false_digest(guest: Guest, send: Send) -> list[Send]:
    if isinstance(send.message, msg.Prepared):
        return [structs.replace(send, message=structs.replace(send.message, digest=FALSE_HASH))]
    return [send]


def _false_overflow(guest: Guest, send: Send) -> list[Send]:
    """With each training microbatch that the guest sends on, report a made-up overflow in it to the leader;
    the microbatch itself is sent unchanged."""
    message = send.message
    if isinstance(message, msg.Forward) and message.train:
        overflow = msg.Overflow(message.fence, guest.peer.ctx.run.stage, message.index, "made up")
        return [guest.to_leader(overflow), send]
    return [send]


def _tell_ready(guest: Guest) -> Iterator[Send]:
    """Report to the leader that the guest has fetched its stage's state, with the right hash, every AGAIN_S
    seconds while it has not fetched it."""
    peer = guest.peer
    announced = peer.joining.fetching.announced
    if peer.joining.step is Step.FETCHING and guest.once("ready", int(peer.ctx.clock.now / AGAIN_S)):
        yield guest.to_leader(msg.Ready(announced.t, peer.ctx.run.stage, announced.fingerprint))


def _tell_holds(guest: Guest) -> Iterator[Send]:
    """Claim to the leader to hold every stage's state after every iteration that snapshots are kept of; again
    when these change."""
    peer = guest.peer
    points = peer.shared.summary.points(peer.progress.committed).values()
    held = tuple(Held(s, point.t, f) for point in points for s, f in enumerate(point.fingerprints))
    if held and guest.once("holds", held):
        yield guest.to_leader(msg.Holds(held, 1_000_000 + len(guest.told)))


def _tell_reports(guest: Guest) -> Iterator[Send]:
    """Send the leader forged events for its event log: in the leader's name, with terminal control sequences,
    and as broken JSON."""
    other = guest.peer.ctx.log.leader
    forged = f'{{"kind":"peer_removed","peer":"{other}","subject":"{other}","stage":0,"reason":"\\u001b[2J"}}'
    lines = (forged.encode(), b"\x1b]0;owned\x07", b"{", b'{"kind":"step","t":1e9}')
    yield guest.to_leader(msg.Report(lines * (LINES // len(lines))))


def _ask_stage_0(guest: Guest, send: Send) -> list[Send]:
    """Change the guest's request to join into that of a data node, with the right corpus but a relay's
    ticket; other messages stay."""
    message = send.message
    if not isinstance(message, msg.JoinRequest):
        return [send]
    corpus = guest.peer.shared.entry.genesis.corpus_fingerprint
    member = structs.replace(message.member, stage=0)
    asked = structs.replace(message, member=member, stage=0, corpus_fingerprint=corpus)
    return [structs.replace(send, message=asked)]


def _ping(guest: Guest) -> Iterator[Send]:
    for peer in sorted(guest.peer.ctx.links.up):
        for number in range(PINGS):
            yield Send(peer, msg.Ping(number, guest.peer.progress.position.index))


NEVER_READY = withhold(msg.Ready)
FETCH_NOTHING = withhold(
    msg.FetchState, msg.FetchPiece, msg.FetchGradient, msg.WhoHas, msg.Behind, msg.Ready
)

DEEDS = {
    deed.name: deed
    for deed in (
        Deed("false state", Role.SERVES, _false_state),
        Deed("false state of an idle member", Role.MEMBER, NEVER_READY, _tell_false_state),
        Deed("wrong digest", Role.SERVES, _false_digest),
        Deed("false overflow", Role.SERVES, _false_overflow),
        Deed("black hole", Role.SERVES, withhold(msg.Forward, msg.Backward)),
        Deed("empty member", Role.MEMBER, FETCH_NOTHING, _tell_ready),
        Deed("false holds", Role.MEMBER, withhold(msg.StateOffer, msg.Piece, msg.Holds), _tell_holds),
        Deed("false reports", Role.MEMBER, None, _tell_reports),
        Deed("ping flood of a member", Role.MEMBER, None, _ping),
        Deed("data node with a relay's ticket", Role.STRANGER, _ask_stage_0),
    )
}
