"""Simulation of one seed of a scenario: the real protocol, or a baseline, on modelled links and devices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

from anabranch.errors import UserError
from anabranch.flow.policies.registry import POLICIES
from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.records import Commit, Rollback, decode_entry
from anabranch.sim.baselines.engine import PATIENCE_S, Baseline
from anabranch.sim.baselines.restart import Restart
from anabranch.sim.baselines.swarm import VARIANTS, Swarm
from anabranch.sim.cluster.churn import Churn
from anabranch.sim.cluster.scenario import Fleet, Regions, Scenario
from anabranch.sim.experiment.initial_placement import placed
from anabranch.sim.experiment.modelled_world import ModelledWorld, member_of, settings_of
from anabranch.sim.kernel.pages import use_huge_pages
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.metrics.iteration_metrics import MetricsRecorder, Outcome
from anabranch.sim.metrics.phase_breakdown import PhaseRecorder
from anabranch.sim.metrics.wasted_compute import WastedCompute
from anabranch.sim.workers.integer_world import wrong_states

#: Hosts of a simulation from which huge pages, and garbage collections at chosen moments, pay (a choice).
LARGE_HOSTS = 200
#: Restarted processes, per host, after which a large simulation collects garbage (a choice). The parts
#: of a dead peer refer to each other, so that nothing else frees it.
RESTARTS_PER_COLLECTION = 0.5
#: Allocations between automatic collections of a large simulation, which find little: more than
#: there are between two explicit ones.
LARGE_GC_ALLOCATIONS = 10_000_000
#: Number of events after which a run has failed; after PATIENCE_S virtual seconds per iteration it has, too.
EVENTS_MAX = 50_000_000
#: Virtual seconds between two checks for processes that were removed, which are restarted, or that lost their
#: link while joining, which dial again.
START_AGAIN_S = 2.0

#: Baselines by policy name.
BASELINES: dict[str, type[Baseline]] = {"restart": Restart, **dict.fromkeys(VARIANTS, Swarm)}
KNOWN_POLICIES = (*POLICIES, *BASELINES)


def simulate(
    scenario: Scenario,
    regions: Regions,
    policy: str,
    seed: int,
    committed: Callable[[int], None] = lambda t: None,
) -> Outcome:
    """Simulate one seed of a scenario under a policy or baseline (KNOWN_POLICIES). A run that fails has a
    result, too, with `failure` set. Raises UserError if the fleet cannot be made, or hides relays from a
    baseline. committed: called with the number of each iteration after its commit, but not again if it is
    committed once more after a rollback; never under a baseline."""
    if policy in BASELINES:
        if scenario.network.hidden:
            key = f"network.hidden = {scenario.network.hidden:g}"
            raise UserError(f"{key}: the baseline {policy} has no carriers; simulate it without")
        # Baselines reduce evenly, and are placed by a cost model that knows it.
        even = replace(scenario, fleet=replace(scenario.fleet, spread="never"))
        fleet = placed(even, regions, seed)
        outcome = BASELINES[policy](fleet, policy, seed).run()
    else:
        fleet = placed(scenario, regions, seed)
        outcome = Simulation(fleet, policy, seed, committed).run()
    outcome.alone_tokens_per_s = alone_tokens_per_s(fleet)
    return outcome


def alone_tokens_per_s(fleet: Fleet) -> float:
    """Tokens per second of the best relay's machine, if it trained the whole model by itself with an
    optimizer step for each batch; 0 if no relay's memory holds the model."""
    model, work = fleet.scenario.model, replace(fleet.scenario.work, stages=1, whole=True)
    best = 0.0
    for host in fleet.hosts.values():
        machine = replace(host.machine, work=work)
        if host.stage and machine.capacity(1) >= 1:
            best = max(best, model.microbatches * work.tokens / machine.inner_s(1, model.microbatches))
    return best


