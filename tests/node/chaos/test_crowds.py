"""Live crowds: a guest with one ticket for any number of peers, and many keys."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerJoined
from anabranch.protocol.fleet.admission import MEMBERS_BYTES
from anabranch.protocol.log.records import Genesis, decode_entry
from support.hostile_runs import hostile_run
from support.local_swarms import PATIENCE_S, Swarm, created, small_run, swarm_of

#: Settings of a run that ends only with its test.
ENDLESS = {"run__steps": 100_000, "checkpoint__every": 100_000, "evaluation__every": 0}
MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="each key has a loopback address of its own")


def class_of(directory: RunDirectory) -> str:
    """Numerics class of a run that was founded."""
    record = decode_entry(directory.log.read_bytes().splitlines()[0]).record
    assert isinstance(record, Genesis)
    return record.numerics_class


@contextmanager
def crowd(swarm: Swarm, deed: str, count: int, numerics_class: str = "") -> Iterator[Path]:
    """Process of so many keys with the run's ticket for relays, and the file of its output."""
    output = swarm.directory.path / f"crowd-{deed}.txt"
    arguments = [deed, swarm.ticket(), str(count), numerics_class]
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.crowd", *arguments], stdout=file, stderr=file,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        try:
            yield output
        finally:
            process.kill()
            process.wait()


def resident_bytes(swarm: Swarm) -> int:
    statm = Path(f"/proc/{swarm.processes['data-0'].pid}/statm").read_text("ascii")
    return int(statm.split()[1]) * resource.getpagesize()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_hundreds_of_keys_with_long_texts_come_in_short_records(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """They are in one record no more: with a thousand it, or the Welcome that lists them, was longer than a
    message may be, and the process that leads ended."""
    run = small_run(texts, **ENDLESS)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        with crowd(swarm, "join", 200, class_of(directory)) as output:
            while "linked" not in output.read_text():  # on a busy machine that takes minutes
                time.sleep(0.5)
            hostile.until(lambda: len(swarm.of(PeerJoined)) > 64)
            hostile.goes_on(10)
            assert "Welcome=" in output.read_text()
        longest = max(map(len, directory.log.read_bytes().splitlines()))
        assert longest < MEMBERS_BYTES / 16, f"a line of {longest} bytes"
        hostile.goes_on(5)
        own = {event.subject for event in swarm.of(PeerJoined) if event.name in swarm.processes}
        assert not [event for event in hostile.honest_removed() if event.subject in own], swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_long_early_messages_of_many_keys_take_little_memory(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Nothing is open while the leader waits for relays: of four keys it kept 1,024 messages of a megabyte,
    which take a dozen times that in memory."""
    run = small_run(texts, **ENDLESS)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        before, since = resident_bytes(swarm), time.monotonic()
        with crowd(swarm, "early", 4) as output:
            while "said" not in output.read_text() and time.monotonic() < since + PATIENCE_S:
                time.sleep(0.5)
                assert resident_bytes(swarm) < before + 512 * MIB
            assert "linked" in output.read_text()
