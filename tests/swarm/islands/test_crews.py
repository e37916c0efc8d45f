"""Rounds of pipeline islands in virtual time, with real tensors: the log tells one process how to compute the
same bits, whatever happens to a crew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import msgspec
import pytest

from anabranch.config import PipelineSection, RoundSection, RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import (
    Embed,
    Head,
    InnerBackward,
    InnerForward,
    InnerHead,
    InnerStep,
    InputGradient,
    Payload,
    Result,
    Task,
)
from anabranch.protocol.interface.tasks import Forward as ForwardTask
from anabranch.protocol.log.records import STRANDED, overflowed
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.rounds.plan import filled
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from support.grids import every_value, first_of
from support.swarms.small_swarm import MadeUpBatches, small_model, small_run
from support.swarms.training_world import training_world
from swarm.islands.test_rounds import check_replayed

#: 2 synchronous steps, then 6 rounds of 2 optimizer steps each. In the first two the leader learns how quick
#: crews are.
STEPS, LEARNT = 14, 2
soak = partial(pytest.param, marks=pytest.mark.soak)
INT8 = {"activations": "int8", "gradients": "int8", "gradient_rounding": "stochastic"}
TIMES = Model(task_s={"InnerForward": 0.05, "InnerBackward": 0.1, "Embed": 0.002})


def crew_run(**changes: object) -> RunConfig:
    """Two relay stages, two slots of two microbatches each."""
    run = small_run(steps=STEPS)
    run = replace(run, batch=replace(run.batch, microbatches=4))
    return replace(run, round=replace(RoundSection(slots=2, steps=2, start=0.15), **changes))  # type: ignore[arg-type]


def world_of(
    run: RunConfig,
    relays: int = 2,
    data_nodes: int = 2,
    seed: int = 1,
    voters: int = 1,
    capacity: int = 4,
    shared: int = 0,
) -> World:
    batches, model = MadeUpBatches(run), small_model(run)
    relays_by_stage = [relays] * run.pipeline.stages
    world = training_world(
        run, model, batches, relays_by_stage, data_nodes, seed, capacity, TIMES, voters=voters, shared=shared
    )
    Invariants(world)
    return world


def counts(world: World) -> list[int]:
    """Number of slots that count in each round."""
    history = world.history()
    rounds = [commit for commit in history.commits if history.plans.get(commit.t)]
    return [len(filled(history.plans[commit.t], commit.stages)) for commit in rounds]


def at_message(
    world: World, kind: type[msg.Message], t: int, do: Callable[[Node], None], nth: int = 1
) -> list[str]:
    """Call `do` with the receiver of the nth message of a kind about iteration t; returns the list that will
    name it."""
    done, seen = list[str](), [0]

    def watch(node: Node, event: ev.Event) -> None:
        message = event.message if isinstance(event, ev.Received) else None
        if done or not isinstance(message, kind) or message.fence.t != t:  # type: ignore[attr-defined]
            return
        seen[0] += 1
        if seen[0] == nth:
            done.append(node.id)
            world.clock.after(0.0, partial(do, node))

    world.watchers.append(watch)
    return done


def crash(world: World) -> Callable[[Node], None]:
    return lambda node: world.crash(node.id)


def crash_and_return(world: World, after_s: float) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        member = msgspec.structs.replace(node.member, incarnation=node.member.incarnation + 1)
        world.crash(node.id)
        world.clock.after(after_s, lambda: world.add(member, "d0", world.clock.now))

    return do


#: Keys of `round`.
CHANGES: list[dict[str, object]] = [
    {},
    {"contributions": "int4", "results": "int4", "first_moment": "estimate"},
    {"first_moment": "keep", "unsent": "feedback", "select": "largest"},
    {"first_steps": 1, "steps": 4, "end": 0.2},
]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("changes", "wire"), every_value(CHANGES, ({}, INT8)))
def test_rounds_of_crews_are_replayed_by_one_process(
    changes: dict[str, object], wire: dict[str, str]
) -> None:
    run = crew_run(**changes)
    run = replace(run, wire=replace(run.wire, **wire))  # type: ignore[arg-type]
    world = world_of(run)
    world.run(until_s=2000)
    check_replayed(run, world)
    plans = world.history().plans
    assert set(counts(world)[LEARNT:]) == {2}
    assert all(len(slot.crew) == 3 for plan in plans.values() for slot in plan)


@pytest.mark.costly
def test_forwards_beyond_the_memory_of_a_crew_are_computed_again() -> None:
    """Four microbatches an inner step, machines that hold one: with `recompute` two are under way."""
    again = dict.fromkeys((0.0, 1.0), 0)
    times = dict.fromkeys(again, 0.0)
    for recompute in again:
        run = crew_run(slots=1)
        run = replace(run, fleet=replace(run.fleet, recompute=recompute))
        world = world_of(run, relays=1, capacity=1)

        def count(node: Node, event: ev.Event, recompute: float = recompute) -> None:
            task = event.task if isinstance(event, ev.Finished) else None
            again[recompute] += isinstance(task, InnerBackward) and task.again and node.id != "d0"

        world.watchers.append(count)
        world.run(until_s=2000)
        times[recompute] = world.clock.now
        check_replayed(run, world)
    assert again[0.0] == 0 and again[1.0] > 20 and times[1.0] < times[0.0]


@pytest.mark.costly
def test_three_stages_and_one_data_node() -> None:
    run = crew_run()
    run = replace(run, model=replace(run.model, blocks=3), pipeline=PipelineSection(stages=3))
    world = world_of(run, data_nodes=1)
    world.run(until_s=2000)
    check_replayed(run, world)
    assert counts(world)[LEARNT:] == [2, 2, 2, 2]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "after_s"), every_value([msg.InnerActivation, msg.InnerGradient], [0.3, 30.0])
)
def test_a_relay_that_dies_costs_its_crew_the_round(kind: type[msg.Message], after_s: float) -> None:
    run = crew_run()
    world = world_of(run)
    back = crash_and_return(world, after_s)
    struck = at_message(world, kind, 6, lambda node: back(world.nodes["r2.0"]), nth=5)
    world.run(until_s=2000)
    assert struck
    check_replayed(run, world)
    assert counts(world)[LEARNT] == 2 and counts(world)[LEARNT + 1] == 1


def test_a_relay_that_is_back_is_sent_nothing_of_the_slot_that_it_lost() -> None:
    run = crew_run()
    world, again = world_of(run), list[str]()
    back = crash_and_return(world, 0.3)
    struck = at_message(world, msg.InnerGradient, 6, lambda node: back(world.nodes["r2.0"]), nth=5)

    def watch(node: Node, event: ev.Event) -> None:
        message = event.message if isinstance(event, ev.Received) else None
        if node.id == "r2.0" and node.member.incarnation > 1 and isinstance(message, msg.InnerActivation):
            again.extend([node.id] * (message.fence.t == 6))

    world.watchers.append(watch)
    world.run(until_s=2000)
    assert struck and world.nodes["r2.0"].member.incarnation == 2 and not again


@pytest.mark.costly
@pytest.mark.parametrize("results", ["int8", "int4"])
def test_a_relay_whose_download_outlasts_the_round_is_of_a_crew_in_the_next_but_one(results: str) -> None:
    """It has the state before the round that ended meanwhile, and fetches that round's result from relays in
    the midst of inner steps; then it serves in the open round, and has a slot of the one after it."""
    run = crew_run(results=results)
    world, held = world_of(run), list[Callable[[], None]]()
    carry, back = world.carry, crash_and_return(world, 0.3)

    def slowly(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if peer == "r2.0" and isinstance(msg.decode(message), msg.Piece) and world.history().t < 5:
            held.append(partial(carry, sender, peer, message, payload))
        else:
            carry(sender, peer, message, payload)

    def release(node: Node, event: ev.Event) -> None:
        while held and world.history().t >= 5:
            held.pop()()

    world.carry = slowly  # type: ignore[method-assign]
    world.watchers.append(release)
    struck = at_message(world, msg.InnerActivation, 5, lambda node: back(world.nodes["r2.0"]), nth=2)
    world.run(until_s=2000)
    assert struck
    check_replayed(run, world)
    assert counts(world)[LEARNT:] == [1, 1, 2, 2]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_relay_of_another_crew_takes_the_seat_of_one_that_is_away(comes_back: bool) -> None:
    """The round in which it died has lost a slot. The next one has both, as the other relay of its stage
    is of two crews, until the one that was away has the state."""
    run = crew_run()
    world = world_of(run, shared=1)
    leave = crash_and_return(world, 4.0) if comes_back else crash(world)
    struck = at_message(world, msg.InnerActivation, 5, lambda node: leave(world.nodes["r2.0"]), nth=5)
    world.run(until_s=2000)
    assert struck
    check_replayed(run, world)
    assert counts(world)[LEARNT:] == [1, 2, 2, 2]
    plans = world.history().plans
    seats = [[slot.crew[1] for slot in plans[t]].count("r2.1") for t in (6, 7, 8)]
    assert seats == ([2, 1, 1] if comes_back else [2, 2, 2])


@pytest.mark.costly
def test_crews_of_one_relay_keep_what_they_carry_until_another_is_there() -> None:
    run = crew_run(first_moment="keep", unsent="feedback", select="largest")
    world = world_of(run, shared=1, voters=3, data_nodes=3)
    back = crash_and_return(world, 6.0)
    struck = at_message(world, msg.InnerActivation, 5, lambda node: back(world.nodes["r2.0"]), nth=5)
    world.run(until_s=2000)
    assert struck
    check_replayed(run, world)
    plans = world.history().plans
    both = [t for t, plan in plans.items() if [slot.crew[1] for slot in plan].count("r2.1") == 2]
    assert len(both) >= 3
    assert all(slot.carried == t - 1 for t in both[1:] for slot in plans[t])


def test_a_relay_that_dies_while_its_slot_closes() -> None:
    run = crew_run()
    world = world_of(run)
    struck = at_message(world, msg.Backward, 6, crash(world))
    world.run(until_s=2000)
    assert struck
    check_replayed(run, world)
    assert 1 in counts(world)[LEARNT:]


def test_a_data_node_that_dies_costs_its_crew_the_round() -> None:
    run = crew_run()
    world = world_of(run)
    gone = at_message(world, msg.InnerGradient, 6, lambda node: world.crash("d1"), nth=5)
    world.run(until_s=2000)
    assert gone
    check_replayed(run, world)
    assert counts(world)[3] == 1 and counts(world)[4:] == [2, 2]  # the other data node has both slots then


def test_a_round_without_any_crew_is_skipped() -> None:
    run = replace(crew_run(), batch=replace(crew_run().batch, microbatches=2))
    run = replace(run, round=replace(run.round, slots=1))
    world = world_of(run)

    def lose(node: Node) -> None:
        world.crash(world.history().plans[6][0].peer)

    struck = at_message(world, msg.InnerActivation, 6, lose, nth=3)
    world.run(until_s=2000)
    assert struck
    history = world.history()
    skipped = [commit.t for commit in history.commits if commit.witness is not None]
    assert skipped == [6] and history.commits[5].witness.tensor == STRANDED  # type: ignore[union-attr]
    assert history.t == 8 and counts(world) == [1, 1, 1, 0, 1, 1]
    assert history.plans[7][0].first == history.plans[6][0].first


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("slots", "finder"), [(1, "d0"), (1, "d1"), (2, "d0"), (2, "r2.1"), soak(1, "r2.1"), soak(2, "d1")]
)
def test_an_overflow_that_a_crew_reports_costs_its_slot_alone(finder: str, slots: int) -> None:
    """Also if the leader of the log is of the crew: inputs of one guest skip no round of the others."""
    run = crew_run(slots=slots)
    world = world_of(run)
    spoilt = list[str]()

    def watch(node: Node, event: ev.Event) -> None:
        if node.id == finder and node.peer.committed == 3 and not spoilt:
            spoilt.append(node.id)
            overflowing(node, 5)

    world.watchers.append(watch)
    world.run(until_s=2000)
    history = world.history()
    with_finder = [slot for slot in history.plans[5] if finder in slot.crew]
    skipped = [commit.t for commit in history.commits if commit.witness is not None]
    if not with_finder:
        assert slots == 1 and skipped == []  # it has no part in the only crew
    elif slots == 1:
        assert skipped == [5] and overflowed(history.commits[4])
    else:
        assert skipped == [] and counts(world)[2] == 1
        check_replayed(run, world)


def overflowing(node: Node, t: int) -> None:
    """Make the worker of a peer find an overflow in the inner steps of round t."""
    computer = node.computer
    assert computer is not None
    run = computer.run

    def spoilt(task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        if isinstance(task, InnerBackward | InnerHead) and task.t == t:
            return Result(overflow="activation")
        return run(task, inputs)

    computer.run = spoilt  # type: ignore[method-assign]


@pytest.mark.costly
def test_a_withholding_relay_makes_room_for_a_spare() -> None:
    """Nobody can say whose fault it is that a crew is not ready, so others come first in the next round."""
    run = crew_run(slots=1)
    world, held = world_of(run, relays=2), list[str]()
    carry = world.carry

    def withhold(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        decoded = msg.decode(message)
        late = isinstance(decoded, msg.InnerGradient) and decoded.fence.t >= 5 and sender.id[0] == "r"
        if late and sender.id in (held or [sender.id]):
            held[:] = [sender.id]
        else:
            carry(sender, peer, message, payload)

    world.carry = withhold  # type: ignore[method-assign]
    world.run(until_s=2000)
    history = world.history()
    assert held and history.t == 8
    assert [commit.t for commit in history.commits if commit.witness is not None] == [5]
    assert all(held[0] not in slot.crew for t in (6, 7, 8) for slot in history.plans[t])
    assert all(node.alive for node in world.nodes.values())


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "kind", first_of([Embed, InnerForward, InputGradient, ForwardTask, InnerStep, Head], 3)
)
def test_a_task_that_fails_costs_its_slot_at_once(kind: type[Task]) -> None:
    run = crew_run(slots=1)
    world, failed = world_of(run), list[str]()

    def watch(node: Node, event: ev.Event) -> None:
        if node.peer.committed == 4 and node.computer is not None and node.id not in failed:
            failed.append(node.id)
            failing(node, kind, 5)

    world.watchers.append(watch)
    world.strict = False
    world.run(until_s=2000)
    history = world.history()
    assert [commit.t for commit in history.commits if commit.witness is not None] == [5]
    assert history.t == 8 and history.commits[4].witness.tensor == STRANDED  # type: ignore[union-attr]
    assert world.clock.now < 60.0  # no deadline was waited for


def failing(node: Node, kind: type[Task], t: int) -> None:
    """Make the worker of a peer fail in tasks of a kind in round t, but for held-out windows."""
    assert node.computer is not None
    run = node.computer.run

    def refused(task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        fails = isinstance(task, kind) and task.t == t and getattr(task, "index", 0) < 1
        return Result(error="out of memory") if fails else run(task, inputs)

    node.computer.run = refused  # type: ignore[method-assign]


@pytest.mark.costly
@pytest.mark.parametrize("message", ["claim", "overflow", "opening"])
def test_a_peer_beside_the_crews_has_no_say(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare relay of stage 2 claims slots, gives up some that do not exist, or opens one at a data node."""
    run = crew_run()
    world, told = world_of(run, relays=3), list[str]()
    opened = Iteration.__init__

    def beside(self: Iteration, ctx: PeerContext, t: int, base: str, *rest: object, **others: object) -> None:
        opened(self, ctx, t, base, *rest, **others)  # type: ignore[arg-type]
        plan = ctx.run.plan(t)
        if t < 5 or ctx.run.stage != 2 or any(ctx.me in slot.crew for slot in plan):
            return
        told.append(ctx.me)
        fence, leader = ctx.fence(t, base), ctx.log.leader
        if message == "claim":
            ctx.outbox.send(leader, msg.Claim(fence, 2, (0, 1), {}, {}, "", (), {}))
        elif message == "overflow":
            for slot in (0, 1, 3):
                ctx.outbox.send(leader, msg.Overflow(fence, 2, slot, "activation"))
        else:
            for slot, each in enumerate(plan):
                ctx.outbox.send(each.crew[-1], msg.Ask(fence, slot, False))

    monkeypatch.setattr(Iteration, "__init__", beside)
    world.run(until_s=2000)
    assert told and counts(world)[LEARNT:] == [2, 2, 2, 2]
    check_replayed(run, world)


