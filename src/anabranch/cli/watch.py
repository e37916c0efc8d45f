"""Serve a web page that shows a run, live and as a replay.

examples:
  anabranch watch runs/tiny --open            open the page of that run in a browser
  anabranch watch                             the most recently active run under ./runs
  anabranch watch anabranch1:...              a run on another machine, with any of its tickets
  anabranch watch runs/tiny --host 0.0.0.0    let other machines see it, with a secret in the address

The page is served to this machine alone unless --host says otherwise. Ctrl+C ends the page, not the run. With
a ticket, the event log is fetched from the run's data node and kept in ~/.anabranch/RUN/watch; watching takes
no part in the run. The page stays when the run is over. It ends, with exit status 2, when the data node
refuses the ticket, e.g. an expired one, or the event log cannot be kept.
"""

from __future__ import annotations

import argparse
import queue
import secrets
import threading
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.addresses import on_loopback
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.support.arguments import PORT, add_listen, check_range
from anabranch.errors import UserError
from anabranch.observe.wording import plain

if TYPE_CHECKING:
    from anabranch.node.driver.peer_driver import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    run = "run directory or ticket (default: the latest run under ./runs)"
    add("run", nargs="?", metavar="RUN_DIR|TICKET", help=run)
    add("--open", action="store_true", help="open the page in a browser")
    add_listen(parser)
    secret = "secret in the page's address (default: random if other machines can reach the page)"
    add("--secret", default="", help=secret)
    home = "with a ticket: folder for key and event log (default: ~/.anabranch/RUN/watch)"
    add("--home", type=Path, metavar="DIR", help=home)


def run(args: argparse.Namespace) -> int:
    from anabranch.net.ticket import TICKET_PREFIX
    from anabranch.observe.page.page_thread import PageThread

    check_range("--port", args.port, PORT)
    if args.secret and not args.secret.isalnum():
        raise UserError("--secret: use letters and digits only, since it becomes part of an address")
    secret = args.secret or ("" if on_loopback(args.host) else secrets.token_hex(16))
    ended: queue.SimpleQueue[Outcome | Exception] = queue.SimpleQueue()
    by_ticket = bool(args.run) and args.run.strip().startswith(TICKET_PREFIX)
    if by_ticket:
        name, events = _remote_run(args.run, args.home, ended)
    else:
        directory = RunDirectory.open(Path(args.run) if args.run else latest_run(Path("runs")))
        name, events = str(directory), directory.events
    page = PageThread(events, args.host, args.port, secret)
    try:
        address = page.start()
        print(f"{plain(name)}: {address}  (Ctrl+C ends the page)", flush=True)
        if args.open:
            webbrowser.open(address)
        while not isinstance(end := ended.get(), Exception) and end.ok:
            stays = "the page stays, perhaps without its last events; Ctrl+C ends it"
            print(f"{end.reason}: {stays}", flush=True)
        raise end if isinstance(end, Exception) else UserError(end.reason)
    except KeyboardInterrupt:
        print()
        return 0
    finally:
        page.close()


def _remote_run(
    text: str, home: Path | None, ended: queue.SimpleQueue[Outcome | Exception]
) -> tuple[str, Path]:
    """Name of a run on another machine, and the path of the local copy of its event log, which a thread,
    started here, keeps up to date. When the thread stops copying, it puts into `ended` how that ended
    (`RemoteWatch.run`), or the exception by which it failed. home: folder of the copy (None: the default).
    Raises TicketError for a bad ticket, UserError if another process keeps that copy."""
    from anabranch.api.volunteer import home_of
    from anabranch.net.ticket import parse_ticket
    from anabranch.node.driver.event_loop import run_async
    from anabranch.node.operator.remote_watch import RemoteWatch

    ticket = parse_ticket(text, now_s=time.time())
    home = home or home_of(ticket) / "watch"
    watching = RemoteWatch(ticket, home, lambda words: print(plain(words), flush=True))

    def fetch() -> None:
        try:
            ended.put(run_async(watching.run()))
        except Exception as error:  # raised again by the thread that waits
            ended.put(error)

    threading.Thread(target=fetch, name="anabranch watch", daemon=True).start()
    return ticket.grant.run, watching.events


def latest_run(folder: Path) -> Path:
    """Run directory in `folder` whose event log was written last. Raises UserError if there is none."""
    logs = sorted(folder.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise UserError(
            f"there is no run under {folder}/ here; give the path of a run directory"
        )
    return logs[-1].parent
