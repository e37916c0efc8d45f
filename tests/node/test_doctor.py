"""`anabranch doctor` finds what is wrong, and says what to do about it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from local_swarms import small_run

from anabranch.cli.main import main
from anabranch.config import render_run_file
from anabranch.node import doctor


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", *arguments])
    return status, {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def test_each_stage_of_a_run_is_measured(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(render_run_file(small_run(texts)))
    _, checks = examined(capsys, str(run_file))
    for stage in ("stage 1", "stage 2"):
        assert checks[stage]["verdict"] == "green" and "backward" in checks[stage]["found"]
    assert checks["Python"]["verdict"] == checks["torch"]["verdict"] == "green"


def test_a_port_that_is_taken_and_a_peer_that_is_not_there_are_red(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken, there = f"--port={port}", f"127.0.0.1:{port}"
        status, checks = examined(
            capsys, taken, "--peer", there, "--peer", "nonsense", "--peer", "127.0.0.1:x"
        )
        assert status == 1 and checks["listening"]["verdict"] == "red"
        assert checks[f"peer {there}"]["verdict"] != "red"
    for name in (f"peer {there}", "peer nonsense", "peer 127.0.0.1:x"):
        _, checks = examined(capsys, "--peer", name.removeprefix("peer "))
        assert checks[name]["verdict"] == "red" and checks[name]["repair"]


@pytest.mark.parametrize(
    ("host", "own", "verdict"),
    [
        ("127.0.0.1", "10.0.0.1", "yellow"),
        ("0.0.0.0", "10.0.0.1", "yellow"),
        ("0.0.0.0", "8.8.8.8", "green"),
        ("0.0.0.0", "", "red"),
        ("my.host", "8.8.8.8", "yellow"),
    ],
)
def test_whether_others_can_dial_is_judged_by_the_addresses(
    monkeypatch: pytest.MonkeyPatch, host: str, own: str, verdict: str
) -> None:
    monkeypatch.setattr(doctor, "_own_address", lambda: own)
    assert doctor._reachability(host).verdict == verdict


def test_little_room_is_doubtful_and_none_is_too_little() -> None:
    for found, verdict in ((1 << 40, "green"), (2 << 30, "yellow"), (1 << 20, "red")):
        check = doctor._amount("disk", found, doctor.DISK_BYTES, "free", "make room")
        assert (check.verdict, check.repair) == (verdict, "" if verdict == "green" else "make room")
