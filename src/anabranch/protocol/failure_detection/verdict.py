"""Verdict on a silent peer, from its own timeout and the statements of other members (R3).

Silence is measured in timeouts of the peer (`telemetry.adaptive_timeout`). After one timeout the peer is
suspected, and work goes to others. After VERDICT timeouts the *link* is bad, and made anew, if another member
hears the peer; the peer is *gone* if members answered and none hears it; the observer is itself *cut off* if
it hears nobody and nobody answers, and then it removes nobody. After LAST timeouts the peer is gone even if
others hear it, for a member without a link to the leader cannot take part in a step. A peer is *silent to
all* if WITNESSED other members with a link to it do not hear it either: a step that needs it does not wait
for the verdict (`fleet.stragglers`).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from anabranch.protocol.failure_detection.indirect_probes import ProbeReport
from anabranch.protocol.telemetry.adaptive_timeout import DOUBT

#: Silence, in timeouts of the peer, after which there is a verdict, and after which the peer is gone in any
#: case.
VERDICT = 2.0
LAST = 5.0
#: Tolerance of comparisons of times (s, or timeouts).
ROUNDING = 1e-6
#: Number of other members with a link to a silent peer that must not hear it before it is silent to all.
WITNESSED = 2


class Verdict(Enum):
    """Verdicts on a silent peer. Their values are the words in the event log."""

    SUSPECTED = "suspected"
    REFUTED = "refuted"
    BAD_LINK = "the link is bad"
    CUT_OFF = "nobody is heard"
    GONE = "gone"


class Overdue(NamedTuple):
    """Evidence about a member that has been silent for `silence_s` seconds. patience_s: its timeout (s).
    account: what other members say. alone: True if this peer hears no other member either, though there are
    some. linked: True if there is a connection to the silent member."""

    peer: str
    silence_s: float
    patience_s: float
    account: ProbeReport
    alone: bool
    linked: bool = True

    @property
    def verdict(self) -> Verdict:
        """Verdict that follows from the evidence."""
        patiences = self.silence_s / self.patience_s + ROUNDING
        if patiences < VERDICT:
            return Verdict.SUSPECTED
        if self.account.heard and patiences < LAST:
            return Verdict.BAD_LINK
        if self.alone and not self.account.answered:
            return Verdict.CUT_OFF
        return Verdict.GONE

    @property
    def to_all(self) -> bool:
        """True if nobody hears the silent member, to which this peer has a link: no member says that it does,
        and WITNESSED others with a link to it have not heard it for the share DOUBT of its timeout."""
        silent = [s for s in self.account.silences_s if s + ROUNDING >= DOUBT * self.patience_s]
        return self.linked and not self.account.heard and len(silent) >= WITNESSED

    def __str__(self) -> str:
        what = "silent" if self.linked else "out of reach"
        return f"{what} for {self.silence_s:.1f} s (patience {self.patience_s:.1f} s); {self.account}"

    def numbers(self) -> dict[str, object]:
        """Numbers about the silence, as fields of an event for the event log."""
        return {
            "verdict": self.verdict.value,
            "silence_s": self.silence_s,
            "patience_s": self.patience_s,
            "asked": dict(self.account.answers),
        }
