"""Each preset in a real swarm: a relay killed while it computes, one in the exchange, one between choice and
application of a step; the first two come back, and a new one takes the place of the third. No bit differs.

`python -m benchmarks.recovery.presets` runs all of them and writes the result."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import FaultDelivered, PeerActive, Step
from anabranch.train.recipes.presets import PRESETS, with_preset
from support.crash_points import PLAN_FILE
from support.local_swarms import Swarm, created, history_of, small_run, steps_of, swarm_of

#: Islands, and most inner steps of a round, of which half are taken in advance where the preset overlaps.
ISLANDS, INNER = 4, 8
#: Steps of the run file: more than are taken, since the run is stopped. Two are synchronous before rounds.
STEPS = 100_000
#: First iteration in which a relay may be killed: with islands the second round.
FIRST = 4
#: Presets in the ordinary tests; the others are long ones. Crews that lose a relay: test_islands.py.
ORDINARY = ("dedloc",)


def run_of(texts: Path, name: str) -> RunConfig:
    """Preset in small: its rules, four islands of one machine or of two stages, or one of six machines."""
    settings = PRESETS[name].settings
    stages, islands = settings.get("pipeline.stages", 2), "round.slots" in settings
    changes: dict[str, object] = {
        "pipeline.stages": stages,
        "batch.microbatches": 2 * ISLANDS,
        "fleet.data_nodes": 2 if stages else 1,
        "fleet.relays_per_stage": [ISLANDS if islands else 3] * max(1, stages),
        "fleet.minimum": ISLANDS if islands else 3,
    }
    if islands:
        steps = min(settings["round.steps"], INNER)
        overlap = min(settings.get("round.overlap", 0), steps // 2)
        changes |= {"round.slots": ISLANDS, "round.steps": steps, "round.overlap": overlap}
        changes["round.start"] = 2.5 / STEPS
    plain = small_run(texts, run__steps=STEPS, evaluation__every=0, checkpoint__every=STEPS)
    return with_preset(plain, name, changes)


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.soak) for name in PRESETS]
)
def test_kills_in_each_phase_and_a_joiner_cost_no_bit(
    name: str,
    texts: Path,
    tmp_path: Path,
    supervisor: Supervisor,
    record_property: Callable[[str, object], None],
) -> None:
    run = run_of(texts, name)
    stages = max(1, run.pipeline.stages)
    directory = created(tmp_path / "run", run)
    computing = "computing" if run.pipeline.whole else "inner" if run.round.slots else "mid_backward"
    victims = {computing: "relay-1.0", "reducing": f"relay-{stages}.1", "committed": "relay-1.2"}
    armed = {at: tmp_path / at for at in victims}
    plans = {
        victim: {"at": at, "iteration": FIRST, "armed": str(armed[at])} for at, victim in victims.items()
    }
    if run.round.steps > 1 and computing == "computing" and run.round.slots:
        plans["relay-1.0"]["after_s"] = 0.01  # the first of its inner steps is taken then
    struck: dict[str, int] = {}
    with swarm_of(directory, run, supervisor, plans) as swarm:
        swarm.until(lambda seen: steps_of(seen)[-1:] >= [FIRST])
        for at, victim in victims.items():
            armed[at].touch()
            process = swarm.processes[victim]
            swarm.until(lambda seen, process=process: not process.running)  # type: ignore[misc]
            assert process.status == -signal.SIGKILL
            struck[at] = fault_of(directory, victim, at)
            (directory.peer(victim) / PLAN_FILE).unlink()
            if at != "committed":
                begun = len(swarm.seen)
                swarm.join(victim, swarm.ticket(), ["--stage", victim[6]])
                swarm.until(lambda seen, who=victim, begun=begun: active(swarm, who, begun))  # type: ignore[misc]
        begun = len(swarm.seen)
        swarm.join("ada", swarm.ticket(), ["--stage", "1"])
        swarm.until(lambda seen: active(swarm, "ada", begun))
        after = max(steps_of(swarm.seen))
        swarm.until(lambda seen: isinstance(seen[-1], Step) and seen[-1].t > after + 2 and owns(swarm, "ada"))
        swarm.stop()
        swarm.to_the_end()
    history, report = history_of(directory), verify(directory.path)
    assert report.holds and report.promise == "bits", "\n".join(report.lines())
    assert report.steps == history.t > after
    if run.round.slots:
        assert all(t in history.plans for t in struck.values())
        crew = {peer for slot in history.plans[struck[computing]] for peer in slot.crew}
        assert swarm.peer_id("relay-1.0") in crew
    record_property("faults", " ".join(f"{at}:{t}" for at, t in struck.items()))
    record_property("iterations", history.t)


def fault_of(directory: RunDirectory, victim: str, at: str) -> int:
    """Iteration in which a relay killed itself at the point `at`, by the event that it wrote before."""
    [fault] = events_of(directory.peer(victim) / "events.jsonl", FaultDelivered)
    where, _, t = fault.phase.partition(" of iteration ")
    assert (fault.fault, where) == ("kill", at)
    return int(t)


def active(swarm: Swarm, name: str, begun: int) -> bool:
    """True if a relay became active after the first `begun` events."""
    later = [event.subject for event in swarm.seen[begun:] if isinstance(event, PeerActive)]
    return bool(later) and swarm.peer_id(name) in later


def owns(swarm: Swarm, name: str) -> bool:
    """True if a committed step has a microbatch or slot of a relay of stage 1."""
    peer = swarm.peer_id(name)
    stages = (commit.stages[1] for commit in history_of(swarm.directory).commits if commit.stages)
    return any(peer in {stage.members[owner] for owner in stage.owners if owner >= 0} for stage in stages)
