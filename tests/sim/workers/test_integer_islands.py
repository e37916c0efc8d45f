"""Slots of pipeline islands in integers: workers that compute a round task by task find a single machine's
sums, and every mistake of a protocol changes a slot's contribution or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Result, Task, embed_unit, head_unit
from anabranch.protocol.log.records import Slot
from anabranch.sim.workers.integer_arithmetic import WORDS, digest_of, initial
from anabranch.sim.workers.integer_worker import IntegerWorker
from anabranch.sim.workers.single_machine import Carried, Step, carried_after, step_of

STAGES, INNER, ROUND = 2, 3, 1
ROUNDS = Rounds(start=0, inner=4, slots=2, carries=True, merges=True, pipeline=True)
SETTINGS = Settings("islands", 1, STAGES, INNER * ROUNDS.slots, 10, rounds=ROUNDS)
PLAN = (Slot(0, 2, "r1.0", others=("r2.0",)), Slot(8, 3, "r1.1", others=("r2.1",)))
Change = Callable[[int, Task], tuple[Task, ...]]


@dataclass
class Crew:
    """Workers of stages 0 to S of one slot. change(stage, task): tasks in place of a task of the protocol."""

    slot: int
    plan: Slot
    workers: list[IntegerWorker]
    change: Change = lambda stage, task: (task,)
    t: int = ROUND
    error: str = ""

    def run(self, stage: int, task: Task, *inputs: int) -> Result:
        result = Result()
        for each in self.change(stage, task):
            result = self.workers[stage].run(each, inputs)
            self.error = self.error or result.error
        return result

    def number(self, stage: int, task: Task, *inputs: int) -> int:
        outputs = self.run(stage, task, *inputs).outputs
        return outputs[0] if outputs and isinstance(outputs[0], int) else 0

    def take_round(self) -> float:
        """Take all inner steps of the slot; returns its loss sum."""
        t, slot, plan = self.t, self.slot, self.plan
        x = self.number(0, tasks.Embed(t, slot, plan.first, plan.steps, plan.carried, plan.late))
        for stage in range(1, STAGES + 1):
            begin = tasks.Forward(t, slot, True, True, plan.steps, plan.carried, plan.late, plan.first)
            x = self.number(stage, begin, x)
        for step in range(plan.first + 1, plan.first + plan.steps + 1):
            self._take_step(step)
        head = self.run(0, tasks.Head(t, slot, True, plan.weight), x)
        dy = head.outputs[0] if head.outputs else 0
        for stage in range(STAGES, 0, -1):
            assert isinstance(dy, int)
            dy = self.number(stage, tasks.InputGradient(t, slot), dy)
            self.run(stage, tasks.WeightGradient(t, slot))
        assert isinstance(dy, int)
        self.run(0, tasks.WeightGradient(t, embed_unit(slot)), dy)
        self.run(0, tasks.WeightGradient(t, head_unit(slot)))
        return head.loss_sum

    def _take_step(self, step: int) -> None:
        """An inner step: all forwards first, then all backwards."""
        t, slot = self.t, self.slot
        ends = []
        for number in range(INNER):
            x = self.number(0, tasks.InnerForward(t, slot, step, number))
            for stage in range(1, STAGES + 1):
                x = self.number(stage, tasks.InnerForward(t, slot, step, number), x)
            ends.append(x)
        gradients = [
            self.number(0, tasks.InnerHead(t, slot, step, number), x) for number, x in enumerate(ends)
        ]
        for stage in range(STAGES, -1, -1):
            for number, dy in enumerate(gradients):
                gradients[number] = self.number(stage, tasks.InnerBackward(t, slot, step, number), dy)
            self.run(stage, tasks.InnerStep(t, slot, step))


def workers_of() -> list[IntegerWorker]:
    return [IntegerWorker(stage, rounds=ROUNDS) for stage in range(STAGES + 1)]


def digests(crews: list[Crew]) -> list[str]:
    """Digest of each stage's sum over the workers of all crews; workers that crews share count once."""
    found = []
    for stage in range(STAGES + 1):
        total = [0] * WORDS
        for worker in {id(crew.workers[stage]): crew.workers[stage] for crew in crews}.values():
            (part,) = worker.run(tasks.Freeze(crews[0].t, 1)).outputs
            assert isinstance(part, tuple)
            total = [one + int(other) for one, other in zip(total, part, strict=True)]
        found.append(digest_of(tuple(total)))
    return found


