"""Real peers that ask for any stage measure their links before the first step, and the stages are dealt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch.node.driver.tensor_codec import from_blob, to_blob
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Note, PeerActive
from support.local_swarms import check_exact, created, small_run, swarm_of


@pytest.mark.soak  # in virtual time: test_initial_assignment_by_links.py
def test_a_run_whose_stages_are_dealt_by_links(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Side by side on one machine nobody gains much; in any case the run begins, and not one bit differs."""
    run = small_run(texts, fleet__deal="links", fleet__minimum=2)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        for name in ("ada", "bob", "cyd", "dot"):
            swarm.join(name, swarm.ticket())
        swarm.to_the_end()
        assert all(process.status == 0 for process in swarm.processes.values()), swarm.story()
    check_exact(directory, steps=4)
    told = [event.text for event in swarm.of(Note) if event.text.startswith("the stages")]
    assert len(told) == 1, swarm.story()  # by what was measured, one way or the other
    assert len({event.subject for event in swarm.of(PeerActive)}) == 5


def test_bytes_travel_as_a_payload() -> None:
    sent = to_blob(bytes(range(7)))
    there = from_blob(replace(sent, data=bytearray(sent.view())))
    assert there.dtype == torch.uint8 and there.tolist() == list(range(7))
