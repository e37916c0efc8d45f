"""Spread reduces under attack: who cannot be a helper, helpers that say nothing or lie, a lying leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from anabranch.counter_rng import CounterRng
from anabranch.protocol import messages as msg
from anabranch.protocol.coordinator import reduce_schedule as spreading
from anabranch.protocol.coordinator.reduce_schedule import EVEN, ReducePlan
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Task
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.1))
STEPS = 8

Deal = Callable[[Sequence[str], Sequence[str]], ReducePlan]


def everybody(members: Sequence[str], helpers: Sequence[str]) -> ReducePlan:
    """Each one part."""
    return ReducePlan(tuple(helpers), tuple(range(len(members) + len(helpers))))


def mostly(peer: str) -> Deal:
    """Eight parts to one peer, whichever it is, and one to each member."""

    def deal(members: Sequence[str], helpers: Sequence[str]) -> ReducePlan:
        if peer in members:
            return ReducePlan((), (members.index(peer),) * 8 + tuple(range(len(members))))
        if peer in helpers:
            return ReducePlan((peer,), (len(members),) * 8 + tuple(range(len(members))))
        return EVEN

    return deal


def helped_by(peer: str) -> Deal:
    def deal(members: Sequence[str], helpers: Sequence[str]) -> ReducePlan:
        return ReducePlan((peer,), tuple(range(len(members) + 1))) if peer in helpers else EVEN

    return deal


class Swarm:
    """Two data nodes and two stages of three; reduces are spread as `deal` says, wherever the leader spreads
    one. committed_s: when each step was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deal: Deal, unreachable: Sequence[str] = ()) -> None:
        def dealt(members: Sequence[str], helpers: Sequence[str], rng: CounterRng) -> ReducePlan:
            return deal(members, helpers)

        monkeypatch.setattr(spreading, "by_chance", dealt)
        settings = Settings("attacked", 1, 2, 8, STEPS, spread="always", min_replicas=2, snapshot_every=2)
        names = [(f"d{n}", 0) for n in range(2)] + [(f"r{s}.{n}", s) for s in (1, 2) for n in range(3)]
        machines = [Machine(name, stage, reachable=name not in unreachable) for name, stage in names]
        self.world = counting_world(settings, machines, 1, SLOW)
        self.committed_s: list[float] = []
        Invariants(self.world)
        self.world.watchers.append(self._watch)

    def _watch(self, node: Node, event: ev.Event) -> None:
        if len(self.world.history().commits) > len(self.committed_s):
            self.committed_s.append(self.world.clock.now)

    def stuck(self) -> int:
        return sum("is stuck" in str(fields.get("text", "")) for *_, fields in self.world.notes)

    def run(self, until_s: float) -> None:
        self.world.run(until_s)
        assert not wrong_states(self.world)
        assert self.world.history().t == STEPS


def test_a_link_between_member_and_helper_that_is_down_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow goes round it. So must reduces: not once more in vain in each iteration, four times as long as
    in the one before."""
    swarm = Swarm(monkeypatch, everybody)

    def cut(node: Node, event: ev.Event) -> None:
        if len(swarm.committed_s) == 1:
            swarm.world.cut("r1.0", "r2.0", 1e9)

    swarm.world.watchers.append(cut)
    swarm.run(150.0)


def test_member_and_helper_of_whom_neither_can_be_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two homes: they never had a link."""
    Swarm(monkeypatch, everybody, unreachable=("r1.0", "r2.0")).run(150.0)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("role", ["helper", "member"])
def test_one_that_takes_its_steps_later_than_the_others(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages before it has opened the iteration are kept (at most four payloads of each sender), and not
    said again: the reduce must not lack a part."""
    swarm = Swarm(monkeypatch, mostly("r2.2"))
    world, usual = swarm.world, swarm.world.task_s

    def task_s(node: Node, task: Task) -> float:
        return 2.0 if isinstance(task, tasks.Apply) and node.id == "r2.2" else usual(node, task)

    world.task_s = task_s  # type: ignore[method-assign]
    if role == "member":
        dealt = spreading.by_chance

        def of_its_stage(members: Sequence[str], helpers: Sequence[str], rng: CounterRng) -> ReducePlan:
            return dealt(members, (), rng)

        monkeypatch.setattr(spreading, "by_chance", of_its_stage)
    swarm.run(150.0)
    assert not swarm.stuck()


def lying(swarm: Swarm, liar: str, lie: Callable[[str, Payload], Payload | None]) -> None:
    """Make a helper lie; None: it says nothing. In its own stage it is honest."""
    world, usual = swarm.world, swarm.world.send
    world.strict = False

    def send(sender: Node, peer: str, message: msg.AnyMessage, payload: Payload | None) -> None:
        as_helper = isinstance(message, msg.ReducedPart) and message.stage != sender.peer.ctx.run.stage
        if sender.id == liar and as_helper and payload is not None:
            payload = lie(peer, payload)
            if payload is None:
                return
        usual(sender, peer, message, payload)

    world.send = send  # type: ignore[method-assign]


def altered_for_some(peer: str, payload: Payload) -> Payload:
    assert isinstance(payload, tuple)
    return tuple(word + 1 for word in payload) if peer.endswith("0") else payload


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "lie",
    [altered_for_some, lambda peer, payload: (*payload, 1), lambda peer, payload: None],
    ids=["other sums to some", "of another length", "nothing"],
)
def test_a_helper_that_lies_does_not_stop_honest_stages(
    lie: Callable[[str, Payload], Payload | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members of stages 0 and 1 are honest: reduced evenly, these have their digests."""
    swarm = Swarm(monkeypatch, helped_by("r2.2"))
    lying(swarm, "r2.2", lie)
    swarm.run(150.0)


def test_a_leader_that_spreads_the_reduce_of_a_stage_in_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, or done: nobody crashes (I7)."""
    settings = Settings("cells", 1, 1, 8, 2, spread="always", min_replicas=2, neighbours=1)
    machines = [Machine(f"d{n}", 0) for n in range(2)] + [Machine(f"r1.{n}", 1) for n in range(6)]
    world: World = counting_world(settings, machines, 1, SLOW)

    def of(
        self: object, stage: int, t: int, members: Sequence[str], able: object, owners: object
    ) -> ReducePlan:
        return ReducePlan((), tuple(part % len(members) for part in range(16))) if stage else EVEN

    monkeypatch.setattr(spreading.ReduceSchedule, "of", of)
    world.run(100.0)
