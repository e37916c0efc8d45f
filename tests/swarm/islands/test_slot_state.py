"""Rounds whose slots carry state: what was not sent, moments, fragments, late contributions. Whatever happens
to the machine that carries it, the log tells one process how to compute the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Forward
from anabranch.protocol.log.records import Commit, Members, decode_entry
from anabranch.protocol.rounds.plan import counted
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.train.model.interface import Model
from anabranch.train.model.rounds import iterations
from anabranch.train.stage import inner_steps
from anabranch.train.stage.inner_steps import Island
from anabranch.train.workers import whole_worker
from anabranch.train.workers.whole_worker import WholeWorker
from support.grids import every_value, first_of
from swarm.islands.test_rounds import check_replayed, island_run, returning, strike, world_of

FEEDBACK = {"select": "largest", "select_share": 0.02, "unsent": "feedback", "contributions": "int2"}
GAIA = {"select": "significant", "threshold": 0.5, "unsent": "local"}
STREAMING = {"fragments": 2, "overlap": 1, "mix": 0.5, "unsent": "local", "first_moment": "keep"}
MOMENTS = {"first_moment": "keep"}
AHEAD = {"overlap": 2, "ahead": "keep", "unsent": "local", "first_moment": "keep"}
SYSTEMS = {
    "sparse": FEEDBACK, "gaia": GAIA, "streaming": STREAMING, "moments": MOMENTS, "ahead": AHEAD
}  # fmt: skip


def run_of(system: str, **changes: object) -> RunConfig:
    return island_run(**{**SYSTEMS[system], **changes})


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("system", "late"), every_value(SYSTEMS, ("drop", "wait")))
def test_rounds_with_state_are_replayed_by_one_process(system: str, late: str) -> None:
    run = run_of(system, late=late)
    world = world_of(run)
    world.run(until_s=2000)
    check_replayed(run, world)
    plans = world.history().plans
    assert [{slot.carried for slot in plans[t]} for t in (3, 4, 5, 6)] == [{0}, {3}, {4}, {5}]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("system", "trouble", "late"), every_value(SYSTEMS, (strike, returning), ("drop", "wait"))
)
def test_a_slot_whose_machine_dies_begins_anew(
    system: str, trouble: Callable[[World, int], list[str]], late: str
) -> None:
    run = run_of(system, late=late)
    world = world_of(run)
    struck = trouble(world, 5)
    world.run(until_s=4000)
    check_replayed(run, world)
    history = world.history()
    [lost] = [slot for slot, each in enumerate(history.plans[5]) if each.peer == struck[0]]
    assert history.plans[5][lost].carried == 4 and lost not in counted(history.commits[4].stages[1].owners)
    assert history.plans[6][lost].carried == 0
    assert all(slot.carried == 5 for k, slot in enumerate(history.plans[6]) if k != lost)


def slowed(world: World, t: int, factor: float) -> list[str]:
    """Slow a relay down for round t; returns the list that will name it."""
    slow: list[str] = []

    def watch(node: Node, event: ev.Event) -> None:
        if node.id == "r1.1" and node.peer.committed == t - 1 and not slow:
            slow.append(node.id)
            node.slowness *= factor
        elif node.id == "r1.1" and node.peer.committed == t and slow == [node.id]:
            slow.append("again quick")
            node.slowness /= factor

    world.bookkeepers.append(watch)
    return slow


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("system", first_of(["", "sparse", "ahead", "gaia", "streaming", "moments"], 3))
def test_a_late_contribution_counts_in_the_next_round(system: str) -> None:
    run = island_run(**SYSTEMS.get(system, {}), late="carry")
    world = world_of(run)
    # Late in round 4, and done before round 5 ends without it: by the steps that the system's plan has.
    slow = slowed(world, 4, {"ahead": 6.5}.get(system, 4.0))
    world.run(until_s=4000)
    check_replayed(run, world)
    history = world.history()
    [late] = [k for k, slot in enumerate(history.plans[5]) if slot.late]
    assert slow and history.plans[4][late].peer == history.plans[5][late].peer == slow[0]
    assert late not in counted(history.commits[3].stages[1].owners)
    assert late in counted(history.commits[4].stages[1].owners)
    assert history.plans[5][late].late == history.plans[4][late].steps
    assert history.plans[6][late].done == history.plans[5][late].first + history.plans[5][late].steps
    weight = sum(slot.weight for slot in history.plans[5])
    inner = run.batch.microbatches // run.round.slots * run.batch.rows * run.batch.sequence
    assert history.commits[4].tokens == weight * inner


@pytest.mark.costly
def test_steps_ahead_are_taken_during_the_exchange() -> None:
    """A slot is claimed before them, the reduce's tasks go between them, and all of them are taken before the
    round's result is applied, however long the exchange takes."""
    run = run_of("ahead", ahead="mix")  # as many for every slot
    run = replace(run, evaluation=replace(run.evaluation, every=0))  # windows would come before these steps
    for step_s in (0.001, 0.02, 1.0):
        world = world_of(run)
        world.model.task_s["StepAhead"] = step_s  # type: ignore[index]
        done: dict[str, dict[int, list[str]]] = {}

        def watch(node: Node, event: ev.Event, done: dict[str, dict[int, list[str]]] = done) -> None:
            if isinstance(event, ev.Finished) and node.peer.ctx.run.stage and event.task.t > 3:
                done.setdefault(node.id, {}).setdefault(event.task.t, []).append(type(event.task).__name__)

        world.bookkeepers.append(watch)
        world.run(until_s=4000)
        check_replayed(run, world)
        of_exchange, during = ("Freeze", "SumPart", "Assemble"), 0
        for kinds in (kinds for of_peer in done.values() for kinds in of_peer.values() if "Apply" in kinds):
            assert kinds.count("StepAhead") == 2
            ahead = [at for at, kind in enumerate(kinds) if kind == "StepAhead"]
            assert kinds.index("WeightGradient") < ahead[0] and ahead[-1] < kinds.index("Apply")
            during += ahead[0] < max(kinds.index(kind) for kind in of_exchange if kind in kinds)
        assert during > 6, step_s


