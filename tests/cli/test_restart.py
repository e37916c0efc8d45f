"""An unattended leader is started again after an internal failure, and after nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.cli.support.restart import INTERNAL_FAILURE, keep_leading
from support.local_swarms import created, small_run, write_texts
from support.small_disk import small_disk


def command(path: Path, *ends: int) -> list[str]:
    """Process whose nth start ends as the nth of `ends` says: with a status, or by a signal if negative."""
    program = (
        "import os, sys, pathlib\n"
        f"path, ends = pathlib.Path({str(path)!r}), {ends!r}\n"
        "number = int(path.read_text()) if path.exists() else 0\n"
        "path.write_text(str(number + 1))\n"
        "end = ends[number]\n"
        "os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)\n"
    )
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("ends", "starts", "status"),
    [
        ((0,), 1, 0),
        ((1, 0), 1, 1),
        ((2, 0), 1, 2),
        ((INTERNAL_FAILURE, INTERNAL_FAILURE, 0), 3, 0),
        ((-signal.SIGKILL, 0), 2, 0),
        ((-signal.SIGTERM, 0), 1, 128 + signal.SIGTERM),
    ],
)
def test_starts(tmp_path: Path, ends: tuple[int, ...], starts: int, status: int) -> None:
    said: list[str] = []
    assert keep_leading(command(tmp_path / "n", *ends), said.append, wait_s=0.01) == status
    assert int((tmp_path / "n").read_text()) == starts and len(said) == starts - 1


def test_the_wait_doubles_and_a_signal_ends_it(tmp_path: Path) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            signal.raise_signal(signal.SIGTERM)

    ends = [INTERNAL_FAILURE] * 3
    assert keep_leading(command(tmp_path / "n", *ends), say, wait_s=0.02) == INTERNAL_FAILURE
    assert [text.rpartition(" in ")[2] for text in said] == ["0.02 s", "0.04 s", "0.08 s"]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell nobody of a parent's end")
def test_the_leader_stops_cleanly_when_the_wrapper_is_killed(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    leader = (
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        f"    pathlib.Path({str(ended)!r}).touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "for _ in range(1200):\n"
        "    time.sleep(0.05)\n"  # a signal between a check for signals and a sleep does not end that sleep
    )
    wrapper = (
        "import sys\n"
        "from anabranch.cli.support.restart import keep_leading\n"
        f"keep_leading([sys.executable, '-c', {leader!r}], print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", wrapper])
    try:
        wait_for(begun)
    finally:
        process.kill()
        process.wait()
    wait_for(ended)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs")
def test_a_leader_that_begins_on_a_full_disk_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even its report of a crash, or its port, finds room: that is no mistake of the user."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        path = created(disk.path / "run", small_run(write_texts(tmp_path / "texts"))).path
        disk.fill()
        assert main(["resume", str(path), "--no-page"]) == INTERNAL_FAILURE
    error = capfd.readouterr().err
    assert "No space left on device" in error and "make room" in error and "Traceback" not in error
