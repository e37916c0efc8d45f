"""Lines that the terminal shows of a run's events."""

from __future__ import annotations

import io

import pytest

from anabranch.observe.console.event_console import Console
from anabranch.observe.events import (
    Note,
    PeerActive,
    PeerJoined,
    PeerRemoved,
    Repair,
    RunStarted,
    Step,
    Waiting,
)


def step(t: int, owners: dict[int, dict[int, str]]) -> Step:
    return Step(
        t=t, loss=4.0, tokens=100, grad_norm=1.0, clip_factor=1.0, learning_rate=0.1, seconds=1.0,
        manifest_hash="", owners=owners, alive=[1, 2],
    )  # fmt: skip


def started_by(founder: str, many: int = 1) -> RunStarted:
    return RunStarted(
        peer=founder, run="r", run_id="r", model="tiny", parameters=5, microbatches=many, stages=many,
        tokens_per_iteration=100, steps=9, numerics="", initial_weights_hash="", corpus_fingerprint="",
        tokenizer_hash="", from_iteration=0,
    )  # fmt: skip


def test_the_step_line_tells_which_replica_served_how_much() -> None:
    out = io.StringIO()
    console = Console(steps=9, stream=out)
    # Named in the other order than their ids are in.
    for peer, name, first in (("bb", "relay-1.0", 1), ("aa", "relay-1.1", 1), ("cc", "relay-1.2", 3)):
        joined = PeerJoined(subject=peer, name=name, region="", role="relay", stage=1, numerics_class="")
        console.on_event(joined)
        console.on_event(PeerActive(subject=peer, stage=1, from_iteration=first))
    heads = {unit: "dd" for unit in range(8)}
    console.on_event(step(1, {0: heads, 1: {0: "aa", 1: "bb", 2: "bb", 3: "bb"}}))
    console.on_event(step(2, {0: heads, 1: dict.fromkeys(range(4), "aa")}))
    console.on_event(step(3, {0: heads, 1: dict.fromkeys(range(4), "aa")}))
    console.on_event(PeerRemoved(subject="bb", stage=1, reason="it was switched off"))
    console.on_event(step(4, {0: heads, 1: {0: "aa", 1: "aa", 2: "cc", 3: "aa"}}))
    console.on_event(step(5, {}))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    splits = [line.partition(" | split ")[2] for line in lines]
    assert splits == ["1: 3+1", "1: 0+4", "1: 0+4+0", "1: 3+1", ""]


def test_a_sentence_that_follows_itself_is_printed_once() -> None:
    out = io.StringIO()
    console = Console(steps=9, stream=out)
    for text in ("no checkpoint: no room", "no checkpoint: no room", "still none", "no checkpoint: no room"):
        console.on_event(Note(text=text))
    assert out.getvalue().splitlines() == ["no checkpoint: no room", "still none", "no checkpoint: no room"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_tells_how_long_the_next_step_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out, now = Terminal(), [0.0]
    with Console(steps=9, stream=out) as console:
        console._ticker._now = lambda: now[0]
        console.on_event(step(1, {}))
        begun = len(out.getvalue())
        for now[0] in (1.0, 3.0):
            console._ticker.tick()
        console.say("a sentence")
    assert out.getvalue()[begun:].startswith("\r\033[Kstep 2 ... 0:03\r\033[Ka sentence\n")


def test_one_is_not_many_and_the_first_step_foretells_nothing() -> None:
    out = io.StringIO()
    console = Console(steps=9, stream=out)
    for many in (1, 2):
        console.on_event(started_by("", many))
        for index in range(many):
            console.on_event(Repair(t=many, index=index, stage=1, dead="a", replacement="b", reason="gone"))
        console.on_event(step(many, {}))
    lines = out.getvalue().splitlines()
    assert "1 relay stage, 1 microbatch and 100 tokens" in lines[0]
    assert lines[1] == "0 peers committed the first step, step 1"
    assert lines[2] == "1 microbatch of a at stage 1 was redone; step 1 lost nothing"
    assert lines[3].endswith("eta        -")
    assert "2 relay stages, 2 microbatches and" in lines[4]
    assert lines[6] == "2 microbatches of a at stage 1 were redone; step 2 lost nothing"
    assert lines[7].endswith("eta     0:07")


def test_every_change_of_what_is_waited_for_is_told_with_its_address() -> None:
    out = io.StringIO()
    console = Console(steps=9, stream=out)
    for number in range(3):
        console.on_event(Waiting(reason=f"waiting for peer {number} at 203.0.113.7:900{number}", time=1.0))
    assert out.getvalue().splitlines() == [
        f"waiting for peer {number} at 203.0.113.7:900{number}" for number in range(3)
    ]


def test_nobody_is_told_by_a_number() -> None:
    """Notes of a volunteer that is no member yet are news for its own terminal."""
    out = io.StringIO()
    console = Console(steps=9, stream=out)
    console.on_event(started_by("founder"))
    console.on_event(Note(peer="5f30d83" + "0" * 57, text="others reach this machine directly"))
    console.on_event(Note(peer="founder", text="the run goes on from the checkpoint of step 110"))
    assert "5f30d83" not in out.getvalue() and "checkpoint of step 110" in out.getvalue()
