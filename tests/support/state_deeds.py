"""Deeds of hostile guests about states: false ones for joiners, offers without end, requests without end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import structs

from anabranch.node.chaos.guests.member_deeds import AGAIN_S, Deed, Guest, Role, withhold
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Received, Send
from anabranch.protocol.interface.tasks import PIECE_BYTES, Payload, Result, Task
from anabranch.protocol.messages.state_transfer import Held
from support.lying_peer import WorkerDeed, WorkerGuest

#: Pieces of an offered state of 64 GiB.
VAST = (64 << 30) // PIECE_BYTES
#: Pieces of an offer that trickles: as many as an offer of the smallest stage may have. Seconds between two
#: of its pieces, less than a joiner waits for one.
TRICKLES, TRICKLE_S = 8, 4.0
#: States of each stage in a report: fewer than a member may hold, and more.
SOME, MANY = 20, 1000

_owed: list[tuple[str, msg.FetchPiece]] = []
"""Pieces that peers asked a guest for whose pieces trickle."""
_requests: list[msg.JoinRequest] = []
"""Request of a guest that asks for a seat and leaves in turn."""


def _false_snapshot(guest: WorkerGuest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Copy another state than the guest has, with the hash that it has: the sign of one moment differs."""
    if not isinstance(task, tasks.Snapshot) or not right.outputs:
        return right
    assert guest.computer is not None
    last: Any = right.outputs[-1]
    false = last.clone()
    false[-1] ^= 0x80
    pieces = (*right.outputs[:-1], false)
    checked = guest.computer.run(tasks.CheckState(task.t, guest.peer.ctx.run.stage), pieces)
    return structs.replace(
        right, outputs=pieces, fingerprint=checked.fingerprint, hashes=checked.hashes
    )


def _offer(guest: Guest, send: Send, pieces: int) -> list[Send]:
    """Offer each state as one of so many pieces, whose hashes are not told."""
    if not isinstance(send.message, msg.StateOffer) or not send.message.pieces:
        return [send]
    return [structs.replace(send, message=structs.replace(send.message, pieces=pieces, hashes=()))]


def _tell_asked(guest: Guest, event: Received) -> bool:
    """Print each piece that others ask for."""
    if isinstance(event.message, msg.FetchPiece):
        print("asked", event.message.piece, flush=True)
    return True


def _owe(guest: Guest, event: Received) -> bool:
    """Note a piece that others ask for, and do not deliver it yet."""
    if not isinstance(event.message, msg.FetchPiece):
        return True
    _owed.append((event.peer, event.message))
    return False


def _trickle(guest: Guest) -> Iterator[Send]:
    """Deliver a tiny piece every TRICKLE_S seconds."""
    import torch

    if _owed and guest.once("trickle", int(guest.peer.ctx.clock.now / TRICKLE_S)):
        peer, asked = _owed.pop(0)
        print("trickled", peer, asked.piece, flush=True)
        yield Send(peer, msg.Piece(asked.stage, asked.t, asked.piece), torch.zeros(16, dtype=torch.uint8))


def _ask_states(guest: Guest) -> Iterator[Send]:
    """Ask the leader for the newest state of the guest's stage all the time."""
    print("asked", flush=True)
    yield guest.to_leader(msg.FetchState(guest.peer.ctx.run.stage, -1))


def _report(guest: Guest, count: int) -> Iterator[Send]:
    """Report so many states of each stage every AGAIN_S seconds."""
    number = int(guest.peer.ctx.clock.now / AGAIN_S)
    if guest.once("report", number):
        stages = range(guest.peer.ctx.run.settings.stages + 1)
        states = tuple(Held(stage, t, "f") for stage in stages for t in range(count))
        yield guest.to_leader(msg.Holds(states, 1_000_000 + number))


def _keep_request(guest: Guest, send: Send) -> list[Send]:
    if isinstance(send.message, msg.JoinRequest):
        _requests[:] = [send.message]
        return []
    return [send]


def _come_and_go(guest: Guest) -> Iterator[Send]:
    """Ask for a seat and leave in turn."""
    if _requests:
        print("came", flush=True)
        yield guest.to_leader(_requests[0])
        yield guest.to_leader(msg.Leave("bye"))


def _no_welcome(guest: Guest, event: Received) -> bool:
    return not isinstance(event.message, msg.Welcome | msg.Refused)


def _alone(guest: Guest) -> bool:
    run = guest.peer.ctx.run
    return list(run.membership.serving(run.stage)) == [guest.peer.ctx.me]


def _no_report(guest: Guest, send: Send) -> list[Send]:
    return [] if isinstance(send.message, msg.Applied) and _alone(guest) else [send]


def _behind(guest: Guest) -> Iterator[Send]:
    """Say that the state after the last step cannot be had, every AGAIN_S seconds, while nobody else of the
    stage serves."""
    t = guest.peer.progress.committed
    if _alone(guest) and guest.once("behind", int(guest.peer.ctx.clock.now / AGAIN_S)):
        yield guest.to_leader(msg.Behind(t, guest.peer.ctx.run.stage))


STATE_DEEDS: dict[str, Deed] = {
    deed.name: deed
    for deed in (
        WorkerDeed("false state for joiners", Role.SERVES, compute=_false_snapshot),
        WorkerDeed(
            "state of 64 GiB", Role.SERVES, lambda guest, send: _offer(guest, send, VAST), hear=_tell_asked
        ),
        WorkerDeed(
            "state that trickles",
            Role.SERVES,
            lambda guest, send: _offer(guest, send, TRICKLES),
            _trickle,
            hear=_owe,
        ),
        Deed("never gets a state", Role.SERVES, _no_report, _behind),
        Deed("states all the time", Role.SERVES, None, _ask_states),
        Deed("holds too much", Role.SERVES, withhold(msg.Holds), lambda guest: _report(guest, MANY)),
        Deed(
            "holds without a seat",
            Role.STRANGER,
            withhold(msg.JoinRequest),
            lambda guest: _report(guest, SOME),
        ),
        WorkerDeed("comes and goes", Role.STRANGER, _keep_request, _come_and_go, hear=_no_welcome),
    )
}
