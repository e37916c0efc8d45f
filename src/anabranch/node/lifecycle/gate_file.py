"""Record of a run's gate, `gate.json` in the run directory: tickets issued, tickets revoked, peers expelled.

It is written by the owner's commands and by the founder's process, and readable by its owner only. It has the
tickets' public keys and never their text. The commit log decides: a revocation that is here and not in the
log is requested by the founder's process when it starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from anabranch.errors import UserError
from anabranch.net.ticket import Grant, PeerIdText
from anabranch.operating_system import lock, write_atomically
from anabranch.protocol.messages.common import REMARK_MAX

FILE, LOCK = "gate.json", "gate.lock"
#: Version of the file's format.
VERSION = 1
#: Longest name of a ticket (characters), and fewest characters of a key or id that name one. Plain choices.
NAME_CHARS = 64
KEY_CHARS = 8
#: Longest reason of a revocation (characters), as a message can carry it.
REASON_CHARS = REMARK_MAX


class IssuedTicket(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ticket that the owner issued. name: chosen by the owner, of this ticket alone. key: its public key.
    role, quota: of its grant (quota: members at one time, 0: any number). Times are Unix seconds;
    revoked_at_s: 0 if it is not revoked. reason: of the revocation; "" before."""

    name: str
    key: PeerIdText
    role: str
    quota: int
    issued_at_s: int
    expires_at_s: int
    revoked_at_s: int = 0
    reason: str = ""


class ExpelledPeer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Peer that the owner expelled, by its id. name: of the peer's own choice, as it was then; "" if it was
    no member. expelled_at_s: Unix time. reason: of the owner."""

    id: PeerIdText
    name: str
    expelled_at_s: int
    reason: str


class GateRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Contents of the gate's record: the tickets that were issued and the peers that were expelled. version:
    of the file's format. A change is kept by `changed` only."""

    version: int = VERSION
    tickets: list[IssuedTicket] = msgspec.field(default_factory=list)
    expelled: list[ExpelledPeer] = msgspec.field(default_factory=list)

    def revocations(self) -> dict[str, str]:
        """Reasons of all revocations, by key of the revoked ticket or id of the expelled peer."""
        found = {ticket.key: ticket.reason for ticket in self.tickets if ticket.revoked_at_s}
        return found | {peer.id: peer.reason for peer in self.expelled}

    def ticket(self, name_or_key: str) -> IssuedTicket | None:
        """Ticket with the name `name_or_key`, expired and revoked ones included; else the ticket whose key
        begins with this text, if it has at least KEY_CHARS characters. None if there is none, or several of
        either."""
        named = [ticket for ticket in self.tickets if ticket.name == name_or_key]
        if not named and len(name_or_key) >= KEY_CHARS:
            named = [ticket for ticket in self.tickets if ticket.key.startswith(name_or_key)]
        return named[0] if len(named) == 1 else None

    def free_name(self, wanted: str) -> str:
        """`wanted`, or the first of WANTED-2, WANTED-3, ... that no ticket has."""
        names, number, name = {ticket.name for ticket in self.tickets}, 1, wanted
        while name in names:
            number += 1
            name = f"{wanted}-{number}"
        return name

    def add(self, name: str, grant: Grant) -> IssuedTicket:
        """Enter a new ticket with permissions `grant`, issued now, into this record in memory; returns its
        entry. Raises UserError if the name is in use, or not a printable text of 1 to NAME_CHARS characters
        without blanks at its ends."""
        if not name.isprintable() or not 1 <= len(name) <= NAME_CHARS or name != name.strip():
            raise UserError(f"a ticket's name is a printable text of 1 to {NAME_CHARS} characters")
        if name != self.free_name(name):
            raise UserError(f"there is a ticket named {name!r} already: choose another name")
        issued = IssuedTicket(
            name=name,
            key=grant.ticket_key,
            role=grant.role,
            quota=grant.quota,
            issued_at_s=int(time.time()),
            expires_at_s=grant.expires_at_s,
        )
        self.tickets.append(issued)
        return issued


def read(run_dir: Path) -> GateRecord:
    """Gate's record of a run directory; empty without a file. Raises UserError for one that is damaged or of
    another version."""
    path = run_dir / FILE
    try:
        record = msgspec.json.decode(path.read_bytes(), type=GateRecord)
    except FileNotFoundError:
        return GateRecord()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}; restore it from a copy") from None
    if record.version != VERSION:
        raise UserError(f"{path} has version {record.version}, this release reads version {VERSION}")
    return record


@contextmanager
def changed(run_dir: Path) -> Iterator[GateRecord]:
    """Yield the gate's record, to be changed in place, and write it at the context's end; an exception in the
    context leaves the file as it was. Raises UserError for a damaged one. Processes take turns, by the lock
    of a file beside it, as the file itself is replaced."""
    turn = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(turn, wait=True)
        record = read(run_dir)
        yield record
        data = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
        write_atomically(run_dir / FILE, data, 0o600)
    finally:
        os.close(turn)
