"""All relays of a stage are killed: one volunteer, and the run goes on, without an operator and exactly."""

from __future__ import annotations

import signal
from pathlib import Path

from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Event, Rollback, Step, Timing
from support.local_swarms import check_exact, created, history_of, small_run, steps_of, swarm_of


def test_one_volunteer_restores_a_stage_whose_relays_were_all_killed(
    tmp_path: Path, texts: Path, supervisor: Supervisor
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
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda seen: isinstance(seen[-1], Step) and seen[-1].t >= 8)
        killed = ("relay-2.0", "relay-2.1")
        for name in killed:
            swarm.processes[name].signal(signal.SIGKILL)
        lost = {swarm.peer_id(name) for name in killed}  # their last reports may still come
        volunteer = swarm.join("ada", swarm.ticket())
        swarm.until(lambda seen: len([t for peer, t in at_stage(2, seen).items() if peer not in lost]) > 0)
        (first,) = [t for peer, t in at_stage(2, swarm.seen).items() if peer not in lost]
        swarm.until(lambda seen: steps_of(seen)[-1:] >= [first + 5])
        back = [rollback.t for rollback in swarm.of(Rollback)]
        swarm.stop()
        swarm.to_the_end()
        assert volunteer.status == 0
    history = history_of(directory)
    # Where it died with the step of a snapshot that the others have, nothing is computed again.
    assert first > 1 and (first - 1) % 3 == 0
    assert back in ([], [first - 1]) and (history.rolled_back > 0) == bool(back)
    check_exact(directory, history.t)


def at_stage(stage: int, seen: list[Event]) -> dict[str, int]:
    """By peer, the first step that it took at the stage."""
    found: dict[str, int] = {}
    for event in seen:
        if isinstance(event, Timing) and event.stage == stage:
            found.setdefault(event.peer, event.t)
    return found
