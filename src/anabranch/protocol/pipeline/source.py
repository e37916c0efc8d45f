"""Source: split of the batch over the data nodes, and the microbatches that begin at one of them (R2, R6).

A data node embeds the indices that it admits and adds the embedding's gradient when that is back. It takes
over indices of a removed data node. Relays know the split alone. Not here: the head of microbatches that end
at a data node (`microbatches`), sending and repair (`sender`, `repair`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT, Seals
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import (
    Embed,
    HashInputs,
    Payload,
    Result,
    WeightGradient,
    embed_unit,
)
from anabranch.protocol.log.records import Slot
from anabranch.protocol.pipeline.claims import Claims
from anabranch.protocol.pipeline.repair import Repairs
from anabranch.protocol.pipeline.sender import Sender
from anabranch.protocol.rounds.plan import sets_of

#: Stands for no slot, of a microbatch.
NO_SLOT = Slot(0, 0)


class Source:
    """Microbatches that begin at this data node, in the sender's iteration. At a relay only the split of the
    batch, and the slots.

    windows: evaluation microbatches of the iteration. admits: False if it has only these, no microbatches to
    train. delayed: True if the step before is not applied yet; evaluation windows then wait for `settle`.
    assignments: data node of each microbatch, in training and in evaluation. gradients: gradient of the
    embedding's output by microbatch. slots: plan of a round of islands; empty in other iterations.
    """

    def __init__(
        self, sender: Sender, repairs: Repairs, claims: Claims, seals: Seals, windows: int, admits: bool,
        delayed: bool,
    ) -> None:  # fmt: skip
        self.ctx, self.t = sender.ctx, sender.t
        self.sender, self.repairs, self.claims, self._seals = sender, repairs, claims, seals
        self.gradients: dict[int, Payload] = {}
        run = self.ctx.run
        self.slots = run.plan(self.t)
        self._delayed = delayed
        self._taken: dict[int, tuple[str, ...]] = {}
        """Held-out window taken over before its state is there -> removed data nodes that had it."""
        # Indices of the batch and of the evaluation windows after it are each split over the data nodes.
        self.assignments = [run.split(self.t) if admits else run.membership.assignment(self.t, ())]
        first = run.settings.microbatches
        self.assignments.append(run.membership.assignment(self.t, range(first, first + windows)))

    def begin(self) -> None:
        """Begin the microbatches of this data node, those of a batch alone while the step before is not
        applied; called once. Nothing at a relay."""
        if self.ctx.run.stage == 0:
            if self._foresees():
                mine = self.assignments[0].of(self.ctx.me)
                self.sender.foresee(Counter(self.slots[slot].peer for slot in mine))
            self._admit([0] if self._delayed else [0, 1])

    def _foresees(self) -> bool:
        """True if the machines that the log binds to slots certainly grant this data node a credit for each
        of its own: they hold whole models, and opened the round with the same split, as no data node was
        removed since."""
        run = self.ctx.run
        whole = sets_of(self.slots).bound and not run.settings.rounds.pipeline
        return whole and not run.membership.handed(self.t)

    def expected(self) -> Mapping[str, int] | None:
        """Upstream peer -> number of slots that it sends this peer, in a round whose slots are all bound to
        machines; None in other iterations. A machine gets its slots from the one before it in the crew, the
        first from the data nodes that begin them, and a data node gets the losses from the last one."""
        if not sets_of(self.slots).bound:
            return None
        stage, around, holder = self.ctx.run.stage, [], self.assignments[0].holder
        own = sets_of(self.slots).of_machine.get(self.ctx.me, ()) if stage else holder
        for slot in own if len(own) < 2 else holder:  # in the order of the data nodes
            relays = self.slots[slot].crew[: self.ctx.run.settings.stages]
            around.append((holder[slot], *relays))
        return Counter(crew[stage - 1] for crew in around if crew[stage : stage + 1] == (self.ctx.me,))

    def settle(self) -> None:
        """Begin this data node's held-out windows of a delayed iteration whose previous step is applied now;
        those taken over from removed data nodes meanwhile are searched at the next stage first. Called once,
        also at a relay, which has no windows to begin."""
        self._delayed = False
        if self.ctx.run.stage == 0:
            self._admit([1])

    def _admit(self, parts: Iterable[int]) -> None:
        """Begin the microbatches of this data node, by `assignments`; those that a removed data node may have
        begun are searched."""
        ctx, reopened = self.ctx, self.ctx.run.membership.is_reopened(self.t)
        mine = [index for part in parts for index in self.assignments[part].of(ctx.me)]
        searched = mine if reopened else [index for index in mine if index in self._taken]
        self.sender.admit([index for index in mine if index not in searched], self.trains)
        for index in searched:
            self.repairs.find(index, (ctx.me,), self.trains(index), self._taken.get(index, ()))

    def trains(self, index: int) -> bool:
        """True for a microbatch of the batch, False for an evaluation window."""
        return index < self.ctx.run.settings.microbatches

    def slot(self, index: int) -> Slot:
        """Plan of the slot that `index` numbers in a round; for a microbatch of another iteration, an
        evaluation window, or a number that no slot has, NO_SLOT (no inner steps)."""
        return self.slots[index] if self.trains(index) and index < len(self.slots) else NO_SLOT

    def has_begun(self, index: int) -> bool:
        """True if this data node's worker began a slot of a round, or embedded a microbatch, so that there is
        something to send; also after it was sent."""
        return index in self.sender.items and self.sender.items[index].payload is not None

    def lacks_gradient(self, index: int) -> bool:
        """True if this data node began a slot of a round whose gradient it has not added yet; False in a
        synchronous iteration."""
        return bool(self.slots) and index in self.sender.items and embed_unit(index) not in self.claims.held

    def exists(self, index: int) -> bool:
        """True if the iteration has a microbatch or an evaluation window of this index."""
        return any(index in assignment.holder for assignment in self.assignments)

    # --- embedding -----------------------------------------------------------------------------

    def embed(self, index: int) -> None:
        """Submit the embedding of a microbatch or evaluation window, or the beginning of a slot, for which
        the sender has used a credit; it is sent once computed. After an error or an overflow it is not: an
        overflow is reported to the leader, and after an error the slot of a crew is given up."""
        slot, hashed = self.slot(index), self._seals.on and self.trains(index)
        task = Embed(self.t, index, slot.first, slot.steps, slot.carried, slot.late, hashed=hashed)
        rank = TaskPriority.FORWARD if self.trains(index) else TaskPriority.EVALUATION
        self.ctx.tasks.submit(rank, task, (), partial(self._embedded, index), index)

    def _embedded(self, index: int, result: Result) -> None:
        if result.error and self.slot(index).others:
            self.claims.give_up(index)
        elif not result.error and self.claims.in_range(index, result):
            if result.hashes:
                self._seals.made(ACTIVATION, index, result.hashes[-1])
            self.sender.provide(index, result.outputs[0])

    def gradient_arrived(self, index: int, payload: Payload | None) -> None:
        """Use the first gradient of microbatch `index` that came back: keep it, and have it added to the
        embedding's gradient; in a run with audits only once its hash fits the seal of its sender. Nothing for
        an evaluation window, without a payload, or for a crew's slot that this process did not begin: the
        island's embedding went with the process that did."""
        if not self.trains(index) or payload is None:
            return
        if self.slot(index).others and not self.has_begun(index):
            return
        self.gradients[index] = payload
        if self._seals.on:
            check, then = HashInputs(self.t, hashed=True), partial(self._hashed, index)
            self.ctx.tasks.submit(TaskPriority.WEIGHTS, check, (payload,), then, index)
        else:
            self._add(index)

    def _hashed(self, index: int, result: Result) -> None:
        """Add the embedding's gradient of microbatch `index` if the hash of the received gradient fits the
        seal of its sender; otherwise have the microbatch computed again."""
        refusal = result.error or self._seals.check(GRADIENT, index, result.hashes[0])
        if refusal:
            self.repairs.reject(index, refusal)
        else:
            self._add(index)

    def _add(self, index: int) -> None:
        task, then = WeightGradient(self.t, embed_unit(index)), partial(self._added, index)
        self.ctx.tasks.submit(TaskPriority.WEIGHTS, task, (self.gradients[index],), then, index)

    def _added(self, index: int, result: Result) -> None:
        if result.error:
            self.repairs.reject(index, result.error)
            return
        false = bool(result.overflow) and self.repairs.may_be_false(index, self.claims)
        item = self.sender.items.get(index)
        if self.claims.in_range(index, result, item.giver if item is not None else ""):
            self.claims.hold(embed_unit(index))
        elif false:
            self.repairs.reject(index, f"{result.overflow} is out of range")

    # --- membership ----------------------------------------------------------------------------

    def data_node_removed(self, peer: str) -> None:
        """Take over indices of a removed data node that are assigned to this one; a later stage may already
        have them."""
        for gone, remaining in self.ctx.run.membership.handed(self.t):
            if gone != peer:
                continue
            for assignment in self.assignments:
                for index in assignment.remove(peer, remaining):
                    self._take(assignment.holder, index, peer)

    def split_again(self) -> None:
        """Follow the new split of an iteration that lost all data nodes that it was opened with while this
        peer had it in flight: take over the microbatches that are assigned to this data node now. Nothing in
        other iterations."""
        membership = self.ctx.run.membership
        if not (membership.is_reopened(self.t) and membership.is_split(self.t)):
            return
        for part, before in enumerate(self.assignments):
            now = membership.assignment(self.t, sorted(before.holder))
            self.assignments[part] = now
            for index, peer in before.holder.items():
                if now.holder[index] != peer:
                    self._take(now.holder, index, peer)

    def _take(self, holder: Mapping[int, str], index: int, peer: str) -> None:
        """Follow the removal of data node `peer`, which had microbatch `index`. If this data node has it now
        and has not begun it, ask the next stage for it before it is begun. A window of a delayed iteration is
        only noted, and begun by `settle`. Nothing for a slot of a pipeline island, which is lost with its
        data node. holder: microbatch -> data node that has it now; the caller has updated it."""
        if self.slots and self.trains(index) and self.ctx.run.settings.rounds.pipeline:
            return
        if self._delayed and not self.trains(index):
            self._taken[index] = (*self._taken.get(index, ()), peer)
        elif holder[index] == self.ctx.me and index not in self.sender.items:
            self.repairs.find(index, (self.ctx.me,), self.trains(index), (peer,))