class Simulation:
    """Simulation of one seed of a scenario under a routing policy, with the real protocol; `run` carries it
    out, once, and returns the outcome, also of a failure. recorder: metrics of its iterations. crashed,
    returned: (relay, virtual seconds) of each crash and return. committed: called with the number of each
    iteration after its first commit."""

    def __init__(
        self, fleet: Fleet, policy: str, seed: int, committed: Callable[[int], None] = lambda t: None
    ) -> None:
        self.fleet, self.seed, self._on_commit = fleet, seed, committed
        self.world = world = ModelledWorld(fleet, settings_of(fleet, policy), seed)
        self.recorder = MetricsRecorder(fleet, world.clock)
        self.outcome = Outcome(policy, seed, self.recorder.rows)
        self.leader = world.nodes[world.genesis.leader]
        churn, relays = fleet.scenario.churn, self.recorder.relays
        self.churn = Churn(world.clock, churn, relays, seed, self._crash, self._back, fleet.trace)
        self._waste = WastedCompute(world, faults=False)
        self._phases = PhaseRecorder(self.leader, fleet.scenario.model.relay_stages)
        self.crashed: list[tuple[str, float]] = []
        self.returned: list[tuple[str, float]] = []
        self._large = len(fleet.hosts) >= LARGE_HOSTS
        self._lost_s = 0.0
        self._t = self._log_read = self._notes_read = self._restarts = 0
        world.bookkeepers.append(self._watch)
        world.clock.after(START_AGAIN_S, self._supervise)

    def run(self) -> Outcome:
        if self._large:
            gc.set_threshold(LARGE_GC_ALLOCATIONS)
        try:
            self.world.run(PATIENCE_S * self.fleet.scenario.run.iterations, EVENTS_MAX)
        except TimeoutError as error:
            self.outcome.failure = str(error)
        self.outcome.carried_bytes = dict(sorted(self.world.carried_bytes.items()))
        wrong = wrong_states(self.world)
        if wrong:
            self.outcome.failure = f"wrong states: {wrong}"
        return self.outcome

    # --- watching ------------------------------------------------------------------------------

    def _watch(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and node.peer.ctx.run.stage:
            self.recorder.add("busy_s", event.result.seconds)
        self._phases.look(node, event, self.world.clock.now)
        if len(self.world.log) == self._log_read:
            return
        for line in self.world.log[self._log_read :]:
            record = decode_entry(line).record
            if isinstance(record, Rollback):
                self.outcome.rollbacks += 1
            elif isinstance(record, Commit) and record.t > self._t:
                self._t = record.t
                self._committed(record)
        self._log_read = len(self.world.log)

    def _committed(self, record: Commit) -> None:
        world, waste = self.world, self._waste
        notes = world.notes[self._notes_read :]
        self._notes_read = len(world.notes)
        self.recorder.add("recoveries", sum(kind == "repair" for _, _, kind, _ in notes))
        under_way_s = sum(world.under_way.seconds.get(relay, 0.0) for relay in self.recorder.relays)
        members = {stage: entry.members for stage, entry in enumerate(record.stages)}
        row = self.recorder.commit(
            record.t,
            members,
            {
                "computed_s": waste.computed_s + self._lost_s,
                "wasted_s": waste.wasted_s + self._lost_s,
                "died_s": waste.died_s + self._lost_s,
                "communicating_s": under_way_s,
                "messages": world.sent.kinds.total(),
                "message_bytes": world.sent.message_bytes,
                "payload_bytes": world.sent.payload_bytes,
            },
            self._phases.end(world.clock.now, len(self.recorder.relays)),
            world.sent.kinds,
        )
        row.microbatches = record.tokens
        self.churn.opened(record.t + 1, row.seconds)
        self._on_commit(record.t)
        if self._large:
            use_huge_pages()

    # --- churn ---------------------------------------------------------------------------------

    def _crash(self, relay: str) -> bool:
        node = self.world.nodes[relay]
        if not node.running or self.leader.stopped is not None:
            return False
        if self.fleet.scenario.churn.spare_last and self._is_last_replica(node):
            self.recorder.add("spared")
            return False
        self._lost_s += self.world.unfinished_s(relay)
        self._waste.crashed(relay)
        self.recorder.down(relay)
        self.crashed.append((relay, self.world.clock.now))
        self.world.crash(relay)
        return True

    def _is_last_replica(self, node: Node) -> bool:
        """True if the crash of `node` would leave no running replica of its stage that has taken the last
        step and serves in the next one."""
        membership, stage = self.leader.peer.ctx.run.membership, node.peer.ctx.run.stage
        others = [self.world.nodes[peer] for peer in membership.live(stage, self._t + 1) if peer != node.id]
        return not any(other.running and other.peer.replica.t >= self._t for other in others)

    def _back(self, relay: str) -> None:
        if self.leader.stopped is None:
            self.recorder.up(relay)
            self.returned.append((relay, self.world.clock.now))
            self._start(relay)

    def _start(self, relay: str) -> None:
        """Start a new process of a relay's machine, with the next incarnation, which joins. In a large
        simulation garbage is collected after a number of such starts."""
        former = self.world.nodes.get(relay)
        incarnation = former.member.incarnation + 1 if former is not None else 1
        self.world.add(member_of(self.fleet, relay, incarnation), self.leader.id, self.world.clock.now)
        self._restarts += 1
        if self._large and self._restarts >= RESTARTS_PER_COLLECTION * len(self.fleet.hosts):
            self._restarts = 0
            gc.collect()

    def _supervise(self) -> None:
        if self.leader.stopped is not None:
            return
        for node in list(self.world.nodes.values()):
            if node.alive and node.stopped is not None and not node.stopped[1]:
                self._start(node.id)
            elif node.running and not node.links and not node.peer.shared.entry.done:
                self.world.dial(node, self.leader.id)
        self.world.clock.after(START_AGAIN_S, self._supervise)
