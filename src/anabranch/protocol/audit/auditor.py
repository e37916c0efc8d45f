"""Auditor: computes a contribution (all units of one replica in a committed step) again, and reports whether
the result is the same. Not here: what follows from the report (protocol.coordinator)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from anabranch.protocol.audit.draw import Drawn
from anabranch.protocol.audit.kept_work import RECEIPT, KeptWork
from anabranch.protocol.audit.receipts import (
    Receipt,
    broken_seal,
    inputs_of,
    opened,
    receipt_hash,
)
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import (
    AUDIT_STEPS,
    WEIGHTS_GONE,
    AuditSum,
    AuditUnit,
    HashInputs,
    Payload,
    Result,
    SumPart,
    Task,
)
from anabranch.protocol.log.records import Dispute, Slot
from anabranch.protocol.messages import Audit, Audited, FetchWork, Work, WorkItem

#: Time (s) to wait for a piece before the next source is asked. A choice: ten times what an activation needs
#: over a line of 1 MB/s.
WAIT_S = 30.0
#: Time (s) to wait for a piece after which an audit that checks a difference goes first. A plain choice.
TURN_S = WAIT_S / 10.0


@dataclass(frozen=True)
class _Check:
    """Computation of an audit, with the hashes that the audited receipt states for it. items: its inputs in
    order. senders: peer that sent each input to the audited replica. expected: hashes of the inputs, then of
    the outputs. what: name of each output."""

    task: Task
    items: tuple[WorkItem, ...]
    senders: tuple[str, ...]
    expected: tuple[str, ...]
    what: tuple[str, ...]


def _checks(
    t: int, receipt: Receipt, disputed: Sequence[Dispute] = (), slots: Sequence[Slot] = ()
) -> Iterator[_Check]:
    """Computations that together repeat a contribution, in order: results of units that it does not own
    (`others` of the receipt), as far as they are in `disputed`; its units; their sum; the parts that it added
    up for all members. slots: plan of round t; () if t is no round."""
    results = {(result.unit, result.output) for result in disputed}
    for unit in receipt.others:
        index = unit.unit
        if not results & {(index, unit.activation_out), (index, unit.gradient_out or unit.activation_out)}:
            continue
        kinds = [(WorkItem(kind, index), came) for kind, came in inputs_of(unit)]
        outputs = (unit.activation_out, unit.gradient_out)[: len(kinds)]
        yield _Check(
            AuditUnit(t, index, True, slots[index].steps if slots else 0, hashed=True),
            tuple(item for item, _ in kinds),
            tuple(came.sender for _, came in kinds),
            (*(came.hash for _, came in kinds), *outputs),
            (f"activation of microbatch {index}", f"gradient of microbatch {index}")[: len(kinds)],
        )
    for unit in receipt.units:
        index, first = unit.unit, unit is receipt.units[0]
        yield _Check(
            AuditUnit(t, index, first, slots[index].steps if slots else 0, hashed=True),
            (WorkItem("activation", index), WorkItem("gradient", index)),
            (unit.activation_in.sender, unit.gradient_in.sender),
            (unit.activation_in.hash, unit.gradient_in.hash, unit.activation_out, unit.gradient_out),
            (f"activation of microbatch {index}", f"gradient of microbatch {index}"),
        )
    if receipt.units:
        task = AuditSum(t, len(receipt.parts), hashed=True)
        names = tuple(f"part {part} of the sum" for part in range(len(receipt.parts)))
        yield _Check(task, (), (), receipt.parts, names)
    for total in receipt.sums:
        items = tuple(WorkItem("part", total.part, position) for position, _ in total.inputs)
        hashes = tuple(came.hash for _, came in total.inputs)
        senders = tuple(came.sender for _, came in total.inputs)
        what = f"sum of part {total.part}"
        yield _Check(SumPart(t, hashed=True), items, senders, (*hashes, total.output), (what,))


@dataclass
class _Asked:
    """Source that is asked for the present piece. due_at: time (s) until which it is waited for. dialled:
    True if it is asked only once it is linked."""

    due_at: float
    dialled: bool


@dataclass
class _Job:
    """Audit in progress, whose inputs ("pieces") are fetched one by one from peers ("sources"). sources:
    peers that may have the pieces, besides those that sent them to the subject. parties: accusers and
    subject, if a difference is to be checked: they are asked at once. left: sources of the present piece that
    were not asked yet. asked: those that are asked now, or are dialled to be asked. For the whole audit,
    silent: sources that did not answer, which are asked for no further piece; broke: sources whose link broke
    once while they were asked, after which it gets no second try; apart: True if a source was out of reach.
    data: the signed receipt. checks: computations to come. got: all pieces so far. gave: source of each
    piece. false: pieces that were not those of the receipt, with the source that gave them. wanted: pieces of
    the present computation that are still missing."""

    drawn: Drawn
    sources: tuple[str, ...]
    parties: frozenset[str] = frozenset()
    left: list[str] = field(default_factory=list)
    asked: dict[str, _Asked] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    broke: set[str] = field(default_factory=set)
    apart: bool = False
    data: bytes = b""
    checks: list[_Check] = field(default_factory=list)
    got: dict[WorkItem, Payload] = field(default_factory=dict)
    gave: dict[WorkItem, str] = field(default_factory=dict)
    false: set[tuple[WorkItem, str]] = field(default_factory=set)
    wanted: list[WorkItem] = field(default_factory=lambda: [RECEIPT])

    @property
    def liars(self) -> set[str]:
        """Sources that gave a false piece."""
        return {source for _, source in self.false}


class Auditor(Timer):
    """Audits made by one replica, or by a member that only audits, one at a time: those drawn for it, and
    those that the leader orders."""

    def __init__(self, ctx: PeerContext, kept: KeptWork) -> None:
        self._ctx = ctx
        self._kept = kept
        self._drawn: dict[tuple[int, str], Drawn] = {}
        """(step, subject) -> contribution for which this replica keeps the weights."""
        self.recent: dict[int, Sequence[Drawn]] = {}
        """Step -> contributions of all stages that are audited, of the last AUDIT_STEPS steps: a peer that
        comes to lead follows their audits."""
        self._reports: dict[tuple[int, str], Audited] = {}
        """(step, subject) -> this peer's report, for a new leader."""
        self._queue: list[_Job] = []
        self._job: _Job | None = None
        self._awaited: set[str] = set()
        """Sources that an audit waited for in vain, and that have answered nothing since: asked last."""
        self._applied_t = -1

    def applied(self, t: int) -> None:
        """Note that this peer has applied step t, with which the weights before it were kept if they are
        audited. A member that only audits can begin audits of t now."""
        self._applied_t = t

    def committed(self, t: int, audited: Sequence[Drawn]) -> bool:
        """Note the audits that were drawn for step t, just before the step is applied. Those of which this
        replica is the first auditor are queued. Audits of steps too old to be audited are dropped. Returns
        True if this replica must keep the weights from before the step, as it may have to compute a
        contribution again."""
        ctx, keeps, oldest = self._ctx, False, t - AUDIT_STEPS
        self.recent = {k: each for k, each in self.recent.items() if k > oldest} | {t: audited}
        if not ctx.run.stage:
            return False
        self._drawn = {key: each for key, each in self._drawn.items() if key[0] > oldest}
        self._reports = {key: report for key, report in self._reports.items() if key[0] > oldest}
        self._queue = [job for job in self._queue if job.drawn.t > oldest]
        if self._job is not None and self._job.drawn.t <= oldest:  # its inputs are dropped, and its case is
            for peer in self._job.asked:
                self._in_vain(peer)
            self._job = None
        for each in audited:
            asked = each.trusted, *each.jury
            if each.stage == ctx.run.stage and ctx.me in asked:
                keeps = True
                self._drawn[each.t, each.subject] = each
                if each.first == ctx.me:
                    self._queue.append(_Job(each, (each.subject,)))
        return keeps

    def on_audit(self, message: Audit) -> str | None:
        """Queue an audit that the leader orders; returns the reason if it is refused: not drawn, or too old.
        A further order of the same audit adds sources; once it is over, its report is repeated. Where another
        found a difference, this audit comes before others: the next steps wait for it."""
        each = self._drawn.get((message.t, message.subject))
        if each is None or each.base != message.base or message.stage != self._ctx.run.stage:
            return "an audit of work for which nothing is kept here"
        if (report := self._reports.get((message.t, message.subject))) is not None:
            self._ctx.outbox.send(self._ctx.log.leader, report)
            return None
        sources = message.sources
        parties = frozenset(sources if set(sources) - {message.subject} else ())
        job = next((job for job in (self._job, *self._queue) if job is not None and job.drawn == each), None)
        if job is None:
            self._queue.append(_Job(each, sources, parties))
        else:
            job.sources, known = tuple(dict.fromkeys((*sources, *job.sources))), job.parties
            job.parties |= parties
            if job.asked and job.parties != known:
                self._fetch(job)
        return None

    def clear(self) -> None:
        """Drop all audits, because the steps are void or this replica lost its state."""
        self._drawn.clear()
        self._queue.clear()
        self.recent.clear()
        self._reports.clear()
        self._job, self._applied_t = None, -1

    def repeat(self) -> None:
        """Send the leader all reports again: it is new, or its link was down."""
        for report in self._reports.values():
            self._ctx.outbox.send(self._ctx.log.leader, report)

    # --- fetching ------------------------------------------------------------------------------

    def tick(self) -> None:
        job = self._following() if self._job is None else None
        if job is not None:
            self._queue.remove(job)
            self._job = job
            if job.data:
                self._take_receipt(job, job.data)
            else:
                self._fetch(job)
        elif self._job is not None and self._ctx.clock.now >= self._due_at(self._job):
            self._overdue(self._job)

    def _following(self) -> _Job | None:
        """Audit of the queue that may begin next: the first that checks a difference, else the first; None if
        there is none. A member that only audits gets the gradient of a step after its commit, so it waits
        until it has applied the step and kept the weights before it. It begins with the newest step: if it is
        too slow for all audits, it makes some in time rather than all of them late."""
        if not self._queue:
            return None
        me = self._ctx.me
        able = [job for job in self._queue if job.drawn.trusted != me or job.drawn.t <= self._applied_t]
        if able and able[0].drawn.trusted == me:
            return max(able, key=lambda job: job.drawn.t)
        return next((job for job in able if job.parties), able[0] if able else None)

    def _gives_way_at(self, job: _Job) -> float:
        """Time (s) at which the present audit, whose source may be silent, gives its turn to another one that
        checks a difference; infinite if there is none."""
        if job.parties or not job.asked or not any(other.parties for other in self._queue):
            return math.inf
        return max(asked.due_at for asked in job.asked.values()) - WAIT_S + TURN_S

    def _put_off(self, job: _Job) -> None:
        """Put the present audit back into the queue. It will begin anew, with the pieces that it has."""
        self._queue.insert(0, replace(job, left=[], asked={}, checks=[], wanted=[RECEIPT]))
        self._job = None

    def _due_at(self, job: _Job) -> float:
        """Time (s) at which the present audit has to act (`_overdue`): a source that was asked is waited for
        no longer, or the audit gives its turn to another one."""
        waits = [self._waited_until(peer, asked) for peer, asked in job.asked.items()]
        return min([*waits, self._gives_way_at(job)])

    def _waited_until(self, peer: str, asked: _Asked) -> float:
        """Time (s) until which a source is waited for. It is now if the source was removed from the run, if
        the link over which it was asked broke, or if it was to be dialled first and is linked now."""
        gone = peer not in self._ctx.run.membership.members or self._lost(peer, asked)
        linked = asked.dialled and self._ctx.reachable(peer)
        return self._ctx.clock.now if gone or linked else asked.due_at

    def _lost(self, peer: str, asked: _Asked) -> bool:
        """True if the link over which a source was asked broke, and the answer with it."""
        return not asked.dialled and peer not in self._ctx.links.up

    def _overdue(self, job: _Job) -> None:
        """Put the present audit off for another one that checks a difference, or else stop to wait for the
        sources whose time is over, and ask the next one."""
        if self._ctx.clock.now >= self._gives_way_at(job):
            self._put_off(job)
            return
        for peer, asked in list(job.asked.items()):
            if self._ctx.clock.now >= self._waited_until(peer, asked):
                self._stop_waiting(job, peer, asked)
        self._ask_next(job)

    def _stop_waiting(self, job: _Job, peer: str, asked: _Asked) -> None:
        """Ask a dialled source that is linked now, or once more one whose link broke; give up a source that
        did not answer in time, broke its link again, or was removed from the run."""
        member = peer in self._ctx.run.membership.members
        if member and self._lost(peer, asked):
            if peer not in job.broke:
                job.broke.add(peer)
                self._ask(job, peer)
                return
            job.apart = True
        if asked.dialled and member and self._ctx.reachable(peer):
            self._ask(job, peer)
            return
        job.apart = job.apart or (member and asked.dialled)
        job.silent.add(peer)
        self._in_vain(peer)
        del job.asked[peer]

    def _in_vain(self, peer: str) -> None:
        """Note that an audit waited for a source in vain, so that later ones ask others first: else one
        silent peer would make each audit of what was computed from its outputs late."""
        self._awaited = (self._awaited | {peer}) & self._ctx.run.membership.members.keys()

    def deadline(self) -> float:
        if self._job is None:
            if not self._queue:
                return math.inf
            return self._ctx.clock.now if self._following() is not None else math.inf
        return self._due_at(self._job)

    def _fetch(self, job: _Job) -> None:
        """Start to fetch the next piece: sources are its sender (of the receipt the leader), then whoever
        made or audited the contribution. The audited replica comes last, so that the audit ends while the
        weights are kept even if that replica does not answer; after it come those that were waited for in
        vain, or gave false pieces, before. Where a difference is to be checked, accuser and subject come
        first, both at once (for the receipt after the leader): one of them has computed with all pieces and
        is honest, whereas the sender may be another's accomplice."""
        item = job.wanted[0]
        if item == RECEIPT:
            also = self._ctx.log.leader
        else:
            also = job.checks[0].senders[job.checks[0].items.index(item)]
        me, members = self._ctx.me, self._ctx.run.membership.members
        order = (*job.sources, also) if job.parties and item != RECEIPT else (also, *job.sources)
        peers = (peer for peer in dict.fromkeys(order) if (item, peer) not in job.false)
        able = (peer for peer in peers if peer != me and peer in members and peer not in job.silent)
        last = (self._awaited - job.parties) | job.liars
        job.left, job.asked = sorted(able, key=last.__contains__), {}
        mine = also == me and (item, me) not in job.false
        own = self._kept.own(job.drawn.t, job.drawn.subject, item) if mine else None
        if own is not None:
            self._got(job, me, own)
        else:
            self._ask_next(job)

    def _got(self, job: _Job, source: str, payload: Payload) -> None:
        job.gave[job.wanted[0]] = source
        job.got[job.wanted.pop(0)] = payload
        self._go_on(job)

    def _ask_next(self, job: _Job) -> None:
        """Ask sources for the present piece: accuser and subject (`parties`) at once, any other only if none
        is waited for. If no source is left to ask or to wait for, report the audit's end without that piece
        (`_withheld`)."""
        at_once = job.parties - job.liars
        while job.left and (not job.asked or job.left[0] in at_once):
            self._ask(job, job.left.pop(0))
        if not job.asked:
            self._withheld(job)

    def _ask(self, job: _Job, peer: str) -> None:
        """Ask a source for the present piece, once it is linked."""
        each, linked = job.drawn, self._ctx.reachable(peer)
        job.asked[peer] = _Asked(self._ctx.clock.now + WAIT_S, dialled=not linked)
        if linked:
            self._ctx.outbox.send(peer, FetchWork(each.t, each.stage, each.subject, job.wanted[0]))
        else:
            self._ctx.dialer.reach(peer)

    def on_work(self, peer: str, message: Work, payload: Payload | None) -> str | None:
        """Take the piece that was asked of `peer`, and go on: fetch the next one, or compute. A receipt comes
        in the message, any other piece as `payload`. A piece that was not asked for is ignored. The next
        source is asked if the peer does not hold the piece (`message.held`), if a payload is missing or too
        many, and for a false receipt; the audit ends if no source is left to ask or to wait for. A receipt
        alone ends it, too, if a seal in it is broken or its round is not known here. Returns None: nothing is
        refused."""
        job = self._job
        if job is None or peer not in job.asked or job.asked[peer].dialled:
            return None
        if (message.t, message.subject) != (job.drawn.t, job.drawn.subject) or message.item != job.wanted[0]:
            return None
        self._awaited.discard(peer)
        del job.asked[peer]
        if not message.held or (payload is None) != (message.item == RECEIPT):
            self._ask_next(job)
        elif message.item == RECEIPT:
            self._take_receipt(job, message.receipt)
        else:
            self._got(job, peer, payload)
        return None

    def _take_receipt(self, job: _Job, data: bytes) -> None:
        receipt = opened(data, self._ctx.signer)
        if receipt is None or receipt_hash(data) != job.drawn.receipt:
            self._ask_next(job)
            return
        job.data = data
        if (what := broken_seal(receipt, self._ctx.signer)) is not None:
            self._report(job, "different", what)
            return
        run, t = self._ctx.run, job.drawn.t
        if not run.can_open(t):  # a round before this peer knew the log
            self._report(job, "unable")
            return
        job.checks = list(_checks(t, receipt, job.drawn.disputed, run.plan(t)))
        self._next_check(job)

    # --- computing again -----------------------------------------------------------------------

    def _next_check(self, job: _Job) -> None:
        """Fetch the inputs of the next computation; after the last one, report the result of the audit."""
        if not job.checks:
            self._report(job, "same")
            return
        job.wanted = [item for item in job.checks[0].items if item not in job.got]
        self._go_on(job)

    def _go_on(self, job: _Job) -> None:
        """Fetch the next missing input; compute once this peer has all inputs."""
        job.asked = {}
        if job.wanted:
            self._fetch(job)
            return
        check = job.checks[0]
        inputs = tuple(job.got[item] for item in check.items)
        then = partial(self._computed, job, check)
        self._ctx.tasks.submit(TaskPriority.BACKGROUND, check.task, inputs, then)

    def _computed(self, job: _Job, check: _Check, result: Result) -> None:
        """Compare the result of a computation with the hashes in the receipt: report a difference, fetch
        false inputs again, or go on to the next computation."""
        if job is not self._job:
            return
        count = len(check.items)
        if result.error == WEIGHTS_GONE:
            self._report(job, "unable")
        elif result.overflow:  # the inputs may not be those of the receipt
            task, then = HashInputs(check.task.t, hashed=True), partial(self._overflowed, job, check, result)
            inputs = tuple(job.got[item] for item in check.items)
            self._ctx.tasks.submit(TaskPriority.BACKGROUND, task, inputs, then)
        elif result.error or result.hashes[:count] != check.expected[:count]:
            self._fetch_again(job, check, result)
        else:
            pairs = zip(check.what, result.hashes[count:], check.expected[count:], strict=True)
            for what, found, claimed in pairs:
                if found != claimed:
                    self._report(job, "different", what, found, claimed)
                    return
            job.checks.pop(0)
            for part, payload in enumerate(result.outputs if isinstance(check.task, AuditSum) else ()):
                job.got[WorkItem("part", part, job.drawn.position)] = payload
            self._next_check(job)

    def _overflowed(self, job: _Job, check: _Check, found: Result, result: Result) -> None:
        """Report the work as different because its computation overflows (`found`), or fetch the inputs again
        if they are not those of the receipt. result: hashes of the inputs. Nothing if this audit is over."""
        if job is not self._job:
            return
        if result.hashes == check.expected[: len(check.items)]:
            self._report(job, "different", f"overflow in {found.overflow}"[:64])
        else:
            self._fetch_again(job, check, result)

    def _fetch_again(self, job: _Job, check: _Check, result: Result) -> None:
        """Fetch the inputs whose hashes are not those in the receipt again, from other sources than gave
        them; if none is left, the audit ends without them (`_withheld`). If no input is wrong, the worker
        failed: the audit ends as "unable"."""
        pairs = zip(check.items, result.hashes or ("",) * len(check.items), check.expected, strict=False)
        job.wanted = [item for item, found, expected in pairs if found != expected]
        if not job.wanted:  # the worker failed: it dropped what the audit had computed
            self._report(job, "unable")
        else:
            job.false |= {(item, job.gave.get(item, self._ctx.me)) for item in job.wanted}
            self._fetch(job)

    def _withheld(self, job: _Job) -> None:
        """End the audit without a piece that no source handed over. The report is "withheld"; it is "unable",
        that this auditor cannot tell, if it could not reach a source. A trusted auditor, whose word decides
        alone, reports "unable" also if a source was merely silent: its own line may be slow."""
        doubtful = job.apart or (job.drawn.trusted == self._ctx.me and bool(job.silent))
        self._report(job, "unable" if doubtful else "withheld")

    def _report(self, job: _Job, verdict: str, what: str = "", found: str = "", claimed: str = "") -> None:
        each = job.drawn
        if verdict == "different":
            self._kept.keep(each.t, each.subject, job.data, job.got)
        receipt = job.data if verdict == "different" else b""
        about = each.t, each.base, each.stage, each.subject
        report = self._reports[each.t, each.subject] = Audited(*about, verdict, what, found, claimed, receipt)
        self._ctx.outbox.send(self._ctx.log.leader, report)
        self._job = None
