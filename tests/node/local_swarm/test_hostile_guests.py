"""A guest with a relay ticket floods a live run's data node with pings, messages about a past iteration and
payloads that never end: the run takes every step, and its resources stay within the budget (I5, I7)."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.config import RunConfig
from anabranch.net.connection_limits import limits_of_run
from anabranch.node.lifecycle.tickets import new_ticket
from anabranch.node.local_swarm.local_swarm import LEADER
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Event, PeerRemoved, Refused
from anabranch.protocol.interface.tasks import PIECE_BYTES
from support.local_swarms import created, small_run, steps_of, swarm_of

#: The run is ended long before its last step.
STEPS = 10_000
#: Reasons with which the data node closes the guest's links, by attack.
REASONS = (
    "too many messages of this kind (the last: Ping)",
    "too many messages about past iterations (the last: Backward)",
    "this peer has",
)
#: Allowance (bytes) for buffers of the connections and for the run itself.
SLACK_BYTES = 96 << 20


@pytest.fixture
def run(texts: Path) -> RunConfig:
    return small_run(texts, run__steps=STEPS, batch__microbatches=16, checkpoint__every=100)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_a_flooding_guest_costs_no_step_and_little_memory(
    tmp_path: Path, run: RunConfig, supervisor: Supervisor
) -> None:
    directory, output = created(tmp_path / "run", run), tmp_path / "guest.txt"
    with swarm_of(directory, run, supervisor) as swarm, open(output, "w") as closed:
        swarm.until(lambda events: 2 in steps_of(events))
        leader = swarm.processes[LEADER].pid
        before_bytes, most_bytes, most_files, attacked_at = resident_bytes(leader), 0, 0, STEPS
        tests = Path(__file__).parents[2]
        # A ticket for each attack: the ban that one of them ends with must not keep the next one out.
        tickets = [new_ticket(directory.path, "relay", 1, 3600.0).text for _ in REASONS]
        guest = subprocess.Popen(
            [sys.executable, "-m", "support.strangers", *tickets],
            cwd=tests, env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tests)])},
            stdout=closed,
        )  # fmt: skip

        def watched(events: list[Event]) -> bool:
            nonlocal most_bytes, most_files, attacked_at
            most_bytes = max(most_bytes, resident_bytes(leader))
            most_files = max(most_files, len(os.listdir(f"/proc/{leader}/fd")))
            if attacked_at == STEPS and all(reason in output.read_text() for reason in REASONS):
                attacked_at = max(steps_of(events))
            return max(steps_of(events)) >= attacked_at + 3

        try:
            swarm.until(watched)
        finally:
            guest.kill()
            guest.wait()
    assert not swarm.of(PeerRemoved), swarm.story()
    told = [event.reason for event in swarm.of(Refused)]
    assert any(REASONS[0] in reason for reason in told)
    share = limits_of_run(100_000, 1.0, 1 << 10, PIECE_BYTES).budgets().ticket
    assert most_bytes - before_bytes < share.memory_bytes + SLACK_BYTES
    assert most_files < 256
    report = verify(directory.path)
    assert report.holds and report.promise == "bits" and report.steps > attacked_at, report.lines()
