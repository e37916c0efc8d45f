"""`verify` of runs with two iterations in flight: zero bits differ, whatever dies; wrong ones are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from anabranch.audit.log_check import read_log
from anabranch.audit.verify import verify
from anabranch.config import RunConfig, load_run_file, render_run_file, with_changes
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import AnyRecord, Commit, Rollback, Witness
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from support.audited_runs import make_run, rewrite_log, small_run
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment

STEPS, START = 7, 2
INT8 = {"wire__activations": "int8", "wire__gradients": "int8", "wire__reduce": "coarse"}


def delayed_run(**changes: Any) -> RunConfig:
    return small_run(steps=STEPS, iteration__delay=1, iteration__delay_from=0.3, **changes)


def ahead_in_mid_backward(t: int) -> Moment:
    """The input gradient of a microbatch of delayed iteration t is being computed before step t - 1."""

    def moment(node: Node, event: ev.Event) -> bool:
        ahead = node.peer.iterations.ahead
        if ahead is None or ahead.t != t:
            return False
        return any(unit.gradient_in is not None and not unit.returned for unit in ahead.units.values())

    return moment


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("moment", "wire"),
    [
        (faults.added_in_mid_backward(4), {}),
        (ahead_in_mid_backward(5), {}),
        (faults.ended(tasks.Freeze, 4), INT8),
        (faults.chosen(4), INT8),
    ],
    ids=["mid-backward", "mid-backward ahead", "reduce", "chosen"],
)
def test_a_peer_that_dies_changes_no_bit(moment: Moment, wire: dict[str, Any], tmp_path: Path) -> None:
    """The proof holds with two iterations in flight (I3)."""
    planned: list[Fault] = []

    def crash(world: World) -> None:
        planned.append(Fault(world, ("r1.0", "r1.1", "r1.2"), moment, faults.kill()))

    run = make_run(tmp_path, delayed_run(**wire), replicas=(3, 2), seed=5, spoil=crash)
    assert planned[0].delivered
    report = verify(run.path)
    assert report.holds and report.promise == "bits", report.lines()
    assert report.removals == 1 and report.steps == STEPS


@pytest.mark.costly
def test_the_delay_is_part_of_the_genesis(tmp_path: Path) -> None:
    """A replay on another version of the weights finds other bits."""
    directory = make_run(tmp_path, delayed_run())
    assert verify(directory.path, jobs=1, independent=True).holds
    run = with_changes(load_run_file(directory.run_file), {"iteration.delay_from": 0.5})
    directory.run_file.write_text(render_run_file(run))
    report = verify(directory.path)
    assert not report.holds and report.differ
    assert any("iteration.delay_from" in problem for problem in report.problems), report.problems


def test_a_skipped_step_after_a_rollback_may_change_what_a_state_keeps(tmp_path: Path) -> None:
    """The weights predicted for the next iteration are part of a state, and a skip brings in others."""
    directory = make_run(tmp_path, delayed_run())

    def skip(records: list[AnyRecord]) -> list[AnyRecord]:
        at = next(i for i, r in enumerate(records) if isinstance(r, Commit) and r.t == 5)
        fifth = records[at]
        assert isinstance(fifth, Commit)
        state = tuple(stage.fingerprint_before for stage in fifth.stages)
        skipped = {"verdict": "skip", "loss_sums": (), "stages": (), "adam_step": 4}
        skipped["witness"] = Witness("r1.0", 1, 0, "activation")
        back = Rollback(4, 4, "taken up", state)
        return [*records[:at], back, structs.replace(fifth, **skipped), *records[at + 1 :]]

    rewrite_log(directory, skip)
    assert not any("another state" in problem for problem in read_log(directory.log).problems)
    report = verify(directory.path)  # the replay finds the state of a step there, not of a skip
    assert not report.holds and report.differ

