"""Reports of other peers are not trusted: what cannot be read is left out, and nobody speaks for another.
Steps that a peer learns of late have no duration."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from anabranch.node.driver.event_writer import EventWriter
from anabranch.observe.event_log import events_of, read_events
from anabranch.observe.events import (
    Checkpoint,
    Evaluation,
    Note,
    PeerRemoved,
    RunFinished,
    Step,
    Timing,
    Vitals,
    encode_event,
)
from anabranch.protocol.log.records import Commit, Slot, Witness
from anabranch.protocol.log.records import Evaluation as LoggedEvaluation
from anabranch.protocol.membership.view import Membership
from support.hand_made_logs import step


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    good, forged = (encode_event(Note(peer=peer, text=peer)) for peer in ("liar", "other"))
    journal.merge("liar", (b"", b"{", b"\xff\xfe", b"[" * 60_000, b'{"kind": 3}', forged, good, b"null"))
    journal.close()
    assert [note.text for note in events_of(path, Note)] == ["liar"]


#: More digits than a float holds, and the most that Python reads.
HUGE, LONGEST = b"1" + b"0" * 400, b"9" * 4300


def test_numbers_without_bounds_neither_end_the_leader_nor_get_into_the_log(tmp_path: Path) -> None:
    """A time of 401 digits once raised what nobody caught; two counts of 4,300 digits have a sum that cannot
    be written, so the page's thread ended."""
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    lines = [
        b'{"kind": "%s", "peer": "liar", "time": %s, "text": ""}' % (kind, number)
        for kind in (b"note", b"unheard of")
        for number in (HUGE, LONGEST, b"1e400", b"-" + HUGE)
    ]
    lines += [
        b'{"kind": "timing", "peer": "liar", "t": 1, "stage": 1, "%s": %s}' % (field, number)
        for field in (b"bytes_reduce", b"version", b"span_s")
        for number in (HUGE, LONGEST, b"-" + HUGE)
    ]
    journal.merge("liar", tuple(lines))
    journal.merge("liar", (encode_event(Note(peer="liar", text="it goes on")),))
    journal.close()
    assert [event.text for event in read_events(path) if isinstance(event, Note)] == ["it goes on"]
    assert len(list(read_events(path))) == 1


def test_nobody_reports_from_the_future(tmp_path: Path) -> None:
    """Such a time would move the clock of all pages, and hide what happens until then."""
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    times = (time.time() + 1e6, 9e10, 1e300, 5.0)
    journal.merge("liar", tuple(encode_event(Note(peer="liar", time=at, text="")) for at in times))
    journal.close()
    *late, early = [note.time for note in events_of(path, Note)]
    assert len(late) == 3 and max(late) <= time.time() and early == 5.0


def test_nobody_but_the_leader_tells_of_steps_and_members(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    forged = (
        PeerRemoved(peer="liar", subject="leader", stage=0, reason="gone"),
        RunFinished(peer="liar", t=1, reason="over"),
        Checkpoint(peer="liar", t=1, path="/"),
        Vitals(peer="liar", stage=1),
    )
    journal.merge("liar", tuple(map(encode_event, forged)))
    journal.close()
    assert list(read_events(path)) == [forged[-1]]


def test_a_step_that_is_read_from_the_log_later_has_no_duration(tmp_path: Path, monkeypatch: Any) -> None:
    """A founder that returns reads many commits at once: their rate would be millions of tokens a second."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    for t, open_t, passed in ((1, 1, 2.0), (2, 2, 3.0), (3, 0, 600.0), (4, 0, 0.001), (5, 5, 4.0)):
        now[0] += passed
        journal.open_t = open_t
        journal.note("step", {"record": step(t)})
    now[0] += 3600.0
    journal.note("control", {"action": "continue", "t": 0})
    now[0] += 5.0
    journal.open_t = 6
    journal.note("step", {"record": step(6)})
    journal.close()
    assert [event.seconds for event in events_of(path, Step)] == [2.0, 3.0, 0.0, 0.0, 4.0, 5.0]


def test_losses_that_have_no_sum_are_written(tmp_path: Path) -> None:
    """A leader may log anything, and its log is read by all."""
    path = tmp_path / "events.jsonl"
    journal = EventWriter("other", True, Membership(), path, lambda lines: None)
    for sums in ((1.7e308, 1.7e308), (math.inf, -math.inf)):
        journal.note("step", {"record": replace(step(1), loss_sums=sums)})
        journal.note("evaluation", {"evaluation": LoggedEvaluation(1, sums, 8)})
    journal.close()
    assert [event.loss for event in (*events_of(path, Step), *events_of(path, Evaluation))] == [None] * 4


@pytest.mark.parametrize("batch_tokens", [0, 64])
def test_a_step_that_is_skipped_is_written(tmp_path: Path, batch_tokens: int) -> None:
    """No token counted. The record of a round has no tokens then, that of another step those of its batch."""
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    witness = Witness("r", 1, 0, "contribution")
    record = Commit(
        run="run", epoch=1, term=1, t=3, previous_base="", manifest="", verdict="skip", tokens=batch_tokens,
        loss_sums=(), stages=(), norm=0.0, clip_factor=0.0, learning_rate=0.7, bias_correction1=1.0,
        bias_correction2=1.0, adam_step=2, witness=witness,
    )  # fmt: skip
    journal.note("step", {"record": record})
    journal.close()
    assert [(step.loss, step.tokens) for step in events_of(path, Step)] == [(None, 0)]


def test_a_round_is_written_with_the_inner_steps_of_its_plan(tmp_path: Path) -> None:
    """Also the first one that this process sees: the plan comes with it. Slot 1 has no steps, slot 2 was
    late."""
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    plan = (Slot(0, 5, "a"), Slot(0, 0), Slot(0, 3, "b"))
    record = step(7, (("d",), (), ("",)), (("a", "b"), (0, -1, -1), ("", "")))
    journal.note("step", {"record": record, "plan": plan})
    journal.close()
    assert [list(event.inner_steps) for event in events_of(path, Step)] == [[5, -1, 0]]


def test_the_seconds_of_a_crews_inner_steps_are_in_the_timing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = EventWriter("r", False, Membership(), path, lambda lines: None)
    seconds = {"InnerForward": 1.0, "InnerHead": 2.0, "InnerBackward": 4.0, "InnerStep": 8.0, "Apply": 16.0}
    journal.note("timing", {"t": 3, "stage": 1, "seconds": seconds})
    journal.close()
    (timing,) = events_of(path, Timing)
    assert (timing.forward_s, timing.input_gradient_s, timing.apply_s) == (3.0, 4.0, 24.0)
