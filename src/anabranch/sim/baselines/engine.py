"""Engine of all baselines: machines with one task at a time, traffic, churn, joining, reduce and step.

Every simplification favours the baseline: decisions cost no messages, a lost peer is noticed by the reset of
its connections, a downloaded state is never too old, and no peer falls behind. Not here: the microbatches of
an iteration (`pipeline_model`).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface import tasks
from anabranch.sim.cluster.churn import Churn
from anabranch.sim.cluster.device_model import SHARED, STATE_BYTES
from anabranch.sim.cluster.scenario import Fleet, Host
from anabranch.sim.kernel.clock import Clock
from anabranch.sim.metrics.iteration_metrics import MetricsRecorder, Outcome
from anabranch.sim.network.fair_share import Traffic
from anabranch.sim.network.in_flight_time import InFlightTime
from anabranch.sim.network.shared_link import SETUP_TRIPS

Callback = Callable[[], None]
#: Priorities of payloads (0 goes first), as in `protocol.messages`.
BACKWARD, FORWARD, REDUCE, STATE = 0, 1, 2, 4
#: Bytes of a control message (a choice; the protocol's are of this order).
SMALL_BYTES = 100
#: Virtual seconds per iteration after which a run has failed.
PATIENCE_S = 3600.0
#: Rounding error of a sum of seconds (s); less waste than this is none.
ROUNDING_S = 1e-6


class Worker:
    """Simulated process of a host. It computes one submission (the tasks of one `submit`) at a time, the most
    urgent first; submissions of a crashed process never end. A restarted host has a new worker."""

    def __init__(self, system: Baseline, host: Host) -> None:
        self.system, self.host = system, host
        self.alive = True
        self._queue: list[tuple[int, int, int, float, Callback]] = []
        """Heap of (priority, microbatch, order of submission, seconds, what to call at the end)."""
        self._submitted = 0
        self._begun_at: float | None = None
        self._computes_step = False

    def submit(
        self,
        priority: TaskPriority,
        index: int,
        kinds: Sequence[type[tasks.Task]],
        then: Callback,
        members: int = 1,
    ) -> float:
        """Queue tasks of microbatch `index`, which are computed one after another as a whole: the lowest
        `priority` first, of equals the lowest index. Returns their seconds, as long as no other process of
        the machine computes (`SHARED`). kinds: the tasks. then: called at the end, unless the process crashed
        or its queue was dropped (`forget`). members: replicas in the reduce, for its tasks."""
        machine, stage = self.host.machine, self.host.stage
        seconds = sum(machine.seconds(stage, kind, members) for kind in kinds)
        seconds *= self.system.fleet.drift.slowness(self.host.id)
        self._submitted += 1
        heapq.heappush(self._queue, (int(priority), index, self._submitted, seconds, then))
        self._next()
        return seconds

    @property
    def queued(self) -> int:
        """Number of submissions that wait, without the one that is being computed."""
        return len(self._queue)

    def forget(self) -> None:
        """Drop all queued submissions; one that is being computed goes on."""
        self._queue.clear()

    def crash(self) -> None:
        self.alive = False
        self._queue.clear()
        if self._begun_at is not None:
            self.system.computed(self.host, self.system.clock.now - self._begun_at, self._computes_step)

    def _next(self) -> None:
        if self._begun_at is not None or not self._queue or not self.alive:
            return
        priority, _, _, seconds, then = heapq.heappop(self._queue)
        self._begun_at, self._computes_step = self.system.clock.now, priority == TaskPriority.STEP

        def finished() -> None:
            if not self.alive:
                return
            self._begun_at = None
            self.system.computed(self.host, seconds, self._computes_step)
            then()
            self._next()

        self.system.clock.after(seconds * (SHARED if self.system.shared(self.host.id) else 1.0), finished)

    @property
    def computes(self) -> bool:
        return self._begun_at is not None and self.alive


class Baseline(ABC):
    """Simulated swarm of another system: `run` returns its outcome. Subclasses define an iteration (`begin`)
    and the effect of a crash on it (`lost`), and call `committed` for each step, which begins the next
    iteration. serving: stage -> live replicas. downloads: joining relay -> replicas that it downloads its
    state from. ready: joined relays that serve from the next iteration on. t: last committed iteration.
    sending: for each host, seconds in which it had a payload in flight that it sent."""

    def __init__(self, fleet: Fleet, policy: str, seed: int) -> None:
        self.fleet, self.clock = fleet, Clock()
        self.recorder = MetricsRecorder(fleet, self.clock)
        self.outcome = Outcome(policy, seed, self.recorder.rows)
        self.traffic = Traffic(self.clock, fleet.link, fleet.line, fleet.machine)
        self._beside = fleet.beside()
        self.sending = InFlightTime(self.clock)
        self.workers = {name: Worker(self, host) for name, host in fleet.hosts.items()}
        self.data_nodes = [host.id for host in fleet.stage(0)]
        self.serving = {stage: {host.id for host in fleet.stage(stage)} for stage in range(self.stages + 1)}
        self.t = 0
        self._computed_in: dict[str, float] = defaultdict(float)
        """Host -> seconds that its current process computed in this iteration."""
        self._died_s = self._computed_before_s = 0.0
        self.downloads: dict[str, list[str]] = {}
        self.ready: set[str] = set()
        for name in fleet.trace.absent:
            self.workers[name].alive = False
            self.serving[fleet.hosts[name].stage].discard(name)
        regions = {host.region for host in fleet.hosts.values()}
        fleet.drift.begin(self.clock, fleet.hosts, regions, lambda: None)
        relays = self.recorder.relays
        self._churn = Churn(
            self.clock, fleet.scenario.churn, relays, seed, self._crash, self._rejoin, fleet.trace
        )

    @property
    def stages(self) -> int:
        return self.fleet.scenario.model.relay_stages

    @property
    def microbatches(self) -> int:
        return self.fleet.scenario.model.microbatches

    # --- defined by a system -------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Start the microbatches of iteration self.t + 1, the one after the last committed: at the start of
        the run, after each commit, and by some systems again after a crash."""

    @abstractmethod
    def lost(self, relay: str) -> None:
        """React to the crash of a serving relay, as the system does: what becomes of its microbatches and of
        the reduce. Called after the connections of the relay were reset."""

    # --- running -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Simulate until the last step; returns the outcome. A run that gets stuck, or takes more than
        PATIENCE_S virtual seconds for each of its iterations, ends early: `failure` in the outcome says so,
        and nothing is raised."""
        run = self.fleet.scenario.run
        self.begin()
        while self.t < run.iterations:
            if not self.clock.step() or self.clock.now > PATIENCE_S * run.iterations:
                after = f"after {self.clock.now:.0f} virtual seconds"
                self.outcome.failure = f"step {self.t + 1} is not there {after}"
                break
        return self.outcome

    def committed(self, members: dict[int, list[str]], useful_s: float, counted_twice: int) -> None:
        """Record step self.t + 1, let relays that are ready serve, plan the crashes of the next iteration and
        begin it. members: stage -> replicas that took the step. useful_s: seconds computed in this iteration
        whose results entered the step; the others are wasted. counted_twice: contributions that a sum
        contains beyond the first."""
        self.t += 1
        recorder, sending_s = self.recorder, self.sending.seconds
        recorder.add("twice", counted_twice)
        computed_s = recorder.totals["computed_s"]
        wasted_s = computed_s - self._computed_before_s - useful_s
        wasted_s = wasted_s if wasted_s > ROUNDING_S else 0.0
        recorder.add("wasted_s", wasted_s)
        recorder.add("died_s", min(wasted_s, self._died_s))
        self._died_s = 0.0
        self._computed_in.clear()
        self._computed_before_s = computed_s
        communicating_s = sum(sending_s.get(relay, 0.0) for relay in recorder.relays)
        row = recorder.commit(self.t, members, {"communicating_s": communicating_s})
        for relay in sorted(self.ready):
            self.serving[self.fleet.hosts[relay].stage].add(relay)
        self.ready.clear()
        self._churn.opened(self.t + 1, row.seconds)
        self.begin()

    def computed(self, host: Host, seconds: float, for_step: bool) -> None:
        """Add seconds for which a process of `host` has computed to the metrics. for_step: True for tasks of
        the optimizer step, which count as busy time of a relay only; others count as compute of microbatches,
        too."""
        if not for_step:
            self.recorder.add("computed_s", seconds)
            self._computed_in[host.id] += seconds
        if host.stage:
            self.recorder.add("busy_s", seconds)

    def alive(self, name: str) -> bool:
        return self.workers[name].alive

    def shared(self, name: str) -> bool:
        """True while another process computes on the host's machine; tasks then take longer (`SHARED`)."""
        return any(self.workers[other].computes for other in self._beside.get(name, ()))

    # --- wires ---------------------------------------------------------------------------------

    def send(self, sender: str, receiver: str, size: float, priority: int, then: Callback) -> None:
        """Send a payload of `size` bytes. `then` is called on arrival, unless the sender's or the receiver's
        process has crashed or the connection was reset; at once if both are the same host. priority: 0 goes
        first."""
        if sender == receiver:
            then()
            return
        ends = (self.workers[sender], self.workers[receiver])
        self.recorder.add("payload_bytes", size)
        self.sending.begin(sender)

        def arrived() -> None:
            self.sending.end(sender)
            if all(end.alive for end in ends):
                then()

        if all(end.alive for end in ends):
            self.traffic.send(sender, receiver, size, arrived, priority)
        else:
            self.sending.end(sender)

    def send_control(self, sender: str, receiver: str, then: Callback) -> None:
        """Send a control message, which takes the link's latency (none to the host itself). `then` is called
        on arrival unless the sender's or the receiver's process has crashed."""
        ends = (self.workers[sender], self.workers[receiver])
        self.recorder.add("messages")
        self.recorder.add("message_bytes", SMALL_BYTES)

        def arrived() -> None:
            if all(end.alive for end in ends):
                then()

        self.clock.after(self.fleet.link(sender, receiver).latency_s if sender != receiver else 0.0, arrived)

    # --- churn ---------------------------------------------------------------------------------

    def _crash(self, relay: str) -> bool:
        stage, worker = self.fleet.hosts[relay].stage, self.workers[relay]
        if not worker.alive:
            return False
        if self.serving[stage] == {relay} and self.fleet.scenario.churn.spare_last:
            self.recorder.add("spared")
            return False
        self.recorder.down(relay)
        worker.crash()
        self._died_s += self._computed_in.pop(relay, 0.0)
        for other in self.workers:
            if other != relay:
                for sender, count in self.traffic.drop(relay, other).items():
                    self.sending.end(sender, count)
        served = relay in self.serving[stage]
        self.serving[stage].discard(relay)
        self.ready.discard(relay)
        self.downloads.pop(relay, None)
        for joiner, sources in list(self.downloads.items()):
            if relay in sources:
                self._download(joiner)
        if served:
            self.lost(relay)
        return True

    def _rejoin(self, relay: str) -> None:
        """Start a new process of a crashed relay's machine, which connects to a data node and downloads its
        state; it serves from the next iteration on."""
        self.recorder.up(relay)
        worker = self.workers[relay] = Worker(self, self.fleet.hosts[relay])
        trip_s = 2 * self.fleet.link(relay, self.data_nodes[0]).latency_s

        def connected() -> None:
            if worker.alive:
                self._download(relay)

        self.clock.after((SETUP_TRIPS + 1) * trip_s, connected)

    def move(self, relay: str, stage: int) -> None:
        """Let a relay stop serving its stage and download the state of another one, which it serves from the
        next iteration after that on."""
        host = self.fleet.hosts[relay]
        self.serving[host.stage].discard(relay)
        moved = self.workers[relay].host = replace(host, stage=stage)
        self.fleet = replace(self.fleet, hosts={**self.fleet.hosts, relay: moved})
        self._download(relay)

    def _download(self, relay: str) -> None:
        """Let a relay download its state from all serving replicas of its stage at once, an equal part from
        each, and load it; it serves from the next iteration on. A call for a relay that downloads starts its
        download anew: a source was lost. Nothing comes while no replica serves."""
        stage = self.fleet.hosts[relay].stage
        sources = self.downloads[relay] = sorted(self.serving[stage])
        size = STATE_BYTES * self.fleet.scenario.work.parameters(stage) / max(1, len(sources))
        missing, worker = set(sources), self.workers[relay]

        def loaded() -> None:
            if self.downloads.get(relay) is sources:
                del self.downloads[relay]
                self.ready.add(relay)

        for source in sources:

            def arrived(source: str = source) -> None:
                missing.discard(source)
                if not missing and self.downloads.get(relay) is sources:
                    worker.submit(TaskPriority.STEP, 0, (tasks.LoadState,), loaded)

            self.send(source, relay, size, STATE, arrived)

    def control_latency_s(self, one: str) -> float:
        """Latency (s) of a control message from the first data node to node `one`; 0 for that node itself."""
        return self.fleet.link(self.data_nodes[0], one).latency_s if one != self.data_nodes[0] else 0.0


