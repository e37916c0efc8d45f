"""Replicas that are spared: they send nothing, keep their state in step, and stand in for who fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import pytest

from anabranch.counter_rng import CounterRng
from anabranch.protocol.context.early_buffer import EARLY_AHEAD
from anabranch.protocol.fleet import standbys as standby_view
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import ReducePart
from anabranch.protocol.reduce import deferred_delivery
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import first_of

SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.1))
STEPS = 8
#: Seconds for which a reduce waits for others: long enough that nobody waits in vain.
LONG_S = 200.0
SPARED = ("r1.1", "r1.2", "r2.0", "r2.1")


class Swarm:
    """Two data nodes and two stages of three (`replicas`), of whom the leader spares some, or (spared: none)
    whom chance says. owners: iteration -> units that each owns."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seed: int,
        spared: Collection[str] = SPARED,
        wait_s: float = LONG_S,
        voters: int = 1,
        replicas: int = 3,
    ) -> None:
        def told(relays: Sequence[str], t: int, before: object, rng: CounterRng) -> Mapping[str, float]:
            return {peer: wait_s for peer in relays if peer in spared}

        if spared:
            monkeypatch.setattr(standby_view, "by_chance", told)
        settings = Settings(
            "spared", 1, 2, 8, STEPS, spare="always", min_replicas=2, snapshot_every=2, voters=voters
        )
        names = [(f"d{n}", 0) for n in range(2)] + [(f"r{s}.{n}", s) for s in (1, 2) for n in range(replicas)]
        self.world = counting_world(settings, [Machine(name, stage) for name, stage in names], seed, SLOW)
        self.sent: set[tuple[str, int]] = set()
        self.reduced_at: dict[int, float] = {}
        self.committed_at: dict[int, float] = {}
        """Iteration -> time at which the first part of a gradient arrived; at which its step was
        committed."""
        Invariants(self.world)
        self.world.watchers.append(self._watch)

    def _watch(self, node: Node, event: ev.Event) -> None:
        self.committed_at.setdefault(self.world.history().t, self.world.clock.now)
        if isinstance(event, ev.Received) and isinstance(event.message, ReducePart):
            self.sent.add((event.peer, event.message.fence.t))
            self.reduced_at.setdefault(event.message.fence.t, self.world.clock.now)

    def owned(self, t: int) -> Counter[str]:
        """Units of stages 1 and 2 in a step, by who owns them."""
        stages = self.world.history().commits[t - 1].stages[1:]
        return Counter(stage.members[owner] for stage in stages for owner in stage.owners)

    def at(self, t: int, strike: Callable[[], None]) -> list[float]:
        """Something happens when so many steps are committed and somebody computes in the next."""
        struck: list[float] = []

        def look(node: Node, event: ev.Event) -> None:
            computed = isinstance(event, ev.Finished) and node.peer.ctx.run.stage > 0
            if not struck and computed and self.world.history().t == t:
                struck.append(self.world.clock.now)
                strike()

        self.world.watchers.append(look)
        return struck

    def run(self, until_s: float = 300.0) -> None:
        self.world.run(until_s)
        assert not wrong_states(self.world)
        assert self.world.history().t == STEPS


def test_who_is_spared_sends_nothing_and_takes_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(monkeypatch, 1)
    swarm.run()
    for t in range(2, STEPS + 1):  # some units of the first iteration set out before that was known
        assert swarm.owned(t).keys() == {"r1.0", "r2.2"}
        assert swarm.owned(t).total() == 16
    assert not [pair for pair in swarm.sent if pair[0] in SPARED and pair[1] > 1]
    assert {swarm.world.nodes[peer].peer.replica.t for peer in SPARED} == {STEPS}


