"""States of the integer worker beside those of the real one."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface import tasks
from anabranch.sim.workers.integer_arithmetic import WORDS
from anabranch.sim.workers.integer_worker import IntegerWorker


@pytest.mark.parametrize("again", ["loaded", "initial"])
def test_weights_that_are_kept_for_audits_are_void_with_a_state_that_is_fetched(again: str) -> None:
    """After a return of the log the next audit of a step may come before the step is taken again: it was made
    with the weights of the false one, and an honest auditor found honest work different."""
    worker = IntegerWorker(1)
    snapshot = worker.run(tasks.Snapshot(0)).outputs
    worker.run(tasks.Apply(1, 0.1, 1.0, 0.1, 0.1, keep=True), ((1,) * WORDS,))
    audit = tasks.AuditUnit(1, 0, True)
    assert not worker.run(audit, (1, 2)).error
    worker.run(tasks.LoadState(0), snapshot) if again == "loaded" else worker.run(tasks.InitState(0))
    assert worker.t == 0 and worker.run(audit, (1, 2)).error == tasks.WEIGHTS_GONE
