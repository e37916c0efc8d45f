"""All relays of a stage are killed: one volunteer, and the run goes on, without an operator and exactly."""

from __future__ import annotations

import signal
from pathlib import Path

from local_swarms import check_exact, created, history_of, small_run, steps_of, swarm_of

from anabranch.node.children import Nursery
from anabranch.observe.events import Rollback, Step


def test_one_volunteer_restores_a_stage_whose_relays_were_all_killed(
    tmp_path: Path, texts: Path, nursery: Nursery
) -> None:
    run = small_run(
        texts,
        run__steps=100_000,
        fleet__minimum=2,
        evaluation__every=0,
        checkpoint__every=100_000,
        snapshots__every=3,
    )
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, nursery) as swarm:
        swarm.until(lambda seen: isinstance(seen[-1], Step) and seen[-1].t >= 8)
        for name in ("relay-2.0", "relay-2.1"):
            swarm.processes[name].signal(signal.SIGKILL)
        volunteer = swarm.join("ada", swarm.ticket())
        swarm.until(lambda seen: isinstance(seen[-1], Rollback))
        back = swarm.of(Rollback)[-1]
        swarm.until(lambda seen: steps_of(seen)[-1:] >= [back.t + 5])
        swarm.stop()
        swarm.to_the_end()
        assert volunteer.status == 0
    history = history_of(directory)
    assert back.t % 3 == 0 and back.t > 0
    assert history.rolled_back > 0
    check_exact(directory, history.t)
