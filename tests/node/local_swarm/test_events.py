"""The events of a local swarm, as whoever started it reads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, with_changes
from anabranch.errors import UserError
from anabranch.node.local_swarm.local_swarm import LEADER, LocalSwarm
from anabranch.observe.event_log import EventLog
from anabranch.observe.events import Note, Step
from support.run_events import step


def test_a_reader_that_pauses_within_a_batch_loses_nothing(tmp_path: Path) -> None:
    """The events are read from the file in batches; a loop that is left and entered again goes on with the
    next event, not with the next batch."""
    unused: Any = None
    swarm = LocalSwarm(RunDirectory.create(tmp_path / "run"), RunConfig(), unused)
    ended: Any = SimpleNamespace(running=False, name=LEADER, status=0)
    swarm.processes[LEADER] = ended
    with EventLog(swarm.directory.events) as log:
        for number in range(3):
            log.write(Note(text=str(number)))
    first = next(swarm.events())
    assert [event.text for event in (first, *swarm.events()) if isinstance(event, Note)] == ["0", "1", "2"]


def test_a_loss_just_after_the_first_step_is_for_the_others(tmp_path: Path) -> None:
    """The step is in the file, and nobody read it yet: the run goes on. Before it, too few relays end it."""
    unused: Any = None
    run = with_changes(RunConfig(), {"fleet.minimum": 2})
    swarm = LocalSwarm(RunDirectory.create(tmp_path / "run"), run, unused)
    leader: Any = SimpleNamespace(running=True, name=LEADER, status=None)

    def lost(name: str) -> Any:
        return SimpleNamespace(running=False, name=name, status=-9)

    swarm.processes.update({LEADER: leader, "relay-2.0": lost("relay-2.0")})
    with pytest.raises(UserError, match=r"stage 2 has fewer than fleet\.minimum relays: relay-2\.0"):
        swarm.report_ends()
    with EventLog(swarm.directory.events) as log:
        log.write(step(1))
    swarm.processes["relay-3.0"] = lost("relay-3.0")
    swarm.report_ends()
    assert [type(event) for event in swarm._unread] == [Note, Step, Note]
