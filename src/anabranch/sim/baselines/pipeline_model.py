"""Microbatches of a baseline: forward through the stages, back, and the step of an iteration.

Not here: machines, traffic, churn and the reduce itself (`engine`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface import tasks
from anabranch.sim.baselines.engine import BACKWARD, FORWARD, Baseline, Reduce
from anabranch.sim.baselines.memory_model import RelayMemory
from anabranch.sim.cluster.scenario import Fleet, Host

Kinds = tuple[type[tasks.Task], ...]
Done = Callable[["Microbatch", str], None]


@dataclass(eq=False)
class Microbatch:
    """Attempt to compute microbatch `index`; a restarted microbatch is a new attempt. source: data node that
    embeds it. path: nodes that its activation has reached, `source` first. over: True if the attempt is given
    up; late results are ignored. returned: True if the gradient of the embedding has arrived at `source`.
    gradient: (sender, receiver) of the newest gradient. spent: node -> seconds computed for it. added: nodes
    whose gradient sums contain it."""

    index: int
    source: str
    path: list[str] = field(default_factory=list)
    over: bool = False
    returned: bool = False
    gradient: tuple[str, str] = ("", "")
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    added: set[str] = field(default_factory=set)


class Pipelines(Baseline):
    """Iterations of a baseline. A subclass chooses the next hop and decides when an iteration is complete.
    attempts: attempts at microbatches of this batch, those given up included. memories: relay -> its memory
    slots. admitted: number of microbatches of the batch that have begun. reducing: number of the newest
    reduce; older ones are given up. backward, late: tasks of a relay for a gradient, before and after it
    sends that on."""

    def __init__(self, fleet: Fleet, policy: str, seed: int) -> None:
        super().__init__(fleet, policy, seed)
        self.attempts: list[Microbatch] = []
        self.memories: dict[str, RelayMemory[Microbatch]] = {}
        self.reducing = self.admitted = 0
        self._reduced = self._batch = 0
        self.clear_memories()

    # --- memory --------------------------------------------------------------------------------

    def memory_of(self, host: Host) -> RelayMemory[Microbatch]:
        return RelayMemory(self.fleet.slots(host), host.capacity + 1)

    def clear_memories(self) -> None:
        """Empty the memory of every relay, for a new iteration or a restarted one; microbatches that wait for
        a slot are forgotten, not admitted."""
        self.memories = {host.id: self.memory_of(host) for host in self.fleet.hosts.values() if host.stage}

    def leave(self, microbatch: Microbatch, *hosts: str) -> None:
        for host in hosts:
            if host in self.memories:
                self.memories[host].leave(microbatch)

    def _crash(self, relay: str) -> bool:
        crashed = super()._crash(relay)
        if crashed:
            self.memories[relay] = self.memory_of(self.fleet.hosts[relay])
        return crashed

    # --- defined by a subclass -----------------------------------------------------------------

    @abstractmethod
    def onward(self, microbatch: Microbatch, sender: str) -> None:
        """Send the activation of a microbatch from `sender`, which has computed it, to a node of the next
        stage of the subclass's choice (`forward_to`)."""

    def back(self, microbatch: Microbatch, sender: str) -> None:
        """Send the gradient from `sender` to the previous node of the path (`back_to`)."""
        self.back_to(microbatch, sender, self.before(microbatch, sender))

    def before(self, microbatch: Microbatch, host: str) -> str:
        """Node that sent `host` the activation of the microbatch. For a data node: the last relay of the
        path."""
        at = -1 if self.fleet.hosts[host].stage == 0 else microbatch.path.index(host)
        return microbatch.path[at - 1]

    @abstractmethod
    def added(self, microbatch: Microbatch) -> None:
        """React to a gradient that was added to a node's sum, or has returned to the microbatch's data node:
        take the step if that completes the iteration."""

    def forward_done(self, microbatch: Microbatch, host: str) -> None:
        self.onward(microbatch, host)

    #: Tasks of a relay for an arriving gradient: before and after it sends the input gradient on.
    backward: Kinds = (tasks.InputGradient,)
    late: Kinds = (tasks.WeightGradient,)

    # --- forward and backward ------------------------------------------------------------------

    def admit_batch(self, sources: Iterable[str]) -> None:
        """Give up the batch before, and begin microbatch k at the k-th data node of `sources`, each once its
        data node has heard of the iteration. Those that have not begun when another batch is admitted never
        do."""
        self.abandon_batch()
        batch = self._batch
        for index, source in enumerate(sources):

            def admitted(index: int = index, source: str = source) -> None:
                if self._batch == batch:
                    self.admitted += 1
                    self.admit(Microbatch(index, source))

            self.clock.after(self.control_latency_s(source), admitted)

    def abandon_batch(self) -> None:
        """Give up the batch: all its attempts, and the microbatches that have not begun; empty the relays'
        memories. Called before the next batch, or because a crash makes the iteration begin again."""
        for microbatch in self.attempts:
            microbatch.over = True
        self.attempts, self.admitted = [], 0
        self._batch += 1
        self.clear_memories()

    def admit(self, microbatch: Microbatch) -> None:
        """Begin an attempt at its data node: compute the embedding, then call `onward`."""
        self.attempts.append(microbatch)
        microbatch.path = [microbatch.source]
        self._compute(microbatch, microbatch.source, TaskPriority.FORWARD, (tasks.Embed,), self.onward)

    def forward_to(self, microbatch: Microbatch, sender: str, receiver: str) -> None:
        size = self.fleet.scenario.work.activation_bytes
        self.send(sender, receiver, size, FORWARD, lambda: self.arrived(microbatch, receiver))

    def arrived(self, microbatch: Microbatch, host: str) -> None:
        if microbatch.over:
            return
        microbatch.path.append(host)
        if self.fleet.hosts[host].stage == 0:
            self._compute(microbatch, host, TaskPriority.GRADIENT, (tasks.Head,), self._headed)
        else:
            kinds, then = (tasks.Forward,), self.forward_done
            compute = partial(self._compute, microbatch, host, TaskPriority.FORWARD, kinds, then)
            self.memories[host].enter(microbatch, microbatch.index, compute)

    def _headed(self, microbatch: Microbatch, host: str) -> None:
        self.back(microbatch, host)
        self._compute(microbatch, host, TaskPriority.WEIGHTS, (tasks.WeightGradient,), self._add)

    def back_to(self, microbatch: Microbatch, sender: str, receiver: str) -> None:
        microbatch.gradient = (sender, receiver)
        size = self.fleet.scenario.work.activation_bytes
        self.send(sender, receiver, size, BACKWARD, lambda: self.gradient_arrived(microbatch, receiver))

    def gradient_arrived(self, microbatch: Microbatch, host: str) -> None:
        """Handle a gradient that has arrived at a node; nothing if the attempt is given up. A relay computes
        the backward, after another forward if its activations were not kept; at a data node the microbatch
        has returned."""
        if microbatch.over:
            return
        if self.fleet.hosts[host].stage == 0:
            microbatch.returned = True
            self.added(microbatch)
            return
        again: Kinds = () if self.memories[host].keeps_activations_of(microbatch) else (tasks.Forward,)
        kinds = (*again, *self.backward)
        self._compute(microbatch, host, TaskPriority.GRADIENT, kinds, self._gradient_done)

    def _gradient_done(self, microbatch: Microbatch, host: str) -> None:
        if self.late:
            self._compute(microbatch, host, TaskPriority.WEIGHTS, self.late, self._add)
        else:
            self._add(microbatch, host)
        self.back(microbatch, host)

    def _add(self, microbatch: Microbatch, host: str) -> None:
        microbatch.added.add(host)
        self.leave(microbatch, host)
        self.added(microbatch)

    def _compute(
        self, microbatch: Microbatch, host: str, priority: TaskPriority, kinds: Kinds, then: Done
    ) -> None:
        if microbatch.over or not self.alive(host):
            return

        def done() -> None:
            microbatch.spent[host] += seconds
            if not microbatch.over:
                then(microbatch, host)

        seconds = self.workers[host].submit(priority, microbatch.index, kinds, done)

    # --- the step ------------------------------------------------------------------------------

    def holders(self, stage: int) -> dict[int, list[tuple[Microbatch, str]]]:
        """Contributions that the sums of a stage's live replicas contain, by index of the microbatch:
        (attempt, replica) each. More than one for an index are contributions counted twice."""
        found: dict[int, list[tuple[Microbatch, str]]] = defaultdict(list)
        for microbatch in self.attempts:
            for name in microbatch.added & self.serving[stage]:
                found[microbatch.index].append((microbatch, name))
        return found

    def take_step(self) -> None:
        """Begin the reduce of every stage over its serving replicas, and take the step when all are done. A
        reduce that is under way is given up."""
        self.reducing += 1
        number, members = self.reducing, {s: sorted(self.serving[s]) for s in range(self.stages + 1)}
        self._reduced = 0

        def still() -> bool:
            return self.reducing == number

        def one_more() -> None:
            self._reduced += 1
            if self._reduced == len(members):
                self._step(members)

        for stage, names in members.items():
            Reduce(self, stage, names, still, one_more).begin()

    def _step(self, members: dict[int, list[str]]) -> None:
        self.reducing += 1
        for name in chain(*members.values()):
            self.workers[name].submit(TaskPriority.STEP, 0, (tasks.Apply,), lambda: None)
        self.committed(members, self._useful_s(), self._counted_twice())

    def _useful_s(self) -> float:
        """Compute seconds of this iteration that the step needed; the rest is waste. At each stage they are
        those of one attempt per microbatch of the batch."""
        useful = 0.0
        for stage in range(1, self.stages + 1):
            held = self.holders(stage)
            for index in sorted(held)[: self.microbatches]:
                useful += max(microbatch.spent[name] for microbatch, name in held[index])
        whole = {microbatch.index: microbatch for microbatch in self.attempts if microbatch.returned}
        for index in sorted(whole)[: self.microbatches]:
            useful += sum(whole[index].spent[name] for name in self.data_nodes)
        return useful

    def _counted_twice(self) -> int:
        stages = range(self.stages + 1)
        return sum(len(held) - 1 for stage in stages for held in self.holders(stage).values())
