"""Real processes that hold the whole model: synchronous steps, then rounds, with a relay that is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import PeerJoined, Step
from anabranch.protocol.rounds.plan import counted
from support.local_swarms import check_exact, created, history_of, small_run, swarm_of


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 6])
def test_a_killed_relay_costs_its_slot_and_no_bit(
    texts: Path, tmp_path: Path, supervisor: Supervisor, kill_at: int
) -> None:
    run = small_run(
        texts,
        run__steps=68,
        pipeline__stages=0,
        round__slots=3,
        round__steps=4,
        round__start=0.06,
        fleet__relays_per_stage=[3],
        fleet__minimum=3,
        evaluation__every=8,
        checkpoint__every=100,
    )
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda seen: any(isinstance(e, Step) and e.t == kill_at for e in seen))
        swarm.processes["relay-1.1"].signal(signal.SIGKILL)
        swarm.to_the_end()
    check_exact(directory, 20)
    history = history_of(directory)
    rounds = [commit for commit in history.commits if commit.t in history.plans]
    assert swarm.processes["relay-1.1"].status == -signal.SIGKILL
    # So short a run may end before the leader removes it, which asks others first.
    joined = events_of(directory.events, PeerJoined)
    [victim] = {each.subject for each in joined if each.name == "relay-1.1"}
    last = rounds[-1].stages[1]
    assert victim not in {last.members[owner] for owner in last.owners if owner >= 0}
    assert len(rounds) == 16 and all(counted(commit.stages[1].owners) for commit in rounds)
