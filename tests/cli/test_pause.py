"""`pause` of this machine's peers: which of them, for how long, and what a joining peer makes of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest

from anabranch import lending
from anabranch.cli.main import main
from anabranch.hours import WhenIdle
from anabranch.lending import PAUSE, Lending, Pause, begin_pause, end_pause, pause_of
from anabranch.net.identity import Identity
from anabranch.net.ticket import PeerAddress, issue_ticket
from anabranch.node.driver.peer_driver import Outcome
from anabranch.node.lifecycle import join, peer_home
from anabranch.node.lifecycle.peer_home import claimed


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".anabranch"


@pytest.fixture
def peers(base: Path) -> Iterator[Path]:
    """Peers of two runs, in the folders that `join` chooses for them, two with `--gpus`; one has ended."""
    with ExitStack() as running:
        for name in ("tiny-1", "tiny-1-2", "tiny-12", "big/gpu-0", "big/gpu-1"):
            running.enter_context(claimed(base / name, exclusive=True))
        with claimed(base / "tiny-1-3", exclusive=True):
            pass
        yield base


def paused(base: Path) -> set[str]:
    return {str(file.parent.relative_to(base)) for file in base.rglob(PAUSE)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"tiny-1", "tiny-1-2", "tiny-12", "big/gpu-0", "big/gpu-1"}),
        (["tiny-1"], {"tiny-1", "tiny-1-2"}),
        (["big"], {"big/gpu-0", "big/gpu-1"}),
        (["--home", "big"], {"big/gpu-0", "big/gpu-1"}),
        (["--home", "tiny-1"], {"tiny-1"}),
    ],
)
def test_the_running_peers_that_are_named_are_paused(
    arguments: list[str], expected: set[str], peers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[:1] == ["--home"]:
        arguments = ["--home", str(peers / arguments[1])]
    assert main(["pause", *arguments]) == 0
    assert paused(peers) == expected
    first, *homes = capsys.readouterr().out.splitlines()
    does = "peer hands over and pauses" if len(expected) == 1 else "peers hand over and pause"
    assert first == f"{len(expected)} {does} until `anabranch pause --end`:"
    assert {str(Path(home.strip()).relative_to(peers)) for home in homes} == expected
    assert main(["pause", "--end"]) == 0
    assert f"join{'s' * (len(expected) == 1)} again:" in capsys.readouterr().out and not paused(peers)


def test_a_pause_of_minutes_ends_by_itself(peers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pause", "tiny-12", "--minutes", "30"]) == 0
    assert re.search(r"pauses until (\d{4}-\d\d-\d\d )?\d\d:\d\d:\n", capsys.readouterr().out)
    home = peers / "tiny-12"
    pause = pause_of(home)
    assert pause is not None and pause.until_s is not None
    assert time.time() < pause.until_s <= time.time() + 1800
    begin_pause(home, Pause(time.time() - 1.0))
    assert pause_of(home) is None and Lending(home, None).refusal() is None


def test_where_no_peer_runs_nothing_is_written(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed(base / "tiny-1", exclusive=True):
        pass
    for arguments in ([], ["tiny-1"], ["--home", str(base / "other")]):
        assert main(["pause", *arguments]) == 2
        assert "no peer runs here: looked in " in capsys.readouterr().err
    assert not paused(base)
    assert main(["pause", "--end"]) == 0
    assert "nothing is paused in " in capsys.readouterr().out


def test_a_pause_whose_peer_ended_is_ended_too(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed(base / "tiny-1", exclusive=True):
        assert main(["pause"]) == 0
    capsys.readouterr()
    assert main(["pause", "--end"]) == 0
    assert capsys.readouterr().out == "0 peers join again; 1 more that were paused do not run\n"
    assert not paused(base)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--minutes", "0"], "--minutes 0: it must be"),
        (["--minutes", "nan"], "--minutes nan: it must be"),
        (["--end", "--minutes", "5"], "give one of them"),
        (["tiny-1", "--home", "x"], "RUN and --home: give one of them"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pause", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"until_s": "soon"}', "\xff"])
def test_a_file_that_nobody_understands_is_a_pause(text: str, tmp_path: Path) -> None:
    (tmp_path / PAUSE).write_text(text, "latin-1")
    assert pause_of(tmp_path) == Pause(None)
    end_pause(tmp_path)
    assert pause_of(tmp_path) is None


def test_a_pause_comes_before_the_hours(tmp_path: Path) -> None:
    now = time.localtime()
    minute = 60 * now.tm_hour + now.tm_min
    later = lending.Hours((minute + 120) % 1440, (minute + 180) % 1440)
    refusal = Lending(tmp_path, later).refusal()
    assert refusal is not None and refusal.leaving == "the hours of this machine are over"
    (tmp_path / PAUSE).write_text(json.dumps({"until_s": None}))
    refusal = Lending(tmp_path, later).refusal()
    assert refusal is not None and refusal.leaving == "this machine is paused by its user"


@pytest.mark.slow
def test_whether_the_machine_is_idle_is_watched_during_a_pause(tmp_path: Path) -> None:
    """Asked after the pause alone it would answer as before it, until it has looked twice."""
    looked: list[bool] = []

    class Idle(WhenIdle):
        def open(self, now: datetime) -> bool:
            looked.append(True)
            return False

    begin_pause(tmp_path, Pause(None))
    refusal = Lending(tmp_path, Idle(lambda: 0.0)).refusal()
    assert looked and refusal is not None and "paused" in refusal.waiting


def test_a_home_of_another_user_is_left_alone(
    peers: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = peer_home.in_use

    def in_use(home: Path) -> bool:
        if home == first:
            raise PermissionError(13, "Permission denied")
        return look(home)

    first = min(path.parent for path in peers.rglob("lock"))
    monkeypatch.setattr(peer_home, "in_use", in_use)
    assert main(["pause"]) == 0
    assert "left alone" in capsys.readouterr().err
    assert paused(peers) and not (first / PAUSE).exists()


@pytest.mark.parametrize(
    ("outcome", "left"),
    [
        (Outcome("left: paused by its user", ok=True), True),
        (Outcome("it is overdue with its slot", ok=True), True),
        (Outcome("expelled", ok=False), False),
        (Outcome("the run is over: all 4 steps are committed", ok=True, over=True), False),
    ],
)
def test_a_part_that_ends_while_its_machine_leaves_is_no_last_one(outcome: Outcome, left: bool) -> None:
    """Whatever the run says: it may have begun to remove the peer for another reason."""
    assert join._ended_by("paused by its user", outcome) is left
    assert not join._ended_by("", outcome)


@pytest.mark.costly
def test_a_machine_that_has_not_joined_yet_pauses_too(tmp_path: Path) -> None:
    """It waits while it still dials, goes on, waits when it starts anew, and Ctrl+C ends it there."""
    owner = Identity.generate()
    door = [PeerAddress(owner.peer_id, "127.0.0.1", 1)]
    ticket = issue_ticket(owner, run="x", role="relay", expires_at_s=int(time.time()) + 600, peers=door)
    home = tmp_path / "home"
    command = [sys.executable, "-m", "anabranch.cli.main", "join", ticket.text, "--home", str(home)]
    for while_dialling in (True, False):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as joining:
            assert joining.stdout is not None
            if while_dialling:
                _said(joining, "no connection to the run's data node")
                assert main(["pause", "--home", str(home)]) == 0
                _said(joining, "this machine is paused until `anabranch pause --end`; waiting until then")
                assert main(["pause", "--home", str(home), "--end"]) == 0
                _said(joining, "no connection to the run's data node")
                assert main(["pause", "--home", str(home), "--minutes", "9"]) == 0
            _said(joining, "this machine is paused until ")
            joining.send_signal(signal.SIGINT)
            assert joining.wait(60) == 0
    assert not (home / "ended").exists(), "the run is not over"


def _said(process: subprocess.Popen[str], part: str) -> None:
    seen = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if part in line:
            return
    raise AssertionError(f"it ended without saying {part!r}:\n{''.join(seen)}")
