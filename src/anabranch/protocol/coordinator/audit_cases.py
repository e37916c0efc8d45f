"""Audit cases at the leader: receipts of the open iteration, auditors' findings, and what follows from them.

A relay is convicted if what it signed proves it a liar (`receipts.contradictions`, `tracing`), if its receipt
hides a result that it sealed, or if more than half of the replicas that count (`Drawn.convicts`) computed its
work again and found it different. Its key is revoked; a second conviction revokes the ticket too unless that
is an open one; and the log goes back to a state before the false step. One replica's word convicts nobody,
nor do two in a stage of more than three. A *trusted* auditor is a member that does nothing else, and came
with the owner's ticket for it: its word alone decides, and replicas audit in its place if it cannot.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from anabranch.protocol.audit.auditor import WAIT_S
from anabranch.protocol.audit.contribution_monitor import Contribution, FarOff
from anabranch.protocol.audit.draw import Drawn, drawn
from anabranch.protocol.audit.receipts import (
    Receipt,
    contradictions,
    inputs_of,
    mismatch,
    mismatches,
    opened,
    receipt_hash,
)
from anabranch.protocol.audit.seals import ACTIVATION
from anabranch.protocol.audit.second_audits import VERDICTS, Case, CaseKey, SecondAudits
from anabranch.protocol.audit.tracing import DisputedResult, traced
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.operator_control import REVOKE, RevocationRequests
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.tasks import AUDIT_STEPS, Moments
from anabranch.protocol.log.records import Commit, Dispute
from anabranch.protocol.messages import REMARK_MAX, Attempt, Audit, Audited, Prepared, Wish
from anabranch.protocol.messages.audit import Transfer
from anabranch.protocol.reduce.hierarchy import FLAT
from anabranch.protocol.reduce.partial_sums import PARTS, contributors, witnessed
from anabranch.protocol.reduce.work_receipt import refused_sums

#: Finding that the leader notes for an audit whose auditor did not report in time.
EXPIRED = "expired"
#: Steps after which the second auditor is asked although the first has not reported: it may be held up by a
#: peer that withholds another contribution. A choice: half of the steps that the weights are kept for.
LATE_STEPS = AUDIT_STEPS // 2
#: Seconds that a relay has to send a receipt that lists what it sealed: PREPARED is repeated every two.
UNLISTED_S = 10.0
#: Seconds for which the run's end waits for an audit: two auditors that each ask two sources in vain. Audits
#: of a round have AUDIT_STEPS rounds more.
PATIENCE_S = 4 * WAIT_S
#: Times what the longest slot of a round should take, as which a round counts at most in that. A choice: as
#: machines that are overdue with their slots (`island_rounds.OVERDUE`).
MOST_SLOTS = 6.0


@dataclass(eq=False)
class AuditCases:
    """Receipts of the open step and audits of the last steps, at the leader. Without audits in the settings
    (`on` is False) nothing is checked or kept. returns: reason why the log has to go back to a snapshot, ""
    if it need not. returns_before: first iteration that is void then. settled: True if the liar was found,
    and is revoked or removed; else the same dispute may come again after the return. second: accusations for
    which the commit of a step waits until a second auditor has checked them."""

    ctx: PeerContext
    admission: Admission
    revocations: RevocationRequests
    returns: str = ""
    returns_before: int = 0
    settled: bool = False
    _far_off: FarOff = field(default_factory=FarOff)
    _cases: dict[CaseKey, Case] = field(default_factory=dict)
    _tickets: dict[str, set[str]] = field(default_factory=dict)
    """Ticket -> its convicted peers."""
    _ends: dict[str, set[str]] = field(default_factory=dict)
    """Data node whose activation or gradient differed from this peer's -> relays that took part each time."""
    _unaudited: set[int] = field(default_factory=set)
    """Stages whose last drawn contribution nobody could audit."""
    _checked: tuple[object, ...] = ()
    """Inputs of the last comparison of receipts."""
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=AUDIT_STEPS))
    """Seconds for each optimizer step of the last rounds that this leader led."""
    _round_s: float = 0.0
    """Seconds that the last of them should have taken: an auditor needs about as many for one slot. 0 before
    the first round."""

    def __post_init__(self) -> None:
        self.second = SecondAudits(self.ctx, self._cases)

    @property
    def on(self) -> bool:
        return self.ctx.run.settings.audits

    # --- receipts of the open iteration --------------------------------------------------------

    def refused(self, peer: str, message: Prepared, attempt: Attempt, current: Round) -> str | None:
        """Check the receipt of a PREPARED report and keep it in `current`. It must be signed by `peer`, be of
        this attempt, list the parts that `peer` had to sum and the moments of what it added up, and contain
        only seals of peers that served. Returns why it is refused, else None; without audits, or if `peer` is
        no member of `attempt`, nothing is checked or kept."""
        if not self.on or peer not in attempt.members:
            return None
        run, receipt = self.ctx.run, opened(message.receipt, self.ctx.signer)
        if receipt is None:
            return "PREPARED without a receipt that it signed"
        if wrong := mismatch(receipt, peer, attempt, run.settings.run, run.settings.stages):
            return wrong
        if wrong := refused_sums(receipt, attempt, FLAT * run.settings.neighbours):
            return wrong
        if message.moments and (not receipt.sums or len(message.moments) != len(receipt.sums[0].inputs)):
            return "moments of other contributions than it added up"
        came = [part for unit in receipt.units for part in (unit.activation_in, unit.gradient_in)]
        came += [part for other in receipt.others for _, part in inputs_of(other)]
        came += [end.came for end in receipt.ends]
        if any(not self._served(current, part) for part in came):
            return "a receipt with the seal of a peer that did not serve"
        current.receipts.setdefault(attempt.stage, {})[peer] = receipt
        return None

    def later_receipt(self, peer: str, message: Prepared, attempt: Attempt, current: Round) -> str | None:
        """Take the receipt of a repeated PREPARED report in place of the first one's, if it lists more
        results beside its own units. `peer` must have reported before (KeyError else). Returns why it is
        refused; None if it is taken, or ignored: without audits, if it is the same, lists no more, or is not
        signed."""
        before = current.prepared[attempt.stage][peer]
        if not self.on or message.receipt == before.receipt:
            return None
        listed = len(current.receipts[attempt.stage][peer].others)
        receipt = opened(message.receipt, self.ctx.signer)
        if receipt is None or len(receipt.others) <= listed:
            return None
        if wrong := self.refused(peer, message, attempt, current):
            return wrong
        current.prepared[attempt.stage][peer] = msgspec.structs.replace(before, receipt=message.receipt)
        return None

    def _served(self, current: Round, came: Transfer) -> bool:
        membership = self.ctx.run.membership
        if membership.is_live(came.sender, came.stage, current.t):
            return True
        # A leader that took over in this iteration did not see all who served: some were removed before.
        removed = came.sender in membership.gone_from(came.stage)
        return removed or (came.stage, came.sender) in current.served

    def complete(self, attempt: Attempt, prepared: Mapping[str, Prepared]) -> bool:
        """True if every owner of units in this attempt has reported PREPARED, and so sent its receipt; always
        without audits. An owner that left without a receipt could not be audited: other replicas compute its
        units again. prepared: member -> its report."""
        if not self.on:
            return True
        return all(attempt.members[position] in prepared for position in set(attempt.owners) - {-1})

    def summing(self, stage: int, t: int, owners: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of the members that sum one part each in iteration t. With audits they are at most PARTS
        of the owners of units, other ones in each iteration: only owners have a receipt in the commit, by
        which their sums are audited. owners: position of each unit's owner, -1 for none. () without audits,
        where all members sum, and at stage 0."""
        able = tuple(sorted(set(owners) - {-1}))
        if not self.on or not stage:
            return ()
        first = t * PARTS % len(able) if len(able) > PARTS else 0
        return (*able[first:], *able[:first])[:PARTS]

    def hashes(self, current: Round, attempt: Attempt) -> tuple[str, ...]:
        """For the commit, in the order of the attempt's members: hash of the receipt of each that owns units
        or has a disputed result, "" for any other; () without audits."""
        if not self.on:
            return ()
        prepared, position = current.prepared[attempt.stage], set(attempt.owners)
        position |= {each.position for each in self.disputed(current, attempt)}
        receipts = [
            prepared[peer].receipt if k in position and peer in prepared else b""
            for k, peer in enumerate(attempt.members)
        ]
        return tuple(map(receipt_hash, receipts))

    @staticmethod
    def disputed(current: Round, attempt: Attempt) -> tuple[Dispute, ...]:
        """Disputed results of the attempt's stage, for the commit, as `consistent` left them in `current`; ()
        if there are none. Raises ValueError if a peer that made one is no member of the attempt."""
        return tuple(
            Dispute(attempt.members.index(each.peer), each.index, each.output)
            for each in current.disputed
            if each.stage == attempt.stage
        )

    def far_off(self, current: Round, attempt: Attempt, found: tuple[Moments, ...] = ()) -> int:
        """For the commit, position of the member whose contribution to the attempt's stage is far off the
        others', so that it is audited; it is told as a note. -1: none, as at stage 0, in a round and without
        audits. To be called once, when the step is proposed. found: moments of the contributions, if this
        peer summed all parts; else those count that members report."""
        if not self.on or not attempt.stage or current.slots:
            return -1  # slots of a round differ in length, and their changes with it
        reports = {peer: each.moments for peer, each in current.prepared[attempt.stage].items()}
        contributions = contributions_of(attempt, {self.ctx.me: found} if found else reports)
        peer, reason = self._far_off.choose(current.t, attempt.stage, contributions)
        if not peer:
            return -1
        about = f"the work of {peer[:8]} at stage {attempt.stage} in step {current.t}"
        self.ctx.outbox.note("note", text=f"{about} is audited, as {reason}")
        return attempt.members.index(peer)

    def consistent(self, current: Round) -> bool:
        """True if the step may be committed as far as receipts tell: nothing is audited, all stages' receipts
        agree, or the results that two relays dispute can be computed again after the commit (they are left in
        `current.disputed`), and the step is void later. Else False: a receipt is awaited, a reduce is to be
        repeated (its stage is left in `current.repeat`), or the log has to go back (`returns`). Peers that
        contradict themselves are convicted. A second call compares again only if a receipt is new."""
        late = self.ctx.clock.now >= current.unlisted_since + UNLISTED_S
        if not self.on or self._checked == (late, *self._state(current)):
            return self._is_settled(current)
        self._checked = late, *self._state(current)
        receipts = [receipt for stage in current.receipts.values() for receipt in stage.values()]
        liars = contradictions(receipts, self.ctx.signer)
        for peer, reason in liars.items():
            self._convict(peer, f"in iteration {current.t} {reason}", current.t)
        current.disputed, current.unlisted_since = [], math.inf if liars else current.unlisted_since
        if not liars and (apart := unlinked(receipts)):
            reason = f"the receipts of iteration {current.t} contradict each other at {apart}"
            self._trace(receipts, current, late, reason)
        elif not liars:
            current.unlisted_since = math.inf
        return self._is_settled(current)

    def _is_settled(self, current: Round) -> bool:
        return not self.returns and current.unlisted_since == math.inf and not current.repeat

    def _trace(self, receipts: Sequence[Receipt], current: Round, late: bool, reason: str) -> None:
        """Decide what follows from receipts of one step that contradict each other, by who made the results
        in which the contradictions end. A liar is convicted. Results of two relays that can be computed again
        go into the commit (`current.disputed`). A relay whose receipt is lacking, or does not list what it
        sealed, has UNLISTED_S to send a full one, and the step waits; after that (`late`) one that gave a
        receipt is convicted. For one that gave none the stage's reduce is first repeated once
        (`current.repeat`), so that it gets from this peer the sums that another may withhold; then it loses
        its seat. The log goes back in both cases, and also for everything else: if the results of two data
        nodes differ (the one that is not this peer is expelled where `_differ` says so), or if the relay left
        the stage, when nobody is convicted. reason: why the log goes back."""
        found, t = traced(receipts, self.ctx.signer), current.t
        for peer, liar in found.liars.items():
            self._convict(peer, f"in iteration {t} {liar}", t)
        if found.liars:
            return
        waits = [key for key in found.unlisted if self.ctx.run.membership.stage_of(key[1]) == key[0]]
        if waits and not late:
            current.unlisted_since = min(current.unlisted_since, self.ctx.clock.now)
            return
        current.unlisted_since = math.inf
        silent = {stage for stage, peer in waits if peer not in current.receipts.get(stage, {})}
        if silent := silent - current.repeated:
            current.repeat |= silent
            current.repeated |= silent
            return
        if found.unlisted:
            for stage, peer in waits:
                self._hid(current, stage, peer, found.unlisted[stage, peer])
            self._return(reason, t)
            self.settled = True  # the sender is out, or has left
        elif found.disputed and all(self._has_receipt(current, each) for each in found.disputed):
            current.disputed = found.disputed
        else:
            self._return(reason, t)
            for kind, ends in found.apart:
                self._differ(current, kind, ends)

    def _differ(self, current: Round, kind: str, ends: Sequence[tuple[str, str]]) -> None:
        """Expel a data node whose result differs from this peer's own, or that made two different ones. For
        an activation it is expelled at once, as that has no input; for a gradient only when no relay took
        part in all its differences, as such a relay may have lied about the activation that it sent. Nothing
        if the two results are of two data nodes other than this peer. kind: activation or gradient, as seals
        call it. ends: for each of the two results, the data node that made it and the relay that received
        it."""
        others = {node for node, _ in ends} - {self.ctx.me}
        if len(others) > 1:
            return  # nobody can tell which of the two lied
        for peer in others:
            relays = {relay for _, relay in ends}
            self._ends[peer] = self._ends.get(peer, relays) & relays
            if kind == ACTIVATION or not self._ends[peer]:
                self.admission.expel(peer, f"in iteration {current.t} it signed a false {kind}")
                self.settled = True

    @staticmethod
    def _has_receipt(current: Round, each: DisputedResult) -> bool:
        return each.peer in current.prepared.get(each.stage, {})

    def _hid(self, current: Round, stage: int, peer: str, name: str) -> None:
        """Convict a relay whose receipt does not list an activation or gradient (`name`) that it sealed. A
        relay that gave no receipt is only expelled, if it is reachable and this peer sent it the sums of the
        reduce, else removed without a ban; so is a relay that began to serve with this iteration, which may
        have sealed that in a former process."""
        text = f"in iteration {current.t} it sealed another {name} than its owner, "
        since = self.ctx.run.membership.active_from.get(peer, current.t)
        if peer in current.receipts.get(stage, {}) and since < current.t:
            self._convict(peer, f"{text}which its receipt does not list", current.t)
        elif self.ctx.reachable(peer) and witnessed(current.attempts[stage], self.ctx.me):
            self.admission.expel(peer, f"{text}and gave no receipt of it")
        else:  # it may be cut off from those that have the sums
            self.admission.remove(peer, f"{text}and gave no receipt of it")

    @staticmethod
    def _state(current: Round) -> tuple[object, ...]:
        counts = tuple(
            (stage, len(each), sum(len(receipt.others) for receipt in each.values()))
            for stage, each in sorted(current.receipts.items())
        )
        return (current.t, current.base, counts, *(a.attempt for a in current.attempts.values()))

    # --- audits --------------------------------------------------------------------------------

    def committed(self, record: Commit, base: str, led: Round | None) -> None:
        """Open a case for each audit that is drawn from the commit `record`, close those that are too old,
        and ask second auditors where the first is late. The auditors drawn first begin by themselves. A step
        with a difference that nobody can check any more becomes void (`returns`). base: hash of the commit's
        log entry. led: the coordinator's round of that step, if this peer led it. Nothing without audits."""
        if not self.on:
            return
        for key in [key for key in self._cases if key[0] <= record.t - AUDIT_STEPS]:
            self._expired(self._cases[key])
        self._void_disputed()
        for key in [key for key in self._cases if key[0] <= record.t - AUDIT_STEPS]:
            del self._cases[key]
        for case in self._cases.values():
            waits = not case.over and self._first(case) not in case.verdicts
            if waits and case.drawn.t <= record.t - LATE_STEPS:
                self._late(case)
        membership, settings = self.ctx.run.membership, self.ctx.run.settings
        in_round = settings.rounds.has(record.t)
        if in_round and led is not None and led.t == record.t:
            self._took(led)
        asked = membership.walk_ins, membership.auditors, in_round
        for each in drawn(record, base, settings.audit_share, *asked):
            prepared = led.prepared.get(each.stage, {}) if led is not None and led.t == each.t else {}
            receipt = prepared[each.subject].receipt if each.subject in prepared else b""
            member = self.ctx.run.membership.members.get(each.subject)
            incarnation = -1 if member is None else member.incarnation
            case = Case(each, receipt, self.ctx.clock.now, incarnation=incarnation)
            self._cases[each.t, each.subject] = case
            self._tell_unaudited(case)
        self._void_disputed()

    def _took(self, led: Round) -> None:
        """Update the time (s) that a round should take (`_round_s`), when the round `led` is committed: the
        number of its inner steps by the least seconds per inner step of the last rounds, but no more than
        MOST_SLOTS times what its longest slot should take. The round's own duration alone does not tell, as
        it may have waited for hours for machines that were away."""
        steps = self.ctx.run.settings.rounds.length(led.t)
        self._paces.append((self.ctx.clock.now - led.since) / steps)
        most_s = MOST_SLOTS * max(led.planned_s.values(), default=math.inf)
        self._round_s = min(steps * min(self._paces), most_s)

    def _due_at(self, case: Case) -> float:
        """Time (s) until which the end of the run waits for an audit: PATIENCE_S after the case was opened,
        in a round the time of AUDIT_STEPS rounds more."""
        in_round = self.ctx.run.settings.rounds.has(case.drawn.t)
        return case.since + PATIENCE_S + AUDIT_STEPS * self._round_s * in_round

    def _tell_unaudited(self, case: Case) -> None:
        """Close a new case that nobody can audit, and note it as expired: there is no trusted auditor, and no
        other replica took part in the reduce, or this was a round of islands. The first time in a row at a
        stage, tell the owner what to do. Nothing if the case has an auditor."""
        stage, told = case.drawn.stage, case.drawn.stage in self._unaudited
        if case.drawn.first:
            self._unaudited.discard(stage)
            return
        self._expired(case)
        self._unaudited.add(stage)
        if not told:
            what = f"stage {stage} has one replica and no auditor, so nobody can compute its work again"
            remedy = "lend a second machine for it, or start an auditor (`anabranch audit`)"
            if self.ctx.run.settings.rounds.has(case.drawn.t):
                what = "rounds have no auditor, so nobody computes contributions of islands again"
                remedy = "start one (`anabranch audit`)"
            self.ctx.outbox.note("note", text=f"{what}: {remedy}")

    def inherit(self, steps: Iterable[Sequence[Drawn]]) -> None:
        """Follow the audits of the last steps, which another leader followed: auditors repeat their reports
        to this one. steps: for each step the audits drawn from it. An audit without auditors is over at once.
        An audited peer that came to its stage after the step counts as gone (no member that withholds
        anything), as it may have dropped what it kept."""
        membership = self.ctx.run.membership
        for each in itertools.chain.from_iterable(steps):
            member, since = membership.members.get(each.subject), membership.active_from.get(each.subject)
            case = Case(each, b"", self.ctx.clock.now, not each.first, inherited=True)
            case.gone = member is None or member.stage != each.stage or since is None or since > each.t
            case.incarnation = -1 if member is None else member.incarnation
            case.replaced = bool(each.trusted) and each.trusted not in membership.auditors
            self._cases[each.t, each.subject] = case
        self._void_disputed()

    def _void_disputed(self) -> None:
        """Have the log go back before each step with disputed results all of whose audits are over, unless it
        goes back that far already: whoever was wrong, a false activation or gradient was used."""
        cases = [case for case in self._cases.values() if case.drawn.disputed]
        for t in {case.drawn.t for case in cases} - {case.drawn.t for case in cases if not case.over}:
            if not (self.returns and self.returns_before <= t):
                self._return(f"nobody could tell which of two receipts of iteration {t} is false", t)

    def ended(self) -> bool:
        """Close, as expired, the cases that are still open when the run ends. True if the log now has to go
        back for one of them, and had not to before."""
        had = self.returns
        for case in self._cases.values():
            self._expired(case)
        self._void_disputed()
        return self.returns != had

    def awaited_until(self) -> float:
        """Time (s) until which the end of the run waits for auditors' reports; -inf: no audit is open whose
        auditor is a member."""
        members, cases = self.ctx.run.membership.members, self._cases.values()
        due = [self._due_at(case) for case in cases if not case.over and self._first(case) in members]
        return max(due, default=-math.inf)

    def doubtful_from(self) -> float:
        """First iteration that is void or has an audit still open and not overdue; infinite if there is none.
        States after earlier iterations are sound."""
        now, open_cases = self.ctx.clock.now, (c for c in self._cases.values() if not c.over)
        first = min((case.drawn.t for case in open_cases if self._due_at(case) > now), default=math.inf)
        return min(first, self.returns_before) if self.returns else first

    def receipt_of(self, t: int, subject: str) -> bytes:
        """Receipt of the audited contribution of `subject` to step t; b"" if this leader does not know it."""
        case = self._cases.get((t, subject))
        return case.receipt if case is not None else b""

    def rolled_back(self, t: int) -> None:
        """Drop all cases and any return, as the log went back to the state after step t (or, with t the last
        step, no state is left to go back to). Auditors drop their audits too, so the open cases of steps that
        stay are noted as expired."""
        for case in self._cases.values():
            if case.drawn.t <= t:
                self._expired(case)
        self._cases.clear()
        self.second.rolled_back(t)
        self._far_off = FarOff()
        self.returns, self.settled, self._checked = "", False, ()

    def on_audited(self, peer: str, message: Audited) -> str | None:
        """Handle the report `message` of the auditor `peer`: note it in the event log, and decide what
        follows (the second auditor, a conviction, a return of the log). Returns why it is refused (`peer` was
        not drawn or not asked); None if it was taken or ignored: there is no such case, it is over, the
        report is repeated, or comes too late to be checked by others."""
        case = self._cases.get((message.t, message.subject))
        if case is None or (case.drawn.base, case.drawn.stage) != (message.base, message.stage):
            return None
        if case.over and not self._overrules(case, peer, message):
            return None
        jury = case.drawn.jury
        if case.inherited and peer in jury[1:]:
            case.asked.add(peer)
        drawn = peer == case.drawn.trusted or peer in jury
        if not drawn or (peer in jury[1:] and peer not in case.asked):
            return "an audit that it was not drawn for"
        if peer in jury and case.drawn.trusted and not case.replaced:
            return None  # asked by nobody: it may not know the auditor yet
        known = peer in case.verdicts or message.verdict not in VERDICTS
        if known or self.second.too_late(case, peer, message.verdict):
            return None
        if peer in jury and message.verdict == "different":
            self.second.found((message.t, message.subject), peer)
        case.verdicts[peer] = message.verdict
        names = ("t", "base", "stage", "subject", "verdict", "what", "found", "claimed")
        found = {name: getattr(message, name) for name in names}
        shown = message.receipt if receipt_hash(message.receipt) == case.drawn.receipt else b""
        receipt = base64.b64encode(shown).decode()
        self.ctx.outbox.note("audit", auditor=peer, receipt=receipt, **found)
        if peer == case.drawn.trusted and peer in self.ctx.run.membership.auditors:
            self._by_trusted(case, message)
        else:
            self._weigh(case, message.what)
        self._void_disputed()
        return None

    def removed(self, peer: str) -> None:
        """Go on without `peer`, which left, or moved to another stage and has the weights of its old one no
        more. Others of the jury are asked in its place. If nobody else can check a difference that was found,
        the step is void. As the audited peer of a case, it is not blamed any more for what it does not hand
        over, even if it comes back."""
        self._far_off.removed(peer)
        self.second.removed(peer)
        for case in self._cases.values():
            jury = case.drawn.jury
            if peer == case.drawn.subject:
                case.gone = True
            if peer == case.drawn.trusted and not (case.over or case.replaced):
                self._replace(case)
            if case.over or peer not in jury or peer in case.verdicts:
                continue
            if case.drawn.trusted and not case.replaced:
                if peer == jury[0]:
                    case.verdicts[peer] = "unable"
            elif peer != jury[0] and jury[0] in case.verdicts and set(jury) <= {peer, *case.verdicts}:
                self._expired(case)
            else:
                case.verdicts[peer] = "unable"
                self._weigh(case)
        self._void_disputed()

    @staticmethod
    def _first(case: Case) -> str:
        """Auditor that is heard first as things are: the trusted one, unless it was replaced; "" if there is
        none."""
        return next(iter(case.drawn.auditors), "") if case.replaced else case.drawn.first

    def _late(self, case: Case) -> None:
        """Ask another auditor, as the one that is heard first has not reported: the second of the jury, or
        replicas in place of a trusted auditor. Nothing if nobody is left to ask."""
        if case.replaced or not case.drawn.trusted:
            self._ask(case, case.drawn.jury[1:2])
        elif case.drawn.auditors:
            self._replace(case)

    def _overrules(self, case: Case, peer: str, message: Audited) -> bool:
        """True if a report on a case that is over is a difference found by the trusted auditor, and no
        replica had found a difference or had inputs withheld: those asked in its place may lie together. The
        caller checks that the case is over."""
        before = set(case.verdicts.values())
        late = peer == case.drawn.trusted and before <= {"same", "unable"}
        return late and message.verdict == "different" and peer in self.ctx.run.membership.auditors

    def _replace(self, case: Case) -> None:
        """Have replicas audit in place of the trusted auditor, which left, is late, or cannot: one of them,
        and the second as ever if the first cannot (or cannot be reached) or finds a difference. If no other
        replica took part in the reduce, the audit ends."""
        each, case.replaced = case.drawn, True
        if each.jury and self.ctx.reachable(each.jury[0]) and each.jury[0] not in case.verdicts:
            order = Audit(each.t, each.base, each.stage, each.subject, (each.subject,))
            self.ctx.outbox.send(each.jury[0], order)
        elif each.jury:
            case.verdicts[each.jury[0]] = "unable"
            self._weigh(case)
        else:
            case.over = True

    def _by_trusted(self, case: Case, message: Audited) -> None:
        """End an audit with the report of the trusted auditor: a difference convicts the audited peer; if the
        audited peer withheld inputs, and is still there, it loses its seat, and the step is void; a replica
        that found a difference where it found none loses its seat. If it cannot tell, replicas audit."""
        each, peer = case.drawn, case.drawn.trusted
        about = f"the work of {each.subject[:8]} at stage {each.stage} in step {each.t}"
        if message.verdict == "unable":
            if not case.replaced:
                self._replace(case)
            return
        case.over = True
        if message.verdict == "different":
            self._convict(
                each.subject, f"the auditor {peer[:8]} computed {about} again: {message.what}", each.t
            )
        elif message.verdict == "withheld":
            if self._stayed(case):
                self.admission.remove(each.subject, f"it did not hand over to the auditor {about}")
                self._return(f"the auditor could not compute {about} again", each.t)
        else:
            for accuser in [other for other, verdict in case.verdicts.items() if verdict == "different"]:
                self.admission.remove(accuser, f"it found {about} different, which the auditor did not")

    def _ask(self, case: Case, peers: Iterable[str]) -> bool:
        """Order those of `peers` (replicas of the jury) to audit a contribution that are within reach and
        were not ordered before; once somebody found a difference, all within reach, so that they learn who
        did. True if any was ordered. They may fetch the inputs from the audited peer, and from those who
        found a difference."""
        accused, reachable = "different" in case.verdicts.values(), self.ctx.reachable
        able = [peer for peer in peers if (accused or peer not in case.asked) and reachable(peer)]
        for peer in able:
            self._order(case, peer)
        return bool(able)

    def _order(self, case: Case, peer: str) -> None:
        each = case.drawn
        found = (peer for peer in each.jury if case.verdicts.get(peer) == "different")
        case.asked.add(peer)
        self.ctx.outbox.send(
            peer, Audit(each.t, each.base, each.stage, each.subject, (*found, each.subject))
        )

    def repeat(self, peer: str) -> None:
        """Send `peer`, whose link came up, the orders of open audits on which it has not reported, as steps
        may wait for it: those that `Case.asked` has, so none to the first of a jury or of an earlier
        leader."""
        for case in self._cases.values():
            if not case.over and peer in case.asked and peer not in case.verdicts:
                self._order(case, peer)

    def _weigh(self, case: Case, what: str = "") -> None:
        """Decide an audit by the jury's findings so far, or ask more of the jury. If `Drawn.convicts` jurors
        found a difference, the audited peer is convicted. If as many found none (the audited peer's own work
        counts as one), those that found a difference lose their seats. If that many were denied the inputs by
        the audited peer, and it is still there, it is removed, and the step is void. If one juror found no
        difference and nobody found any, the audit ends (of a case that another leader opened, once the first
        juror has reported). what: words for the difference that was found last."""
        each, verdicts = case.drawn, case.verdicts
        about = f"the work of {each.subject[:8]} at stage {each.stage} in step {each.t}"
        heard = [peer for peer in each.jury if peer in verdicts]
        found = Counter(verdicts[peer] for peer in heard)
        accusers = [peer for peer in heard if verdicts[peer] == "different"]
        if found["different"] >= each.convicts:
            case.over = True
            self.second.confirmed(accusers)
            many = {2: "two", 3: "three"}[each.convicts]
            self._convict(each.subject, f"{many} replicas computed {about} again: {what}", each.t)
        elif accusers and found["same"] + 1 >= each.convicts:
            case.over = True
            others = "another replica" if found["same"] == 1 else "others"
            for peer in accusers:
                self.admission.remove(peer, f"it found {about} different, which {others} did not")
        elif found["withheld"] >= each.convicts:
            case.over = True
            if self._stayed(case):
                self.admission.remove(each.subject, f"it did not hand over to replicas {about}")
                self._return(f"nobody could compute {about} again", each.t)
        elif not accusers and found["same"] and not (case.inherited and each.jury[0] not in verdicts):
            case.over = True
        elif not self._goes_on(case, bool(accusers) or found["withheld"] > 1):
            self._undecided(case, heard, about, what)

    def _goes_on(self, case: Case, all_left: bool) -> bool:
        """Ask the next replica of the jury that has not answered, unless one that was asked and is within
        reach is still awaited; with `all_left` ask all that have not answered. False if neither anybody could
        be asked nor anybody is awaited."""
        left = [peer for peer in case.drawn.jury if peer not in case.verdicts]
        waits = any(peer in case.asked and self.ctx.reachable(peer) for peer in left)
        if all_left:
            return self._ask(case, left) or waits
        return waits or any(self._ask(case, (peer,)) for peer in left)

    def _undecided(self, case: Case, heard: Collection[str], about: str, what: str) -> None:
        """End an audit that the jury cannot decide. Any difference voids the step; so does work withheld by a
        peer that is still there, if only one replica looked. Nobody is convicted. heard: jurors with a
        verdict. about, what: words for the note: the work that was audited, and the difference ("": none)."""
        case.over, verdicts = True, case.verdicts
        words = "different", "withheld"
        peer = next((peer for word in words for peer in heard if verdicts[peer] == word), "")
        if not peer or (verdicts[peer] == "withheld" and (len(heard) > 1 or not self._stayed(case))):
            return  # if the audited peer died, its neighbours do not have all of it any more
        text = f"{peer[:8]} finds {about} {verdicts[peer]}" + f" ({what})" * bool(what)
        self.ctx.outbox.note("note", text=f"{text}, and too few other replicas can tell: lend one")
        self._return(text, case.drawn.t)

    def _expired(self, case: Case) -> None:
        """Close an open case that can no longer be audited, as its inputs are dropped now, and note it as
        expired. If an auditor found a difference that no second one checked, the step is void."""
        each = case.drawn
        if case.over:
            return
        case.over = True
        asked = each.trusted, *each.jury
        silent = next((peer for peer in asked if peer and peer not in case.verdicts), "")
        fields = {"t": each.t, "base": each.base, "stage": each.stage, "subject": each.subject}
        self.ctx.outbox.note("audit", auditor=silent, verdict=EXPIRED, receipt="", **fields)
        accusers = {peer for peer, verdict in case.verdicts.items() if verdict == "different"}
        if accusers:
            self.second.unchecked((each.t, each.subject), accusers)
            about = f"the work of {each.subject[:8]} at stage {each.stage} in step {each.t}"
            self._return(f"too few replicas answered if {about} is false", each.t)

    def _stayed(self, case: Case) -> bool:
        """True if the audited peer is reachable and still runs, at the same stage, the process that did the
        work."""
        member = self.ctx.run.membership.members.get(case.drawn.subject)
        return (
            member is not None
            and not case.gone
            and (member.incarnation, member.stage) == (case.incarnation, case.drawn.stage)
            and self.ctx.reachable(member.id)
        )

    # --- consequences --------------------------------------------------------------------------

    def _return(self, reason: str, t: int) -> None:
        """Note that the log has to go back to a state before iteration t (`returns`). Of several calls the
        first reason and the earliest iteration stay."""
        self.returns_before = min(self.returns_before, t) if self.returns else t
        self.returns = self.returns or reason

    def _convict(self, peer: str, reason: str, t: int) -> None:
        member = self.ctx.run.membership.members.get(peer)
        self._revoke(peer, reason)
        if member is not None and member.ticket and member.walk_in is not True:
            convicted = self._tickets.setdefault(member.ticket, set())
            convicted.add(peer)
            if len(convicted) > 1:
                self._revoke(member.ticket, f"two of its peers were convicted; the last: {reason}")
        self._return(reason, t)
        self.settled = True

    def _revoke(self, target: str, reason: str) -> None:
        self.revocations.ask(Wish(REVOKE, target=target, reason=reason[:REMARK_MAX]))


def unlinked(receipts: Sequence[Receipt]) -> str:
    """Words that name the first microbatch with two receipts that disagree: a received activation or gradient
    is not the one that the microbatch's owner sent. "" if all agree. receipts: of all stages, of one step."""
    for wrong in mismatches(receipts):
        return f"microbatch {wrong.index} between stages {wrong.came.stage} and {wrong.receiver.stage}"
    return ""


def contributions_of(
    attempt: Attempt, reports: Mapping[str, tuple[Moments, ...]]
) -> dict[str, Contribution]:
    """Contributions to a reduce attempt: owner -> number of its units and the moments (sum of squares, inner
    product with the sum of all contributions) that each peer reports which summed parts, one entry per peer
    however many parts it summed. reports: peer -> moments of all contributions in the order of
    `contributors`, or (). Empty if nobody reports any."""
    by = tuple(sorted(peer for peer, moments in reports.items() if moments))
    if not by:
        return {}
    found = {}
    for rank, position in enumerate(contributors(attempt)):
        squares = tuple(reports[peer][rank][0] for peer in by)
        dots = tuple(reports[peer][rank][1] for peer in by)
        units = attempt.owners.count(position)
        found[attempt.members[position]] = Contribution(units, squares, dots, by)
    return found
