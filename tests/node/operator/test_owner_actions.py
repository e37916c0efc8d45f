"""Actions of a run's owner, which come from the page's threads, perhaps more than once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.node.operator.owner_actions import LeaderOwner, SwarmOwner


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """Interrupts of this process (SIGINT) so far, as Ctrl+C makes them."""
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    yield came
    signal.signal(signal.SIGINT, former)


def test_a_stop_that_is_sent_again_does_not_end_the_run_at_once(
    tmp_path: Path, interrupts: list[int]
) -> None:
    """A second Ctrl+C would: from another tab of the page, or sent by whoever recorded the first request."""
    leader = LeaderOwner(tmp_path)
    assert [leader.ask("stop", "") for _ in range(3)] == ["", *["the run is stopping already"] * 2]
    assert interrupts == [signal.SIGINT]
    swarm: Any = SimpleNamespace(processes={})
    stops: list[int] = []
    owner = SwarmOwner(swarm, lambda: stops.append(0))
    assert [owner.ask("stop", "") for _ in range(3)] == ["", *["the run is stopping already"] * 2]
    owner.poll()
    assert stops == [0]
