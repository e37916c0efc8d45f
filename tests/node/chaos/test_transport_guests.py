"""Live guests that do odd things over the real transport, with a real worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.config import RunConfig
from anabranch.node.local_swarm.supervisor import Supervisor
from support.hostile_runs import hostile_run
from support.local_swarms import small_run
from support.transport_deeds import run_transport_guest

#: Settings of a run that ends only with its test.
ENDLESS = {"run__steps": 100_000, "checkpoint__every": 100_000, "evaluation__every": 0}
#: Steps under attack.
STEPS = 20


def withstood(deed: str, path: Path, run: RunConfig, supervisor: Supervisor) -> None:
    """A guest at stage 1 does its deed for some steps: no honest member loses its seat, no bit differs."""
    with hostile_run(path, run, supervisor) as hostile:
        hostile.target = run_transport_guest
        guest = hostile.invite(deed, 1)
        hostile.until(hostile.withstood(guest, steps=STEPS))
        hostile.end(guest)
        hostile.goes_on()
        assert not hostile.honest_removed(), hostile.swarm.story()
    report = verify(path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("deed", ["dials anew", "pours", "answers nonsense", "changes fields"])
def test_a_guest_is_withstood(deed: str, tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    snapshots = {"snapshots__every": 2, "snapshots__copies": 2, "audit__share": 0.3}
    withstood(deed, tmp_path / "run", small_run(texts, **ENDLESS, **snapshots), supervisor)


@pytest.mark.soak  # in virtual time: test_two_sums.py
@pytest.mark.timeout(600)
def test_a_guest_that_sums_falsely_for_one(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    withstood("sums falsely for one", tmp_path / "run", small_run(texts, **ENDLESS), supervisor)
