"""Requests of the run's owner to the founder's process (pause, continue, steps, revoke, stop), as lines of a
file in the run directory.

Another process on the same machine writes them (the page of a local swarm, the owner's commands). Only the
user who owns the directory can write the file."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import msgspec

from anabranch.config import CONSTRAINTS
from anabranch.node.driver.peer_driver import LivePeer
from anabranch.node.lifecycle import gate_file
from anabranch.protocol.fleet.operator_control import CONTINUE, PAUSE, REVOKE, STEPS
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages.common import REMARK_MAX

FILE = "wishes.jsonl"
#: Seconds between reads of the file, and most bytes of one read.
INTERVAL_S = 0.25
READ_BYTES = 1 << 16
#: Request that is not the protocol's: it does what a first Ctrl+C does.
STOP = "stop"
ACTIONS = (PAUSE, CONTINUE, STEPS)


class _Request(msgspec.Struct):
    action: str
    steps: int = 0
    target: str = ""
    reason: str = ""


_DECODER = msgspec.json.Decoder(_Request)
#: Id of a peer or key of a ticket.
_KEY = re.compile("[0-9a-f]{64}")


def problem_of(action: str, steps: int) -> str:
    """Reason why a request of the owner is invalid, "" if it is valid. action: its kind, valid ones are
    ACTIONS. steps: wished number of steps, for "steps"."""
    if action not in ACTIONS:
        return f"there is no action {action!r}"
    problem = CONSTRAINTS["run.steps"].problem(steps) if action == STEPS else ""
    return f"the number of steps {problem}" if problem else ""


def request(run_dir: Path, action: str, steps: int = 0) -> str:
    """Append a request to the run's file of requests, which the founder's process reads, if it runs now;
    returns "". An invalid one is not written: returns the reason. action: one of ACTIONS. steps: new number
    of steps, for "steps". Raises OSError if the file cannot be written."""
    problem = problem_of(action, steps)
    if not problem:
        _append(run_dir, _Request(action, steps))
    return problem


def request_revocation(run_dir: Path, target: str, reason: str) -> None:
    """Append a request to revoke `target` to the run's file of requests: a ticket, by its key, or a peer, by
    its id (64 hexadecimal digits; others are ignored when the file is read). reason: for the log. The caller
    has written it to the gate's record, from which a later process of the founder takes it. Raises OSError if
    the file cannot be written."""
    _append(run_dir, _Request(REVOKE, 0, target, reason))


def _append(run_dir: Path, wanted: _Request) -> None:
    handle = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, msgspec.json.encode(wanted) + b"\n")
    finally:
        os.close(handle)


def _valid(wish: _Request) -> bool:
    if wish.action == REVOKE:
        return bool(_KEY.fullmatch(wish.target)) and len(wish.reason) <= REMARK_MAX
    return not problem_of(wish.action, wish.steps)


def request_stop(run_dir: Path) -> None:
    """Append a request to stop after the present step, for systems where no signal can ask for it. Lost
    unless the founder's process runs now. Raises OSError if the file cannot be written."""
    _append(run_dir, _Request(STOP))


async def follow(live: LivePeer, run_dir: Path) -> None:
    """Hand the owner's requests to the founder (`live`), until this task is cancelled: first all revocations
    in the gate's record, some perhaps made while it did not run; then each request that is appended to the
    run directory's file of requests from now on. Malformed and invalid ones are ignored. Raises UserError for
    a damaged gate's record."""
    path = run_dir / FILE
    position = path.stat().st_size if path.exists() else 0
    for target, reason in gate_file.read(run_dir).revocations().items():
        live.handle(ev.Wished(REVOKE, 0, target, reason))
    while True:
        await asyncio.sleep(INTERVAL_S)
        if not path.exists() or path.stat().st_size <= position:
            continue
        try:
            with open(path, "rb") as file:
                file.seek(position)
                whole, newline, _ = file.read(READ_BYTES).rpartition(b"\n")
        except OSError:  # no descriptor is left; the requests are read later
            continue
        position += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                wish = _DECODER.decode(line)
            except (ValueError, RecursionError):
                continue
            if wish.action == STOP:
                live.stop("stopped by its user")
            elif _valid(wish):
                live.handle(ev.Wished(wish.action, wish.steps, wish.target, wish.reason))