def test_where_most_are_spared_half_of_all_get_the_gradient_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a stage have to agree on the gradient, and a step does not wait for the delivery that is put
    off for those who are spared."""
    swarm = Swarm(monkeypatch, 70, spared=("r1.2", "r1.3", "r1.4"), replicas=5)
    swarm.run()
    reduced_s = [swarm.committed_at[t] - at for t, at in swarm.reduced_at.items()]
    assert len(reduced_s) == STEPS and max(reduced_s) < deferred_delivery.DELAY_S
    assert not {"r1.2", "r1.3", "r1.4"} & set(swarm.owned(STEPS))


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_who_is_spared_does_the_work_when_all_others_die(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(monkeypatch, 10 + seed)

    def strike() -> None:
        swarm.world.crash("r1.0")
        swarm.world.crash("r2.2")

    struck = swarm.at(3, strike)
    swarm.run()
    assert struck and swarm.owned(STEPS).keys() <= set(SPARED)
    assert swarm.world.clock.now < struck[0] + LONG_S  # nobody was waited for


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_nobody_waits_for_long_for_one_that_is_frozen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(monkeypatch, 20 + seed)
    struck = swarm.at(3, lambda: swarm.world.freeze("r1.0", 1000.0))
    swarm.run(900.0)
    assert struck and swarm.world.clock.now < struck[0] + LONG_S


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_a_new_leader_spares_anew(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one and whoever worked at a stage die together: those it spared stand in, and work on as long
    as nobody has come back."""
    swarm = Swarm(monkeypatch, 30 + seed, voters=3)

    def strike() -> None:
        swarm.world.crash("d0")
        swarm.world.crash("r1.0")

    struck = swarm.at(3, strike)
    world = swarm.world
    world.run(200.0)
    assert struck and not wrong_states(world)
    assert world.history().t == STEPS
    assert {peer for peer in swarm.owned(STEPS) if peer[1] == "1"} <= set(SPARED)


def test_who_comes_is_told_and_works_where_only_others_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a stage are spared: each works, until somebody comes who is not; then that one alone."""
    swarm = Swarm(monkeypatch, 40, spared=("r1.0", "r1.1", "r1.2"))
    swarm.world.add(member_of(Machine("late", 1)), "d0", at=0.8)
    swarm.run()
    first = [peer for peer in swarm.owned(1) if peer[1] == "1"]
    assert len(first) > 1
    assert {peer for peer in swarm.owned(STEPS) if not peer.startswith("r2")} == {"late"}
    assert swarm.world.nodes["late"].peer.ctx.standby_view.waits.keys() == {"r1.0", "r1.1", "r1.2"}


@pytest.mark.parametrize("seed", first_of(range(6), 2))
def test_whoever_is_spared_by_chance_every_step_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others in every other iteration, while one after the other dies and comes back."""
    swarm = Swarm(monkeypatch, 50 + seed, spared=())
    for t, peer in enumerate(("r1.0", "r2.1", "r1.2", "r2.0"), start=1):
        swarm.at(t, lambda peer=peer: swarm.world.crash(peer))  # type: ignore[misc]
    swarm.run(600.0)


def test_slots_that_their_peer_does_not_know_of_do_not_keep_those_waiting_who_are_spared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only one of a stage that is not spared has no link to the data node, which deals it all slots. When
    it has one again it is so many steps behind that it forgets what it is told of them."""

    def told(relays: Sequence[str], t: int, before: object, rng: CounterRng) -> Mapping[str, float]:
        return {peer: 5.0 for peer in relays if peer != "r1.0" and t > 8}

    monkeypatch.setattr(standby_view, "by_chance", told)
    settings = Settings("spared", 1, 1, 4, 14, spare="always", min_replicas=3, heartbeat_s=2.0)
    names = [("d0", 0), *((f"r1.{n}", 1) for n in range(3))]
    world = counting_world(settings, [Machine(name, stage) for name, stage in names], 1)
    Invariants(world)
    cut: list[bool] = []
    behind: list[int] = []

    def look(node: Node, event: ev.Event) -> None:
        if not cut and world.history().t == 2:
            cut.append(world.cut("d0", "r1.0", 6.0))
        if cut and isinstance(event, ev.LinkUp) and (node.id, event.peer) == ("r1.0", "d0"):
            behind.append(world.history().t - node.peer.replica.t)

    world.watchers.append(look)
    world.run(300.0)
    assert cut == [True] and behind[0] > EARLY_AHEAD
    assert not wrong_states(world)
    assert world.history().t == 14
