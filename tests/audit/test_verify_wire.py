"""`verify` of runs with codecs at the cuts and coarse sums: zero bits differ, whatever dies; a codec that is
applied on one side only is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.audit.verify import verify
from anabranch.config import load_run_file, render_run_file, with_changes
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import AnyRecord, Genesis
from anabranch.sim.kernel.swarm_world import World
from support.audited_runs import make_run, rewrite_log, small_run
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment

INT8: dict[str, Any] = {"wire__activations": "int8", "wire__gradients": "int8"}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("moment", "wire"),
    [
        (faults.added_in_mid_backward(3), INT8),
        (faults.added_in_mid_backward(3), {**INT8, "wire__gradient_rounding": "stochastic"}),
        (faults.ended(tasks.Freeze, 4), {"wire__activations": "int4", "wire__reduce": "coarse"}),
        (faults.chosen(3), {**INT8, "wire__reduce": "coarse", "wire__block": 40}),
    ],
    ids=["int8", "stochastic", "coarse", "both"],
)
def test_a_peer_that_dies_changes_no_bit(moment: Moment, wire: dict[str, Any], tmp_path: Path) -> None:
    """The proof holds for every codec (I3)."""
    planned: list[Fault] = []

    def crash(world: World) -> None:
        planned.append(Fault(world, ("r1.0", "r1.1", "r1.2"), moment, faults.kill()))

    run = make_run(tmp_path, small_run(**wire), replicas=(3, 2), seed=5, spoil=crash)
    assert planned[0].delivered
    report = verify(run.path)
    assert report.holds and report.promise == "bits", report.lines()
    assert report.removals == 1 and report.counts["evaluations"].compared == 6


def test_another_wire_than_that_of_the_genesis_is_a_problem(tmp_path: Path) -> None:
    """The keys are part of the run's definition: a replay with others finds other bits, too."""
    directory = make_run(tmp_path, small_run(**INT8))
    assert verify(directory.path).holds
    run = with_changes(load_run_file(directory.run_file), {"wire.gradients": "bf16", "wire.block": 32})
    directory.run_file.write_text(render_run_file(run))
    report = verify(directory.path)
    assert not report.holds and report.differ
    assert any("wire.block, wire.gradients" in problem for problem in report.problems), report.problems


@pytest.mark.costly
@pytest.mark.slow
def test_processes_share_the_replay_of_coarse_sums(tmp_path: Path) -> None:
    """And the independent implementation, which rounds by its own formulas, stays near."""
    directory = make_run(tmp_path, small_run(**INT8, wire__reduce="coarse"))
    report = verify(directory.path, jobs=2, independent=True)
    assert report.holds, report.lines()
    assert report.independent
    assert max(each.distance for each in report.independent if each.of == "mean losses") < 1e-2


def test_a_run_of_an_earlier_release_has_no_wire(tmp_path: Path) -> None:
    """Its genesis record lacks the section, which is that of nothing encoded."""

    def without(records: list[AnyRecord]) -> list[AnyRecord]:
        first = records[0]
        assert isinstance(first, Genesis)
        before, _, after = first.config.partition("[wire]")
        config = before + after[after.index("[evaluation]") :]
        return [msgspec.structs.replace(first, config=config), *records[1:]]

    directory = make_run(tmp_path, small_run(steps=2))
    rewrite_log(directory, without)
    report = verify(directory.path)
    assert report.holds, report.lines()
