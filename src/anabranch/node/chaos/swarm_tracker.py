"""Members of a swarm and its last committed step, followed by its events; voters from its log."""

from __future__ import annotations

from anabranch.observe.events import Event, PeerActive, PeerJoined, PeerRemoved, Rollback, Step
from anabranch.protocol.log.records import Voters, decode_entry


def voters_of(log: bytes) -> set[str]:
    """Peer ids of the voters, from the last `Voters` record of a commit log (its bytes, of which an
    unfinished last line is ignored); empty if it has none."""
    for line in reversed(log.rpartition(b"\n")[0].splitlines()):
        if b'"voters"' in line:
            record = decode_entry(line).record
            if isinstance(record, Voters):
                return {voter.partition("/")[0] for voter in record.ids}  # a voter id is PEER/DISK
    return set()


class SwarmTracker:
    """State of a swarm, kept up to date from the run's events. names: process names by peer id, also of
    removed peers. stages: stages of the members by process name. serving: process names of the active
    members. t: last committed step."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.stages: dict[str, int] = {}
        self.serving: set[str] = set()
        self.t = 0

    def on_event(self, event: Event) -> None:
        match event:
            case PeerJoined(subject=subject, name=name, stage=stage):
                self.names[subject] = name
                self.stages[name] = stage
                self.serving.discard(name)
            case PeerActive(subject=subject) if subject in self.names:
                self.serving.add(self.names[subject])
            case PeerRemoved(subject=subject) if subject in self.names:
                self.serving.discard(self.names[subject])
                self.stages.pop(self.names[subject], None)
            case Step(t=t) | Rollback(t=t):
                self.t = t
