"""Overflows that only one peer can find, as it alone has the microbatch: an honest peer is not banned for its
word."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Task, embed_unit
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from swarm.byzantine.test_review_stalls import go_on, overflowing

BAD, STEPS = (3, 6, 9, 15, 18, 21), 23


def overflows_of(world: World, name: str, kind: type[Task]) -> None:
    """Let one embedding of a microbatch that `name` has in each of the iterations BAD overflow, or its weight
    gradient, wherever it is computed."""
    bad: dict[int, int] = {}

    def is_bad(task: Task, inputs: tuple[Payload, ...]) -> bool:
        if not isinstance(task, kind) or task.t not in BAD:
            return False
        run = world.leading().peer.ctx.run
        holder = run.membership.assignment(task.t, run.batch(task.t)).holder
        own = [index for index, node in holder.items() if node == name]
        if own:
            bad.setdefault(task.t, max(own))
        index = task.unit // 2 if isinstance(task, tasks.WeightGradient) else task.index  # type: ignore[attr-defined]
        if isinstance(task, tasks.WeightGradient) and task.unit != embed_unit(index):
            return False
        return index == bad.get(task.t, -1)

    overflowing(world, 0, is_bad)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kind", [tasks.Embed, tasks.WeightGradient])
def test_a_data_node_that_finds_overflows_of_its_part_is_not_banned(kind: type[Task]) -> None:
    """No other data node computes the embeddings of its microbatches. It was expelled with the third overflow
    within 50 iterations. It loses its seat then, so that another one looks, which finds the same, and comes
    back."""
    settings = Settings("words", 1, 1, 6, STEPS, min_replicas=2)
    machines = [Machine(name, int(name[0] == "r")) for name in ("d0", "d1", "r1.0", "r1.1")]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    overflows_of(world, "d1", kind)
    seats = [1]

    def come_back(node: Node, event: object) -> None:
        records = [decode_entry(line).record for line in world.log]
        if sum(isinstance(r, Members) and "d1" in r.removed for r in records) == len(seats):
            seats.append(seats[-1] + 1)
            world.crash("d1")
            member = msgspec.structs.replace(world.nodes["d1"].member, incarnation=seats[-1])
            world.clock.after(1.0, lambda: world.add(member, "d0", world.clock.now) and None)

    world.watchers.append(come_back)
    assert go_on(world, 900.0) == STEPS
    assert [commit.t for commit in world.history().commits if commit.verdict == "skip"] == list(BAD)
    assert len(seats) <= 3 and not world.leading().peer.ctx.rate_limits.banned("d1", world.clock.now)
