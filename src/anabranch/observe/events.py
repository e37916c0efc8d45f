"""Types of the events in `events.jsonl`, one event per line, and their JSON form.

The event log is the only source of terminal output, plots and pages. Every event has `kind`, `version` (of
this schema), `time` (unix seconds, the writer's clock) and `peer` (id of the observing peer, "" for the run
as a whole). Peers send their events to a data node, which merges them: lines are in the order of arrival, not
of `time`. `event_log.py` reads and writes the file.

JSON has no NaN: a number that is not finite is written as null and read as None.
"""

from __future__ import annotations

import time as clock
from typing import Annotated, Any, Union

import msgspec

#: Version of the schema. It rises when a field changes its meaning, not for new fields and kinds.
EVENT_VERSION = 1
#: Greatest absolute value of an integer in an event that is read: readers of JSON have it exactly. With no
#: bound, the sum of two numbers that a stranger wrote could have more digits than Python writes.
WHOLE_MAX = 1 << 53
Whole = Annotated[int, msgspec.Meta(ge=-WHOLE_MAX, le=WHOLE_MAX)]
"""Integer field of an event."""


def _kind(name: str) -> str:
    """Event kind of a class name: "RunStarted" -> "run_started"."""
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_kind):
    """Fields of all events. time: unix seconds, by default now. peer: id of the peer that reports the event
    ("": of the run as a whole). version: of the events' schema."""

    time: float = msgspec.field(default_factory=clock.time)
    peer: str = ""
    version: Whole = EVENT_VERSION


class RunStarted(Event, frozen=True, kw_only=True):
    """Start of a run, `run` by name and `run_id`: the first event, and again after each `resume`.
    tokens_per_iteration: target tokens. numerics: numerics class of the writer (hash). stages: relay stages
    S; stage 0 is on the data nodes. from_iteration: of the checkpoint that it continues from (0: none)."""

    run: str
    run_id: str
    model: str
    parameters: Whole
    microbatches: Whole
    tokens_per_iteration: Whole
    steps: Whole
    numerics: str
    initial_weights_hash: str
    corpus_fingerprint: str
    tokenizer_hash: str
    stages: Whole
    from_iteration: Whole = 0


class PeerJoined(Event, frozen=True, kw_only=True):
    """Admission of the peer `subject` to `stage`, whose state it downloads before it serves. name, region: as
    its owner says. role: "data", "relay" or "auditor". capacity: microbatches that it can hold at once.
    forward_s: seconds of one block's forward pass of one microbatch, measured when it joined (0: not
    measured)."""

    subject: str
    name: str
    region: str
    role: str
    stage: Whole
    numerics_class: str
    capacity: Whole = 0
    forward_s: float = 0.0


class PeerActive(Event, frozen=True, kw_only=True):
    """Start of service of the peer `subject`: it takes part from iteration `from_iteration` on."""

    subject: str
    stage: Whole
    from_iteration: Whole


class PeerRemoved(Event, frozen=True, kw_only=True):
    """Removal of the peer `subject` from the run's members: it left, moved to another stage, or is lost."""

    subject: str
    stage: Whole
    reason: str


class Step(Event, frozen=True, kw_only=True):
    """Commit of iteration t. loss: nats per token. tokens: target tokens that counted (0: skipped).
    grad_norm: of the whole gradient before clipping, in a round of the islands' mean change. seconds: since
    the previous commit (0: not known, as the writer learnt of the step later). manifest_hash: of the batch,
    in a round of the plan's inner steps. clip_factor, learning_rate: in a round the weight of one inner step
    in the mean change, and the outer learning rate. owners: stage -> unit -> id of the peer whose
    contribution counted. verdict: "step" or "skip". alive, attempts: live peers, and reduce attempts, at
    stages 0..S. loss_sums: nats summed over the tokens of each microbatch, in a round of each slot, by index
    (None: not told). bits_per_byte: the loss in bits per byte of text (None: not known, as in a round).
    inner_steps: of each slot of a round; 0 for a late slot, which does not count, -1 for one without a
    machine."""

    t: Whole
    loss: float | None
    tokens: Whole
    grad_norm: float | None
    clip_factor: float
    learning_rate: float
    seconds: float
    manifest_hash: str
    owners: dict[Whole, dict[Whole, str]] = msgspec.field(default_factory=dict)
    verdict: str = "step"
    alive: list[Whole] = msgspec.field(default_factory=list)
    attempts: list[Whole] = msgspec.field(default_factory=list)
    loss_sums: list[float | None] | None = None
    bits_per_byte: float | None = None
    inner_steps: list[Whole] = msgspec.field(default_factory=list)


