"""Audit cases at the leader: contributions that are drawn when a step is committed, the findings of auditors,
and what follows from them. Receipts before the commit are in `step_receipts`.

A relay is convicted if more than half of the replicas that count (`Drawn.convicts`) computed its work again
and found it different. Its key is revoked, and the log goes back to a state before the false step
(`fleet.convictions`). One replica's word convicts nobody, nor do two in a stage of more than three. A
*trusted* auditor is a member that does nothing else, and came with the owner's ticket for it: its word alone
decides, and replicas audit in its place if it cannot.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from anabranch.protocol.audit.auditor import WAIT_S
from anabranch.protocol.audit.draw import Drawn, drawn
from anabranch.protocol.audit.receipts import receipt_hash
from anabranch.protocol.audit.second_audits import VERDICTS, Case, CaseKey, SecondAudits
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.interface.tasks import AUDIT_STEPS
from anabranch.protocol.log.records import Commit
from anabranch.protocol.messages import Audit, Audited

#: Finding that the leader notes for an audit whose auditor did not report in time.
EXPIRED = "expired"
#: Steps after which the second auditor is asked although the first has not reported: it may be held up by a
#: peer that withholds another contribution. A choice: half of the steps that the weights are kept for.
LATE_STEPS = AUDIT_STEPS // 2
#: Seconds for which the run's end waits for an audit: two auditors that each ask two sources in vain. Audits
#: of a round have AUDIT_STEPS rounds more.
PATIENCE_S = 4 * WAIT_S
#: Times what the longest slot of a round should take, as which a round counts at most in that. A choice: as
#: machines that are overdue with their slots (`island_rounds.OVERDUE`).
MOST_SLOTS = 6.0


@dataclass(eq=False)
class AuditCases:
    """Audits of the last steps, at the leader. Without audits in the settings nothing is kept.
    second: accusations for which the commit of a step waits until a second auditor has checked them."""

    ctx: PeerContext
    admission: Admission
    convictions: Convictions
    _cases: dict[CaseKey, Case] = field(default_factory=dict)
    _unaudited: set[int] = field(default_factory=set)
    """Stages whose last drawn contribution nobody could audit."""
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=AUDIT_STEPS))
    """Seconds for each optimizer step of the last rounds that this leader led."""
    _round_s: float = 0.0
    """Seconds that the last of them should have taken: an auditor needs about as many for one slot. 0 before
    the first round."""

    def __post_init__(self) -> None:
        self.second = SecondAudits(self.ctx, self._cases)

    def committed(self, record: Commit, base: str, led: Round | None) -> None:
        """Open a case for each audit that is drawn from the commit `record`, close those that are too old,
        and ask second auditors where the first is late. The auditors drawn first begin by themselves. A step
        with a difference that nobody can check any more becomes void (`Convictions`). base: hash of the
        commit's log entry. led: the coordinator's round of that step, if this peer led it. Nothing without
        audits."""
        if not self.ctx.run.settings.audits:
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
            if not (self.convictions.returns and self.convictions.returns_before <= t):
                reason = f"nobody could tell which of two receipts of iteration {t} is false"
                self.convictions.go_back(reason, t)

    def ended(self) -> bool:
        """Close, as expired, the cases that are still open when the run ends. True if the log now has to go
        back for one of them, and had not to before."""
        had = self.convictions.returns
        for case in self._cases.values():
            self._expired(case)
        self._void_disputed()
        return self.convictions.returns != had

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
        return min(first, self.convictions.returns_before) if self.convictions.returns else first

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
        self.convictions.rolled_back()

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
        """Ask another auditor, as the one that is heard first has not reported: the next of the jury, unless
        one that was asked is within reach, or replicas in place of a trusted auditor. Nothing if nobody is
        left to ask."""
        if case.replaced or not case.drawn.trusted:
            left = [p for p in case.drawn.jury[1:] if p not in case.verdicts and self.ctx.reachable(p)]
            if case.asked.isdisjoint(left):
                self._ask(case, left[:1])
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
            self.convictions.convict(
                each.subject, f"the auditor {peer[:8]} computed {about} again: {message.what}", each.t
            )
        elif message.verdict == "withheld":
            if self._stayed(case):
                self.admission.remove(each.subject, f"it did not hand over to the auditor {about}")
                self.convictions.go_back(f"the auditor could not compute {about} again", each.t)
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
            self.convictions.convict(each.subject, f"{many} replicas computed {about} again: {what}", each.t)
        elif accusers and found["same"] + 1 >= each.convicts:
            case.over = True
            others = "another replica" if found["same"] == 1 else "others"
            for peer in accusers:
                self.admission.remove(peer, f"it found {about} different, which {others} did not")
        elif found["withheld"] >= each.convicts:
            case.over = True
            if self._stayed(case):
                self.admission.remove(each.subject, f"it did not hand over to replicas {about}")
                self.convictions.go_back(f"nobody could compute {about} again", each.t)
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
        self.convictions.go_back(text, case.drawn.t)

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
            self.convictions.go_back(f"too few replicas answered if {about} is false", each.t)

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
