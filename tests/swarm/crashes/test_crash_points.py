"""A relay that dies at a named event of the protocol costs its own work and nothing else (I3, R5)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from anabranch.config import RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.torch_world import node_member
from support.grids import first_of
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment, kill
from support.swarms.small_swarm import check_equal, small_run, small_world

MOMENTS: dict[str, Callable[[int], Moment]] = {
    "mid-backward": faults.added_in_mid_backward,
    "first forward": lambda t: faults.received(msg.Forward, t),
    "third forward": lambda t: faults.received(msg.Forward, t, 3),
    "backward sent": faults.sent_backward,
    "attempt": lambda t: faults.received(msg.Attempt, t),
    "freeze": lambda t: faults.ended(tasks.Freeze, t),
    "reduce part": lambda t: faults.received(msg.ReducePart, t),
    "sum": lambda t: faults.ended(tasks.SumPart, t),
    "prepared": lambda t: faults.ended(tasks.Assemble, t),
    "chosen": faults.chosen,
    "applied": lambda t: faults.ended(tasks.Apply, t),
}


def finish(world: World, run: RunConfig, *planned: Fault, removed: int, sure: bool = True) -> None:
    """The run ends, every fault was delivered (or, not `sure`, its moment never came), steps were committed
    after the last, and all is equal."""
    invariants = Invariants(world)
    world.run(until_s=600)
    history = check_equal(world, run)
    if not sure and not any(fault.delivered for fault in planned):
        return
    for fault in planned:
        assert len(fault.delivered) == 1, f"not delivered: {fault}"
        (_, _, committed) = fault.delivered[0]
        assert committed < history.t
    assert history.removals == removed
    assert invariants.computed


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("t", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", MOMENTS)
def test_a_relay_dies(name: str, t: int) -> None:
    run = small_run(minimum=2, steps=3)
    world = small_world(run, [2, 2], seed=t)
    fault = Fault(world, ("r1.1", "r2.1"), MOMENTS[name](t), kill())
    finish(world, run, fault, removed=1)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("name", first_of(["mid-backward", "sum", "chosen", "third forward", "prepared"], 3))
def test_neighbours_die_at_the_same_instant(name: str) -> None:
    """The replacement finds no holder further on, and sends the microbatch on as a repair (R5)."""
    run = small_run(stages=4, minimum=2, steps=3)
    world = small_world(run, [2, 2, 2, 2], data_nodes=2, seed=3)
    fault = Fault(world, ("r2.1",), MOMENTS[name](1), kill("r3.1"))
    finish(world, run, fault, removed=2)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("name", ["backward sent", "attempt", "prepared"])
def test_two_of_three_replicas_die_one_after_the_other(name: str) -> None:
    run = small_run(minimum=3, steps=3)
    world = small_world(run, [3, 3], seed=4)
    first = Fault(world, ("r1.0", "r1.1", "r1.2"), MOMENTS[name](1), kill())
    second = Fault(world, ("r1.0", "r1.1", "r1.2"), MOMENTS[name](2), kill())
    finish(world, run, first, second, removed=2)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("t", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["first forward", "freeze", "prepared", "chosen"])
def test_a_data_node_dies(name: str, t: int) -> None:
    run = small_run(minimum=2, steps=4, evaluate_every=1)
    world = small_world(run, [2, 2], data_nodes=3, seed=t)
    fault = Fault(world, ("d2",), MOMENTS[name](t), kill())
    finish(world, run, fault, removed=1)


def test_a_data_node_and_the_relay_before_it_die_with_their_windows() -> None:
    run = small_run(minimum=2, steps=3, evaluate_every=1)
    world = small_world(run, [2, 2], data_nodes=3, seed=8)
    fault = Fault(world, ("d2",), faults.received(msg.Forward, 2, 2), kill("r2.1"))
    finish(world, run, fault, removed=2)


@pytest.mark.costly
def test_a_window_that_only_the_dead_had_heard_of_is_sent_again() -> None:
    """Its loss came back to all relays but one; then that relay dies with the data node, untold (R13)."""
    run = small_run(minimum=2, steps=3, evaluate_every=1)
    lost = []
    for seed in range(6):
        world = small_world(run, [2, 2], data_nodes=3, seed=seed)

        def head_of_window(node: Node, event: ev.Event) -> bool:
            ended = isinstance(event, ev.Finished) and isinstance(event.task, tasks.Head)
            return ended and event.task.t == 2 and not event.task.train  # type: ignore[union-attr]

        def strike(world: World, node: Node) -> None:
            """The empty Backward is at the relay, the claim not yet at the leader."""
            index = next(u.index for u in node.peer.iteration.units.values() if not u.train)  # type: ignore[union-attr]
            lost.append(index)
            world.cut(node.id, "d0", 99.0)
            world.clock.after(0.2, lambda: kill("r2.1", "r2.1")(world, node))

        fault = Fault(world, ("d1", "d2"), head_of_window, strike)
        finish(world, run, fault, removed=2, sure=False)
    assert len(lost) >= 3


def test_a_newcomer_takes_the_place_of_the_dead() -> None:
    run = small_run(minimum=2, steps=6, checkpoint_every=0)
    world = small_world(run, [2, 2], seed=5)
    fault = Fault(world, ("r2.1",), faults.added_in_mid_backward(1), kill())
    world.add(node_member("fresh", -1), "d0", at=3.0)
    finish(world, run, fault, removed=1)
    history = world.history()
    assert history.membership.members["fresh"].stage == 2
    served = [c.t for c in history.commits if "fresh" in c.stages[2].members]
    assert served and served[-1] == 6
    entries = [commit.stages[2] for commit in history.commits]
    assert any(entry.members[owner] == "fresh" for entry in entries for owner in entry.owners)


def test_a_relay_dies_while_a_newcomer_downloads_from_it() -> None:
    run = small_run(minimum=2, steps=6, checkpoint_every=0)
    world = small_world(run, [2, 2], seed=6)
    world.add(node_member("fresh", 1), "d0", at=2.5)
    fault = Fault(world, ("r1.0", "r1.1"), faults.serving_state(), kill())
    finish(world, run, fault, removed=1)
    assert "fresh" in world.history().membership.active_from


def test_a_restarted_relay_is_admitted_again() -> None:
    run = small_run(minimum=2, steps=6, checkpoint_every=0)
    world = small_world(run, [2, 2], seed=7)

    def restart(world: World, node: object) -> None:
        world.crash("r1.1")
        world.add(msgspec.structs.replace(node_member("r1.1", 1), incarnation=2), "d0")

    fault = Fault(world, ("r1.1",), faults.added_in_mid_backward(1), restart)
    finish(world, run, fault, removed=1)
    assert world.history().membership.members["r1.1"].incarnation == 2


def test_a_data_node_removed_before_others_open_the_iteration_loses_no_index() -> None:
    """The split of indices follows the log, not the moment at which a peer comes to open the iteration."""
    run = small_run(minimum=2, steps=4, evaluate_every=1)
    world = small_world(run, [2, 2], data_nodes=3, seed=1)

    def dawdle(slowness: float) -> Callable[[World, Node], None]:
        def strike(world: World, node: Node) -> None:
            node.slowness = slowness

        return strike

    # d1 takes half a second to apply C_2; d2 is removed meanwhile, when d0 has opened iteration 3 already.
    slow = Fault(world, ("d1",), faults.ended(tasks.Assemble, 2), dawdle(500.0))
    back = Fault(world, ("d1",), faults.ended(tasks.Apply, 2), dawdle(1.0))
    fault = Fault(world, ("d2",), faults.ended(tasks.Apply, 2), kill())
    finish(world, run, slow, back, fault, removed=1)
    removed = next(at for at, who, kind, _ in world.notes if (who, kind) == ("d1", "peer_removed"))
    assert removed < back.delivered[0][0]
    assert not [f for _, _, kind, f in world.notes if kind == "waiting" and "lacks" in str(f)]


def test_a_newcomer_serves_at_once_when_its_stage_has_lost_all_others() -> None:
    """It was to begin with the iteration after the next, which its stage can no longer reach."""
    run = small_run(minimum=2, steps=5, checkpoint_every=0)
    world = small_world(run, [2, 2], seed=9)
    world.add(node_member("fresh", 2), "d0", at=0.6)

    def is_about_to_serve(node: Node, event: ev.Event) -> bool:
        membership, t = node.peer.ctx.run.membership, node.peer.replica.t
        follows = world.nodes["fresh"].peer.replica.t == t and node.peer.replica.all_reduce.reduce is None
        return follows and membership.active_from.get("fresh", 0) > t + 1 and node.peer.iteration is not None

    fault = Fault(world, ("r2.1",), is_about_to_serve, kill("r2.0"))
    finish(world, run, fault, removed=2)
    (_, _, committed) = fault.delivered[0]
    assert world.history().commits[committed].stages[2].members == ("fresh",)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("frozen_s", "removed"), [(12.0, 0), (90.0, 1)], ids=["for a while", "not for ever"])
def test_a_frozen_last_replica_is_waited_for(frozen_s: float, removed: int) -> None:
    run = small_run(minimum=1, steps=4)
    world = small_world(run, [1, 2], seed=10)
    fault = Fault(world, ("r1.0",), faults.added_in_mid_backward(2), lambda w, n: w.freeze(n.id, frozen_s))
    finish(world, run, fault, removed=removed)


def test_a_cut_off_last_replica_is_waited_for() -> None:
    run = small_run(minimum=1, steps=4)
    world = small_world(run, [1, 2], seed=11)

    def isolate(world: World, node: Node) -> None:
        for other in list(node.links):
            world.cut(node.id, other, 12.0)

    fault = Fault(world, ("r1.0",), faults.received(msg.Backward, 2), isolate)
    finish(world, run, fault, removed=0)
