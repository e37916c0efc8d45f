"""Two iterations in flight (`iteration.delay = 1`): every state is that of a single machine, under faults, too.

The worlds compute with integers, whose states depend on every value that a step used; the invariants I1 to I6
are checked after every event (I3 against a single machine that computes on predicted weights).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.world_builder import IntegerWorld
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import Machine, counting_world, wrong_states

STEPS, START = 12, 2


def world_of(delay: int = START, seed: int = 0, stages: int = 3, replicas: int = 2) -> World:
    settings = Settings(
        run="r", epoch=1, stages=stages, microbatches=8, steps=STEPS, windows=2, evaluate_every=3,
        checkpoint_every=4, snapshot_every=3, delay=Delay(delay),
    )  # fmt: skip
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{stage}.{k}", stage) for stage in range(1, stages + 1) for k in range(replicas)]
    world = counting_world(settings, machines, seed)
    Invariants(world, IntegerWorld(settings))
    return world


def check_ended(world: World) -> None:
    history = world.history()
    assert history.t == STEPS, history.t
    assert not wrong_states(world)
    assert sorted(history.evaluations) == [0, 3, 6, 9, 12]


class Overlaps:
    """Counts, by kind of task, the tasks of a delayed iteration that end before the step before is taken."""

    def __init__(self, world: World) -> None:
        self.ended: Counter[str] = Counter()
        world.watchers.append(self._watch)

    def _watch(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and event.task.t == node.peer.replica.t + 2:
            self.ended[type(event.task).__name__] += 1


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_delayed_steps_are_those_of_a_single_machine(stages: int, seed: int) -> None:
    world = world_of(seed=seed, stages=stages)
    overlaps = Overlaps(world)
    world.run(600.0)
    check_ended(world)
    for kind in (tasks.Embed, tasks.Forward, tasks.Head, tasks.InputGradient, tasks.WeightGradient):
        assert overlaps.ended[kind.__name__] > 0, overlaps.ended
    assert not {"Freeze", "Assemble", "Apply", "Skip"} & overlaps.ended.keys()
    assert not [fields for _, _, kind, fields in world.notes if kind in ("refused", "double")]


def test_iterations_up_to_the_start_do_not_overlap() -> None:
    world = world_of(delay=0)
    overlaps = Overlaps(world)
    world.run(600.0)
    check_ended(world)
    assert not overlaps.ended


def test_the_run_is_quicker_than_a_synchronous_one() -> None:
    times = {}
    for delay in (0, START):
        world = world_of(delay=delay, seed=3)
        world.run(600.0)
        times[delay] = world.clock.now
    assert times[START] < times[0]
