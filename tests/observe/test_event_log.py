"""The event log survives crashes, other versions and strange numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from anabranch.observe.event_log import CHUNK_BYTES, EventLog, EventTail, events_of, read_events
from anabranch.observe.events import (
    KINDS,
    Evaluation,
    Event,
    FaultDelivered,
    Note,
    Repair,
    RunStarted,
    Step,
    Unknown,
    decode_event,
    encode_event,
)


def a_step(t: int = 3, loss: float | None = 0.1 + 0.2) -> Step:
    return Step(
        t=t,
        loss=loss,
        tokens=4096,
        grad_norm=0.5,
        clip_factor=1.0,
        learning_rate=1 / 3,
        seconds=0.25,
        manifest_hash="m",
        owners={0: {0: "a", 1: "b"}, 3: {7: "c"}},
        alive=[2, 2, 1, 2],
        loss_sums=[1.0, math.pi],
    )


def test_events_come_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    written: list[Event] = [
        a_step(),
        Note(text="line\nbreak ü", peer="p"),
        Evaluation(t=0, loss=6.2, bits_per_byte=3.1, tokens=9),
    ]
    with EventLog(path) as log:
        for event in written:
            log.write(event)
    assert list(read_events(path)) == written
    assert events_of(path, Evaluation) == written[2:]
    assert len(path.read_bytes().splitlines()) == 3


def test_a_line_says_what_it_is() -> None:
    fields = json.loads(
        encode_event(Repair(t=1, index=2, stage=3, dead="d", replacement="r", reason="why", time=5.5))
    )
    assert fields["kind"] == "repair" and fields["version"] == 1 and fields["time"] == 5.5
    for kind in (RunStarted, FaultDelivered):
        tag = kind.__struct_config__.tag
        assert tag in ("run_started", "fault_delivered")
        unknown = decode_event(json.dumps({"kind": tag}).encode())  # without its fields
        assert isinstance(unknown, Unknown) and unknown.kind == tag
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS)
    assert set(KINDS) == set(Event.__subclasses__())


def test_a_line_cut_off_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(a_step(1))
        log.write(a_step(2))
    path.write_bytes(path.read_bytes()[:-10])
    assert [e.t for e in events_of(path, Step)] == [1]
    with EventLog(path) as log:
        log.write(a_step(3))
    assert [e.t for e in events_of(path, Step)] == [1, 3]


def test_every_prefix_of_the_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = encode_event(Note(text="ä")) + b"\n"
    for length in range(len(line) + 1):
        path.write_bytes(line + line[:length])
        assert len(list(read_events(path))) == (2 if length >= len(line) - 1 else 1)


def test_unknown_kinds_are_kept_as_they_stand() -> None:
    line = b'{"kind":"comet","time":2,"peer":"p","version":9,"tail":[1,{"a":null}]}'
    event = decode_event(line)
    assert event == Unknown(kind="comet", time=2.0, peer="p", version=9, fields=json.loads(line))
    assert json.loads(encode_event(event)) == json.loads(line)


def test_logs_of_earlier_releases_are_read_though_a_kind_of_theirs_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    redo = b'{"kind":"redo","t":1,"stage":2,"unit":0,"owner":"p","reason":"lost","time":1.5,"version":1}\n'
    path.write_bytes(redo + encode_event(a_step(1)) + b"\n")
    first, second = read_events(path)
    assert isinstance(first, Unknown) and first.kind == "redo" and first.fields["owner"] == "p"
    assert isinstance(second, Step)


def test_known_kinds_in_another_shape_are_kept_too() -> None:
    event = decode_event(b'{"kind":"step","t":"three","time":null}')
    assert isinstance(event, Unknown) and event.kind == "step" and event.fields["t"] == "three"
    newer = decode_event(b'{"kind":"note","text":"x","time":1,"version":1,"mood":"good"}')
    assert newer == Note(text="x", time=1.0)


@pytest.mark.parametrize("line", [b"", b"\n", b"[1]", b'{"time":1}', b'{"kind":3}', b"\xff\x00"])
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode_event(line)


def test_numbers_that_are_not_finite_are_none() -> None:
    event = decode_event(encode_event(a_step(loss=math.inf)))
    assert isinstance(event, Step) and event.loss is None


def test_a_line_that_a_full_disk_cut_costs_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(Note(text="first"))
        whole = log._file

        class Full:
            """A file on a disk with room for ten bytes."""

            def write(self, data: bytes) -> int:
                return int(whole.write(data[:10]) or 0)

        monkeypatch.setattr(log, "_file", Full())
        with pytest.raises(OSError, match="No space"):
            log.write(Note(text="lost"))
        monkeypatch.setattr(log, "_file", whole)
        log.write(Note(text="last"))
    assert [note.text for note in events_of(path, Note)] == ["first", "last"]


def test_a_reader_does_not_take_a_long_event_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long = Note(peer="d", text="x" * (2 * CHUNK_BYTES))
    with EventLog(path) as file:
        for event in (a_step(1), long, a_step(2)):
            file.write(event)
    tail = EventTail(path)
    found: list[Event | Unknown] = []
    while events := tail.read():
        found += events
    assert [type(event) for event in found] == [Step, Note, Step]
    assert tail.read() == []
