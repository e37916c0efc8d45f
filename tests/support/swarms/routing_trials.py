"""Random trials of routing in the world of whole numbers: a swarm and its faults from one seed."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from msgspec import structs

from anabranch.flow.graph.problem import Return
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

#: (policy, return rule). The auction plans for "any" alone.
COMBINATIONS = [*itertools.product(["greedy", "static", "gwtf", "swarm"], ["any", "own"]), ("auction", "any")]
LATENCIES = [(0.001, 0.02), (0.001, 0.02), (0.02, 0.2), (0.2, 1.0)]
#: Faults happen in the first so many seconds, and after the last it is quiet for so long.
TROUBLE_S, QUIET_S = 25.0, 70.0
#: Ends of a link that have disagreed for the last so many seconds will disagree for ever.
GHOST_S = 25.0
#: A peer that is woken more often than this per second of virtual time goes round in a circle.
WAKES_PER_S = 400.0


def mismatches(world: World) -> set[str]:
    """Units of the plan that the two ends of a link do not agree about."""
    held = {}
    for name, node in world.nodes.items():
        agent = node.peer.router.agent
        if node.running and agent is not None:
            held[name] = agent.held()
    wrong = set()
    for name, units in held.items():
        for unit, previous, following in units:
            if following is not None and not any(
                other.unit == unit and other.previous == name for other in held.get(following, ())
            ):
                wrong.add(f"{name} sends {unit} to {following}, which does not hold it")
            if previous is not None and not any(
                other.unit == unit and other.next == name for other in held.get(previous, ())
            ):
                wrong.add(f"{name} has {unit} from {previous}, which does not send it")
    return wrong


class RoutedTrial:
    """`policy` and `returns` are given; everything else is drawn from `seed`."""

    def __init__(self, seed: int, policy: str, returns: Return) -> None:
        self.draw = draw = random.Random(seed)
        stages, data_nodes = draw.choice([1, 2, 2, 3]), draw.choice([1, 2, 2, 3])
        replicas = draw.choice([2, 2, 3])
        self.settings = Settings(
            f"trial {seed}",
            1,
            stages,
            draw.choice([4, 6, 8]),
            10_000,
            windows=draw.choice([0, 0, 2]),
            evaluate_every=3,
            policy=policy,
            returns=returns,
            activation_bytes=1024,
        )
        self._machines = [Machine(f"d{n}", 0) for n in range(data_nodes)]
        for stage in range(1, stages + 1):
            for n in range(replicas):
                slowness = draw.choice([1.0, 1.0, 2.0, 5.0])
                self._machines.append(Machine(f"r{stage}.{n}", stage, draw.choice([1, 2, 4]), slowness))
        latency = draw.choice(LATENCIES)
        model = Model(
            latency, draw.choice([0.0, 0.01, 0.1]), {**dict.fromkeys(_COMPUTING, 0.06), "Embed": 0.002}
        )
        self.world = counting_world(self.settings, self._machines, seed, model)
        Invariants(self.world)
        self.faults: list[tuple[float, str]] = []
        self.wrong_since: dict[str, float] = {}
        self.wakes: Counter[str] = Counter()
        self.end_s = TROUBLE_S + QUIET_S * (1.0 + 2.0 * latency[1])
        self._wakes_from = self.end_s - 20.0
        self._incarnations: Counter[str] = Counter()
        for _ in range(draw.randint(1, 5)):
            self._plan(draw.choice(["kill", "rejoin", "freeze", "cut", "join", "slow", "pair"]))
        self.world.watchers.append(self._look)
        self.world.clock.at(self.end_s, self._stop)
        self.steps_at_quiet = 0
        self.world.clock.at(TROUBLE_S + 15.0, self._quiet)

    # --- faults --------------------------------------------------------------------------------

    def _plan(self, kind: str) -> None:
        at = self.draw.uniform(2.0, TROUBLE_S)
        strike = getattr(self, f"_{kind}")
        self.world.clock.at(at, lambda: self._strike(kind, strike))

    def _strike(self, kind: str, strike: object) -> None:
        assert callable(strike)
        self.faults.append((self.world.clock.now, f"{kind} {strike()}"))

    def _expendable(self) -> list[str]:
        """Peers that may be lost: not the leader, and the first replica of each stage stays."""
        return [m.id for m in self._machines if m.id != "d0" and not m.id.endswith(".0")
                and self.world.nodes[m.id].running]  # fmt: skip

    def _kill(self) -> str:
        victim = self.draw.choice([*self._expendable(), ""])
        if victim:
            self.world.crash(victim)
        return victim

    def _rejoin(self) -> str:
        victim = self._kill()
        if victim:
            machine = next(m for m in self._machines if m.id == victim)
            wait = self.draw.choice([0.01, 0.5, 4.0])
            self.world.clock.after(wait, lambda: self._enter(machine))
        return victim

    def _enter(self, machine: Machine) -> None:
        self._incarnations[machine.id] += 1
        member = structs.replace(
            self.world.nodes[machine.id].member, incarnation=1 + self._incarnations[machine.id]
        )
        self.world.add(member, "d0", self.world.clock.now, machine.slowness)

    def _join(self) -> str:
        stage = self.draw.randint(1, self.settings.stages)
        machine = Machine(f"r{stage}.late{len(self._machines)}", stage, self.draw.choice([1, 3]))
        self._machines.append(machine)
        template = self.world.nodes[f"r{stage}.0"].member
        member = structs.replace(template, id=machine.id, name=machine.id, address=f"{machine.id}:1",
                                 capacity=machine.capacity)  # fmt: skip
        self.world.add(member, "d0", self.world.clock.now)
        return machine.id

    def _freeze(self) -> str:
        victim = self.draw.choice([m.id for m in self._machines if m.id != "d0"])
        self.world.freeze(victim, self.draw.choice([0.5, 3.0, 8.0]))
        return victim

    def _cut(self) -> str:
        one = self.draw.choice(self._machines).id
        linked = sorted(self.world.nodes[one].links)
        other = self.draw.choice([*linked, ""])
        return (
            f"{one} {other} {self.world.cut(one, other, self.draw.choice([0.0, 1.0, 6.0]))}" if other else ""
        )

    def _slow(self) -> str:
        one = self.draw.choice(self._machines).id
        for other in self.world.nodes[one].links:
            self.world.slow[frozenset((one, other))] = self.draw.choice([2.0, 5.0])
        return one

    def _pair(self) -> str:
        return f"{self._kill()} {self._cut()} {self._freeze()}"

    # --- watching ------------------------------------------------------------------------------

    def _look(self, node: Node, event: ev.Event) -> None:
        now = self.world.clock.now
        if isinstance(event, ev.Wake) and now > self._wakes_from:
            self.wakes[node.id] += 1
        agent = node.peer.router.agent
        if agent is not None and node.peer.ctx.run.stage:
            assert len(agent.held()) <= node.member.capacity
        if node.id == "d0" and now > self.end_s - 2 * GHOST_S and isinstance(event, ev.Wake):
            wrong = mismatches(self.world)
            self.wrong_since = {text: self.wrong_since.get(text, now) for text in wrong}

    def _quiet(self) -> None:
        self.steps_at_quiet = self.world.history().t

    def _stop(self) -> None:
        self.world.nodes["d0"].handle(ev.Stopping("the trial is over"))

    def carry_out(self) -> None:
        self.world.run(self.end_s + 200.0)
        wrong = wrong_states(self.world)
        assert not wrong, wrong
        done = self.world.history().t
        assert done > self.steps_at_quiet + 1, f"{self.steps_at_quiet} steps, then {done}"
        ghosts = [text for text, since in self.wrong_since.items() if self.end_s - since > GHOST_S]
        assert not ghosts, ghosts
        refused = {str(fields["reason"]) for _, _, kind, fields in self.world.notes if kind == "refused"}
        assert not any(reason.startswith("Route") for reason in refused), refused
        busy = {name: count for name, count in self.wakes.items() if count > 20.0 * WAKES_PER_S}
        assert not busy, busy

    def report(self) -> str:
        return f"{self.settings} {[(m.id, m.capacity, m.slowness) for m in self._machines]} {self.faults}"


_COMPUTING = ("Forward", "Head", "InputGradient", "WeightGradient")
