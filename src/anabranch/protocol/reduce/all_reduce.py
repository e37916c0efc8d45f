"""All-reduce of one stage's gradient at one replica: attempts, exchange of parts, PREPARED (R7, R8).

The leader orders a reduce by an `Attempt`, which names the members and the owner of each unit. A newer
attempt replaces an older one; the replica's own gradient sum is left as it was, so a reduce can be repeated.
A replica that holds the whole reduced gradient sends `Prepared`. Not here: applying the committed step
(`step_apply`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial

import msgspec

from anabranch.protocol.audit.seals import PART, REDUCED
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import Assemble, Freeze, Payload, Recount, Result, SumPart
from anabranch.protocol.messages import (
    Attempt,
    Fence,
    Got,
    Prepared,
    ReducedPart,
    ReducePart,
    WorkItem,
)
from anabranch.protocol.pipeline.link_sampling import sampled
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.reduce.attempt import ReduceAttempt
from anabranch.protocol.reduce.deferred_delivery import DeferredDelivery
from anabranch.protocol.reduce.hierarchy import FLAT, cells_of, is_large
from anabranch.protocol.reduce.partial_sums import (
    TOO_LARGE,
    EarlyParts,
    PartialSums,
    ReduceAccount,
    account_of,
    attempt_sets,
    witnessed,
)
from anabranch.protocol.reduce.work_receipt import WorkReceipt

#: Heartbeats that a reduce of a large stage may take before the links to all partners are watched. A choice,
#: as often as neighbours that are heard are pinged: the leader finds a dead member sooner, and a broken link
#: of two live ones delays the step only where others are done (`attempt.LATE_SHARE`).
PATIENT = 8.0


class AllReduce:
    """Reduce of the open iteration at one replica.

    iteration: the open iteration; reduce: the attempt that has begun; prepared: report of the whole reduced
    gradient once this replica has it; each None before. committed(t): True if the step of iteration t is
    committed and not applied yet. taken(t): True if the worker was told to apply or skip it. on_prepared:
    called when this replica holds the whole reduced gradient.
    """

    def __init__(
        self,
        ctx: PeerContext,
        committed: Callable[[int], bool],
        taken: Callable[[int], bool],
        on_prepared: Callable[[], None],
    ) -> None:
        self.ctx = ctx
        self.iteration: Iteration | None = None
        self.reduce: ReduceAttempt | None = None
        self.prepared: Prepared | None = None
        self._committed, self._taken, self._on_prepared = committed, taken, on_prepared
        self._announced: Attempt | None = None
        self._deferred = DeferredDelivery(ctx)
        self._subtracted: set[int] = set()
        self._early = EarlyParts()
        self._sent_at: dict[str, float] = {}
        """Peer -> send time (s) of the part that the peer has not acknowledged; -inf if it is several."""

    def open(self, iteration: Iteration) -> None:
        """Begin an iteration: forget the attempts and parts of the previous one, also parts that came early,
        and dial the likely partners of its reduce in a large swarm (`look_ahead`)."""
        self.close()
        self.iteration = iteration
        self._deferred.opened()
        self._subtracted = set()
        self._early = EarlyParts()
        self._sent_at = {}
        self.look_ahead()

    def close(self) -> None:
        """Drop the open iteration, if there is one, and the state of its reduce. Results of tasks under way
        are ignored."""
        self.iteration = self.reduce = self.prepared = self._announced = None

    def look_ahead(self) -> None:
        """Dial the likely partners of this iteration's reduce, in a large swarm, where not all of them are
        linked yet; nothing in a small one, or if no iteration is open."""
        ctx, iteration = self.ctx, self.iteration
        if iteration is None or not ctx.run.near.crowded:
            return
        membership, stage, picks = ctx.run.membership, ctx.run.stage, ctx.run.settings.neighbours
        large = is_large(membership.count(stage, iteration.t), picks)
        order = membership.by_region if large else membership.live
        members = order(stage, iteration.t)
        if membership.is_live(ctx.me, stage, iteration.t):
            cells = cells_of(len(members), FLAT * picks)
            self._reach(members[position] for position in cells.partners(members.index(ctx.me)))

    def _reach(self, peers: Iterable[str]) -> None:
        """Connect to those of `peers` that this peer is to dial (of two peers always the same one dials)."""
        for peer in peers:
            if self.ctx.run.membership.dials(self.ctx.me, peer):
                self.ctx.dialer.reach(peer)

    def on_attempt(self, message: Attempt) -> str | None:
        """Check an attempt (R7), and begin it as `resume` says; an iteration must be open. Returns the reason
        if it is refused, else None; an attempt that is no newer than the present one is ignored. Slots of a
        round that the plan binds to this replica may be assigned to it before they are done. If it is
        assigned other units that it does not hold, the replica also repeats its claim."""
        iteration = self.iteration
        assert iteration is not None
        current = self._announced
        if current is not None and message.attempt <= current.attempt:
            return None
        sets = attempt_sets(message)
        if self.ctx.me not in sets.positions:
            return "a reduce that I am not a member of"
        settings = self.ctx.run.settings
        cover = self.ctx.run.cover(self.ctx.run.stage, iteration.t)
        slots = settings.rounds.slots if iteration.source.slots else 0
        if wrong := sets.refusal(cover, slots):
            return wrong
        lacking = sets.units_of(self.ctx.me) - iteration.claims.held
        plan = self.ctx.run.plan(iteration.t) if self.ctx.run.stage else ()
        if not all(unit < len(plan) and plan[unit].peer == self.ctx.me for unit in lacking):
            iteration.claims.send()
            return f"units {sorted(lacking)} are assigned to me and I do not hold them"
        self._announced = message
        self._deferred.announced()
        self.reduce = None
        self.prepared = None
        self.resume()
        return None

    def forget_attempts(self, term: int) -> None:
        """Forget the reduce attempt, and what was made of it, if it was ordered in a log term above `term`:
        its sender was not the leader."""
        if self._announced is not None and self._announced.attempt.term > term:
            self._announced = self.reduce = self.prepared = None

    def _owned(self, message: Attempt) -> frozenset[int]:
        """Units that an attempt, of which this replica is a member, assigns to it; empty if it only receives
        the result."""
        return attempt_sets(message).units_of(self.ctx.me)

    def resume(self) -> None:
        """Begin the announced attempt if no weight gradient is being added and this replica holds all units
        that the attempt assigns to it: subtract units that other members own (and add those again that were
        subtracted for an older attempt), cut this replica's sum into parts, and send them. Nothing if there
        is no attempt, it has begun, or the worker takes the step already: it has no sum for it then."""
        message, iteration = self._announced, self.iteration
        if message is None or iteration is None or self.reduce is not None:
            return
        mine = self._owned(message)
        if self.ctx.tasks.adding or self._taken(iteration.t) or not self._holds(mine):
            return
        for unit in sorted(iteration.claims.held - self._subtracted - mine):
            self.ctx.outbox.note(
                "double", t=iteration.t, stage=self.ctx.run.stage, unit=unit, subtracted=self.ctx.me
            )
            self._subtracted.add(unit)
            self._recount(iteration, unit, -1)
        for unit in sorted(self._subtracted & mine):
            self._subtracted.discard(unit)
            self._recount(iteration, unit, +1)
        count = len(message.members)
        cells = cells_of(count, count if message.sums else FLAT * self.ctx.run.settings.neighbours)
        receipt = WorkReceipt(self.ctx, iteration.seals, message, flat=len(cells.bounds) == 1)
        position = attempt_sets(message).positions[self.ctx.me]
        reduce = ReduceAttempt(message, receipt, position, cells, begun_at=self.ctx.clock.now)
        self.reduce = reduce
        reduce.first = self._deferred.first(reduce, self._committed(message.fence.t))
        reduce.told_late = reduce.position not in reduce.first
        if self.ctx.run.near.crowded:
            self._reach(reduce.partners)
        freeze = Freeze(iteration.t, reduce.count, hashed=receipt.on)
        self.ctx.tasks.submit(TaskPriority.STEP, freeze, (), lambda result: self._frozen(reduce, result))

    def _holds(self, units: frozenset[int]) -> bool:
        """True if the weight gradients of `units` are in this replica's sum; an iteration must be open."""
        assert self.iteration is not None
        return units <= self.iteration.claims.held

    def _recount(self, iteration: Iteration, unit: int, sign: int) -> None:
        """Start the task that adds (+1) or subtracts (-1) the weight gradient of a unit to or from this
        replica's sum; this replica must still have the unit's inputs. The claim is left as it is."""
        task = Recount(iteration.t, unit, sign)
        self.ctx.tasks.submit(TaskPriority.STEP, task, iteration.inputs_of(unit), lambda result: None)

    def _frozen(self, reduce: ReduceAttempt, result: Result) -> None:
        """Send the parts of this replica's sum (the result of the Freeze task) to the peers that add them up,
        and take the parts that came early. The result of an older attempt's task is ignored."""
        if reduce is not self.reduce:
            return
        assert self.iteration is not None
        reduce.parts, whole = result.outputs, len(reduce.cells.bounds) == 1
        reduce.receipt.frozen(result.hashes)
        then = self._stage_summed if whole else self._cell_summed
        weighed, t = self.ctx.run.settings.audits and reduce.message.stage > 0, self.iteration.t
        reduce.summing = PartialSums(self.ctx, t, reduce.mine, reduce.senders, whole, weighed, then)
        if witnessed(reduce.message, self.ctx.me):
            reduce.summing.keep()
        for part, collector in enumerate(reduce.collectors if reduce.position in reduce.senders else ()):
            if collector == self.ctx.me:
                reduce.summing.add(part, reduce.position, reduce.parts[part])
            else:
                self._send_part(reduce, part, collector, reduce.parts[part])
        for peer, message, payload, share in self._early.take():
            self.on_part(peer, message, payload, share)

    # --- sending -------------------------------------------------------------------------------

    def _send_part(self, reduce: ReduceAttempt, part: int, to: str, payload: Payload) -> None:
        """Send a part of this replica's sum, or of its cell's sum (a cell is a group of members in a large
        stage), to the peer that adds the part up, with a seal if it is of its own sum."""
        message = reduce.message
        # With two parts under way, an acknowledgement does not say which of them arrived.
        self._sent_at[to] = -math.inf if to in self._sent_at else self.ctx.clock.now
        seal = reduce.receipt.part_seal(part) if payload is reduce.parts[part] else b""
        part_message = ReducePart(self._fence(), message.stage, message.attempt, part, seal)
        self.ctx.outbox.send(to, part_message, payload)

    def _send_to(self, reduce: ReduceAttempt, part: int, positions: Collection[int]) -> None:
        """Send a part that this replica summed to the members at `positions`, itself left out."""
        message, seal = reduce.message, reduce.receipt.reduced_seal(part)
        reduced = ReducedPart(self._fence(), message.stage, message.attempt, part, seal)
        for position in positions:
            if position != reduce.position:
                self.ctx.outbox.send(reduce.members[position], reduced, reduce.reduced[part])

    def _deliver_deferred(self) -> None:
        """Send standbys the parts that this replica has summed so far; they get its later parts together with
        the other members. Nothing without an attempt, or if they have been served."""
        reduce = self.reduce
        if (positions := self._deferred.take(reduce)) and reduce is not None:
            for part in reduce.mine:
                if part in reduce.reduced:
                    self._send_to(reduce, part, positions)

    def _fence(self) -> Fence:
        assert self.iteration is not None
        return self.ctx.fence(self.iteration.t, self.iteration.base)

    # --- receiving and adding up ---------------------------------------------------------------

    def on_part(
        self, peer: str, message: ReducePart | ReducedPart, payload: Payload | None, share: float = 0.0
    ) -> str | None:
        """Take a part of a member's sum, or a reduced part; return why it is refused, or None.

        A part of an attempt that this replica has not begun is kept until it begins; one of an older attempt,
        and a second one, is dropped. In iterations in which links are timed, the sender of a part of a sum
        gets an acknowledgement (`Got`). share: memory of the payload, in largest payloads of the run.
        """
        if payload is None:
            return "a part of a reduce without its payload"
        if isinstance(message, ReducePart) and self._sampled(message.fence.t):
            self.ctx.outbox.send(peer, Got(self._fence(), message.part, False))
        announced = self._announced
        reduce = self.reduce
        if announced is None or message.attempt > announced.attempt or reduce is None or not reduce.summing:
            if announced is None or message.attempt >= announced.attempt:
                return self._early.keep(peer, message, payload, share)
            return None
        if message.attempt != reduce.message.attempt:
            return None
        if isinstance(message, ReducedPart):
            if message.part >= reduce.count or reduce.collectors[message.part] != peer:
                return "a reduced part from a peer that does not sum it"
            if reduce.memory.exceeded(peer, message, share):
                return TOO_LARGE
            if message.part not in reduce.reduced:
                reduce.reduced[message.part] = payload
                reduce.receipt.came(REDUCED, message.part, peer, message.seal)
                self._assemble(reduce)
            return None
        sender = reduce.positions.get(peer)
        if sender is None:
            return "a part from a peer that is no member of the attempt"
        if message.part not in reduce.mine:
            return "a part that another member sums"
        if reduce.memory.exceeded(peer, message, share):
            return TOO_LARGE
        if sender in reduce.senders:
            reduce.receipt.came(PART, message.part, peer, message.seal)
            reduce.summing.add(message.part, sender, payload)
        elif sender in reduce.fellows:
            return "a part from a member that owns no unit"
        elif reduce.cells.part(sender) != message.part:
            return "a part of another cell from a member that does not sum it"
        else:
            reduce.sums.setdefault(reduce.cells.of(sender), payload)
            self._add_up(reduce)
        return None

    def _sampled(self, t: int) -> bool:
        """True if the transfers of gradient parts are timed in iteration t: a sample of the iterations, and
        only where rebalancing uses the measurements."""
        return self.ctx.run.settings.rebalance > 0 and sampled(t)

    def on_got(self, peer: str) -> None:
        """Measure the link to `peer` by its acknowledgement of a part; not if several parts to it are under
        way, at a data node, or if none is awaited."""
        settings, reduce = self.ctx.run.settings, self.reduce
        sent_at = self._sent_at.pop(peer, -math.inf)
        if reduce is None or not settings.blocks or not self.ctx.run.stage or sent_at < 0.0:
            return
        size_bytes = settings.sums_bytes * settings.blocks[self.ctx.run.stage - 1] / reduce.count
        self.ctx.costs.sums_arrived(peer, size_bytes, self.ctx.clock.now - sent_at, self.ctx.clock.now)

    def _stage_summed(
        self, summing: PartialSums, part: int, inputs: tuple[Payload, ...], result: Result
    ) -> None:
        reduce = self.reduce
        if reduce is None or reduce.summing is not summing:
            return
        unsealed = reduce.receipt.summed(part, reduce.senders, inputs, result)
        if unsealed is not None:
            summing.unusable.add(reduce.positions[unsealed])
            self._unsealed(unsealed, "ReducePart")
            return
        self._summed(reduce, part, result)

    def _cell_summed(
        self, summing: PartialSums, part: int, inputs: tuple[Payload, ...], result: Result
    ) -> None:
        """Send the sum of this replica's cell (group of members in a large stage) to the peers that collect
        the same part in the other cells, and add up what came from these. Ignored if the attempt is over."""
        reduce = self.reduce
        if reduce is None or reduce.summing is not summing or self._failed(reduce, result):
            return
        reduce.sums[reduce.cell] = result.outputs[0]
        for cell in range(len(reduce.cells.bounds)):
            if cell != reduce.cell:
                to = reduce.members[reduce.cells.collector(cell, part)]
                self._send_part(reduce, part, to, result.outputs[0])
        self._add_up(reduce)

    def _add_up(self, reduce: ReduceAttempt) -> None:
        """Add up this replica's part over all cells, once, when the sum of every cell has come, in cell
        order: every collector of the part gets the same bits."""
        cells = range(len(reduce.cells.bounds))
        if reduce.added or len(reduce.sums) < len(cells):
            return
        reduce.added = True
        assert self.iteration is not None
        inputs = tuple(reduce.sums[cell] for cell in cells)
        then = partial(self._summed, reduce, reduce.mine[0])
        self.ctx.tasks.submit(TaskPriority.STEP, SumPart(self.iteration.t), inputs, then)

    def _summed(self, reduce: ReduceAttempt, part: int, result: Result) -> None:
        """Store a reduced part that this replica summed, and send it to the members that get it at once (not
        yet to standbys). Ignored if the attempt is over; a failed sum is handled by `_failed`."""
        if reduce is not self.reduce or self._failed(reduce, result):
            return
        reduce.reduced[part] = result.outputs[0]
        self._send_to(reduce, part, reduce.first)
        self._assemble(reduce)

    def _assemble(self, reduce: ReduceAttempt) -> None:
        """Join the reduced parts to a gradient once this replica has all, once for each attempt; `_assembled`
        checks and reports it."""
        if reduce.assembled or len(reduce.reduced) < reduce.count:
            return
        reduce.assembled = True
        self._deferred.assembled(reduce)
        assert self.iteration is not None
        inputs = tuple(reduce.reduced[part] for part in range(reduce.count))
        task = Assemble(self.iteration.t, hashed=reduce.receipt.on)
        self.ctx.tasks.submit(TaskPriority.STEP, task, inputs, lambda result: self._assembled(reduce, result))

    def _assembled(self, reduce: ReduceAttempt, result: Result) -> None:
        if reduce is not self.reduce:
            return
        message = reduce.message
        if self._failed(reduce, result):
            return
        iteration = self.iteration
        assert iteration is not None
        unsealed = reduce.receipt.assembled(reduce.collectors, result.hashes)
        if unsealed is not None:
            self._unsealed(unsealed, "ReducedPart")
            return
        receipt = reduce.receipt.signed(iteration.t, iteration.base, self._owned(message))
        of_step, of_work = (message.stage, message.attempt), (receipt, reduce.receipt.moments)
        self.prepared = Prepared(self._fence(), *of_step, result.digest, result.squares, *of_work)
        self.repeat_prepared()
        self._on_prepared()

    def _unsealed(self, peer: str, message: str) -> None:
        """Note that `peer` sent a part without its own seal: it gets no more work from this replica, and a
        claim sent at once tells the leader. message: name of the message's type."""
        self.ctx.outbox.refuse(peer, message, "without the seal of its sender")
        self.ctx.links.forged(peer)
        if self.iteration is not None:
            self.iteration.claims.send()

    def _failed(self, reduce: ReduceAttempt, result: Result) -> bool:
        """True if `result` holds no sum, e.g. because a contribution is not finite; else nothing happens.

        A note says why, and the members' contributions are examined one by one where they were kept
        (`PartialSums.keep`). This replica then sends no `Prepared`, and the leader orders another attempt,
        with or without the member at fault.
        """
        if result.outputs or (result.digest and not result.error and not result.overflow):
            return False
        why = result.error or f"{result.overflow} is not finite"
        self.ctx.outbox.note("note", text=f"the reduce of iteration {reduce.message.fence.t} failed: {why}")
        if reduce.summing is not None:
            reduce.summing.examine(reduce.message.stage)
        return True

    def account(self, message: Attempt) -> ReduceAccount | None:
        """Account of an attempt of this stage: members whose parts are lacking or unusable, and the result,
        as far as this replica knows them. None if it has not begun this attempt."""
        reduce, prepared = self.reduce, self.prepared
        if reduce is None or reduce.summing is None or reduce.message.attempt != message.attempt:
            return None
        result = None if prepared is None else (prepared.digest, prepared.squares)
        return account_of(message, reduce.summing, len(reduce.reduced), result)

    # --- repeating -----------------------------------------------------------------------------

    def repeat_prepared(self) -> None:
        """Send PREPARED (again) to the leader that this peer knows, with a new receipt if the work went on
        since; nothing unless this replica has the reduced gradient."""
        if self.prepared is None:
            return
        reduce, iteration = self.reduce, self.iteration
        if reduce is not None and iteration is not None and reduce.receipt.on and reduce.receipt.outdated:
            receipt = reduce.receipt.signed(iteration.t, iteration.base, self._owned(reduce.message))
            self.prepared = msgspec.structs.replace(self.prepared, receipt=receipt)
        self.ctx.outbox.send(self.ctx.log.leader, self.prepared)

    def repeat_parts(self, peer: str) -> None:
        """Send `peer`, a member or helper whose link is back, the own and reduced parts, or the sum of this
        replica's cell, that it may have missed; nothing to others, or while this peer has no reduce whose
        parts are there."""
        reduce = self.reduce
        if reduce is None or not reduce.parts or peer == self.ctx.me:
            return
        for part, collector in enumerate(reduce.collectors):
            if collector == peer and reduce.position in reduce.senders:
                self._send_part(reduce, part, peer, reduce.parts[part])
        to = reduce.positions.get(peer)
        if to is None:
            return
        if to in reduce.fellows:
            for part in reduce.mine:
                if part in reduce.reduced:
                    self._send_to(reduce, part, (to,))
        elif reduce.cells.part(to) in reduce.mine and reduce.cell in reduce.sums:
            self._send_part(reduce, reduce.mine[0], peer, reduce.sums[reduce.cell])

    @property
    def late(self) -> list[str]:
        """Partners that the reduce may wait for: those whose payloads are late (`ReduceAttempt.late`), and
        all once it takes PATIENT heartbeats. Empty without an attempt, and once this replica has the reduced
        gradient."""
        reduce, ctx = self.reduce, self.ctx
        if reduce is None or self.prepared is not None:
            return []
        long = ctx.clock.now >= reduce.begun_at + PATIENT * ctx.run.settings.heartbeat_s
        return reduce.partners if long else reduce.late()

    # --- for step_apply --------------------------------------------------------------------------

    def holds_gradient(self, t: int, digest: str) -> bool:
        """True if this replica holds the reduced gradient of iteration t with this digest."""
        prepared = self.prepared
        return prepared is not None and prepared.fence.t == t and prepared.digest == digest

    def audited_items(self, subject: str) -> dict[WorkItem, Payload]:
        """Parts (item -> payload) from which the audited replica `subject` made its sums in the present
        attempt. If that is this replica: the parts of all members that came; else the parts that this replica
        sent to `subject`. Empty without an attempt."""
        reduce = self.reduce
        if reduce is None:
            return {}
        if subject == self.ctx.me:
            return {
                WorkItem("part", part, position): payload
                for part, parts in reduce.receipt.sum_inputs.items()
                for position, payload in zip(reduce.senders, parts, strict=True)
            }
        return {
            WorkItem("part", part, reduce.position): payload
            for part, payload in enumerate(reduce.parts)
            if reduce.collectors[part] == subject
        }

    def parts_arriving(self, t: int) -> bool:
        """True if this replica is a standby and the reduced parts of step t that it lacks may still arrive:
        their senders are linked, and their time is not over."""
        return self._deferred.arriving(self.reduce, t)

    def step_committed(self) -> None:
        """React to the commit of the open iteration's step, before it is applied: deliver the reduced parts
        to the standbys."""
        self._deferred.committed()
        self._deliver_deferred()

    def tick(self) -> None:
        """Deliver the reduced parts to standbys if no commit has come by the time `deadline`, once for each
        attempt."""
        if self.ctx.clock.now >= self._deferred.at:
            self._deliver_deferred()

    def deadline(self) -> float:
        """Time (s) at which standbys get the reduced parts even without a commit: DELAY_S, and DELAY_FACTOR
        times the expected transfer, after this replica held the whole reduced gradient. Infinite before that,
        and if nothing is to be delivered."""
        return self._deferred.at
