"""`anabranch watch`: the page of a run, live or played again."""

from __future__ import annotations

import argparse
import secrets
import time
import webbrowser
from pathlib import Path

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config_rules import RANGES
from anabranch.errors import UserError

_EPILOG = """\
examples:
  anabranch watch runs/tiny --open            the page of that run, in your browser
  anabranch watch                             the run under ./runs that was active last
  anabranch watch runs/tiny --host 0.0.0.0    for other machines, too: with a secret in the address

The page shows a run as it happens, and any moment of it again. It is served on this machine alone unless
--host says otherwise. Ctrl+C ends the page, not the run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve a page that shows a run, live and as a replay."
    parser.epilog = _EPILOG
    parser.add_argument(
        "run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="default: the latest under ./runs"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port to listen on (default: a free one)"
    )
    parser.add_argument(
        "--secret", default="", help="who looks must know it (default: drawn if others can look)"
    )


def run(args: argparse.Namespace) -> int:
    from anabranch.observe.page.follow import PageThread
    from anabranch.observe.page.server import on_loopback

    if not RANGES["network.port"].holds(args.port):
        raise UserError(f"--port {args.port}: it must be {RANGES['network.port']}")
    if args.secret and not args.secret.isalnum():
        raise UserError("--secret: letters and digits only, for it is part of an address")
    directory = RunDirectory.open(args.run_dir or latest_run(Path("runs")))
    secret = args.secret or ("" if on_loopback(args.host) else secrets.token_hex(16))
    page = PageThread(directory.events, args.host, args.port, secret)
    address = page.start()
    print(f"{directory.path}: {address}  (Ctrl+C ends the page)", flush=True)
    if args.open:
        webbrowser.open(address)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print()
        return 0
    finally:
        page.close()


def latest_run(folder: Path) -> Path:
    """The run directory whose event log was written last. Raises UserError when there is none."""
    logs = sorted(folder.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise UserError(f"no run is under {folder}/ here; name a run directory: anabranch watch RUN_DIR")
    return logs[-1].parent
