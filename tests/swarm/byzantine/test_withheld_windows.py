"""Relays that do all work to train and evaluate no held-out window (R13): no claim tells which stage keeps
one, and the step, or the run's end, waited for it for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Forward, Head, Payload, Result, Task
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node, TaskExecutor
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

STEPS = 8


def swarm(
    liars: int, stage: int, others: int, since: int, settings: Settings, data_nodes: int = 2, of: str = ""
) -> World:
    """Liars that are all of `stage`, with `others` replicas at the other one of two; from iteration `since`
    on they send no window on. of: data node whose windows alone they keep ("": they keep all)."""
    nodes = [Machine(f"d{k}", 0) for k in range(data_nodes)]
    machines = [*nodes, *(Machine(f"x{k}", stage) for k in range(liars))]
    world = counting_world(settings, [*machines, *(Machine(f"r{k}", 3 - stage) for k in range(others))], 1)
    Invariants(world)
    world.liars.update(f"x{k}" for k in range(liars))

    def lose(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        if not isinstance(message, msg.Forward) or message.train or sender.id not in world.liars:
            return message
        windows = range(settings.microbatches, settings.microbatches + settings.windows)
        holder = sender.peer.ctx.run.membership.assignment(message.fence.t, windows).holder
        kept = message.fence.t >= since and of in ("", holder.get(message.index))
        return None if kept else message

    altered(world, lose)
    return world


@pytest.mark.parametrize(
    ("stage", "others", "since"), every_value([1, 2], [2, 3], [1, 5, STEPS + 1])
)
def test_another_relay_evaluates_what_a_stages_only_replica_withholds(
    stage: int, others: int, since: int
) -> None:
    """In the first step, in a later one, and after the last one."""
    settings = Settings("windows", 1, 2, 12, STEPS, 4, 2, min_replicas=1, snapshot_every=2)
    world = swarm(1, stage, others, since, settings)
    assert go_on(world, 400.0) == STEPS and world.clock.now < 150.0
    assert wrong_states(world) == {} and rollbacks(world) == []
    [(moved, why)] = removed(world).items()
    assert moved != "x0" and "whose only replica may hold the step up" in why


@pytest.mark.costly
def test_another_relay_evaluates_what_all_of_a_stage_withhold() -> None:
    settings = Settings("windows", 1, 2, 12, STEPS, 4, 100, min_replicas=1, snapshot_every=2)
    world = swarm(2, 1, 3, 1, settings)
    assert go_on(world, 1500.0) == STEPS and wrong_states(world) == {} and rollbacks(world) == []


def test_another_relay_evaluates_what_the_only_replica_withholds_in_rounds_of_crews() -> None:
    rounds = Rounds(2, 4, 3, pipeline=True)
    settings = Settings("windows", 1, 2, 12, 12, 4, 4, min_replicas=1, snapshot_every=2)
    settings = replace(settings, rounds=rounds, steps=rounds.iterations(2 + 4 * 10))
    world = swarm(1, 1, 3, 5, settings)
    assert go_on(world, 600.0) == settings.steps and world.clock.now < 200.0
    assert wrong_states(world) == {} and rollbacks(world) == [] and "x0" not in removed(world)


def test_another_relay_evaluates_what_all_of_a_stage_withhold_in_rounds_of_crews() -> None:
    """The second relay that was moved came when there was news, so it was to serve from the next round on,
    and that never came: the run stood for ever."""
    rounds = Rounds(2, 4, 3, pipeline=True)
    settings = Settings("windows", 1, 2, 12, 12, 4, 4, min_replicas=1, snapshot_every=2)
    settings = replace(settings, rounds=rounds, steps=rounds.iterations(2 + 4 * 10))
    world = swarm(2, 1, 3, 3, settings, data_nodes=1)
    assert go_on(world, 1000.0) == settings.steps
    assert wrong_states(world) == {} and rollbacks(world) == [] and "r2" in removed(world)


@pytest.mark.parametrize("kind", ["steps", "crews", "delayed"])
def test_who_withholds_one_data_nodes_windows_costs_it_no_seat(kind: str) -> None:
    """It lost its seat before a relay was moved to look, or since microbatches of it lacked that this relay
    had claimed, though their reduce was PREPARED."""
    every = 4 if kind == "crews" else 2
    settings = Settings("windows", 1, 2, 12, STEPS, 4, every, min_replicas=1, snapshot_every=2)
    settings = replace(settings, delay=Delay(1) if kind == "delayed" else settings.delay)
    if kind == "crews":
        rounds = Rounds(2, 4, 3, pipeline=True)
        settings = replace(settings, rounds=rounds, steps=rounds.iterations(2 + 4 * 10))
    world = swarm(1, 2, 3, 3, settings, of="d1")
    assert go_on(world, 600.0) == settings.steps and world.clock.now < 150.0
    assert wrong_states(world) == {} and rollbacks(world) == []
    [(moved, why)] = removed(world).items()
    assert moved[0] == "r" and "whose only replica may hold the step up" in why


def test_a_data_node_whose_windows_lack_again_is_not_expelled() -> None:
    """Nobody can be moved, so it, or the only relay of either stage, may keep them. With crews it begins
    nothing else, and was banned for the second time."""
    rounds = Rounds(2, 4, 3, pipeline=True)
    settings = Settings("windows", 1, 2, 12, 12, 4, 4, min_replicas=1, snapshot_every=2)
    settings = replace(settings, rounds=rounds, steps=rounds.iterations(2 + 4 * 10))
    world = swarm(1, 1, 1, 3, settings, of="d1")

    def look(node: Node, event: ev.Event) -> None:
        coordinator = node.peer.shared.coordination.coordinator
        if node.id == "d0" and coordinator is not None:
            coordinator.reducing.sources._removed.setdefault("d1", 0)

    world.bookkeepers.append(look)
    assert go_on(world, 600.0) == settings.steps and removed(world).keys() == {"d1"}
    assert not world.nodes["d0"].peer.ctx.rate_limits.banned("d1", world.clock.now)


# --- windows that overflow after the last step -----------------------------------------------------


class _Overflowing:
    """Worker whose tasks of one kind overflow in windows from iteration `since` on."""

    def __init__(self, worker: TaskExecutor, kind: type[Forward | Head], since: int) -> None:
        self._worker, self._kind, self._since = worker, kind, since

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        if isinstance(task, self._kind) and not task.train and task.t >= self._since:
            return Result(overflow="loss")
        return self._worker.run(task, inputs)


@pytest.mark.parametrize(("kind", "stage"), [(Head, 0), (Forward, 1)])
def test_windows_that_overflow_after_the_last_step_end_the_run(
    kind: type[Forward | Head], stage: int
) -> None:
    """An overflow skips a step; there is none then, and the run waited for the windows for ever."""
    settings = Settings("windows", 1, 2, 12, STEPS, 4, 100, min_replicas=1, snapshot_every=2)
    relays = [Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(2)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *relays], 1)
    Invariants(world)
    make = world.make_computer
    world.make_computer = lambda s: _Overflowing(make(s), kind, STEPS + 1) if s == stage else make(s)
    world.run(until_s=200.0)
    assert world.history().t == STEPS and world.history().removals == 0
