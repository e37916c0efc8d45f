"""Events that a driver reports to the protocol, and effects that the protocol asks of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.log.records import Genesis, Member
from anabranch.protocol.log.step_parameters import Schedule
from anabranch.protocol.messages import Message

#: Expiry (Unix time, s) of a credential that never expires: the largest that a certificate states.
NEVER_EXPIRES_S = 1 << 40


class VerifiedCredential(msgspec.Struct, frozen=True):
    """Verified right of a peer to take part in the run.

    role: "relay", "data" (may be a data node too), "watch", "open" (a relay that nobody invited), or
    "auditor" (computes others' work again, and is believed). expires_at_s: Unix time from which it is void.
    ticket: public key of the ticket that it descends from ("": none, for the owner's own peer). quota: number
    of peers that may be members with this ticket at one time (0: any number). block: network that the peer
    dialled from ("": not known, or this machine).
    """

    role: str
    expires_at_s: int
    ticket: str = ""
    quota: int = 0
    block: str = ""


class Event(msgspec.Struct, frozen=True):
    """Base of all events, which the driver reports to the protocol."""


class Started(Event, frozen=True):
    """First event: the driver is ready to carry out effects."""


class Received(Event, frozen=True):
    """Message that arrived from an authenticated peer, decoded, with its payload if it carried one. share:
    memory of the payload, in the largest payload that the link accepts. size_bytes: of the payload as it
    came; 0: not known (simulated)."""

    peer: str
    message: Message
    payload: Payload | None = None
    share: float = 0.0
    size_bytes: int = 0


class LinkUp(Event, frozen=True):
    """New authenticated link to process `incarnation` of a peer. credential: what the peer showed when it
    dialled; None if this side dialled. via: id of the carrier that forwards it, or "iroh" ("": none)."""

    peer: str
    incarnation: int
    credential: VerifiedCredential | None = None
    via: str = ""


class PathChanged(Event, frozen=True):
    """New path of iroh (a peer-to-peer transport) to a peer. path: "relay", or the peer's UDP address."""

    peer: str
    path: str


class LinkDown(Event, frozen=True):
    """End of an established link, or a failed dial. refused: nobody listens at the address."""

    peer: str
    reason: str
    refused: bool = False


class Garbled(LinkDown, frozen=True):
    """End of a link that was closed because the peer sent bytes that are no message, or no frame."""


class Finished(Event, frozen=True):
    """Completion of the task that the worker was running, with its result; a worker runs one at a time."""

    task: Task
    result: Result


class KeptState(msgspec.Struct, frozen=True):
    """State of a stage after iteration t that an earlier process of this machine kept on disk: fingerprint,
    pieces, and the pieces' hashes. The bytes were not compared with the hashes."""

    t: int
    fingerprint: str
    pieces: tuple[Payload, ...]
    hashes: tuple[str, ...]


class StageBuilt(Event, frozen=True):
    """Answer to BuildStage: the worker exists. fingerprint: hash of its initial state, made from the seed.
    kept: state of the stage that this machine has on disk; None: it has none."""

    stage: int
    fingerprint: str
    kept: KeptState | None = None


class Described(Event, frozen=True):
    """Answer to Describe: member record with this machine's measurements, and the parameters needed to take
    part and to lead: settings, hashes of the corpus and of the model's shape, schedule of step parameters."""

    member: Member
    settings: Settings
    corpus_fingerprint: str = ""
    model_hash: str = ""
    schedule: Schedule | None = None


class Observed(Event, frozen=True):
    """Event-log lines (JSON) that this peer's driver wrote; the protocol sends them to the leader, for the
    run's event log."""

    lines: tuple[bytes, ...]


class Persisted(Event, frozen=True):
    """Answer to Persist: the write with this number, and all before it, are on disk."""

    number: int


class CheckpointRead(Event, frozen=True):
    """Answer to ReadCheckpoint for iteration `asked_t` (-1: the newest). t: iteration of the checkpoint.
    pieces: of the stage's state; empty if there is no checkpoint. hashes: of the pieces; empty if only the
    whole state can be verified."""

    asked_t: int
    t: int
    stage: int
    fingerprint: str
    pieces: tuple[Payload, ...]
    hashes: tuple[str, ...] = ()


class CheckpointFailed(Event, frozen=True):
    """Answer to WriteCheckpoint if the checkpoint could not be written, such as on a full disk."""

    t: int
    reason: str


class CheckpointWritten(Event, frozen=True):
    """Answer to WriteCheckpoint: the checkpoint after iteration t is on disk. base: as in WriteCheckpoint."""

    t: int
    base: str


class EventsRead(Event, frozen=True):
    """Answer to ReadEvents: a piece of the event log from byte `position` on (zlib; empty: nothing new), and
    the log's size in bytes (0: it cannot be read)."""

    peer: str
    position: int
    data: bytes
    size: int


class DialledBack(Event, frozen=True):
    """Answer to DialBack. addresses: those that were tried. reached: those of them that answered with the key
    of `peer`. Both are joined by commas. reason: why the others failed."""

    peer: str
    addresses: str
    reached: str
    reason: str


class Wake(Event, frozen=True):
    """Arrival of the time that `Peer.deadline` returned."""


class Stopping(Event, frozen=True):
    """Request of the user to stop (Ctrl+C): a founder that leads stops the run; a founder that does not, or
    any other peer, leaves the run."""

    reason: str


class Wished(Event, frozen=True):
    """Operator's request at the founder. action: "pause", "continue", "steps" (`steps`: the new number), or
    "revoke" (`target`: id of a peer or key of a ticket; `reason`: the owner's words)."""

    action: str
    steps: int = 0
    target: str = ""
    reason: str = ""


class Effect(msgspec.Struct, frozen=True):
    """Base of all effects, which the protocol asks of the driver."""


class Send(Effect, frozen=True):
    """Send a message to a linked peer."""

    peer: str
    message: Message
    payload: Payload | None = None


class Dial(Effect, frozen=True):
    """Connect to a peer at the first of its addresses (`anabranch.addresses`) that answers; answered by
    LinkUp or LinkDown. Where a carrier forwards a link to the peer already, and none of the addresses leads
    through one, a link that is made replaces it (LinkDown, LinkUp), and a failure is not reported."""

    peer: str
    address: str


class DialBack(Effect, frozen=True):
    """Try each of a peer's addresses, and close the connection when its key is proved; answered by
    DialledBack."""

    peer: str
    addresses: str


class ReadEvents(Effect, frozen=True):
    """Order to the driver to read the run's event log from byte `position` on, for the observer `peer`. The
    event EventsRead brings the result."""

    peer: str
    position: int


class Showed(Effect, frozen=True):
    """At an observer: hand on `data`, bytes of the event log from `position` on, to be shown."""

    position: int
    data: bytes


class HangUp(Effect, frozen=True):
    """Close the link to a peer, which is told the reason; the driver reports no LinkDown of it to this
    peer."""

    peer: str
    reason: str


class Run(Effect, frozen=True):
    """Start a task on the worker; answered by Finished."""

    task: Task
    inputs: tuple[Payload, ...]


class Describe(Effect, frozen=True):
    """Measure this machine for a run; answered by Described."""

    genesis: Genesis


class Admitted(Effect, frozen=True):
    """Notice of the protocol to its driver that this peer was admitted to `stage`. certificate: proof of the
    admission for other members."""

    stage: int
    certificate: bytes


class BuildStage(Effect, frozen=True):
    """Create the worker of `stage`; answered by StageBuilt."""

    stage: int


class Persist(Effect, frozen=True):
    """Write term and vote, truncate the log at entry `start`, append `lines`, fsync, in this order; answered
    by Persisted."""

    number: int
    term: int
    vote: str
    start: int
    lines: tuple[bytes, ...]


class ReadCheckpoint(Effect, frozen=True):
    """Read a stage's state from the checkpoint after iteration t (-1: the newest); answered by
    CheckpointRead."""

    t: int
    stage: int


class WriteCheckpoint(Effect, frozen=True):
    """Write all stages' states after iteration t as a checkpoint; answered by CheckpointWritten or
    CheckpointFailed. base: hash of the log entry of t. stages: stage -> (pieces, fingerprint)."""

    t: int
    base: str
    stages: Mapping[int, tuple[tuple[Payload, ...], str]]


class Note(Effect, frozen=True):
    """Write an event to the run's event log (kinds and fields: `observe.events`)."""

    kind: str
    fields: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Reported(Effect, frozen=True):
    """Write event-log lines that another peer sent (untrusted JSON) to the run's event log."""

    peer: str
    events: tuple[bytes, ...]


class Stop(Effect, frozen=True):
    """End this peer's part in the run. ok: False if neither the user nor the run's owner asked for it. again:
    True if this machine may join the run again with the same ticket. over: True if the log ended the run
    because all steps are committed."""

    reason: str
    ok: bool = True
    again: bool = False
    over: bool = False
