"""A volunteer's terminal tells of its whole part in the run, other stages included."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from anabranch.net.identity import Identity
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import PeerAddress, issue_ticket
from anabranch.node.driver.peer_driver import LivePeer
from anabranch.node.lifecycle.join import JoinOptions, Volunteer
from anabranch.node.lifecycle.volunteer_console import VolunteerConsole
from anabranch.observe.events import Note
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.protocol.messages import StateOffer
from support.hand_made_logs import step


def committed(t: int, stage: int) -> ev.Note:
    """Step whose two units at `stage`, of two, are this machine's."""
    others, mine = (("other",), (0, 0), ()), (("me", "other"), (0, 0), ())
    return ev.Note("step", {"record": step(t, *(mine if s == stage else others for s in range(3)))})


def test_a_relay_that_is_moved_goes_on_telling_and_counting() -> None:
    said: list[str] = []
    console = VolunteerConsole("me", said.append, lambda: 10)
    console.begin()
    for effect in (
        ev.Admitted(1, b""),
        ev.BuildStage(1),
        ev.Note("peer_active", {"subject": "me", "from_iteration": 1}),
        committed(1, stage=1),
        ev.BuildStage(2),
        committed(2, stage=1),
        ev.Note("peer_active", {"subject": "me", "from_iteration": 3}),
        committed(3, stage=2),
    ):
        console.on_effect(effect)
    assert "moved to stage 2 by the run; initializing it" in said
    assert "serving stage 2 from iteration 3 on" in said
    assert console.total == 4, "units of both stages, and none of a stage that it had left"


def test_the_size_of_a_state_is_told_before_it_is_fetched() -> None:
    said: list[str] = []
    console = VolunteerConsole("me", said.append, lambda: 10)
    console.begin()
    console.watch(cast(LivePeer, None), ev.Received("d0", StateOffer(1, 7, "ab", 3)))
    console.watch(cast(LivePeer, None), ev.Finished(cast(Any, None), cast(Any, None)))
    size = 3 * PIECE_BYTES / (1 << 20)
    assert said[-1] == f"fetching the state after iteration 7: at most {size:,.0f} MiB, from the run's peers"


def test_loss_time_left_and_share_are_told_every_ten_seconds() -> None:
    said: list[str] = []
    at = 96.0
    console = VolunteerConsole("me", said.append, lambda: 10, lambda: at)
    console.on_effect(ev.Admitted(1, b""))
    console.on_effect(ev.Note("peer_active", {"subject": "me", "from_iteration": 1}))
    said.clear()
    for t in range(1, 5):
        at += 4.0
        record = replace(committed(t, 1).fields["record"], loss_sums=(96.0, 32.0))
        console.on_effect(ev.Note("step", {"record": record}))
    assert said == [
        "step 1 of 10 is committed, loss 2.000: this machine computed 2 of this step's 2 units of work at "
        "stage 1, 2 in all",
        "step 4 of 10 is committed, loss 2.000, eta 0:24: this machine computed 6 of the last 3 steps' 6 "
        "units of work at stage 1, 8 in all",
    ]


def test_a_run_that_stands_still_is_told_with_the_stage_that_nobody_holds() -> None:
    said: list[str] = []
    at = 0.0
    console = VolunteerConsole("me", said.append, lambda: 10, lambda: at)
    members = {"me": SimpleNamespace(stage=1), "data": SimpleNamespace(stage=0)}
    run = SimpleNamespace(membership=SimpleNamespace(members=members), settings=SimpleNamespace(stages=2))
    live = cast(LivePeer, SimpleNamespace(peer=SimpleNamespace(ctx=SimpleNamespace(run=run))))

    def passes(seconds: int) -> list[str]:
        nonlocal at
        said.clear()
        for _ in range(seconds):
            at += 1.0
            console.watch(live, ev.Wake())
        return list(said)

    assert passes(100) == [], "it is no member yet"
    console.on_effect(ev.Admitted(1, b""))
    assert passes(100) == [
        f"no step was committed for {time}; the run waits for peers of stage 2; this machine stays "
        "(Ctrl+C leaves)"
        for time in ("0:20", "0:40", "1:20")
    ]
    members["other"] = SimpleNamespace(stage=2)
    console.on_effect(committed(1, stage=1))
    assert passes(30) == [], "four times the time of the last step"
    console.on_effect(committed(2, stage=1))
    assert passes(119) == []
    assert passes(1) == ["no step was committed for 2:00; this machine stays (Ctrl+C leaves)"]
    console.on_effect(ev.Note("control", {"action": "pause", "t": 7}))
    assert passes(1000) == []


def test_losses_that_have_no_sum_end_no_volunteer() -> None:
    said: list[str] = []
    console = VolunteerConsole("me", said.append, lambda: 10, lambda: 100.0)
    console.on_effect(ev.Admitted(1, b""))
    console.on_effect(ev.Note("peer_active", {"subject": "me", "from_iteration": 1}))
    record = replace(committed(1, 1).fields["record"], loss_sums=(1.7e308, 1.7e308))
    console.on_effect(ev.Note("step", {"record": record}))
    assert said[-1].startswith("step 1 of 10 is committed: ")


def test_a_pause_and_its_end_are_told() -> None:
    said: list[str] = []
    console = VolunteerConsole("me", said.append, lambda: 10)
    console.on_effect(ev.Note("control", {"action": "pause", "t": 7}))
    console.on_effect(ev.Note("control", {"action": "continue", "t": 0}))
    assert "pauses it after step 7; this machine stays, and waits" in said[0] and "go on" in said[1]


def test_a_volunteer_reads_names_not_ids(tmp_path: Path) -> None:
    owner, said = Identity.generate(), list[str]()
    here = [PeerAddress(owner.peer_id, "127.0.0.1", 9)]
    ticket = issue_ticket(owner, run="r", role="relay", expires_at_s=int(time.time()) + 3600, peers=here)
    volunteer = Volunteer(JoinOptions(ticket, tmp_path), said.append, LivePeer, TcpTransport)
    names = {"3f9a02c1" + 56 * "0": "ada", "70000000" + 56 * "0": ""}
    members = {peer: SimpleNamespace(name=name) for peer, name in names.items()}
    run = SimpleNamespace(membership=SimpleNamespace(members=members))
    volunteer._live = cast(Any, SimpleNamespace(peer=SimpleNamespace(ctx=SimpleNamespace(run=run))))
    volunteer._console.on_event(Note(text="3f9a02c1 is linked through carrier 70000000"))
    assert said == ["ada is linked through carrier 70000000"]