class Evaluation(Event, frozen=True, kw_only=True):
    """Loss of the weights after step t on held-out windows with so many target `tokens`: nats per token, and
    `bits_per_byte` of text (None: not finite, or not known)."""

    t: Whole
    loss: float | None
    bits_per_byte: float | None
    tokens: Whole


#: Skip.tensor of a round of which no slot could be filled, as the commit log has it.
STRANDED = "state of slots"


class Skip(Event, frozen=True, kw_only=True):
    """Commit of iteration t without a step: `tensor` overflowed in microbatch `index` at `stage`. With tensor
    `STRANDED` nothing overflowed: no slot of the round could be filled any more, and `index` is the
    first of them."""

    t: Whole
    stage: Whole
    tensor: str
    index: Whole


class Suspected(Event, frozen=True, kw_only=True):
    """Event: verdict of `peer` on the silence of `subject`, which gets no work from it meanwhile. `verdict`:
    "suspected", "refuted" (heard again), "the link is bad", "nobody is heard", "gone". silence_s: its length;
    patience_s: length of silence from which on `subject` is suspected. asked: peer -> its answer about
    `subject`."""

    subject: str
    reason: str
    verdict: str = "suspected"
    silence_s: float = 0.0
    patience_s: float = 0.0
    asked: dict[str, str] = msgspec.field(default_factory=dict)


class Repair(Event, frozen=True, kw_only=True):
    """Event: `peer` sent microbatch (t, index) to another replica of `stage`, as the replica `dead` failed.
    replacement: id of the other one, "" if not told."""

    t: Whole
    index: Whole
    stage: Whole
    dead: str
    replacement: str
    reason: str


class Double(Event, frozen=True, kw_only=True):
    """Event: two replicas had computed the same unit, the share of one microbatch in a stage's gradient;
    `subtracted` took it out of its gradient sum. kept: the other one, whose result counts; "" if not told."""

    t: Whole
    stage: Whole
    unit: Whole
    kept: str
    subtracted: str


class Audit(Event, frozen=True, kw_only=True):
    """Event: finding of `auditor`, which computed the work of `subject` at `stage` in step t again. verdict:
    "same", "different", "withheld", "unable" or "expired" (it did not report in time, or nobody else has the
    weights: then `auditor` is ""). what, found, claimed: the first difference, its hash as computed again and
    in the subject's receipt. receipt: the signed receipt (base64), if it is different. base: hash of the
    commit's log entry."""

    t: Whole
    stage: Whole
    subject: str
    auditor: str
    verdict: str
    base: str = ""
    what: str = ""
    found: str = ""
    claimed: str = ""
    receipt: str = ""


class Refused(Event, frozen=True, kw_only=True):
    """Event: `peer` refused messages or a connection of `subject` ("": unknown), for the `count`-th time."""

    subject: str
    reason: str
    count: Whole


class FaultDelivered(Event, frozen=True, kw_only=True):
    """Event: a fault that a test had planned struck `peer`, or a guest that a test had planned began its
    deed. fault: its kind, such as "kill" or "freeze". phase: when, such as "after step 3"."""

    fault: str
    phase: str


class Checkpoint(Event, frozen=True, kw_only=True):
    """Checkpoint of the state after step t, written to `path`."""

    t: Whole
    path: str


class Waiting(Event, frozen=True, kw_only=True):
    """Event: `peer` waits until an outside condition changes, and with it the run if it is the leader."""

    reason: str


class Rollback(Event, frozen=True, kw_only=True):
    """Event: the run went back to the state after step t. reason: "" if not told."""

    t: Whole
    reason: str = ""


