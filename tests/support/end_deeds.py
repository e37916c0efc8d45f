"""Deeds of hostile guests at the end of a run: they are honest until its last steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from anabranch.node.chaos.guests.guest_process import run_guest
from anabranch.node.chaos.guests.member_deeds import Deed, Guest, Role, Swap
from anabranch.protocol import messages as msg
from anabranch.protocol.interface.events import Send
from support.lying_peer import LyingPeer
from support.state_deeds import STATE_DEEDS


def _left(guest: Guest) -> int:
    """Number of steps of the run that are not committed."""
    return guest.peer.ctx.run.settings.steps - guest.peer.progress.committed


def _from(left: int, swap: Swap) -> Callable[[Guest, Send], list[Send]]:
    """Swap that is done once at most `left` steps are to be committed."""
    return lambda guest, send: swap(guest, send) if _left(guest) <= left else [send]


def _silent(guest: Guest, send: Send) -> list[Send]:
    return []


def _but_heartbeats(guest: Guest, send: Send) -> list[Send]:
    return [send] if isinstance(send.message, msg.Ping | msg.Pong) else []


END_DEEDS: Mapping[str, Deed] = {
    deed.name: deed
    for deed in (
        Deed("silent in the last step", Role.SERVES, _from(1, _silent)),
        Deed("only heartbeats in the last step", Role.SERVES, _from(1, _but_heartbeats)),
        Deed("only heartbeats after the last step", Role.SERVES, _from(0, _but_heartbeats)),
        STATE_DEEDS["false state for joiners"],
    )
}


def run_last_guest(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be a guest that does one of these deeds (see `run_guest`)."""
    run_guest(name, arguments, log, namespace, environment, END_DEEDS, LyingPeer)
