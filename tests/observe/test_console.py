"""What the terminal shows of a run's events."""

from __future__ import annotations

import io

from anabranch.observe.console import Console
from anabranch.observe.events import PeerActive, PeerJoined, PeerRemoved, Step


def step(t: int, owners: dict[int, dict[int, str]]) -> Step:
    return Step(
        t=t, loss=4.0, tokens=100, grad_norm=1.0, clip_factor=1.0, learning_rate=0.1, seconds=1.0,
        manifest_hash="", owners=owners, alive=[1, 2],
    )  # fmt: skip


def test_the_step_line_tells_which_replica_served_how_much() -> None:
    out = io.StringIO()
    console = Console(steps=9, stream=out)
    # Named in the other order than their ids are in.
    for peer, name, first in (("bb", "relay-1.0", 1), ("aa", "relay-1.1", 1), ("cc", "relay-1.2", 3)):
        joined = PeerJoined(subject=peer, name=name, region="", role="relay", stage=1, numerics_class="")
        console.on_event(joined)
        console.on_event(PeerActive(subject=peer, stage=1, from_iteration=first))
    heads = {unit: "dd" for unit in range(8)}
    console.on_event(step(1, {0: heads, 1: {0: "aa", 1: "bb", 2: "bb", 3: "bb"}}))
    console.on_event(step(2, {0: heads, 1: dict.fromkeys(range(4), "aa")}))
    console.on_event(step(3, {0: heads, 1: dict.fromkeys(range(4), "aa")}))
    console.on_event(PeerRemoved(subject="bb", stage=1, reason="it was switched off"))
    console.on_event(step(4, {0: heads, 1: {0: "aa", 1: "aa", 2: "cc", 3: "aa"}}))
    console.on_event(step(5, {}))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    splits = [line.partition(" | split ")[2] for line in lines]
    assert splits == ["1: 3+1", "1: 0+4", "1: 0+4+0", "1: 3+1", ""]