def test_an_overflow_in_a_step_ahead_spoils_the_next_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contribution before it was good, and counts. The slot's next round begins with the overflow, which
    is reported as any other, and the slot begins anew after that."""
    run, go_ahead, spoilt = run_of("ahead", ahead="mix"), inner_steps.go_ahead, set[int]()

    def spoil(run: RunConfig, model: Model, island: Island, tokens: Tensor, last: int) -> None:
        if island._t == 4 and int(tokens[0].sum()) % 2:  # in some slots, by their tokens
            island.gradient.fill_(math.inf)
            spoilt.add(int(tokens[0].sum()))
        go_ahead(run, model, island, tokens, last)

    monkeypatch.setattr(inner_steps, "go_ahead", spoil)
    monkeypatch.setattr(whole_worker, "go_ahead", spoil)
    world = world_of(run)
    world.run(until_s=4000)
    check_replayed(run, world)
    history = world.history()
    counts = {t: counted(history.commits[t - 1].stages[1].owners) for t in (4, 5, 6)}
    assert 0 < len(spoilt) < 3 and counts[4] == counts[6] == (0, 1, 2)
    assert len(counts[5]) == 3 - len(spoilt)
    assert [slot.carried > 0 for slot in history.plans[6]] == [slot in counts[5] for slot in range(3)]


def test_a_residual_that_survives_its_reset_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that goes on with what it carried although the log says that its slot begins anew."""
    run = run_of("sparse")
    world = world_of(run)
    struck = slowed(world, 4, 12.0)
    take = WholeWorker._take_inner_steps

    def survives(self: WholeWorker, task: Forward, tokens: Tensor) -> float:
        held = self._slot_states.find(task.index, task.t - 1)
        return take(self, msgspec.structs.replace(task, carried=held.t if held else 0), tokens)

    monkeypatch.setattr(WholeWorker, "_take_inner_steps", survives)
    world.run(until_s=4000)
    assert struck
    with pytest.raises(AssertionError):
        check_replayed(run, world)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("system", ["moments", "sparse"])
def test_a_machine_that_falls_silent_in_the_exchange_holds_up_no_round(system: str) -> None:
    """Its contribution is claimed, but gone with it, and nobody else has what it carried: the round ends
    without its slot as soon as the reduce goes on without it, not when it is removed."""
    run = run_of(system, late="drop")
    world = world_of(run, relays=4)
    frozen: list[str] = []

    def watch(node: Node, event: ev.Event) -> None:
        message = event.message if isinstance(event, ev.Received) else None
        if not isinstance(message, msg.Attempt) or frozen or message.stage != 1 or message.fence.t != 5:
            return
        if node.id in {slot.peer for slot in world.history().plans[5]}:
            frozen.append(node.id)
            world.freeze(node.id, 100.0)

    world.watchers.append(watch)
    world.run(until_s=4000)
    check_replayed(run, world)
    records = [decode_entry(line).record for line in world.log]
    [end] = [at for at, each in enumerate(records) if isinstance(each, Commit) and each.t == 5]
    gone = [at for at, each in enumerate(records) if isinstance(each, Members) and each.removed]
    [slot] = [slot for slot, each in enumerate(world.history().plans[5]) if [each.peer] == frozen]
    assert records[end].stages[1].owners[slot] == -1  # type: ignore[union-attr]
    assert not gone or gone[0] > end


@pytest.mark.costly
@pytest.mark.parametrize("late", ["drop", "wait"])
def test_a_round_whose_machines_all_left_is_skipped(late: str) -> None:
    """Nobody else has what they carried: the next round begins anew, and its batches come again."""
    run = island_run(slots=2, start=0.07, **SYSTEMS["sparse"], late=late)
    run = replace(run, run=replace(run.run, steps=32))
    world = world_of(run, relays=3)
    struck: list[str] = []
    at: list[int] = []

    def watch(node: Node, event: ev.Event) -> None:
        if struck or not 4 <= node.peer.committed < 9:
            return
        plan = world.history().plans[node.peer.committed + 1]
        if all(slot.carried for slot in plan):
            at.append(node.peer.committed + 1)
            struck.extend(slot.peer for slot in plan)
            for peer in struck:
                world.clock.after(0.05, partial(world.crash, peer))

    world.bookkeepers.append(watch)
    world.run(until_s=4000)
    [t], history, plans = at, world.history(), world.history().plans
    assert len(struck) == 2 and history.t == iterations(run)
    assert [commit.t for commit in history.commits if commit.verdict == "skip"] == [t]
    assert [slot.first for slot in plans[t + 1]] == [slot.first for slot in plans[t]]
    assert {slot.carried for slot in plans[t + 1]} == {0}