class Reduce:
    """All-reduce of a stage's sums over `members`, like the protocol's: member p sums part p and sends the
    result to all. `begin` starts it. still(): False once it is to be given up; then nothing more happens.
    then: called when all members have the result."""

    TASKS = (tasks.Freeze, tasks.SumPart, tasks.Assemble)

    def __init__(
        self, system: Baseline, stage: int, members: Sequence[str], still: Callable[[], bool], then: Callback
    ) -> None:
        self.system, self.members, self.still, self.then = system, list(members), still, then
        work = system.fleet.scenario.work
        elements = work.parameters(stage) / len(members)
        self._sent_bytes = (work.sum_bytes * elements, work.reduced_bytes * elements)
        self._arrived = Counter[tuple[str, int]]()
        """(member, number of a task in TASKS) -> parts that the member has received for the task."""
        self._missing = len(members)

    def begin(self) -> None:
        for name in self.members:
            self._run(name, 0)

    def _run(self, name: str, task: int) -> None:
        def done() -> None:
            if self.still():
                self._done(name, task)

        self.system.workers[name].submit(TaskPriority.STEP, 0, (self.TASKS[task],), done, len(self.members))

    def _done(self, name: str, task: int) -> None:
        if task == len(self._sent_bytes):
            self._missing -= 1
            if not self._missing:
                self.then()
            return
        for receiver in self.members:
            arrive = partial(self._arrive, receiver, task + 1)
            self.system.send(name, receiver, self._sent_bytes[task], REDUCE, arrive)

    def _arrive(self, receiver: str, task: int) -> None:
        self._arrived[receiver, task] += 1
        if self._arrived[receiver, task] == len(self.members) and self.still():
            self._run(receiver, task)
