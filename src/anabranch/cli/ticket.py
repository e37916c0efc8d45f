"""Issue, list and revoke the tickets of a run, while it is going or stopped.

examples:
  anabranch ticket new runs/tiny --role relay --quota 5 --expires 7d --name lab
  anabranch ticket new runs/tiny --role open --quota 20 --expires 4w
  anabranch ticket new runs/tiny --role auditor --quota 1
  anabranch ticket list runs/tiny
  anabranch ticket revoke lab runs/tiny --reason "the course is over"

`ticket new` prints a ticket: give it to one person or group. At most --quota peers are members with it at one
time. `ticket list` shows all tickets with the number of members that came with each; tickets themselves are
not kept. `ticket revoke` takes the name or the key of a ticket: members that came with it are removed, and
nobody gets in with it again, under any key. On a stopped run it takes effect when the run is resumed.

A ticket of role `open` is no secret: put it on a web page, and anyone may come. Whoever comes with it solves
a puzzle first, harder with each one of the same network; it gets no vote, never the corpus, and a seat only
where invited peers outnumber those like it, and all its work is computed again for its first iterations. The
run needs audits (audit.share).

Who comes with a ticket of role `auditor` only computes others' work again (`anabranch audit`), and is
believed: its word alone convicts. Give it to machines that you trust as your own. The run needs audits,
too."""

from __future__ import annotations

import argparse
import re
import time
from typing import TYPE_CHECKING

from anabranch.cli.support.arguments import add_json, add_run_dir, check_range
from anabranch.config import Range
from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.node.lifecycle.gate_file import IssuedTicket

#: Seconds by unit of a duration.
UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
#: Allowed quotas (0: none), and lifetimes of a ticket in seconds: a minute to ten years.
QUOTA = Range(0, 1 << 31)
LIFETIME_S = Range(60, 10 * 365 * 86400)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    new = actions.add_parser("new", help="issue a ticket and print it")
    add_run_dir(new)
    roles = ("relay", "data", "watch", "open", "auditor")
    new.add_argument("--role", choices=roles, default="relay", help="what it permits")
    new.add_argument("--quota", type=int, default=0, metavar="N", help="members at one time; 0: any number")
    new.add_argument("--expires", default="7d", metavar="TIME", help="lifetime: 30m, 12h, 7d, 4w")
    new.add_argument("--name", default="", metavar="NAME", help="name in the list; not part of the ticket")
    listed = actions.add_parser("list", help="show all tickets")
    add_run_dir(listed)
    add_json(listed)
    revoke = actions.add_parser("revoke", help="revoke a ticket, and remove the members that came with it")
    revoke.add_argument("ticket", metavar="NAME|KEY", help="name of the ticket, or the beginning of its key")
    add_run_dir(revoke)
    add_reason(revoke)


def add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", default="", metavar="TEXT", help="is told to the peers concerned")


def checked_reason(text: str) -> str:
    """`text` as a reason, or a standard one if it is empty. Raises UserError for one that is too long or not
    printable."""
    from anabranch.node.lifecycle.gate_file import REASON_CHARS

    if len(text) > REASON_CHARS or not text.isprintable():
        raise UserError(f"--reason: a printable text of at most {REASON_CHARS} characters")
    return text or "no reason given"


def run(args: argparse.Namespace) -> int:
    action = {"new": _new, "list": _list, "revoke": _revoke}[args.action]
    return action(args)


def duration_s(text: str) -> float:
    """Seconds of a lifetime written as 30m, 12h, 7d or 4w. Raises UserError, also outside LIFETIME_S."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if match is None:
        raise UserError(f"--expires is {text!r}; write a number and m, h, d or w, as in 12h or 7d")
    seconds = int(match[1]) * UNITS[match[2]]
    if not LIFETIME_S.holds(seconds):
        raise UserError(f"--expires {text}: it must be at least a minute and at most ten years")
    return seconds


def _new(args: argparse.Namespace) -> int:
    from anabranch.node.lifecycle.tickets import new_ticket

    check_range("--quota", args.quota, QUOTA)
    ticket = new_ticket(args.run_dir, args.role, args.quota, duration_s(args.expires), args.name)
    verb = {"watch": "watch", "auditor": "audit"}.get(args.role, "join")
    print(f"anabranch {verb} {ticket.text}")
    return 0


def _list(args: argparse.Namespace) -> int:
    import msgspec

    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.node.lifecycle import gate_file
    from anabranch.node.lifecycle.tickets import history_of
    from anabranch.observe.console.progress import ticking

    directory = RunDirectory.open(args.run_dir)
    record = gate_file.read(args.run_dir)
    with ticking("reading the log"):
        history = history_of(directory)
    members: dict[str, list[str]] = {}
    for member in history.membership.members.values():
        members.setdefault(member.ticket, []).append(member.id)
    if args.json:
        tickets = [msgspec.structs.asdict(t) | {"members": members.get(t.key, [])} for t in record.tickets]
        expelled = [msgspec.structs.asdict(peer) for peer in record.expelled]
        print(msgspec.json.encode({"tickets": tickets, "expelled": expelled}).decode())
        return 0
    print(f"{'NAME':16} {'ROLE':6} {'MEMBERS':>9} {'STATE':24} KEY")
    for ticket in record.tickets:
        used = f"{len(members.get(ticket.key, []))} of {ticket.quota or 'any'}"
        print(f"{ticket.name:16} {ticket.role:6} {used:>9} {_state(ticket):24} {ticket.key}")
    for peer in record.expelled:
        print(f"expelled: {peer.id} ({peer.reason})")
    return 0


def _state(ticket: IssuedTicket) -> str:
    """State of a ticket in words: "revoked", "expired" or the time until it expires, such as "expires in 3d".
    """
    if ticket.revoked_at_s:
        return "revoked"
    left_s = ticket.expires_at_s - time.time()
    if left_s <= 0:
        return "expired"
    unit = next((unit for unit in ("d", "h", "m") if left_s >= 2 * UNITS[unit]), "m")
    return f"expires in {left_s / UNITS[unit]:.0f}{unit}"


def _revoke(args: argparse.Namespace) -> int:
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.node.lifecycle.tickets import history_of, revoke_ticket
    from anabranch.observe.console.progress import ticking

    ticket = revoke_ticket(args.run_dir, args.ticket, checked_reason(args.reason))
    with ticking("reading the log"):
        members = history_of(RunDirectory.open(args.run_dir)).membership.members.values()
    came = sum(member.ticket == ticket.key for member in members)
    print(f"ticket {ticket.name} ({ticket.key[:8]}) is revoked; members that came with it: {came}")
    return 0
