"""Audit cases, and second audits that steps wait for, at the leader: where one auditor found a difference,
another has to check it before the weights for it are gone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from anabranch.protocol.audit.auditor import WAIT_S
from anabranch.protocol.audit.draw import Drawn
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.tasks import AUDIT_STEPS

#: Seconds for which the commit of a step waits for a second auditor where one found a difference, and the
#: weights to check it would be dropped with that step: accuser and subject are asked at once, then senders.
HOLD_S = 2 * WAIT_S

#: Words of an auditor.
VERDICTS = ("same", "different", "withheld", "unable")
#: Step and audited peer.
CaseKey = tuple[int, str]


@dataclass
class Case:
    """Audit of one contribution, as the leader follows it. drawn: which contribution, and who is to audit it.
    receipt: of the audited peer, as it came with PREPARED (b"": this leader does not know it). since: time
    (s) at which the step was committed, or this leader took over. over: True once no more reports are
    awaited. incarnation: process number of the audited peer when the step was committed (-1: no member then).
    verdicts: auditor -> its word, of VERDICTS. asked: jurors that this leader ordered to audit, without the
    first of the jury, which begins by itself, or by an order in place of the trusted auditor. gone: True once
    the audited peer left its stage. replaced: True once replicas were asked in place of the trusted auditor.
    inherited: True if another leader opened the case, and may have asked replicas that are not in `asked`."""

    drawn: Drawn
    receipt: bytes
    since: float
    over: bool = False
    incarnation: int = -1
    verdicts: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    gone: bool = False
    replaced: bool = False
    inherited: bool = False


class SecondAudits:
    """Differences for which the commit of a step may wait until a second auditor has checked them. cases: all
    audit cases of the last steps, which the caller changes."""

    def __init__(self, ctx: PeerContext, cases: Mapping[CaseKey, Case]) -> None:
        self.ctx, self._cases = ctx, cases
        self._until: dict[CaseKey, float] = {}
        """Case in which a juror found a difference -> time (s) until which steps wait for another."""
        self._told: set[CaseKey] = set()
        """Cases of which the owner was told that a step waits."""
        self._unchecked: set[str] = set()
        """Replicas for whose accusation a step waited in vain: none waits again until one of theirs
        convicts."""
        self._proposed = -1
        """Last step that this leader proposed."""

    def found(self, key: CaseKey, accuser: str) -> None:
        """Note that the juror `accuser` found a difference in the case `key` now: steps may wait HOLD_S for
        another juror, unless a step waited in vain for this accuser before."""
        self._until = {known: until for known, until in self._until.items() if known in self._cases}
        self._told &= self._cases.keys()
        if accuser not in self._unchecked:
            self._until[key] = max(self._until.get(key, -math.inf), self.ctx.clock.now + HOLD_S)

    def holds(self, t: int) -> bool:
        """True if step t may not be committed yet: the weights of an earlier step, which go with it, are
        needed to check a difference that one auditor found. The owner is told once for each case. Without
        this wait a replica that accuses falsely just before the weights go would have the log go back at no
        risk."""
        now, waits = self.ctx.clock.now, False
        for key, case in self._cases.items():
            if case.over or case.drawn.t > t - AUDIT_STEPS or self._until.get(key, -math.inf) <= now:
                continue
            waits = True
            if key not in self._told:
                self._told.add(key)
                each = case.drawn
                about = f"the work of {each.subject[:8]} at stage {each.stage} in step {each.t}"
                reason = f"iteration {t} waits for a second audit of {about}: one found it different"
                self.ctx.outbox.note("waiting", reason=reason)
        return waits

    def held_until(self) -> float:
        """Time (s) at which the next of the present waits for second auditors ends by itself; infinite if
        there is none."""
        now, cases = self.ctx.clock.now, self._cases
        held = (until for key, until in self._until.items() if key in cases and not cases[key].over)
        return min((until for until in held if until > now), default=math.inf)

    def proposed(self, t: int) -> None:
        """Note that step t is being committed, or that the log went back to it: steps whose weights that
        drops cannot be audited any more."""
        self._proposed = t

    def too_late(self, case: Case, peer: str, verdict: str) -> bool:
        """True if a juror's report is the first of a difference in its case, and the weights to check that
        are being dropped by the last proposed step. False for a case that another leader opened: it may have
        heard of the difference in time."""
        first = verdict == "different" and "different" not in case.verdicts.values()
        checked = peer in case.drawn.jury and not case.inherited
        return first and checked and case.drawn.t <= self._proposed - AUDIT_STEPS

    def unchecked(self, key: CaseKey, accusers: Collection[str]) -> None:
        """Note that nobody checked the difference that `accusers` found in the case `key`. If a step waited
        for that, none waits for these accusers again."""
        if key in self._told:
            self._unchecked.update(accusers)

    def confirmed(self, accusers: Collection[str]) -> None:
        """Note that other replicas found the difference of `accusers`, too: steps may wait for them again."""
        self._unchecked.difference_update(accusers)

    def removed(self, peer: str) -> None:
        """Forget a former member."""
        self._unchecked.discard(peer)

    def rolled_back(self, t: int) -> None:
        """Forget all waits, as the log went back to the state after step t."""
        self._until, self._told = {}, set()
        self.proposed(t)
