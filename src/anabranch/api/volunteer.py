"""Joining a run: the ticket, the home folder, and the peer that computes until its part is over."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.errors import UserError
from anabranch.hours import Hours, WhenIdle, parse_hours
from anabranch.net.connection_limits import CarryLimits, LineCaps
from anabranch.node.lifecycle.shutdown import STOP_S
from anabranch.operating_system import lower_priority

if TYPE_CHECKING:
    from anabranch.net.ticket import Ticket
    from anabranch.node.driver.peer_driver import Outcome

#: Default of `cache_gb`. A choice: the state of 300 million parameters at fp32.
CACHE_GB = 4.0
#: Default of `keep_gb`. A choice: two hundred rounds of a model of 40 million parameters in 4 bits.
KEEP_GB = 4.0
#: Default of `nice`. A choice: on Linux, a tenth of the processor time of a program beside it.
NICE = 10


def join(
    ticket: str,
    *,
    name: str = "",
    region: str = "",
    device: str = "",
    stage: int | None = None,
    host: str = "127.0.0.1", port: int = 0, advertise: str = "",
    corpus: str | Path | None = None,
    home: str | Path | None = None,
    patience_s: float = 120.0, grace_s: float = STOP_S,
    once: bool = False,
    listens: bool = True,
    hours: str = "",
    carry: CarryLimits | None = None,
    transport: str = "auto",
    caps: LineCaps | None = None,
    audits: bool = False,
    cache_gb: float = CACHE_GB,
    threads: int = 0, memory_gib: float = 0.0, nice: int = NICE,
    private_data: str | Path | None = None, keep_gb: float = KEEP_GB,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:  # fmt: skip
    """Lend this machine to a run until it is over, a signal comes, or the ticket fails; returns how it ended.

    ticket: text that the run's owner gave away. name, region: as others see this peer. device: "" for the run
    file's; several, as in "cuda:0,cuda:1", hold a stage together. stage: wished stage. host, port, advertise:
    address to listen on, and those that others dial. corpus: copy of the run's corpus folder (data nodes
    only). home: folder for key and log; the default is ~/.anabranch/RUN. patience_s: how long to try to reach
    the run for the first time. grace_s: seconds to leave in after SIGINT or SIGTERM. once: do not join again.
    listens: False to accept no connection. hours: times of the day at which it is lent, as in "22:00-07:00",
    or "when idle", for which `nice` lowers the priority of this whole process; "" for always. carry: limits
    of what it carries for others (None: the default ones). transport: "tcp", "iroh", or "auto" for both.
    caps: of its line. audits: True if the ticket is an auditor's. cache_gb: most GB of stages' states kept on
    its disk for its next process. threads: of torch, 0 for the run file's; another number only where
    run.numerics is "mixed". memory_gib: memory (GiB) to plan with, also of each GPU; 0: what is free. nice:
    see `operating_system.lower_priority`. private_data: prepared corpus of this machine alone, on which it
    takes its inner steps in a run on private data. keep_gb: most GB of its contributions that it keeps in
    such a run, for `verify`. say: gets sentences about the progress. Blocks; computes in this process, whose
    torch it configures for reproducible results. Raises UserError or NetError if an argument cannot be used.
    """
    from anabranch.node.driver.event_loop import run_async
    from anabranch.node.lifecycle.join import JoinOptions
    from anabranch.node.lifecycle.join import join as take_part
    from anabranch.node.lifecycle.peer_home import claimed

    parsed = checked_ticket(ticket, has_corpus=corpus is not None, audits=audits)
    default_home = Path(home) if home is not None else home_of(parsed)
    with claimed(default_home, exclusive=home is not None) as folder:
        if folder != default_home:
            say(f"this machine has a peer in this run already; joining as another one, in {folder}")
        options = JoinOptions(
            parsed, folder, name, region, -1 if stage is None else stage, host, port, advertise,
            Path(corpus) if corpus else None, device, patience_s, once, grace_s, listens,
            _times(hours, nice), carry or CarryLimits(), transport, caps or LineCaps(),
            int(cache_gb * 1e9), threads, int(memory_gib * (1 << 30)), nice,
            Path(private_data) if private_data else None, int(keep_gb * 1e9),
        )  # fmt: skip
        return run_async(take_part(options, say))


def _times(hours: str, nice: int) -> Hours | WhenIdle | None:
    """Times at which this machine is lent, by the argument `hours` of `join`; None for "". For "when idle"
    the priority of this whole process is lowered by `nice`, since the work of other programs is told from
    that of peers by it. Raises UserError for another text."""
    if hours and isinstance(parse_hours(hours), WhenIdle):
        lower_priority(nice)
    return parse_hours(hours) if hours else None


def checked_ticket(text: str, has_corpus: bool, audits: bool = False) -> Ticket:
    """Parse the text of a ticket with which a peer is to take part in a run, as an auditor if `audits` is
    True, else as a relay or a data node, and verify its owner's signature; returns it. Raises NetError if the
    text is no ticket, or the ticket is damaged, forged or expired; UserError if it permits watching only, is
    an auditor's and `audits` is False or the reverse, or is a data node's and `has_corpus` is False."""
    from anabranch.net.ticket import AUDITOR, parse_ticket

    ticket = parse_ticket(text, now_s=time.time())
    if ticket.grant.role == "watch":
        raise UserError("this ticket only permits watching: anabranch watch TICKET; ask for a relay ticket")
    if audits and ticket.grant.role != AUDITOR:
        role = ticket.grant.role
        raise UserError(f"this is a ticket of role {role}: ask for one of role auditor, or anabranch join")
    if not audits and ticket.grant.role == AUDITOR:
        raise UserError("this is an auditor's ticket: anabranch audit TICKET; ask for a relay ticket to join")
    if ticket.grant.role == "data" and not has_corpus:
        raise UserError(
            "a data node needs the run's corpus: copy its `corpus` folder to this machine and name it with "
            "--corpus"
        )
    return ticket


def home_of(ticket: Ticket) -> Path:
    """Default folder of a volunteer's peer in the ticket's run: ~/.anabranch/RUN, which is not made here.
    Raises UserError if the run's name is no plain folder name."""
    run_id = ticket.grant.run
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run_id):
        raise UserError(
            f"the ticket's run {run_id[:40]!r} cannot be a folder name: choose a folder with --home"
        )
    return Path.home() / ".anabranch" / run_id
