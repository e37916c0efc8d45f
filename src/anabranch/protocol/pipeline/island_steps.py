"""Inner steps of pipeline islands at one peer: microbatches that a crew passes on, and its optimizer steps.

A *crew* is one relay of each stage and the data node that began the slot. The data node sends the
microbatches of an inner step down, is their head, and gets their gradients back last; then each machine of
the crew takes the optimizer step by itself, and the next inner step begins. No message of the log's leader is
on this path. A crew that loses a machine does not go on: its slot is late, and is dropped. Not here: opening
and closing of a slot, which pass through the crew as an ordinary microbatch (`microbatches`, `source`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import (
    InnerBackward,
    InnerForward,
    InnerHead,
    InnerStep,
    Payload,
    Result,
)
from anabranch.protocol.log.records import Slot
from anabranch.protocol.messages import InnerActivation, InnerGradient
from anabranch.protocol.pipeline.claims import Claims
from anabranch.protocol.rounds.plan import sets_of


class IslandSteps:
    """Slots of round t whose inner steps this peer takes part in; none in an iteration that is no round of
    pipeline islands. claims: gets the overflows and the slots that were given up."""

    def __init__(self, ctx: PeerContext, t: int, base: str, claims: Claims) -> None:
        self.ctx, self.t, self.base, self.claims = ctx, t, base, claims
        self._slots: dict[int, CrewPass] = {}

    def begin(self, index: int, slot: Slot, ended: Callable[[], None] | None = None) -> None:
        """Take part in the inner steps of a slot whose state the worker has made; a data node sends the first
        microbatches at once. ended: called at its data node after the last inner step, not if a task failed.
        Nothing if the slot is begun."""
        if index not in self._slots:
            self._slots[index] = CrewPass(self, index, slot, ended)

    def end(self, index: int) -> None:
        """Take no further part in a slot, which was closed or given up; nothing if it takes none. The
        worker's state of the slot stays."""
        self._slots.pop(index, None)

    def on_tensor(
        self, peer: str, message: InnerActivation | InnerGradient, payload: Payload | None
    ) -> str | None:
        """Take an activation or a gradient of an inner step of a slot that this peer has begun; return why it
        is refused, or None."""
        crew = self._slots.get(message.index)
        if crew is None or payload is None:
            return f"slot {message.index} takes no inner steps here"
        take = crew.on_activation if isinstance(message, InnerActivation) else crew.on_gradient
        return take(peer, message.step, message.number, payload)

    def link_up(self, peer: str) -> None:
        """Send `peer`, whose link is back, the activations again for which it has sent no gradient yet;
        nothing if it is not the machine after this one in any slot."""
        for crew in self._slots.values():
            crew.link_up(peer)


