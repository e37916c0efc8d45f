"""Event log of one peer: converts the protocol's notes to events, and merges other peers' events.

Every peer writes its events to a file of its own. Their events also go, through the log's leader, to the
founder, which merges them into the run's `events.jsonl`. Only the founder writes events on commits and
membership."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from anabranch.observe import events as log
from anabranch.observe.event_log import EventLog
from anabranch.observe.event_texts import own_event, plain_event
from anabranch.protocol.log.records import Commit, Evaluation, Member, loss_total
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.rounds.plan import Plan, counted

#: Kinds of notes that only the founder writes as events; every peer makes them, from the commit log.
_LEADER_NOTES = frozenset(
    {"step", "evaluation", "peer_joined", "peer_active", "peer_removed", "rollback", "control", "audit"}
)
#: Types of events that the founder refuses from other peers, since it alone writes them.
_LEADER_EVENTS = (
    log.Step, log.Skip, log.Evaluation, log.PeerJoined, log.PeerActive, log.PeerRemoved, log.Rollback,
    log.Controlled, log.RunStarted, log.RunFinished, log.Checkpoint, log.Audit,
)  # fmt: skip
#: Type of event that has the same fields as a note, by the note's kind.
_SAME_FIELDS: dict[str, type[log.Event]] = {
    "peer_removed": log.PeerRemoved,
    "suspected": log.Suspected,
    "refused": log.Refused,
    "waiting": log.Waiting,
    "control": log.Controlled,
    "rollback": log.Rollback,
    "note": log.Note,
    "audit": log.Audit,
}
#: Kinds of tasks whose seconds are those of forward passes; StepAhead has no finer times.
_FORWARDS = ("Forward", "Head", "Embed", "StepAhead", "InnerForward", "InnerHead")
#: Most events in one message, and most bytes of one event, that are sent or accepted.
MAX_EVENTS = 256
MAX_EVENT_BYTES = 65536
#: Most bytes that events of other peers may add to the event log in one process of the founder: a week of a
#: hundred honest relays, at a step every 15 s.
MAX_OTHERS_BYTES = 4 << 30
#: Free bytes of the disk below which others' events are left out: log and checkpoints need them more.
MIN_FREE_BYTES = 256 << 20
#: Seconds between two looks at the free disk.
FREE_CHECK_S = 1.0


class EventWriter:
    """Writes the event log of one peer.

    peer: its id. path: of the log. leads: True at the founder, whoever leads the log: it also writes events
    on commits and membership, and merges those of other peers. membership: members by the commit log, read
    here. iteration_bytes(t), window_bytes(w): bytes of corpus text in iteration t and in evaluation window w,
    set on data nodes. on_event: called for each event that is written. send: sends encoded events on their
    way to the founder. open_t: iteration that is open at this peer, set by the driver before each event.
    """

    def __init__(
        self,
        peer: str,
        leads: bool,
        membership: Membership,
        path: Path,
        send: Callable[[tuple[bytes, ...]], None],
    ) -> None:
        self.iteration_bytes: Callable[[int], int] | None = None
        self.window_bytes: Callable[[int], int] | None = None
        self.on_event: Callable[[log.Event], None] | None = None
        self.path = path
        self._peer = peer
        self._leads = leads
        self._membership = membership
        self._file = EventLog(path)
        self._send = send
        self._unsent: list[bytes] = []
        self._step_at = time.time()
        self.open_t = 0
        """Iteration that was open at this peer before the present event; its step is timed."""
        self._lost = 0
        self._others_bytes = 0
        self._left_out_because = ""
        self._free_checked_at = float("-inf")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a note of this peer's protocol as an event of the log, which `flush` sends to the founder. A
        peer other than the founder writes nothing for the kinds that the founder alone writes
        (`_LEADER_NOTES`). fields: by name, as the kind of note has them. A control note "continue" also
        restarts the time of the open step, so that a pause is no part of its duration."""
        if kind == "control" and fields["action"] == "continue":
            self._step_at = time.time()  # a pause is no part of the next step
        if self._leads or kind not in _LEADER_NOTES:
            self.write(self._event(kind, fields))

    def write(self, event: log.Event) -> None:
        event = own_event(event, self.path.parent)
        self._record(event)
        if not self._leads:
            self._unsent.append(log.encode_event(event))

    def flush(self) -> None:
        """Send the founder events that it lacks, as one message of at most MAX_EVENTS; the others wait for
        the next call. The founder itself has none to send."""
        if self._unsent:
            lines, self._unsent = tuple(self._unsent[:MAX_EVENTS]), self._unsent[MAX_EVENTS:]
            self._send(lines)

    def merge(self, peer: str, lines: tuple[bytes, ...]) -> None:
        """Write events that another peer sent, JSON lines, with all texts short, on one line and without
        control characters, and at no time to come. Left out are unreadable events, those in a third peer's
        name, of types that only the founder writes, and lines after the first MAX_EVENTS of a call; all of
        them on a nearly full disk, or once those of all peers have taken MAX_OTHERS_BYTES, which a note
        tells."""
        if self._left_out():
            return
        for line in lines[:MAX_EVENTS]:
            try:
                event = log.decode_event(line[:MAX_EVENT_BYTES])
            except ValueError:  # unreadable events of other peers are left out
                continue
            if isinstance(event, log.Event) and event.peer == peer and not isinstance(event, _LEADER_EVENTS):
                self._others_bytes += len(line)
                # A time to come would move the clock of all who look on, and hide what happens until then.
                self._record(plain_event(replace(event, time=min(event.time, time.time()))))

    def _left_out(self) -> bool:
        """True while events of other peers are not written, as the disk is nearly full or they have taken
        MAX_OTHERS_BYTES; looked at once in FREE_CHECK_S, between which the last answer holds. A note in this
        log tells each new reason."""
        now = time.monotonic()
        if now < self._free_checked_at + FREE_CHECK_S:
            return bool(self._left_out_because)
        self._free_checked_at, before = now, self._left_out_because
        self._left_out_because = ""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.path.parent).free < MIN_FREE_BYTES:
                self._left_out_because = f"the disk has less than {MIN_FREE_BYTES >> 20} MiB free"
        if self._others_bytes > MAX_OTHERS_BYTES:
            self._left_out_because = f"they have filled {MAX_OTHERS_BYTES >> 30} GiB of the event log"
        if self._left_out_because and self._left_out_because != before:
            text = f"events of other peers are not written: {self._left_out_because}"
            self.write(log.Note(peer=self._peer, text=text))
        return bool(self._left_out_because)

    def close(self) -> None:
        self._file.close()

    def _record(self, event: log.Event) -> None:
        """Write an event and show it. A full disk costs the event, not the run; that is told once, and again
        with the number of lost events when there is room again."""
        try:
            self._file.write(event)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                why = f"events are lost, the event log cannot be written: {error.strerror}"
                self._show(log.Note(peer=self._peer, text=why))
        else:
            if self._lost:
                text = f"{self._lost} events were lost while the event log could not be written"
                self._lost = 0
                self._record(log.Note(peer=self._peer, text=text))
        self._show(event)

    def _show(self, event: log.Event) -> None:
        if self.on_event is not None:
            with contextlib.suppress(OSError):  # the terminal is gone, or its file is on the full disk
                self.on_event(event)

    def _event(self, kind: str, f: Mapping[str, Any]) -> log.Event:
        if kind in _SAME_FIELDS:
            return self._copied(_SAME_FIELDS[kind], f)
        match kind:
            case "step":
                return self._step(f["record"], f.get("plan", ()))
            case "evaluation":
                return self._evaluation(f["evaluation"])
            case "peer_joined":
                return self._joined(f["member"])
            case "peer_active":
                return self._copied(log.PeerActive, f, stage=self._membership.stage_of(f["subject"]) or 0)
            case "repair":
                reason = f"{f['phase']}: {f['reason']}"
                return self._copied(log.Repair, f, dead=f["lost"], replacement="", reason=reason)
            case "double":
                return self._copied(log.Double, f, kept="")
            case "overflow":
                text = f"overflow in {f['tensor']} of microbatch {f['index']} at stage {f['stage']}"
                return log.Note(peer=self._peer, text=f"iteration {f['t']}: {text}")
            case "timing":
                return self._timing(f)
        return log.Note(peer=self._peer, text=f"{kind}: {dict(f)}")

    def _copied(self, kind: type[log.Event], f: Mapping[str, Any], **changes: Any) -> log.Event:
        """Event of type `kind` with those fields of the note `f` that the type has, and with `changes`."""
        names = set(kind.__struct_fields__) - set(log.Event.__struct_fields__)
        return kind(peer=self._peer, **{name: f[name] for name in names if name in f} | changes)

    def _step(self, record: Commit, plan: Plan) -> log.Event:
        now = time.time()
        # Nobody here knows how long a step took that this peer learns of after an absence.
        seconds, self._step_at = (now - self._step_at if record.t == self.open_t else 0.0), now
        if record.witness is not None:
            self.write(self._copied(log.Skip, asdict(record.witness), t=record.t))
        total = loss_total(record)
        size_bytes = self.iteration_bytes(record.t) if self.iteration_bytes and not plan else 0
        accepted = counted(record.stages[1].owners) if plan and record.stages else ()
        owners = {
            stage: {unit: commit.members[owner] for unit, owner in enumerate(commit.owners) if owner >= 0}
            for stage, commit in enumerate(record.stages)
        }
        last = max((member.stage for member in self._membership.members.values()), default=0)
        return self._copied(
            log.Step,
            asdict(record),
            loss=_finite(total / record.tokens) if record.tokens else None,
            tokens=0 if record.witness is not None else record.tokens,
            grad_norm=_finite(record.norm * record.clip_factor if plan else record.norm),
            inner_steps=[
                slot.steps * (k in accepted) if slot.steps else -1 for k, slot in enumerate(plan)
            ],
            seconds=seconds,
            manifest_hash=record.manifest,
            owners=owners,
            alive=[len(self._membership.live(stage, record.t)) for stage in range(last + 1)],
            loss_sums=[_finite(loss) for loss in record.loss_sums],
            bits_per_byte=_finite(total / math.log(2) / size_bytes) if size_bytes else None,
        )

    def _evaluation(self, evaluation: Evaluation) -> log.Event:
        total = loss_total(evaluation)
        size_bytes = 0
        if self.window_bytes is not None:
            size_bytes = sum(self.window_bytes(window) for window in range(len(evaluation.loss_sums)))
        return log.Evaluation(
            peer=self._peer,
            t=evaluation.t,
            loss=_finite(total / evaluation.tokens),
            bits_per_byte=_finite(total / math.log(2) / size_bytes) if size_bytes else None,
            tokens=evaluation.tokens,
        )

    def _joined(self, member: Member) -> log.Event:
        role = "data" if member.stage == 0 else "auditor" if member.is_auditor else "relay"
        return self._copied(log.PeerJoined, asdict(member), subject=member.id, role=role)

    def _timing(self, f: Mapping[str, Any]) -> log.Event:
        s: Mapping[str, float] = f["seconds"]
        return self._copied(
            log.Timing,
            f,
            forward_s=sum(s.get(kind, 0.0) for kind in _FORWARDS),
            input_gradient_s=s.get("InputGradient", 0.0) + s.get("InnerBackward", 0.0),
            weight_gradient_s=s.get("WeightGradient", 0.0) + s.get("Recount", 0.0),
            reduce_s=s.get("Freeze", 0.0) + s.get("SumPart", 0.0) + s.get("Assemble", 0.0),
            apply_s=s.get("Apply", 0.0) + s.get("Skip", 0.0) + s.get("InnerStep", 0.0),
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
