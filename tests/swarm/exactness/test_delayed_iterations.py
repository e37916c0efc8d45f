"""Two iterations in flight (`iteration.delay = 1`): every state is that of a single machine, faults or not.

The worlds compute with integers, whose states depend on every value that a step used; the invariants I1 to I6
are checked after every event (I3 against a single machine that computes on predicted weights).
"""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.protocol.messages import Claim, decode
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.world_builder import IntegerWorld
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value, first_of
from support.swarms import fault_points as faults
from support.swarms import lost_stages
from support.swarms.fault_points import Fault, Moment

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


@pytest.mark.parametrize(("stages", "seed"), every_value([1, 3], [0, 1]))
def test_delayed_steps_are_those_of_a_single_machine(stages: int, seed: int) -> None:
    world = world_of(seed=seed, stages=stages)
    overlaps = Overlaps(world)
    world.run(600.0)
    check_ended(world)
    for kind in (tasks.Embed, tasks.Forward, tasks.Head, tasks.InputGradient, tasks.WeightGradient):
        assert overlaps.ended[kind.__name__] > 0, overlaps.ended
    assert not {"Freeze", "Assemble", "Apply", "Skip"} & overlaps.ended.keys()
    assert not [fields for _, _, kind, fields in world.notes if kind in ("refused", "double")]


@pytest.mark.parametrize("phase", [None, "added ahead"])
def test_who_claims_units_of_a_delayed_iteration_has_applied_the_step_before(phase: str | None) -> None:
    """The leader takes such a claim for a sign that its sender has the last state."""
    world = world_of(seed=1)
    if phase is not None:
        Fault(world, RELAYS, moment_of(phase), faults.kill())
    claimed: Counter[int] = Counter()
    carry = world.carry

    def look(sender: Node, peer: str, message: bytes, payload: tasks.Payload | None) -> None:
        said = decode(message)
        if isinstance(said, Claim):
            claimed[said.fence.t - sender.peer.replica.t] += said.fence.t > START
        carry(sender, peer, message, payload)

    world.carry = look  # type: ignore[method-assign]
    world.run(600.0)
    check_ended(world)
    assert claimed.keys() == {1} and claimed[1] > 0


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


def front_or_ahead(t: int, ahead: bool, kind: type[tasks.Task]) -> Moment:
    """A task of iteration t ended, of the current iteration, or (ahead) of the delayed one."""

    def moment(node: Node, event: ev.Event) -> bool:
        if not isinstance(event, ev.Finished) or type(event.task) is not kind or event.task.t != t:
            return False
        return node.peer.replica.t == t - 1 - ahead

    return moment


PHASES: dict[str, tuple[int, bool, type[tasks.Task]]] = {
    "forward ahead": (6, True, tasks.Forward),
    "gradient": (5, False, tasks.InputGradient),
    "gradient ahead": (6, True, tasks.InputGradient),
    "added ahead": (6, True, tasks.WeightGradient),
    "reduce": (5, False, tasks.Freeze),
    "applied": (5, True, tasks.Apply),
    "last": (STEPS, True, tasks.Forward),
    "first": (START + 1, True, tasks.Forward),
}


def apply_moment(t: int) -> Moment:
    return lambda node, event: faults.finished(node, event, tasks.Apply, t)


def moment_of(phase: str) -> Moment:
    t, ahead, kind = PHASES[phase]
    return apply_moment(t) if kind is tasks.Apply else front_or_ahead(t, ahead, kind)


RELAYS = ("r1.0", "r1.1", "r2.0", "r2.1", "r3.0", "r3.1")


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("phase", first_of(sorted(PHASES), 4))
def test_a_crash_in_either_iteration_changes_nothing(phase: str) -> None:
    """I1 to I6: the units of the dead relay are computed again, in both iterations."""
    world = world_of(seed=len(phase))
    fault = Fault(world, RELAYS, moment_of(phase), faults.kill())
    world.run(600.0)
    check_ended(world)
    assert fault.delivered and world.history().removals >= 1


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("phase", ["reduce", "applied"])
def test_a_lost_stage_comes_back_from_snapshots(phase: str) -> None:
    """After the rollback two iterations are in flight at once, on the state that it names."""
    world = world_of(seed=len(phase))
    fault = Fault(world, ("r2.0", "r2.1"), moment_of(phase), faults.kill("r2.0", "r2.1"))
    lost_stages.joiner(world, "late.0", 3.0, 2)
    lost_stages.joiner(world, "late.1", 3.5, 2)
    world.run(900.0)
    assert fault.delivered and lost_stages.rollbacks(world)
    check_ended(world)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("phase", ["forward ahead", "reduce"])
def test_a_frozen_relay_is_passed_by_and_does_no_harm(phase: str) -> None:
    world = world_of(seed=len(phase))

    def freeze(world: World, node: Node) -> None:
        world.freeze(node.id, 20.0)

    fault = Fault(world, RELAYS, moment_of(phase), freeze)
    world.run(600.0)
    assert fault.delivered
    check_ended(world)


def test_a_joiner_serves_from_an_iteration_that_nobody_has_opened() -> None:
    world = world_of(seed=4, replicas=1)
    lost_stages.joiner(world, "new", 0.5, 2)
    opened: list[tuple[int, int]] = []

    def watch(node: Node, event: ev.Event) -> None:
        opened.extend((each.t, node.peer.committed) for each in node.peer.iterations.in_flight)

    world.watchers.append(watch)
    world.run(600.0)
    check_ended(world)
    records = [decode_entry(line).record for line in world.log]
    served = [r for r in records if isinstance(r, Members) and "new" in r.active_from]
    assert len(served) == 1
    assert max(t - committed for t, committed in opened) == 2