class CrewPass:
    """Inner steps of one slot at one machine of its crew.

    step: open inner step, counted over all rounds of the slot. count: microbatches of each step. upstream,
    downstream: machines before and after this one; the data node comes after the last relay.
    """

    def __init__(
        self, steps: IslandSteps, index: int, slot: Slot, ended: Callable[[], None] | None
    ) -> None:
        self._all, self.ctx, self.index = steps, steps.ctx, index
        run = self.ctx.run
        # A crew is in order of stages from 1 on, with the data node at its end.
        self.upstream, self.downstream = slot.crew[run.previous_stage() - 1], slot.crew[run.next_stage() - 1]
        self._is_source, self._ended = run.stage == 0, ended
        self.count = run.settings.microbatches // run.settings.rounds.slots
        self.step, self._last = slot.first + 1, slot.first + slot.steps
        relays = enumerate(slot.crew[:-1], 1)
        self._most = min(self.count, *(run.settings.slots(at, self._capacity(peer)) for at, peer in relays))
        own, me = sets_of(run.plan(steps.t)).of_machine, run.membership.members.get(self.ctx.me)
        self._graphs = me.held(len(own[self.ctx.me])) if me is not None and self.ctx.me in own else 1
        self._kept: set[int] = set()
        """Microbatches of the step whose graph the worker keeps: at most `_graphs`. The forward of others is
        computed again."""
        self._sent: dict[int, Payload] = {}
        """Microbatch of the step -> activation that this peer sent on, until its gradient's turn."""
        self._begun: set[int] = set()
        """Microbatches whose forward task (at the data node: embedding) is submitted."""
        self._activations: dict[tuple[int, int], Payload] = {}
        """(step, microbatch) -> received activation whose turn has not come."""
        self._gradients: dict[int, Payload] = {}
        """Microbatch -> received gradient whose turn has not come."""
        self._heads = self._backwards = 0
        """Microbatches whose head, and whose backward task, is submitted: each kind in order."""
        self._answers: dict[tuple[int, int], Payload] = {}
        """(step, microbatch) -> gradient that this peer sent back in this step and the one before."""
        self._failed = False
        if self._is_source:
            self._send_more()

    def _capacity(self, peer: str) -> int:
        member = self.ctx.run.membership.members.get(peer)
        return max(1, member.capacity if member is not None else 1)

    # --- forward -------------------------------------------------------------------------------

    def _send_more(self) -> None:
        """At the data node: submit the embedding of further microbatches of the step, as many as the crew can
        hold beside those whose gradients are not back."""
        while len(self._begun) < min(self.count, self._backwards + self._most):
            self._forward(len(self._begun), ())

    def _forward(self, number: int, inputs: tuple[Payload, ...]) -> None:
        self._begun.add(number)
        if keep := self._is_source or len(self._kept) < self._graphs:
            self._kept.add(number)
        task = InnerForward(self._all.t, self.index, self.step, number, keep)
        self._submit(TaskPriority.FORWARD, task, inputs, partial(self._forward_done, number))

    def _forward_done(self, number: int, result: Result) -> None:
        if self._is_good(result, InnerActivation):
            self._sent[number] = result.outputs[0]
            self._send_on(number)

    def _send_on(self, number: int) -> None:
        fence = self.ctx.fence(self._all.t, self._all.base)
        message = InnerActivation(fence, self.index, self.step, number)
        self.ctx.outbox.send(self.downstream, message, self._sent[number])

    def on_activation(self, peer: str, step: int, number: int, payload: Payload) -> str | None:
        """Take an activation from the machine before, or at the data node from the last relay; return why it
        is refused, or None. One that came before is ignored, or answered again if its gradient was sent: that
        may be lost with a link. One of the next step is kept for it."""
        if peer != self.upstream or not 0 <= number < self.count:
            return f"no activation of microbatch {number} of slot {self.index} is expected from this peer"
        self._forget_answers(step, number - self._most)
        taken = number < self._heads if self._is_source else number in self._begun
        if (answer := self._answers.get((step, number))) is not None:
            self._answer(step, number, answer)
        elif not self._is_due(step, number):
            return f"microbatch {number} of inner step {step} of slot {self.index} is not its turn"
        elif step > self.step or not taken:
            self._activations.setdefault((step, number), payload)
            self._take_activations()
        return None

    def _is_due(self, step: int, number: int) -> bool:
        """True if the data node may have sent a microbatch: it has no more in flight than the crew can hold,
        and begins a step after the last gradient of the one before."""
        over = self._backwards == self.count
        begun = self._backwards if step == self.step else 0
        return number < begun + self._most and (step == self.step or (over and step == self.step + 1))

    def _forget_answers(self, step: int, last: int) -> None:
        """Drop the gradients sent back that the machine before has used: those of earlier steps than `step`,
        and of that one up to number `last`. Nothing unless `step` is open or the next."""
        if step in (self.step, self.step + 1):
            self._answers = {
                of: answer for of, answer in self._answers.items() if of[0] >= step and (of[0], last) < of
            }

    def _take_activations(self) -> None:
        """Submit the tasks of activations that came and whose turn it is."""
        if self._is_source:
            while (payload := self._activations.pop((self.step, self._heads), None)) is not None:
                number, self._heads = self._heads, self._heads + 1
                task = InnerHead(self._all.t, self.index, self.step, number)
                self._submit(TaskPriority.GRADIENT, task, (payload,), partial(self._gradient_done, number))
            return
        for step, number in sorted(self._activations):
            if step == self.step:
                self._forward(number, (self._activations.pop((step, number)),))

    # --- backward ------------------------------------------------------------------------------

    def on_gradient(self, peer: str, step: int, number: int, payload: Payload) -> str | None:
        """Take a gradient from the machine after this one; return why it is refused, or None. Its backward
        begins when those of all microbatches before it have; a second one is ignored."""
        if peer != self.downstream or step > self.step or not 0 <= number < self.count:
            return f"no gradient of microbatch {number} of slot {self.index} is expected from this peer"
        if step < self.step or number < self._backwards:
            return None  # it came twice
        if number not in self._sent:
            return f"gradient of microbatch {number} of slot {self.index}, which was not sent"
        self._gradients.setdefault(number, payload)
        while (due := self._gradients.pop(self._backwards, None)) is not None:
            number, self._backwards = self._backwards, self._backwards + 1
            del self._sent[number]
            task = InnerBackward(self._all.t, self.index, self.step, number, number not in self._kept)
            self._submit(TaskPriority.GRADIENT, task, (due,), partial(self._backward_done, number))
        if self._is_source:
            self._send_more()
        return None

    def _backward_done(self, number: int, result: Result) -> None:
        self._kept.discard(number)
        if not self._is_source:
            self._gradient_done(number, result)
        elif not self._is_good(result, InnerGradient):
            return
        if number == self.count - 1 and not self._failed:
            task = InnerStep(self._all.t, self.index, self.step)
            self._submit(TaskPriority.GRADIENT, task, (), self._stepped)

    def _gradient_done(self, number: int, result: Result) -> None:
        """Send the gradient that a backward or head task made to the machine before, and keep it to send it
        again; nothing if the task failed."""
        if self._is_good(result, InnerActivation if self._is_source else InnerGradient):
            self._answers[self.step, number] = result.outputs[0]
            self._answer(self.step, number, result.outputs[0])

    def _answer(self, step: int, number: int, gradient: Payload) -> None:
        fence = self.ctx.fence(self._all.t, self._all.base)
        self.ctx.outbox.send(self.upstream, InnerGradient(fence, self.index, step, number), gradient)

    # --- steps ---------------------------------------------------------------------------------

    def _stepped(self, result: Result) -> None:
        if not self._is_good(result, InnerGradient):
            return
        self.step += 1
        self._sent.clear()
        self._begun.clear()
        self._heads = self._backwards = 0
        if self.step > self._last:
            if self._ended is not None:
                self._ended()
        elif self._is_source:
            self._send_more()
        else:
            self._take_activations()

    def _submit(
        self,
        rank: TaskPriority,
        task: InnerForward | InnerHead | InnerBackward | InnerStep,
        inputs: tuple[Payload, ...],
        then: Callable[[Result], None],
    ) -> None:
        if not self._failed:
            self.ctx.tasks.submit(rank, task, inputs, then, self.index)

    def _is_good(self, result: Result, source: type[InnerActivation | InnerGradient]) -> bool:
        """True if a task succeeded, and none of this slot failed before. Otherwise this peer goes on with the
        slot no more, and reports that, so that the leader drops it. source: message that brought the task's
        input."""
        if self._failed:
            return False
        sender = self.upstream if source is InnerActivation else self.downstream
        if result.error:
            self.ctx.outbox.refuse(sender, source.__name__, result.error)
            self._all.claims.give_up(self.index, sender)
        self._failed = bool(result.error) or not self._all.claims.in_range(self.index, result, sender)
        return not self._failed

    def link_up(self, peer: str) -> None:
        """Send the machine after this one, if `peer` is it, the activations again whose gradients have not
        come. Nothing if that machine left the run since, and is back: it has lost the slot."""
        run = self.ctx.run
        if peer == self.downstream and run.membership.is_live(peer, run.next_stage(), self._all.t - 1):
            for number in sorted(self._sent.keys() - self._gradients.keys()):
                self._send_on(number)
