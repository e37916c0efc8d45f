"""Preview of a long event log: a recording of its last events, with the peers' names from its beginning.

Folding a million events takes half a minute. Until then the page shows this preview, with the present step,
figures, flow and peers. Totals, most of the story and some names of peers are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from anabranch.observe import events as log
from anabranch.observe.event_log import decode_lines
from anabranch.observe.view.recording import Recording

#: Least size in bytes of a log that gets a preview; shorter ones are folded within a second or two.
LONG_BYTES = 8 << 20
#: Bytes of the log's beginning and end that a preview reads.
HEAD_BYTES, TAIL_BYTES = 1 << 19, 3 << 19


def preview(path: Path) -> Recording | None:
    """Recording made from the first HEAD_BYTES and the last TAIL_BYTES of the log at `path`, which a page
    shows until all is read. None if the log is missing or shorter than LONG_BYTES, or if no run start is in
    its beginning or no peer in its end."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < LONG_BYTES:
                return None
            file.seek(0)
            head = file.read(HEAD_BYTES)
            file.seek(size - TAIL_BYTES)
            tail = file.read(TAIL_BYTES).partition(b"\n")[2]
    except OSError:
        return None
    started: log.RunStarted | None = None
    joined: dict[str, log.PeerJoined] = {}
    for event in _events(head):
        if isinstance(event, log.RunStarted):
            started = event
        elif isinstance(event, log.PeerJoined):
            joined[event.subject] = event
    if started is None:
        return None
    recording = Recording()
    recording.take(started)
    known: set[str] = set()
    for event in _events(tail):
        for peer, stage in _seen(event):
            if peer not in known:
                known.add(peer)
                peers = recording.view.peers  # without a sentence in the story: the peer was there before
                if peer in joined:
                    peers.joined(msgspec.structs.replace(joined[peer], stage=stage))
                peers.active(log.PeerActive(time=event.time, subject=peer, stage=stage, from_iteration=1))
        recording.take(event)
    return recording if known else None


def _events(data: bytes) -> Iterator[log.Event]:
    """Events of known kinds in the whole lines of `data`; a last line without its end is left out."""
    return (event for event in decode_lines(data.split(b"\n")[:-1]) if isinstance(event, log.Event))


def _seen(event: log.Event) -> Iterator[tuple[str, int]]:
    """Yield (peer, stage) of each peer that takes part according to this event; nothing for most events."""
    match event:
        case log.Timing() | log.Vitals():
            yield event.peer, event.stage
        case log.Step():
            for stage, units in event.owners.items():
                for peer in set(units.values()):
                    yield peer, stage
