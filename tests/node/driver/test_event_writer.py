"""Reports of other peers are not trusted: what cannot be read is left out, and nobody speaks for another."""

from __future__ import annotations

from pathlib import Path

from anabranch.node.driver.event_writer import EventWriter
from anabranch.observe.event_log import events_of, read_events
from anabranch.observe.events import Checkpoint, Note, PeerRemoved, RunFinished, Step, Vitals, encode_event
from anabranch.protocol.log.records import Commit, Witness
from anabranch.protocol.membership.view import Membership


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    good, forged = (encode_event(Note(peer=peer, text=peer)) for peer in ("liar", "other"))
    journal.merge("liar", (b"", b"{", b"\xff\xfe", b"[" * 60_000, b'{"kind": 3}', forged, good, b"null"))
    journal.close()
    assert [note.text for note in events_of(path, Note)] == ["liar"]


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


def test_a_round_that_is_skipped_is_written(tmp_path: Path) -> None:
    """It counts no slot, so its record has no tokens."""
    path = tmp_path / "events.jsonl"
    journal = EventWriter("leader", True, Membership(), path, lambda lines: None)
    witness = Witness("r", 1, 0, "contribution")
    record = Commit(
        run="run", epoch=1, term=1, t=3, previous_base="", manifest="", verdict="skip", tokens=0,
        loss_sums=(), stages=(), norm=0.0, clip_factor=0.0, learning_rate=0.7, bias_correction1=1.0,
        bias_correction2=1.0, adam_step=2, witness=witness,
    )  # fmt: skip
    journal.note("step", {"record": record})
    journal.close()
    assert [step.loss for step in events_of(path, Step)] == [None]
