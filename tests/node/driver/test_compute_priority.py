"""A machine's computing has low priority, its messages have not: heartbeats do not wait for its user."""

from __future__ import annotations

import os
import queue
import sys
import threading
from pathlib import Path

import pytest

from anabranch import operating_system
from anabranch.cli.main import build_parser
from anabranch.node.driver.worker_thread import WorkerThread
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerActive, PeerJoined, Step
from anabranch.operating_system import lower_priority
from support.local_swarms import check_exact, created, small_run, swarm_of

NAME, NICE = "guest", 7
linux = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@linux
def test_the_worker_and_its_threads_are_lowered_alone() -> None:
    before, found = priority(), queue.SimpleQueue[int]()
    worker = WorkerThread(lambda action: action(), pytest.fail, max(before, NICE))

    def helped() -> int:
        helper = threading.Thread(target=lambda: found.put(priority()))
        helper.start()
        helper.join()
        return priority()

    worker.submit(helped, found.put)
    assert [found.get(timeout=20) for _ in range(2)] == [max(before, NICE)] * 2
    worker.close()
    assert priority() == before


def test_a_priority_that_is_lower_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(operating_system.sys, "platform", "linux")
    monkeypatch.setattr(operating_system.os, "getpriority", lambda which, who: 12)
    monkeypatch.setattr(operating_system.os, "setpriority", lambda which, who, nice: calls.append(nice))
    for nice in (0, 10, 12, 15):
        lower_priority(nice)
    assert calls == [15]


@pytest.mark.parametrize("command", ["join", "audit"])
def test_low_priority_is_the_default(command: str) -> None:
    parser = build_parser([command])
    assert parser.parse_args([command, "TICKET"]).nice == 10
    assert parser.parse_args([command, "TICKET", "--nice", "0"]).nice == 0


@linux
@pytest.mark.slow
def test_a_volunteer_computes_with_low_priority(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Its worker and its packer are lowered; the thread of its messages is not."""
    run = small_run(texts, run__steps=100_000, evaluation__every=0, checkpoint__every=1000)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        guest = swarm.join(NAME, swarm.ticket(), ["--nice", str(NICE)])
        swarm.until(lambda _: any(each.name == NAME for each in swarm.of(PeerJoined)))
        swarm.until(lambda _: any(e.subject == swarm.peer_id(NAME) for e in swarm.of(PeerActive)))
        threads = [int(each.name) for each in Path(f"/proc/{guest.pid}/task").iterdir()]
        nices = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        assert nices[guest.pid] == priority() and list(nices.values()).count(NICE) >= 2
        swarm.until(lambda _: bool(swarm.of(Step)))
        swarm.stop()
        swarm.to_the_end()
    check_exact(directory, len(swarm.of(Step)))
