"""Iteration: receiving and computing the microbatches of one iteration at one peer (R2, R4-R6).

A relay's microbatch: activation in, Forward, sent on, gradient in, InputGradient, gradient sent back,
WeightGradient, claimed. A data node is the head of microbatches that end at it (Head: loss and input
gradient). Not here: microbatches that begin at a data node (`source`), sending on (`sender`), credits
(`credit_reports`), replies (`upstream_replies`), claims (`claims`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial

from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT, Seals
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import (
    Discard,
    Head,
    InputGradient,
    Payload,
    Result,
    StepAhead,
    Task,
    WeightGradient,
    head_unit,
)
from anabranch.protocol.interface.tasks import Forward as ForwardTask
from anabranch.protocol.log.records import Slot
from anabranch.protocol.messages import (
    Ask,
    Backward,
    CallBack,
    Forward,
    Got,
    Want,
    WorkItem,
)
from anabranch.protocol.pipeline.claims import Claims
from anabranch.protocol.pipeline.credit_reports import CreditReports
from anabranch.protocol.pipeline.incoming import IncomingMicrobatch
from anabranch.protocol.pipeline.island_steps import IslandSteps
from anabranch.protocol.pipeline.link_sampling import LinkSampling
from anabranch.protocol.pipeline.repair import Repairs
from anabranch.protocol.pipeline.sender import Sender
from anabranch.protocol.pipeline.source import Source
from anabranch.protocol.pipeline.upstream_replies import UpstreamReplies, no_units

#: Owner of credits held by a removed peer; its next incarnation starts afresh.
GONE = ""
#: Index before all others: its task is computed next of its rank.
NEXT = -1
#: Transmissions of a microbatch from one upstream peer that are remembered, to ignore repeated messages.
#: Plain choice.
TRANSMISSIONS_KEPT = 16
#: Unusable activations of a microbatch after which no further one of the same sender is taken: they would
#: keep out the right one of another sender, as one at a time is held. Plain choice: the error may be of this
#: peer.
UNUSABLE_MAX = 3


class Iteration:
    """Microbatches of iteration t at this peer; making it grants credits and begins those of this data node.
    units: incoming microbatches by index."""

    def __init__(
        self,
        ctx: PeerContext,
        t: int,
        base: str,
        capacity: int,
        windows: int,
        admits: bool,
        plan: Mapping[str, int] | None = None,
        planned: Callable[[], Mapping[str, int]] = dict,
        delayed: bool = False,
        computed: Callable[[str], int] = no_units,
    ) -> None:
        """capacity: microbatches that this peer can hold. windows: evaluation microbatches of the iteration.
        admits: False if it has only evaluation windows, no microbatches to train. delayed: True if the step
        before is not applied yet; `settle` is called once it is. plan: upstream peer -> units of the planned
        flow that come from it. planned: returns next hop -> units of the planned flow that go to it.
        computed(peer): microbatches that an upstream peer computed in the last step that was taken."""
        self.ctx = ctx
        self.t = t
        self.base = base
        self.units: dict[int, IncomingMicrobatch] = {}
        self.claims = Claims(ctx, t, base, lambda: self.sender.holders())
        self.islands = IslandSteps(ctx, t, base, self.claims)
        self.seals = Seals(ctx, base)
        self.replies = UpstreamReplies(ctx, t, base, self.seals, computed)
        self._sampling = LinkSampling(ctx, t, base)
        self._received_transmissions: dict[tuple[str, int], deque[int]] = defaultdict(
            lambda: deque(maxlen=TRANSMISSIONS_KEPT)
        )
        self._unusable: Counter[tuple[str, int]] = Counter()
        """(sender, microbatch) -> number of its activations that could not be used."""
        prepare = None if ctx.run.stage else lambda index: self.source.embed(index)
        self.sender = Sender(ctx, t, base, prepare, planned, self.seals)
        self.repairs = Repairs(ctx, self.sender)
        self._room = capacity + 1  # with the credit for repairs
        self.training, self._delayed = admits, delayed
        self._waiting: list[IncomingMicrobatch] = []
        """Held-out windows that came before the state which they evaluate."""
        self.source: Source = Source(
            self.sender, self.repairs, self.claims, self.seals, windows, admits, delayed
        )
        expected = self.source.expected() if admits else None
        self.credits = CreditReports(ctx, t, base, capacity, plan, expected)
        self.source.begin()

    def settle(self) -> None:
        """Begin what had to wait for the step before, in a delayed iteration whose previous step is applied
        now: held-out windows are computed, and the claims are sent."""
        self._delayed = False
        waiting, self._waiting = self._waiting, []
        for unit in waiting:
            if self.units.get(unit.index) is unit:
                self._begin(unit)
        self.source.settle()
        self.claims.changed = True

    # --- links and credits -------------------------------------------------------------------

    def link_up(self, peer: str) -> None:
        """Report credits to `peer`, whose link is (back) up, and ask it for the microbatches that are being
        searched there; activations of inner steps whose gradients it owes are sent to it again."""
        self.credits.link_up(peer)
        self.repairs.link_up(peer)
        self.islands.link_up(peer)

    @property
    def partners(self) -> set[str]:
        """Peers that this peer exchanges microbatches with: those that it granted credits, or that granted it
        some."""
        return {*self.credits.ledger.grants, *self.sender.credits}

    def link_down(self, peer: str, reason: str) -> None:
        """Free the unused credits of `peer`, whose link broke. Microbatches whose gradient it owes, or whose
        claim the leader misses, go to another replica (`Repairs.link_down`). Those that came from it stay:
        their gradients are sent once asked for again."""
        self.credits.tell(self.credits.ledger.unlink(peer))
        for unit in self.units.values():
            unit.back.pop(peer, None)
        self.repairs.link_down(peer, reason)

    def on_ask(self, peer: str, message: Ask) -> str | None:
        """Take a request for a credit, which is reported as soon as one is free; return why it is refused, or
        None."""
        if not self.source.exists(message.index):
            return f"no microbatch {message.index} in iteration {self.t}"
        if (refusal := self._not_of_crew(peer, message.index)) is not None:
            return refusal
        self.credits.tell(self.credits.ledger.ask(peer, message.index, message.repair))
        return None

    def _release_slot(self, unit: IncomingMicrobatch) -> None:
        if unit.granted is not None:
            self.credits.release(unit.granted)
            unit.granted = None

    # --- forward -----------------------------------------------------------------------------

    def on_forward(self, peer: str, message: Forward, payload: Payload | None) -> str | None:
        """Take an activation, use its sender's credit, and submit its forward task (at a data node: head,
        loss and gradient), in a delayed iteration that of an evaluation window after `settle`. With
        `message.repair` a relay asks the next stage meanwhile if it has the microbatch. Returns why it is
        refused (no payload, microbatch, seat or credit), which the caller answers with `Lack`; else None.

        A repeated message, or one of a peer after UNUSABLE_MAX unusable ones of this microbatch, is ignored.
        If this peer has the microbatch already, it sends the gradient to `peer`, too, and frees the credit;
        a spoilt one begins anew. The activation of a forger is not used: a `Lack` answers it.
        """
        if payload is None:
            return "forward without its activation"
        if (refusal := self._misfit(message) or self._not_of_crew(peer, message.index)) is not None:
            return refusal
        received = self._received_transmissions[peer, message.index]
        if message.way in received:
            return None  # a repeated message
        received.append(message.way)
        if not self.credits.ledger.receive(peer):
            return f"forward of microbatch {message.index} without a slot"
        if self._unusable[peer, message.index] >= UNUSABLE_MAX:
            self.credits.release(peer)
            self.ctx.outbox.refuse(peer, "Forward", f"{UNUSABLE_MAX} of its activations could not be used")
            return None
        if self.ctx.links.is_forger(peer):
            self.credits.release(peer)
            self.ctx.outbox.refuse(peer, "Forward", "its sender sent false inputs before")
            self.replies.lack(peer, message.index, message.way, refused=True)
            return None
        known = self.units.get(message.index)
        if known is not None and known.spoilt and peer != known.sender:
            self._refuse(known, "another peer sends its input")
            known = None
        if known is not None:
            self.credits.release(peer)
            self.replies.adopt(known, peer, message)
            return None
        unit = IncomingMicrobatch(
            message.index,
            message.train,
            peer,
            message.path,
            payload,
            message.gradient_needed,
            peer,
            message.way,
        )
        unit.kept, unit.sender = self._has_room(), peer
        self.units[message.index] = unit
        if unit.train:
            self.seals.arrived(ACTIVATION, unit.index, peer, self.ctx.run.previous_stage(), message.seal)
        self.credits.use(peer)
        self._sampling.acknowledge(peer, message.index, backward=False)
        if self.ctx.run.stage and message.repair:
            self.repairs.find(unit.index, (*unit.path, self.ctx.me), unit.train, message.lost)
        if self._delayed and not unit.train:
            self._waiting.append(unit)
        else:
            self._begin(unit)
        return None

    def _not_of_crew(self, peer: str, index: int) -> str | None:
        """Reason why `peer` may not send or ask for slot `index` in a round of pipeline islands: this peer is
        not of the slot's crew, or `peer` is not the crew's machine of the stage before. None if it may, and
        in other iterations."""
        crew, run = self.source.slot(index).crew, self.ctx.run
        if not (crew and run.settings.rounds.pipeline):
            return None
        if crew[run.stage - 1] != self.ctx.me:
            return f"slot {index} is of a crew without this peer"
        return None if crew[run.previous_stage() - 1] == peer else f"slot {index} comes from another peer"

    def _misfit(self, message: Forward) -> str | None:
        """Reason why a forward does not fit this iteration and stage, or None: there is no such microbatch,
        it is one to train and the message says otherwise (or the reverse), or its path has the wrong
        length."""
        if message.train and not (self.training and self.source.trains(message.index)):
            return f"no microbatch {message.index} to train in iteration {self.t}"
        if not self.source.exists(message.index):
            return f"no microbatch {message.index} in iteration {self.t}"
        if message.train != self.source.trains(message.index):
            return f"microbatch {message.index} of iteration {self.t} is one to train"
        if len(message.path) != (self.ctx.run.stage or self.ctx.run.settings.stages + 1):
            return "a path that is not one"  # a path has one peer of each stage before
        return None

    def _begin(self, unit: IncomingMicrobatch) -> None:
        """Submit the forward task of a microbatch that arrived; at a data node its head task, or the inner
        steps of a crew's slot, which is refused if this data node did not begin it."""
        payload = unit.received
        slot = self.source.slot(unit.index)
        if self.ctx.run.stage == 0:
            if not (slot.crew and self.ctx.run.settings.rounds.pipeline):
                self._head(unit, slot)
            elif self.source.has_begun(unit.index):
                self.islands.begin(unit.index, slot, partial(self._head, unit, slot))
            else:
                self._refuse(unit, "this data node has not begun the slot")
            return
        hashed = self.seals.on and unit.train
        work = (slot.steps, slot.carried, slot.late, slot.first)
        forward = ForwardTask(self.t, unit.index, unit.train, unit.kept, *work, hashed=hashed)
        rank = unit.rank(TaskPriority.FORWARD)
        self.ctx.tasks.submit(rank, forward, (payload,), partial(self._forward_done, unit), unit.index)

    def _head(self, unit: IncomingMicrobatch, slot: Slot) -> None:
        """Submit the head task of `unit`, a microbatch or slot that came back to this data node. slot: its
        plan in the round, NO_SLOT for a microbatch (`Source.slot`)."""
        head = Head(self.t, unit.index, unit.train, slot.weight, hashed=self.seals.on and unit.train)
        rank = TaskPriority.GRADIENT if unit.train else TaskPriority.EVALUATION
        self.ctx.tasks.submit(rank, head, (unit.received,), partial(self._head_done, unit), unit.index)

    def _has_room(self) -> bool:
        """True if the activations of one more microbatch can be kept, from its forward until its weight
        gradient is added."""
        kept = sum(unit.kept and unit.granted is not None for unit in self.units.values())
        return kept < self._room

    def _forward_done(self, unit: IncomingMicrobatch, result: Result) -> None:
        if not self._is_usable(unit, ACTIVATION, result):
            return
        if self._adds_at_once(unit):
            task, loss = WeightGradient(self.t, unit.index), result.outputs[0]
            then = partial(self._added_at_once, unit, loss)
            self.ctx.tasks.submit(TaskPriority.GRADIENT, task, (), then, unit.index)
        else:
            self._send_on(unit, result.outputs[0])

    def _adds_at_once(self, unit: IncomingMicrobatch) -> bool:
        """True for a slot of a machine that holds the whole model: its contribution needs no gradient of the
        data node, and is added and claimed once the inner steps are done. Not where work is audited: seals
        and audits follow the data node's answer."""
        rounds = self.ctx.run.settings.rounds
        return bool(self.source.slot(unit.index).steps) and not (rounds.pipeline or self.seals.on)

    def _added_at_once(self, unit: IncomingMicrobatch, loss: Payload, result: Result) -> None:
        """Claim a slot whose contribution is in the sum, then send its loss. After an error or an overflow
        the slot is given up as if its inner steps had failed."""
        if result.error or result.overflow:
            self._discard(unit)
        if result.error:
            self._refuse(unit, result.error)
        elif self._in_range(unit, result):
            unit.added = True
            self._claim(unit, unit.index, result)
            self._send_on(unit, loss)

    def _send_on(self, unit: IncomingMicrobatch, output: Payload) -> None:
        """Send the output of a forward task to the next stage; begin the inner steps if the microbatch is a
        crew's slot; submit the backward task if its gradient has come already."""
        unit.forward_done = True
        slot = self.source.slot(unit.index)
        if slot.crew and self.ctx.run.settings.rounds.pipeline:
            self.islands.begin(unit.index, slot)
        if unit.index in self.sender.items:
            self.sender.provide(unit.index, output)
        else:
            self.sender.submit(unit.index, output, (*unit.path, self.ctx.me), unit.train)
        if unit.gradient_in is not None:
            self._input_gradient(unit)

    def _is_usable(self, unit: IncomingMicrobatch, made: str, result: Result) -> bool:
        """True if the forward or head task of a microbatch gave a usable output (of kind `made`): its input
        has the seal of its sender, and nothing overflowed. Otherwise the microbatch is given up (`_refuse`)
        and counts as unusable of its sender; after an overflow it does not count, and may be kept
        (`_in_range`)."""
        refusal = result.error or self._sealed(unit.index, ACTIVATION, made, result)
        if not refusal:
            return self._in_range(unit, result)
        if result.error:
            self._give_up(unit)
        elif unit.kept or not self.ctx.run.stage:
            self._discard(unit)
        self._unusable[unit.sender, unit.index] += 1
        self._refuse(unit, refusal)
        return False

    def _give_up(self, unit: IncomingMicrobatch) -> None:
        """Tell the leader that the crew of a slot does not go on, as a task of it failed at this machine;
        nothing for a microbatch, or a slot that one machine fills."""
        if self.source.slot(unit.index).others:
            self.claims.give_up(unit.index, unit.sender_of_last)

    def _discard(self, unit: IncomingMicrobatch) -> None:
        self.ctx.tasks.submit(TaskPriority.STEP, Discard(self.t, unit.index), (), lambda result: None)

    # --- loss and backward -------------------------------------------------------------------

    def _head_done(self, unit: IncomingMicrobatch, result: Result) -> None:
        if not self._is_usable(unit, GRADIENT, result):
            return
        unit.forward_done = True
        self._finish(unit)
        if unit.train:
            self.claims.losses[unit.index] = result.loss_sum
            unit.gradient_out = result.outputs[0]
            self.replies.send_back(unit)
            self._weight_gradient(unit, head_unit(unit.index))
        else:
            self.claims.evaluated(unit.index, result.loss_sum)
            self.replies.send_back(unit)
            self._release_slot(unit)

    def on_backward(self, peer: str, message: Backward, payload: Payload | None) -> str | None:
        """Take the gradient of a microbatch that `peer` computed; return why it is refused, or None. The
        first one starts the backward tasks, or is passed on in an evaluation; later ones are ignored."""
        if payload is not None:
            self._sampling.acknowledge(peer, message.index, backward=True)
        first, refusal = self.sender.on_backward(peer, message.index, payload)
        if first:
            self.seals.arrived(GRADIENT, message.index, peer, self.ctx.run.next_stage(), message.seal)
            self._gradient_arrived(peer, message.index, payload)
        return refusal

    def on_got(self, peer: str, message: Got) -> None:
        """Measure the link to `peer` by the time from sending an activation, or (message.backward) a
        gradient, to this acknowledgement. One that is not awaited from `peer` is ignored."""
        if not message.backward:
            self.sender.on_got(peer, message.index)
            return
        self.replies.delivered(self.units.get(message.index), peer)

    def _gradient_arrived(self, peer: str, index: int, payload: Payload | None) -> None:
        """Use the first gradient of microbatch `index` that came from `peer` of the next stage: submit the
        backward task, once the forward is computed; without training, pass it on. A data node hands it to
        `Source`. payload: None without training."""
        if self.ctx.run.stage == 0:
            self.source.gradient_arrived(index, payload)
            return
        unit = self.units[index]
        if unit.train:
            unit.gradient_in, unit.gradient_sender = payload, peer
            if unit.forward_done:
                self._input_gradient(unit)
        else:
            self._finish(unit)
            self.replies.send_back(unit)
            self._release_slot(unit)

    def _input_gradient(self, unit: IncomingMicrobatch) -> None:
        task = InputGradient(self.t, unit.index, again=not unit.kept, hashed=self.seals.on)
        then = partial(self._input_gradient_done, unit)
        inputs = (unit.gradient_in,) if unit.kept else (unit.gradient_in, unit.received)
        self.ctx.tasks.submit(unit.rank(TaskPriority.GRADIENT), task, inputs, then, unit.index)

    def _input_gradient_done(self, unit: IncomingMicrobatch, result: Result) -> None:
        refusal = result.error or self._sealed(unit.index, GRADIENT, GRADIENT, result)
        if not refusal and result.overflow and self.repairs.may_be_false(unit.index, self.claims):
            self.claims.in_range(unit.index, result, unit.sender_of_last)
            refusal = f"{result.overflow} is out of range"
        if refusal:
            unit.gradient_in = None
            if result.error:
                self._give_up(unit)
            else:
                self._discard(unit)
                unit.kept = False  # the next gradient begins with the forward again
            self.repairs.reject(unit.index, refusal)
            return
        if not self._in_range(unit, result):
            return
        unit.gradient_out = result.outputs[0]
        self._finish(unit)
        self.replies.send_back(unit)
        if unit.added:
            self._release_slot(unit)
        else:
            self._weight_gradient(unit, unit.index)

    def _sealed(self, index: int, came: str, made: str, result: Result) -> str | None:
        """Check the seal of a task's first input, of kind `came`, and note the hash of its output, of kind
        `made`; return why the input is refused, and then nothing is noted, or None. Nothing if the task made
        no hashes, in a run without audits."""
        if not result.hashes:
            return None
        if refusal := self.seals.check(came, index, result.hashes[0]):
            return refusal
        self.seals.made(made, index, result.hashes[-1])
        return None

    def _finish(self, unit: IncomingMicrobatch) -> None:
        """Note that the gradient can go upstream, so that the microbatch is no load to its sender any more;
        nothing if that was noted before."""
        if unit.returned:
            return
        unit.returned = True
        if unit.granted is not None:
            self.credits.load_changed(unit.granted, -1)

    def _weight_gradient(self, unit: IncomingMicrobatch, name: int) -> None:
        task, then = WeightGradient(self.t, name), partial(self._added, unit, name)
        if not unit.kept and self._has_room():
            unit.kept = True
        if unit.kept:
            self.ctx.tasks.submit(TaskPriority.WEIGHTS, task, (), then, unit.index)
        else:
            self.ctx.tasks.submit(TaskPriority.GRADIENT, task, (), then, NEXT)

    def _added(self, unit: IncomingMicrobatch, name: int, result: Result) -> None:
        if result.error:
            self._refuse(unit, result.error)
            return
        if self._in_range(unit, result):
            self._claim(unit, name, result)
            self._release_slot(unit)

    def _claim(self, unit: IncomingMicrobatch, name: int, result: Result) -> None:
        """Claim the unit numbered `name` of microbatch `unit`, whose weight gradient was added with this
        result, and begin the steps that this machine takes ahead (`_go_ahead`)."""
        if result.digest:
            self.claims.own[name] = result
        self.claims.hold(name, half=not self.ctx.run.stage and self.source.lacks_gradient(unit.index))
        self._go_ahead(unit.index)

    def _go_ahead(self, index: int) -> None:
        """Submit the steps of the next round that this machine takes while the contribution of a slot, which
        is claimed now, is exchanged. They are many short tasks: sums and results of the exchange go first.
        Nothing at a data node, or if the run takes no steps ahead."""
        slot, rounds = self.source.slot(index), self.ctx.run.settings.rounds
        for step in range(1, rounds.ahead(slot.steps) + 1 if self.ctx.run.stage and slot.steps else 1):
            task = StepAhead(self.t, index, step)
            self.ctx.tasks.submit(TaskPriority.AHEAD, task, (), lambda result: None, index)

    def _in_range(self, unit: IncomingMicrobatch, result: Result) -> bool:
        """True if the task found no overflow (non-finite or out-of-range value).

        Otherwise the overflow is reported to the leader, and after the forward the peer that sent the last
        input counts as doubted (`HopCandidates.doubted`). If the stage has other replicas, one that finds the
        overflow for the first time gives the microbatch up, so that another computes it too: no step is
        skipped on the word of one peer. Else the microbatch stays; one whose forward overflowed, until
        another peer sends its input.
        """
        run, again = self.ctx.run, unit.index in self.claims.overflows
        if self.claims.in_range(unit.index, result, unit.sender_of_last):
            return True
        if unit.forward_done:
            self.sender.hops.doubted.add(unit.sender_of_last)
        if not again and run.membership.count(run.stage, self.t) > 1:
            if unit.forward_done and run.stage:
                self._discard(unit)
            self._refuse(unit, f"{result.overflow} is out of range")
        else:
            unit.spoilt = not unit.forward_done
        return False

    def _refuse(self, unit: IncomingMicrobatch, reason: str) -> None:
        """Give up a microbatch that cannot be computed: free its credit, and tell all upstream peers that
        wait for it that this peer does not have it (`Lack`); these may try elsewhere. A relay also forgets
        that it sent the microbatch on. A task of it that runs is not stopped. reason: for the event log."""
        del self.units[unit.index]
        self.islands.end(unit.index)
        if self.ctx.run.stage:  # a data node may be the source of the microbatch too, and stays so
            self.sender.forget(unit.index)
        if unit.granted is not None:
            self.credits.ledger.useless(unit.granted)
        self._finish(unit)
        self._release_slot(unit)
        self.ctx.outbox.refuse(unit.sender, "Forward", reason)
        for peer, transmission in {**unit.others, unit.upstream: unit.transmission}.items():
            self.replies.lack(peer, unit.index, transmission, refused=True)

    # --- questions and recall ----------------------------------------------------------------

    def on_want(self, peer: str, message: Want) -> str | None:
        """Answer a peer that asks if this peer has a microbatch. If so, `peer` becomes its upstream peer and
        gets the gradient once it is ready. The answer is no for a spoilt one, unless its sender asks, for any
        to a peer that sent false inputs, and by `UpstreamReplies.on_want`. Returns why the question is
        refused, or None."""
        if (refusal := self._not_of_crew(peer, message.index)) is not None:
            return refusal
        known = self.units.get(message.index)
        if known is not None and known.spoilt and peer != known.sender:
            known = None
        if self.ctx.links.is_forger(peer):
            known = None
        self.replies.on_want(known, peer, message)
        return None

    def on_call_back(self, peer: str, message: CallBack) -> None:
        """Give up at most `message.most` of the microbatches that the upstream `peer` lists (`message.ways`:
        microbatch -> number of its last transmission), whose task waits and does not run yet: it wants to
        send them to another replica of this stage, which has nothing to do.

        Those without computed results go first. A microbatch in the credit of another member stays, since
        that member would not learn of it; so does one that was called back before, or the next stage would
        have to send its gradient again and again.
        """
        found: list[tuple[bool, bool, IncomingMicrobatch, Task]] = []
        for rank, task in self.ctx.tasks.waits((ForwardTask, InputGradient)):
            assert isinstance(task, ForwardTask | InputGradient)
            unit = self.units.get(task.index) if task.t == self.t else None
            if unit is None or not unit.train or unit.upstream != peer or unit.others or unit.added:
                continue
            if unit.granted not in (peer, GONE) or unit.index in self.sender.called_back:
                continue
            if message.ways.get(unit.index) == unit.transmission:
                begun = isinstance(task, InputGradient)
                found.append((begun and unit.kept, begun and rank is not TaskPriority.REDO, unit, task))
        for _, _, unit, task in sorted(found, key=lambda each: each[:2])[: message.most]:
            self.ctx.tasks.withdraw(task)
            self._let_go(unit)

    def _let_go(self, unit: IncomingMicrobatch) -> None:
        """Give up a microbatch that its sender called back and on which no task runs; a `Lack` tells the
        sender, who sends it to another replica."""
        del self.units[unit.index]
        self.sender.let_go(unit.index)
        if unit.forward_done:
            self._discard(unit)
        self._finish(unit)
        self._release_slot(unit)
        self.replies.lack(unit.upstream, unit.index, unit.transmission, refused=True)

    # --- membership --------------------------------------------------------------------------

    def peer_removed(self, peer: str, stage: int, reason: str) -> None:
        """Free the credits of a removed member of `stage`; send the microbatches that it had again, also
        those whose gradient is back; take over those of a removed data node that are assigned to this one.
        reason: for the event log."""
        if stage == self.ctx.run.previous_stage():
            for unit in self.units.values():
                unit.others.pop(peer, None)
                unit.back.pop(peer, None)
                if unit.granted == peer:
                    unit.granted = GONE
            self.credits.tell(self.credits.ledger.forget(peer))
            for known in [known for known in self._received_transmissions if known[0] == peer]:
                del self._received_transmissions[known]  # its next incarnation numbers anew
        if stage == self.ctx.run.next_stage():
            self.repairs.peer_removed(peer, reason)
        if stage == 0:
            self.source.data_node_removed(peer)

    # --- time --------------------------------------------------------------------------------

    def deadline(self) -> float:
        """Earliest time (s) at which an outgoing microbatch is due: to be sent, or to be inquired after;
        infinite if none is."""
        return self.sender.deadline()

    def tick(self) -> None:
        """Send microbatches that were held back long enough; inquire after those that take too long, and send
        those that are overdue to another replica."""
        self.sender.tick()
        self.repairs.tick()

    def audited_items(self, stage: int, units: list[int], own: bool) -> dict[WorkItem, Payload]:
        """Payloads from which the contribution of the microbatches `units` at `stage` was computed, as far as
        this peer has them: those it sent there and, if the contribution is its `own`, those it received."""
        run, items = self.ctx.run, {}
        for index in units:
            came, sent = self.units.get(index), self.sender.items.get(index)
            if own and came is not None:
                items[WorkItem("activation", index)] = came.received
                items[WorkItem("gradient", index)] = came.gradient_in
            if stage == run.next_stage() and sent is not None and sent.payload is not None:
                items[WorkItem("activation", index)] = sent.payload
            if stage == run.previous_stage() and came is not None and came.gradient_out is not None:
                items[WorkItem("gradient", index)] = came.gradient_out
        return items

    # --- reduce ------------------------------------------------------------------------------

    def inputs_of(self, unit: int) -> tuple[Payload, ...]:
        """Inputs of the `Recount` task of a claimed unit: (activation, gradient) of a relay's microbatch, or
        (activation,) of a slot that was added before its gradient came; at stage 0 the gradient for the
        embedding, or the activation for the head. Raises KeyError if this peer does not have it."""
        if self.ctx.run.stage == 0:
            index, embeds = divmod(unit, 2)
            if embeds:
                return (self.source.gradients[index],)
            return (self.units[index].received,)
        held = self.units[unit]
        return (held.received,) if held.added else (held.received, held.gradient_in)
