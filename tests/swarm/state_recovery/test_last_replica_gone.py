"""When all replicas of a stage are gone for good, whoever comes says so once and asks less and less often."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.events import Event, Received
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import ONE_CLASS, Machine, counting_world, wrong_states
from support.grids import first_of


def test_a_joiner_of_a_lost_stage_says_what_helps_and_asks_seldom() -> None:
    settings = Settings("run", 1, 1, 4, 9, checkpoint_every=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1)])
    asked: list[float] = []

    def look(node: Node, event: Event) -> None:
        if node.id == "d0" and node.peer.committed == 3 and world.nodes["r1.0"].alive:
            world.crash("r1.0")
            world.add(Member("late", -1, 1, ONE_CLASS, 4, name="late", address="late:1"), "d0", 30.0)
        if isinstance(event, Received) and isinstance(event.message, msg.FetchState):
            asked.append(world.clock.now)

    world.watchers.append(look)
    with pytest.raises(TimeoutError):
        world.run(3600.0)
    texts = [str(fields["text"]) for _, who, kind, fields in world.notes if kind == "note" and who == "late"]
    told = [text for text in texts if "too old" in text]
    assert len(told) == 1 and "anabranch resume" in told[0]
    assert 10 < len(asked) < 90


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("delay_s", [0.0, 0.5])
@pytest.mark.parametrize("seed", first_of(range(6)))
def test_two_stages_that_lose_two_of_three_each_at_once_are_both_served(seed: int, delay_s: float) -> None:
    """The last one of a stage is not moved to another one that is down to one replica because those who died
    with it have yet to be removed; and if it is, it goes back, whether it serves there yet or not."""
    settings = Settings("both", 1, 2, 6, 8, min_replicas=2, snapshot_every=2)
    names = [("d0", 0), ("d1", 0), *((f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(3))]
    world = counting_world(settings, [Machine(name, stage) for name, stage in names], seed)
    Invariants(world)
    struck: list[float] = []

    def strike() -> None:
        for name, stage in names:
            if stage and not name.endswith("2"):
                world.crash(name)

    def look(node: Node, event: Event) -> None:
        if not struck and world.history().t == 4:
            struck.append(world.clock.now)
            world.clock.after(delay_s, strike)

    world.watchers.append(look)
    world.run(300.0)
    assert struck and world.history().t == 8
    assert not wrong_states(world)
