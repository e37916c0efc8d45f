"""One-way trips between a machine and the data node of its slot that a round waits for (R1, R4)."""

from __future__ import annotations

from collections import defaultdict

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Forward, WeightGradient
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from support.grids import every_value
from support.swarms.small_swarm import MadeUpBatches, small_model
from support.swarms.training_world import training_world
from swarm.islands.test_rounds import check_replayed, island_run

#: Seconds of a one-way trip, and first round that begins with a plan that binds its slots.
TRIP_S, BOUND = 0.1, 4
#: Numbers of the slots; those of held-out windows are higher.
SLOTS = range(3)


def distant_world(late: str = "drop") -> World:
    """Three islands and two data nodes, each a tenth of a second from all others; tasks take hardly any time
    but inner steps."""
    run = island_run(late=late)
    times = Model(latency_s=(TRIP_S, TRIP_S), bulk_s=0.0, task_s={"Forward": 0.5})
    world = training_world(run, small_model(run), MadeUpBatches(run), [3], 2, 1, capacity=2, times=times)
    Invariants(world)
    return world


class Moments:
    """Times (s) of events in the rounds of a world, by round and machine: tokens that came from d0, the first
    data node, credits that d0 got, inner steps that were done, contributions that were added, d0's answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.at: dict[str, dict[tuple[int, str], float]] = defaultdict(dict)
        world.watchers.append(self.watch)

    def watch(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and "d0" in (node.id, event.peer):
            said, who = event.message, node.id if event.peer == "d0" else event.peer
            to_relay = isinstance(said, msg.Forward | msg.Backward) and said.index in SLOTS
            if to_relay if who == node.id else isinstance(said, msg.Slots):
                self._note(type(said).__name__, said.fence.t, who)  # type: ignore[attr-defined]
        elif isinstance(event, ev.Finished) and node.id[0] == "r":
            task = event.task
            if isinstance(task, WeightGradient) or (isinstance(task, Forward) and task.train):
                self._note("done " + type(task).__name__, task.t, node.id)

    def _note(self, kind: str, t: int, who: str) -> None:
        self.at[kind].setdefault((t, who), self.world.clock.now)


@pytest.mark.costly
def test_tokens_and_contributions_wait_for_no_round_trip() -> None:
    """The tokens of a slot leave before the data node, which leads, has any word of the round from the slot's
    machine, and the contribution is added before the data node has answered the loss."""
    world = distant_world()
    moments = Moments(world)
    world.run(until_s=2000)
    check_replayed(island_run(), world)
    came = {key: at for key, at in moments.at["Forward"].items() if key[0] >= BOUND}
    assert len(came) >= 4
    for key, at in came.items():
        assert at < moments.at["Slots"][key] - TRIP_S / 2, key
        assert moments.at["done WeightGradient"][key] < moments.at["done Forward"][key] + TRIP_S / 2
        assert moments.at["Backward"][key] > moments.at["done Forward"][key] + TRIP_S


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("late", "when"), every_value(["drop", "wait"], ["tokens", "loss"]))
def test_a_link_breaks_while_tokens_or_loss_are_under_way(late: str, when: str) -> None:
    """Tokens that were sent on a foreseen credit, or the loss of a slot that is claimed already: each is sent
    again, nothing is counted twice (I1, I3)."""
    world = distant_world(late)
    cuts: list[str] = []

    def watch(node: Node, event: ev.Event) -> None:
        if cuts or node.peer.committed != BOUND:
            return
        if when == "tokens":
            sent = isinstance(event, ev.Finished) and type(event.task).__name__ == "Embed"
            if sent and node.id == "d0":
                plan, source = world.history().plans[BOUND + 1], node.peer.iteration
                assert source is not None and isinstance(event, ev.Finished)
                holder = plan[event.task.index].peer  # type: ignore[attr-defined]
                cuts.append(holder)
                world.clock.after(TRIP_S / 2, lambda: world.cut("d0", holder))
        elif isinstance(event, ev.Finished) and isinstance(event.task, WeightGradient) and node.id[0] == "r":
            cuts.append(node.id)
            for data in ("d0", "d1"):
                world.clock.after(TRIP_S / 2, lambda data=data: world.cut(data, node.id))  # type: ignore[misc]

    world.watchers.append(watch)
    world.run(until_s=2000)
    assert cuts
    check_replayed(island_run(late=late), world)
