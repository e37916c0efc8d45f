"""Raft's persistent state in files: term and vote, and the voter's copy of the commit log."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from itertools import accumulate
from pathlib import Path

import msgspec

from anabranch.errors import UserError, os_errors_named
from anabranch.operating_system import write_at, write_atomically
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface.events import Persist
from anabranch.protocol.log.hash_chain import LogError, Position
from anabranch.protocol.log.records import decode_entry
from anabranch.protocol.raft.raft_log import RaftLog

VERSION = 1


class _Versioned(msgspec.Struct):
    """Version field of a vote file, read before the rest: one of another release is refused."""

    version: int


class _Vote(msgspec.Struct):
    nonce: str
    term: int
    vote: str

    def __post_init__(self) -> None:
        if self.term < 0:
            raise ValueError("a term is negative")


class RaftStorage:
    """Files of a voter: its copy of the commit log (one entry per line), and the vote file, a JSON object
    with term, vote and a random name of the disk (`nonce`). Raises UserError if the vote file is damaged or
    of another version, OSError if it cannot be read."""

    def __init__(self, log: Path, vote: Path) -> None:
        self.log = log
        self._vote = vote
        self._state = self._read_vote()
        self._start = 0
        self._ends = [0]

    def load(self) -> SavedVoterState:
        """Read term, vote and log. A last line that a crash cut off is removed, if there is a whole one
        before it: it was never acknowledged. Raises UserError if the log is damaged. To be called before
        `do`."""
        lines = self._read_log()
        if self._state is None:
            # A log without a vote file belongs to a single voter, whose id has no nonce.
            nonce = "" if lines else secrets.token_hex(8)
            self._state = (nonce, 0, "")
        nonce, term, vote = self._state
        start = Position()
        if lines:
            first = decode_entry(lines[0])
            start = Position(first.index, first.previous)
        self._start = start.index
        self._ends = [0, *accumulate(len(line) + 1 for line in lines)]
        return SavedVoterState(nonce, term, vote, lines, start, seed=secrets.randbits(63))

    def do(self, write: Persist) -> None:
        """Write term, vote and log lines, which replace the log from entry `write.start` on; on return they
        survive a power loss. Raises UserError if they cannot be written. This peer must then end: it may not
        acknowledge what it could lose."""
        problem = f"the commit log {self.log.name} cannot be written"
        with os_errors_named(problem, "make room, then start again"):
            self._write(write)

    def _write(self, write: Persist) -> None:
        assert self._state is not None, "loaded first"
        if self._state[1:] != (write.term, write.vote) or not self._vote.exists():
            self._state = (self._state[0], write.term, write.vote)
            state = dict(zip(("nonce", "term", "vote"), self._state, strict=True))
            write_atomically(self._vote, json.dumps({"version": VERSION, **state}).encode())
        if len(self._ends) == 1:
            self._start = write.start
        kept = write.start - self._start
        with open(self.log, "r+b" if self.log.exists() else "x+b", buffering=0) as file:
            file.truncate(self._ends[kept])
            try:
                write_at(file.fileno(), b"".join(line + b"\n" for line in write.lines), self._ends[kept])
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(self._ends[kept])  # a part of a line is worth nothing
                raise
        del self._ends[kept + 1 :]
        for line in write.lines:
            self._ends.append(self._ends[-1] + len(line) + 1)

    def _read_vote(self) -> tuple[str, int, str] | None:
        try:
            data = self._vote.read_bytes()
            version = msgspec.json.decode(data, type=_Versioned).version
            if version != VERSION:
                raise UserError(
                    f"{self._vote}: version {version}, but this release reads version {VERSION}; use the "
                    "release that wrote it"
                )
            state = msgspec.json.decode(data, type=_Vote)
            return state.nonce, state.term, state.vote
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            raise UserError(
                f"{self._vote} cannot be read: remove it together with {self.log.name} beside it; this "
                "machine then joins as one that lost its disk"
            ) from None

    def _read_log(self) -> tuple[bytes, ...]:
        try:
            data = self.log.read_bytes()
        except FileNotFoundError:
            return ()
        whole = data[: data.rfind(b"\n") + 1]
        if whole and len(whole) < len(data):  # a file without a whole line is left for its owner to see
            with open(self.log, "r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        lines = tuple(whole.splitlines())
        if not lines:
            return ()
        try:
            first = decode_entry(lines[0])
            RaftLog(lines, Position(first.index, first.previous))
        except (LogError, ValueError) as error:
            raise UserError(f"{self.log}: {error}; restore the file from a copy") from None
        return lines
