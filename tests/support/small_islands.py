"""Workers of a pipeline driven by hand through rounds of islands, beside a reference with the same log."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabranch.config import RoundSection, RunConfig
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload, Result, Task, embed_unit, head_unit
from anabranch.protocol.log.records import Slot
from anabranch.train.model.rounds import inner_microbatches, rounds_of
from anabranch.train.reference.reference import Reference, StepRecord
from anabranch.train.stage.worker import Worker
from anabranch.train.workers.workers import make_worker
from support.small_training import MadeUpBatches, done, small_model, small_run, with_section


def island_run(
    architecture: str = "llama", stages: int = 2, tied: bool = True, dtype: str = "fp32", **rounds: Any
) -> RunConfig:
    """A first synchronous step, then rounds of two islands with three microbatches in each inner step."""
    plain = RoundSection(slots=2, steps=3, start=0.05, contributions="int4", results="int8", late="carry")
    run = small_run(architecture, stages, dtype, tied=tied)
    run = with_section(replace(run, round=replace(plain, **rounds)), "batch", microbatches=6)
    return run


@dataclass
class Round:
    """Round as the log would have it. losses: by slot. fingerprints: after the round, by stage."""

    losses: dict[int, float]
    tokens: dict[int, int]
    squares: dict[str, float]
    digests: tuple[str, ...]
    fingerprints: tuple[str, ...]


class IslandSwarm:
    """A crew for each slot, and `data_nodes` data nodes, slot k being of the k-th one, modulo their number.
    The order in which different machines do their tasks is drawn from `seed`."""

    def __init__(self, run: RunConfig, seed: int = 0, data_nodes: int = 1) -> None:
        self.run, self.model = run, small_model(run)
        self.batches = MadeUpBatches(run)
        self.draw = random.Random(seed)
        self.slots = range(run.round.slots)
        self.ends = [make_worker(run, self.model, 0, self.batches) for _ in range(data_nodes)]
        relays = range(1, run.pipeline.stages + 1)
        self.crews = [[make_worker(run, self.model, stage) for stage in relays] for _ in self.slots]
        self.opened: dict[int, tuple[Payload, ...]] = {}
        """Slot -> payload with which its begin came back to the data node."""
        for worker in self.workers():
            done(worker.run(tasks.InitState(0)))

    def workers(self) -> list[Worker]:
        return [*self.ends, *(worker for crew in self.crews for worker in crew)]

    def stage(self, stage: int) -> list[Worker]:
        return self.ends if stage == 0 else [crew[stage - 1] for crew in self.crews]

    def crew(self, slot: int) -> list[Worker]:
        """Workers of a slot's stages 0 to S."""
        return [self.ends[slot % len(self.ends)], *self.crews[slot]]

    def skip(self, t: int) -> None:
        for worker in self.workers():
            done(worker.run(tasks.Skip(t)))

    def begin(self, t: int, slot: int, plan: Slot) -> None:
        ends, *relays = self.crew(slot)
        embed = tasks.Embed(t, slot, plan.first, plan.steps, plan.carried, plan.late)
        byte = done(ends.run(embed)).outputs
        for relay in relays:
            forward = tasks.Forward(
                t, slot, True, True, plan.steps, plan.carried, plan.late, plan.first
            )
            byte = done(relay.run(forward, byte)).outputs
        self.opened[slot] = byte

    def inner_steps(self, t: int, slot: int, plan: Slot) -> Iterator[Result]:
        """Results of the tasks of a slot's inner steps. Which stage does its next task is drawn."""
        for step in range(plan.first + 1, plan.first + plan.steps + 1):
            yield from InnerStep(self, t, slot, step).results()

    def end(self, t: int, slot: int, plan: Slot) -> Result:
        """End a slot at all stages, and add its contributions to the sums; returns the head's result."""
        ends, *relays = self.crew(slot)
        head = done(ends.run(tasks.Head(t, slot, True, plan.weight), self.opened[slot]))
        back = head.outputs
        for relay in reversed(relays):
            back = done(relay.run(tasks.InputGradient(t, slot), back)).outputs
            done(relay.run(tasks.WeightGradient(t, slot)))
        done(ends.run(tasks.WeightGradient(t, embed_unit(slot)), back))
        done(ends.run(tasks.WeightGradient(t, head_unit(slot))))
        return head

    def take_part(self, t: int, plans: Mapping[int, Slot]) -> dict[int, Result]:
        """Take the slots `plans` from begin to end, all at once; returns the head's results."""
        for slot, plan in plans.items():
            self.begin(t, slot, plan)
        running = {slot: self.inner_steps(t, slot, plan) for slot, plan in plans.items()}
        while running:
            slot = self.draw.choice(list(running))
            result = next(running[slot], None)
            if result is None:
                del running[slot]
            else:
                done(result)
        return {slot: self.end(t, slot, plan) for slot, plan in plans.items()}

    def round(self, t: int, plans: Mapping[int, Slot]) -> Round:
        """Take a round in which the slots `plans` count."""
        heads = self.take_part(t, plans)
        squares: dict[str, float] = {}
        digests = []
        for stage in range(self.run.pipeline.stages + 1):
            result = self.reduce(t, self.stage(stage))
            squares |= result.squares
            digests.append(result.digest)
        factor = 1.0 / sum(plan.weight for plan in plans.values())
        fingerprints = self.apply(tasks.Apply(t, self.run.round.outer_lr, factor, 1.0, 1.0))
        losses = {slot: head.loss_sum for slot, head in heads.items()}
        tokens = {slot: head.tokens for slot, head in heads.items()}
        return Round(losses, tokens, squares, tuple(digests), fingerprints)

    def reduce(self, t: int, replicas: Sequence[Worker]) -> Result:
        parts = [done(member.run(tasks.Freeze(t, len(replicas)))).outputs for member in replicas]
        summed = [
            done(member.run(tasks.SumPart(t), tuple(cut[p] for cut in parts))).outputs[0]
            for p, member in enumerate(replicas)
        ]
        results = [done(member.run(tasks.Assemble(t), tuple(summed))) for member in replicas]
        assert len({(result.digest, tuple(result.squares.items())) for result in results}) == 1
        return results[0]

    def window(self, t: int, window: int) -> float:
        """Loss sum of a held-out window."""
        index = self.run.batch.microbatches + window
        ends, *relays = self.crew(0)
        x = done(ends.run(tasks.Embed(t, index))).outputs
        for relay in relays:
            x = done(relay.run(tasks.Forward(t, index, False), x)).outputs
        return done(ends.run(tasks.Head(t, index, False), x)).loss_sum

    def synchronous_step(self, t: int, reference: Reference) -> tuple[str, ...]:
        """Take a synchronous step by workers and reference, with the scalars of the latter; fingerprints of
        the workers after it."""
        indices = range(self.run.batch.microbatches)
        for index in indices:
            ends, *relays = self.crew(self.draw.choice(self.slots))
            x = done(ends.run(tasks.Embed(t, index))).outputs
            for relay in relays:
                x = done(relay.run(tasks.Forward(t, index, True), x)).outputs
            g = done(ends.run(tasks.Head(t, index, True), x)).outputs
            done(ends.run(tasks.WeightGradient(t, head_unit(index))))
            for relay in reversed(relays):
                g = done(relay.run(tasks.InputGradient(t, index), g)).outputs
                done(relay.run(tasks.WeightGradient(t, index)))
            done(ends.run(tasks.WeightGradient(t, embed_unit(index)), g))
        for stage in range(self.run.pipeline.stages + 1):
            self.reduce(t, self.stage(stage))
        record = reference.step(reference.share(t, indices))
        scalars = record.learning_rate, record.clip_factor, *record.bias_corrections
        return self.apply(tasks.Apply(t, *scalars))

    def first_overflow(self, t: int, slot: int, plan: Slot) -> tuple[int, str]:
        """(stage, tensor) of the first overflow in a slot's inner steps."""
        for step in range(plan.first + 1, plan.first + plan.steps + 1):
            tried = InnerStep(self, t, slot, step)
            for result in tried.results():
                if result.overflow:
                    return tried.stage, result.overflow
                done(result)
        raise AssertionError("nothing overflowed")

    def apply(self, task: Task) -> tuple[str, ...]:
        """Step taken by all workers; fingerprint of each stage after it."""
        found = []
        for stage in range(self.run.pipeline.stages + 1):
            after = {done(worker.run(task)).fingerprint for worker in self.stage(stage)}
            assert len(after) == 1
            found += after
        return tuple(found)