def test_cut_links_lose_no_inner_step() -> None:
    """Messages under way on the link are lost; both ends go on once it is back."""
    run = crew_run()
    world = world_of(run)
    cuts = list[float]()

    def cut(node: Node) -> None:
        for crew in {slot.crew for slot in node.peer.ctx.run.plan(node.peer.committed + 1)}:
            around = (*crew, crew[0])
            for one, other in pairwise(around):
                if world.clock.now and world.cut(one, other, 0.0):
                    cuts.append(world.clock.now)

    for t, nth in ((3, 4), (4, 7), (5, 2), (6, 9), (7, 3), (8, 11)):
        at_message(world, msg.InnerActivation, t, cut, nth)
        at_message(world, msg.InnerGradient, t, cut, nth)
    world.run(until_s=2000)
    assert len(cuts) > 20
    check_replayed(run, world)
    assert counts(world)[LEARNT:] == [2, 2, 2, 2]


@pytest.mark.costly
def test_a_new_leader_goes_on_with_the_crews_of_the_log() -> None:
    run = crew_run()
    world = world_of(run, voters=3)
    struck = at_message(world, msg.InnerActivation, 6, lambda node: world.crash("d0"), nth=3)
    world.run(until_s=4000)
    assert struck
    check_replayed(run, world)
