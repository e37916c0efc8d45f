"""Live guests that are honest until the last steps of a run: it ends, and nothing of it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch
from anabranch.audit.verify import verify
from anabranch.node.local_swarm.supervisor import Supervisor
from support.end_deeds import END_DEEDS, run_last_guest
from support.hostile_runs import hostile_run
from support.local_swarms import small_run

#: Steps of the run: a guest serves before half of them are taken.
STEPS = 150


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("deed", [*END_DEEDS, "frozen"])
def test_a_run_ends_beside_a_guest(deed: str, tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """The last step takes as long as any, and the run ends a tenth of a second after it; 22 s after it beside
    a guest that is frozen then."""
    run = small_run(texts, run__steps=STEPS, checkpoint__every=50, evaluation__every=50)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        hostile.target = run_last_guest
        guest = hostile.invite(deed if deed in END_DEEDS else "silent in the last step", 1, first=True)
        hostile.until(lambda: guest.peer in hostile.serving())
        assert hostile.steps < STEPS // 2
        if deed == "frozen":
            hostile.until(lambda: hostile.steps >= STEPS - 2)
            guest.process.signal(19)
        hostile.swarm.to_the_end(guest.process)
        assert hostile.steps == STEPS and (guest.words("begun") or deed == "frozen")
        assert not hostile.honest_removed(), hostile.swarm.story()
    report = verify(tmp_path / "run")
    assert report.holds and report.promise == "bits", report.lines()
    anabranch.export(tmp_path / "run", tmp_path / "out", STEPS)
