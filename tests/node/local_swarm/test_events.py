"""The events of a local swarm, as whoever started it reads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig
from anabranch.node.local_swarm.local_swarm import LEADER, LocalSwarm
from anabranch.observe.event_log import EventLog
from anabranch.observe.events import Note


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