def expected(plan: tuple[Slot, ...] = PLAN, before: Carried = ()) -> Step:
    states = tuple(map(initial, range(STAGES + 1)))
    return step_of(SETTINGS, ROUND, states, dict(enumerate(plan)), before)


def test_crews_find_the_sums_and_losses_of_a_single_machine() -> None:
    ends = IntegerWorker(0, rounds=ROUNDS)
    crews = [Crew(slot, plan, [ends, *workers_of()[1:]]) for slot, plan in enumerate(PLAN)]
    losses = tuple(crew.take_round() for crew in crews)
    assert not any(crew.error for crew in crews)
    right = expected()
    assert digests(crews) == list(map(digest_of, right.gradients))
    assert losses == right.losses


def test_what_is_carried_and_what_was_late_change_the_next_round() -> None:
    crews = [Crew(slot, plan, workers_of()) for slot, plan in enumerate(PLAN)]
    for crew in crews:
        crew.take_round()
    states = tuple(map(initial, range(STAGES + 1)))
    carried = carried_after(SETTINGS, states, PLAN, ())
    assert len(carried) == len(PLAN)
    after = (replace(PLAN[0], first=2, carried=ROUND), replace(PLAN[1], first=11, carried=ROUND, late=3))
    right = step_of(SETTINGS, ROUND + 1, states, dict(enumerate(after)), carried)
    for crew, plan in zip(crews, after, strict=True):
        for worker in crew.workers:
            worker.run(tasks.Skip(ROUND))
        crew.plan, crew.t = plan, ROUND + 1
        crew.take_round()
        assert not crew.error
    assert digests(crews) == list(map(digest_of, right.gradients))
    for change in ({"carried": 0, "late": 0}, {"late": 0}):
        other = (after[0], replace(after[1], **change))
        assert step_of(SETTINGS, ROUND + 1, states, dict(enumerate(other)), carried) != right
    alone = Crew(1, after[1], workers_of())
    for worker in alone.workers:
        worker.run(tasks.Skip(ROUND))
    alone.t = ROUND + 1
    alone.take_round()
    assert "no state of slot 1 after round 1 is here" in alone.error


def changed(kind: type[Task], stage: int, make: Callable[[Task], tuple[Task, ...]]) -> Change:
    """Tasks of a protocol with a mistake: `make(task)` in place of the first task of a kind at a stage."""
    struck = []

    def change(at: int, task: Task) -> tuple[Task, ...]:
        if not struck and at == stage and isinstance(task, kind):
            struck.append(task)
            return make(task)
        return (task,)

    return change


def other(**values: int) -> Callable[[Task], tuple[Task, ...]]:
    return lambda task: (replace(task, **values),)


