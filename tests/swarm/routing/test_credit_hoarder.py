"""A member that asks its next stage for a slot for every microbatch, hands none back and uses hardly any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.pipeline.sender import Sender
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of

STEPS, MICROBATCHES = 3, 36
TASKS = dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.1)


class Swarm:
    """Two data nodes, relays of the first stage, of whom those who hoard take one microbatch at a time, and
    two of the second with so many slots. keep: they hand no slot back; ask: and ask for one for every
    microbatch."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        hoarders: int,
        keep: bool,
        ask: bool,
        upstream: int = 4,
        slots: int = 8,
    ) -> None:
        settings = Settings("hoarded", 1, 2, MICROBATCHES, STEPS, min_replicas=2)
        machines = [Machine(f"d{n}", 0, 12) for n in range(2)]
        machines += [Machine(f"r1.{n}", 1, 12) for n in range(upstream - hoarders)]
        self.hoarders = [f"h{n}" for n in range(hoarders)]
        machines += [Machine(name, 1, 1) for name in self.hoarders]
        machines += [Machine(f"r2.{n}", 2, slots) for n in range(2)]
        self.world = counting_world(settings, machines, 3, Model(latency_s=(0.01, 0.05), task_s=TASKS))
        self.committed_s: list[float] = []
        self._asked: set[tuple[str, int]] = set()
        Invariants(self.world)
        self.world.watchers.append(self._watch)
        if keep:
            self._keep_all(patch)
        if ask:
            self.world.watchers.append(self._ask)

    def _keep_all(self, patch: pytest.MonkeyPatch) -> None:
        give_back: Callable[..., None] = Sender._give_back

        def honest_only(sender: Sender, *given: Any) -> None:
            if sender.ctx.me not in self.hoarders:
                give_back(sender, *given)

        patch.setattr(Sender, "_give_back", honest_only)

    def _watch(self, node: Node, event: ev.Event) -> None:
        if len(self.world.history().commits) > len(self.committed_s):
            self.committed_s.append(self.world.clock.now)

    def _ask(self, node: Node, event: ev.Event) -> None:
        """As soon as it has opened an iteration, for all of it."""
        iteration = node.peer.iteration
        if node.id not in self.hoarders or iteration is None or (node.id, iteration.t) in self._asked:
            return
        self._asked.add((node.id, iteration.t))
        fence = node.peer.ctx.fence(iteration.t, iteration.base)
        for index in range(MICROBATCHES):
            for relay in ("r2.0", "r2.1"):
                self.world.carry(node, relay, msg.encode(msg.Ask(fence, index, index % 2 == 0)), None)

    def run(self) -> float:
        """Seconds of all iterations."""
        self.world.run(300.0)
        assert not wrong_states(self.world)
        assert self.world.history().t == STEPS
        return self.committed_s[-1]


@pytest.mark.parametrize("hoarders", first_of([1, 2]))
def test_hoarders_have_no_more_by_asking_than_was_dealt_to_them(
    monkeypatch: pytest.MonkeyPatch, hoarders: int
) -> None:
    """The others get through as if these kept no more than their own: before, the second iteration had no
    end."""
    kept = Swarm(monkeypatch, hoarders, keep=True, ask=False).run()
    assert Swarm(monkeypatch, hoarders, keep=True, ask=True).run() < 1.15 * kept


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("hoarders, upstream, slots", first_of([(1, 4, 2), (3, 8, 5), (2, 8, 3)], 2))
def test_a_run_ends_where_those_who_hoard_cannot_have_all_slots(
    monkeypatch: pytest.MonkeyPatch, hoarders: int, upstream: int, slots: int
) -> None:
    """Though there are fewer slots than upstream peers, and so none is dealt to anybody."""
    Swarm(monkeypatch, hoarders, keep=True, ask=True, upstream=upstream, slots=slots).run()
