"""Grid of faults against two iterations in flight: each fault in each of the two, at several moments.

The workers compute with integers, whose states depend on every value that a step used. The invariants I1 to
I7 are checked after every event, and each history is that of a single machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Commit, Evaluation, Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.world_builder import IntegerWorld
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms import lost_stages
from support.swarms.fault_points import Fault, Moment, kill

STEPS, START, STAGES = 8, 2, 2
#: Iteration in which faults strike: the first of two that are in flight.
AT = 4

Strike = Callable[[World, Node], None]


def world_of(seed: int, replicas: int = 2) -> World:
    settings = Settings(
        run="r", epoch=1, stages=STAGES, microbatches=6, steps=STEPS, windows=2, evaluate_every=2,
        checkpoint_every=0, snapshot_every=2, voters=3, delay=Delay(START), newcomer_s=0.0,
    )  # fmt: skip
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("d2", 0)]
    machines += [Machine(f"r{s}.{k}", s) for s in range(1, STAGES + 1) for k in range(replicas)]
    world = counting_world(settings, machines, seed)
    Invariants(world, IntegerWorld(settings))
    return world


def finished(kind: type[tasks.Task], t: int, ahead: bool) -> Moment:
    """A task of iteration t ended, as the first of two in flight, or (ahead) as the second."""

    def moment(node: Node, event: ev.Event) -> bool:
        if not isinstance(event, ev.Finished) or type(event.task) is not kind or event.task.t != t:
            return False
        iterations = node.peer.iterations
        return iterations.ahead is not None and node.peer.replica.t == t - 1 - ahead

    return moment


MOMENTS: dict[str, Moment] = {
    "forward of the first": finished(tasks.Forward, AT, False),
    "backward of the first": finished(tasks.InputGradient, AT, False),
    "reduce of the first": finished(tasks.Freeze, AT, False),
    "forward of the second": finished(tasks.Forward, AT + 1, True),
    "backward of the second": finished(tasks.InputGradient, AT + 1, True),
    "weight gradient of the second": finished(tasks.WeightGradient, AT + 1, True),
}
RELAYS = tuple(f"r{s}.{k}" for s in range(1, STAGES + 1) for k in range(2))


def freeze(seconds: float, world: World, node: Node) -> None:
    world.freeze(node.id, seconds)


def leave(world: World, node: Node) -> None:
    node.handle(ev.Stopping("the user stopped it"))


def join(world: World, node: Node) -> None:
    lost_stages.joiner(world, "late.0", 0.05, node.stage)


def lose_stage(world: World, node: Node) -> None:
    """All replicas of the victim's stage die; relays for it come later, so that nobody has its state."""
    stage = node.stage
    kill(*(name for name in RELAYS if name.startswith(f"r{stage}.")))(world, node)
    lost_stages.joiner(world, "late.0", 3.0, stage)
    lost_stages.joiner(world, "late.1", 3.5, stage)


def crash_leader(world: World, node: Node) -> None:
    world.crash(world.leading().id)


def crash_data_node(world: World, node: Node) -> None:
    """A data node dies that holds a held-out window of the second iteration, unless it leads."""
    held = node.peer.iterations.at(AT + 1).source.assignments[1].holder.values()
    world.crash(next(name for name in sorted(held, reverse=True) if name != world.leading().id))


def pause(world: World, node: Node) -> None:
    for at_s, action in ((0.0, "pause"), (3.0, "continue")):
        world.clock.after(at_s, partial(order, world, action))


def order(world: World, action: str) -> None:
    world.leading().handle(ev.Wished(action))


def cut(world: World, node: Node) -> None:
    other = next(peer for peer in sorted(node.links) if peer.startswith("d"))
    world.cut(node.id, other, 1.0)


FAULTS: dict[str, Strike] = {
    "crash": kill(),
    "freeze": partial(freeze, 15.0),
    "short freeze": partial(freeze, 0.5),
    "leave": leave,
    "join": join,
    "lost stage": lose_stage,
    "leader crash": crash_leader,
    "data node crash": crash_data_node,
    "pause": pause,
    "cut": cut,
}


def check_windows(node: Node, event: ev.Event) -> None:
    """Held-out windows wait for the state that they evaluate."""
    if isinstance(event, ev.Finished) and isinstance(event.task, tasks.Embed):
        early = event.task.t == node.peer.replica.t + 2
        assert not (early and event.task.index >= node.peer.ctx.run.settings.microbatches), event.task


def joins(world: World) -> list[tuple[int, int]]:
    """(committed steps, iteration from which it serves) of each relay that came later."""
    found, committed = [], 0
    for line in world.log:
        record = decode_entry(line).record
        if isinstance(record, Commit):
            committed = record.t
        elif isinstance(record, Members):
            found += [(committed, t) for peer, t in record.active_from.items() if peer.startswith("late")]
    return found


def trial(fault: str, moment: str, seed: int) -> tuple[World, bool]:
    """World after its run; True if the fault was delivered."""
    world = world_of(seed)
    world.watchers.append(check_windows)
    planned = Fault(world, RELAYS, MOMENTS[moment], FAULTS[fault])
    world.run(900.0)
    return world, bool(planned.delivered)


#: Faults that only the long suite tries; the seeds of `simtest` have them, too.
SELDOM = {"short freeze", "cut", "leave"}


@pytest.fixture(scope="module")
def evaluations() -> dict[int, Evaluation]:
    """Held-out losses of the run that nothing disturbs."""
    undisturbed = world_of(0)
    undisturbed.run(900.0)
    found = undisturbed.history().evaluations
    assert sorted(found) == [0, 2, 4, 6, 8]
    return found


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.soak) if f in SELDOM else f for f in FAULTS]
)
def test_each_fault_in_each_of_two_iterations_changes_nothing(
    fault: str, half: bool, evaluations: dict[int, Evaluation]
) -> None:
    """I1 to I7, and progress after the fault (I4). The faults delivered are counted by moment.

    half: True for every second moment, in both iterations: the odd ones for one fault, the even ones for the
    next.
    """
    moments = [*enumerate(MOMENTS)][list(FAULTS).index(fault) % 2 :: 2] if half else [*enumerate(MOMENTS)]
    delivered: Counter[str] = Counter()
    begins: set[int] = set()
    for seed, moment in moments:
        world, struck = trial(fault, moment, seed)
        history = world.history()
        assert history.t == STEPS, (fault, moment, history.t)
        assert [commit.t for commit in history.commits] == list(range(1, STEPS + 1))
        assert not wrong_states(world), (fault, moment)
        assert history.evaluations == evaluations, (fault, moment)
        delivered[moment] += struck
        if fault == "lost stage" and struck:
            (record,) = lost_stages.rollbacks(world)  # neither snapshot nor checkpoint is of step AT - 1
            assert record.t == AT - 2
        begins |= {begin - committed for committed, begin in joins(world)}
    assert fault != "join" or begins == {1, 3}  # in both in flight, or in the first that nobody has opened
    missed = [moment for _, moment in moments if not delivered[moment]]
    assert not missed, missed