INNER_KINDS = (tasks.InnerForward, tasks.InnerHead, tasks.InnerBackward, tasks.InnerStep)
MISTAKES: dict[str, Callable[[Task], tuple[Task, ...]]] = {
    "left out": lambda task: (),
    "done twice": lambda task: (task, task),
    "of the next step": other(step=2),
    "of another slot": other(index=1),
    "of another microbatch": other(number=INNER - 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("stage", range(STAGES + 1))
@pytest.mark.parametrize("kind", INNER_KINDS)
def test_mistakes_change_the_contribution_or_are_refused(
    kind: type[Task], stage: int, mistake: str
) -> None:
    if kind is tasks.InnerStep and mistake == "of another microbatch":
        return  # it has no number
    if kind is tasks.InnerHead:
        stage = 0
    crew = Crew(0, PLAN[0], workers_of(), changed(kind, stage, MISTAKES[mistake]))
    crew.take_round()
    right = Crew(0, PLAN[0], workers_of())
    right.take_round()
    assert not right.error
    repeated_without_effect = kind is tasks.InnerForward and mistake == "done twice"
    assert repeated_without_effect == (not crew.error and digests([crew]) == digests([right]))


def swapped(stage: int, kind: type[Task]) -> Change:
    """Tasks of a protocol that does a kind of task for the first two microbatches in reverse order."""
    waiting: list[Task] = []

    def change(at: int, task: Task) -> tuple[Task, ...]:
        if at != stage or not isinstance(task, kind) or getattr(task, "step", 0) != 1:
            return (task,)
        number = getattr(task, "number", 0)
        if number == 0:
            waiting.append(task)
            return ()
        return (task, *waiting) if number == 1 else (task,)

    return change


@pytest.mark.parametrize("kind", [tasks.InnerHead, tasks.InnerBackward])
def test_microbatches_out_of_order_change_the_contribution(kind: type[Task]) -> None:
    right = Crew(0, PLAN[0], workers_of())
    right.take_round()
    for stage in range(STAGES + 1 if kind is tasks.InnerBackward else 1):
        crew = Crew(0, PLAN[0], workers_of(), swapped(stage, kind))
        crew.take_round()
        assert digests([crew]) != digests([right])


def test_a_slot_that_is_not_open_is_refused() -> None:
    worker = IntegerWorker(1, rounds=ROUNDS)
    assert worker.run(tasks.InnerForward(ROUND, 0, 1, 0), (7,)).error == "slot 0 is not open"
    worker.run(tasks.Forward(ROUND, 0, True, True, 2), (7,))
    assert worker.run(tasks.InnerForward(ROUND, 0, 2, 0), (7,)).error
    assert not worker.run(tasks.InnerForward(ROUND, 0, 1, 0), (7,)).error
    worker.run(tasks.Discard(ROUND, 0))
    assert worker.run(tasks.InnerBackward(ROUND, 0, 1, 0), (7,)).error == "slot 0 is not open"
    worker.run(tasks.Forward(ROUND, 0, True, True, 1), (7,))
    assert "0 inner steps of 1" in worker.run(tasks.InputGradient(ROUND, 0), (7,)).error
    worker.run(tasks.InnerStep(ROUND, 0, 1))
    assert not worker.run(tasks.InputGradient(ROUND, 0), (7,)).error
    assert worker.run(tasks.InnerForward(ROUND, 0, 2, 0), (7,)).error == "slot 0 is not open"


def test_a_contribution_that_two_counted_is_subtracted() -> None:
    crew = Crew(0, PLAN[0], workers_of())
    crew.take_round()
    for stage, worker in enumerate(crew.workers):
        unit = 0 if stage else embed_unit(0)
        counted = worker.run(tasks.Freeze(ROUND, 1)).outputs
        assert counted != ((0,) * WORDS,)
        worker.run(tasks.Recount(ROUND, unit, -1), (1, 2))
        assert worker.run(tasks.Freeze(ROUND, 1)).outputs == ((0,) * WORDS,)
        worker.run(tasks.Recount(ROUND, unit, +1), (1, 2))
        assert worker.run(tasks.Freeze(ROUND, 1)).outputs == counted
    before = digests([crew])
    assert not crew.workers[0].run(tasks.Recount(ROUND, head_unit(0), -1), (1,)).error
    assert digests([crew]) == before


def test_windows_and_synchronous_iterations_are_as_without_rounds() -> None:
    later = Rounds(start=5, inner=4, slots=2, pipeline=True)
    for stage in range(STAGES + 1):
        plain, one = IntegerWorker(stage), IntegerWorker(stage, rounds=later)
        window = IntegerWorker(stage, rounds=ROUNDS)
        for task in (tasks.Forward(1, 9, train=False), tasks.Head(1, 9, train=False), tasks.Embed(1, 9)):
            inputs = () if isinstance(task, tasks.Embed) else (3,)
            assert plain.run(task, inputs) == one.run(task, inputs) == window.run(task, inputs)
        forward = tasks.Forward(1, 0, train=True)
        assert plain.run(forward, (3,)) == one.run(forward, (3,))