class InnerStep:
    """Inner step of a slot among its crew. Any task whose inputs are there may be next, each stage's own
    heads and backward passes in the order of their numbers."""

    def __init__(self, swarm: IslandSwarm, t: int, slot: int, step: int) -> None:
        self._swarm, self._of = swarm, (t, slot, step)
        self._crew = swarm.crew(slot)
        self._count = inner_microbatches(swarm.run)
        self._down: dict[tuple[int, int], Payload] = {}
        """(stage, number) -> activation that the stage has received; stage S + 1: the head."""
        self._up: dict[tuple[int, int], Payload] = {}
        """(stage, number) -> gradient that the stage has received."""
        self._kept: set[tuple[int, int]] = set()
        """(stage, number) of forwards whose graph is kept; drawn at random."""
        self._embedded = self._heads = 0
        self.stage = 0
        """Stage of the last result."""
        self._backwards = [0] * len(self._crew)

    def results(self) -> Iterator[Result]:
        while ready := self._ready():
            stage, number, kind = self._swarm.draw.choice(ready)
            yield self._do(stage, number, kind)
        for stage, worker in enumerate(self._crew):
            self.stage = stage
            yield worker.run(tasks.InnerStep(*self._of))

    def _ready(self) -> list[tuple[int, int, str]]:
        last = len(self._crew)
        ready = [(stage, number, "forward") for stage, number in self._down if stage < last]
        if self._embedded < self._count:
            ready.append((0, self._embedded, "forward"))
        if (last, self._heads) in self._down:
            ready.append((0, self._heads, "head"))
        ready += [
            (stage, number, "backward")
            for stage, number in self._up
            if number == self._backwards[stage]
        ]
        return ready

    def _do(self, stage: int, number: int, kind: str) -> Result:
        worker, last, self.stage = self._crew[stage], len(self._crew), stage
        if kind == "forward":
            given = (self._down.pop((stage, number)),) if stage else ()
            self._embedded += stage == 0
            if keep := self._swarm.draw.random() < 0.5:
                self._kept.add((stage, number))
            result = worker.run(tasks.InnerForward(*self._of, number, keep), given)
            if result.outputs:
                self._down[stage + 1, number] = result.outputs[0]
        elif kind == "head":
            self._heads += 1
            result = worker.run(tasks.InnerHead(*self._of, number), (self._down.pop((last, number)),))
            if result.outputs:
                self._up[last - 1, number] = result.outputs[0]
        else:
            self._backwards[stage] += 1
            again = (stage, number) not in self._kept
            gradient = self._up.pop((stage, number))
            result = worker.run(tasks.InnerBackward(*self._of, number, again), (gradient,))
            if result.outputs:
                self._up[stage - 1, number] = result.outputs[0]
        return result


def reference_round(reference: Reference, t: int, plans: Mapping[int, Slot]) -> StepRecord:
    """The same round by the reference."""
    reference.slots = plans
    return reference.step(reference.share(t, sorted(plans)))


def first_round(run: RunConfig) -> int:
    return rounds_of(run).start + 1