class Controlled(Event, frozen=True, kw_only=True):
    """Event: decision of the owner, as logged. action: "pause" (t: the step after which no other begins),
    "continue", "steps" (t: the new number of steps)."""

    action: str
    t: Whole = 0

    def words(self) -> str:
        """The owner's decision as a sentence."""
        match self.action:
            case "pause":
                return f"the owner pauses the run after step {self.t}"
            case "continue":
                return "the owner continues the run"
        return f"the owner sets the number of steps to {self.t:,}"


class RunFinished(Event, frozen=True, kw_only=True):
    """End of the run after step t."""

    t: Whole
    reason: str


class Timing(Event, frozen=True, kw_only=True):
    """Event: work of `peer` between its previous step and step t, which it has just applied: seconds by kind
    of task (forward_s with embedding and head, weight_gradient_s with those computed again, reduce_s and
    apply_s without waiting; of inner steps of pipeline islands input_gradient_s has the whole backward pass,
    apply_s the optimizer step), idle_s without any task (0 in its
    first step), and bytes of payloads sent (bytes_activations with input gradients). span_s: seconds since it
    applied its previous step; 0 if unknown. reducing_s: from the start of the committed reduce attempt until
    the step was applied. transfer_s: idle seconds in which it waited for links to deliver activations and
    gradients."""

    t: Whole
    stage: Whole
    forward_s: float = 0.0
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    reduce_s: float = 0.0
    apply_s: float = 0.0
    idle_s: float = 0.0
    bytes_activations: Whole = 0
    bytes_reduce: Whole = 0
    span_s: float = 0.0
    reducing_s: float = 0.0
    transfer_s: float = 0.0


class Vitals(Event, frozen=True, kw_only=True):
    """Event: `peer` reports measurements of itself and its links, every few seconds of training. capacity:
    microbatches that it can hold at once. forward_s, backward_s: seconds of forward and backward of one
    microbatch. trips: peer -> round trip in seconds of a small message. rates: peer -> measured bits per
    second of what it sends there. ways: peer -> way of the link to it, for links that are not direct:
    "punched" (iroh, over UDP), "relayed" (iroh's relay), or the id of its carrier. program: version of its
    program."""

    stage: Whole
    capacity: Whole = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    trips: dict[str, float] = msgspec.field(default_factory=dict)
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    ways: dict[str, str] = msgspec.field(default_factory=dict)
    program: str = ""


class Note(Event, frozen=True, kw_only=True):
    """Event that is only a sentence for people."""

    text: str


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a kind or shape that this program does not know; `fields` is the whole JSON object."""

    kind: str
    time: float
    peer: str
    version: int
    fields: dict[str, Any]


#: All known kinds of events.
KINDS: tuple[type[Event], ...] = tuple(Event.__subclasses__())

_KNOWN: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Union[KINDS])  # noqa: UP007
_ANY = msgspec.json.Decoder(dict[str, Any])
_ENCODER = msgspec.json.Encoder()


def encode_event(event: Event | Unknown) -> bytes:
    """Event as a line of JSON, without the newline."""
    return _ENCODER.encode(event.fields if isinstance(event, Unknown) else event)


def decode_event(line: bytes) -> Event | Unknown:
    """Event of one line of the log, without its newline; `Unknown` if this version does not know its kind or
    fields. Raises ValueError or msgspec.DecodeError unless the line is a JSON object with a `kind`."""
    try:
        try:
            return _KNOWN.decode(line)
        except msgspec.ValidationError:  # written by another version, or not an event
            raw = _ANY.decode(line)
    except RecursionError:
        raise ValueError("an event nested too deeply") from None
    kind, time, peer, version = (raw.get(key) for key in ("kind", "time", "peer", "version"))
    if not isinstance(kind, str):
        raise ValueError("an event without a kind")
    return Unknown(
        kind=kind,
        time=float(time) if isinstance(time, int | float) and abs(time) <= WHOLE_MAX else 0.0,
        peer=peer if isinstance(peer, str) else "",
        version=version if isinstance(version, int) else 0,
        fields=raw,
    )
