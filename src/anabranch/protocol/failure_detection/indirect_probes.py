"""Indirect probes: before a silent peer is removed, other members are asked whether they hear it.

As in SWIM (Das, Gupta, Motivala, DSN 2002, §4.1) the asker sends `Probe` to a few members, the witnesses;
each pings the silent peer, the subject, and answers `Probed` when the subject is heard, or that it was not:
after a while, or soon if the subject has been silent to it for long, too. So a bad link is told from a dead
peer, and an asker that hears no witness either learns that it is cut off itself. Against floods an answer
counts only from a witness that was asked, and a witness keeps one question per asker and subject and pings a
subject at most once per PING_S.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Probe, Probed

#: Members asked at a time.
WITNESSES = 3
#: Heartbeat intervals after which a witness answers at the latest, and least time (s) between two pings of a
#: subject.
ANSWER_HEARTBEATS, PING_S = 2.0, 0.25
#: Most questions that a witness keeps.
QUESTIONS_MAX = 1024
#: Silence (s) that an implausible report counts as.
SILENCE_MAX_S = 1e6


class ProbeReport(NamedTuple):
    """Statements of other members, the witnesses, about a silent peer. heard_s: seconds since any witness
    last heard the peer; infinite if none did. answers: witness -> its answer in words ("": none yet).
    silences_s: for each witness that has a link to the peer and did not hear it, its silence in seconds."""

    heard_s: float
    answers: dict[str, str]
    silences_s: tuple[float, ...] = ()

    @property
    def heard(self) -> bool:
        return self.heard_s < math.inf

    @property
    def answered(self) -> bool:
        return any(self.answers.values())

    def __str__(self) -> str:
        if not self.answers:
            return "nobody else could be asked"
        said = (f"{peer[:8]} {words or 'has not answered'}" for peer, words in self.answers.items())
        return "asked: " + ", ".join(said)


@dataclass
class Inquiry:
    """Questions that this peer asked about one silent peer, numbered `first` to `number`, and the answers.
    answers: witness -> its answer (None: none yet) and the time of the answer, or of the question if there is
    no answer."""

    first: int
    number: int
    asked_at: float
    answers: dict[str, tuple[Probed | None, float]] = field(default_factory=dict)


class IndirectProbes:
    """Sender and answerer of questions about silent peers: those that this peer asks, and those that others
    ask it. ping(peer): callback that sends a heartbeat at once."""

    def __init__(self, ctx: PeerContext, ping: Callable[[str], None]) -> None:
        self.ctx = ctx
        self._ping = ping
        self._number = 0
        self._inquiries: dict[str, Inquiry] = {}
        """Subject -> this peer's questions."""
        self._questions: dict[tuple[str, str], tuple[int, float]] = {}
        """Open questions of others: (asker, subject) -> number, time of the first question (s)."""
        self._pinged: dict[str, float] = {}
        """Subject -> time of the last ping for a question (s)."""

    # --- asking --------------------------------------------------------------------------------

    def ask(self, subject: str, keep_s: float = 0.0, voters: bool = False) -> None:
        """Ask at most WITNESSES members whether they hear `subject` (none, if `subject` is no member).
        Answers of the last `keep_s` seconds count until the witness answers again. voters: True to ask all
        linked voters as well, any of which could lead in this peer's place."""
        ctx, rng = self.ctx, self.ctx.rng
        member = ctx.run.membership.members.get(subject)
        asked: list[str] = []
        incarnation = 0
        if member is not None:
            incarnation = member.incarnation
            near, far = self._candidates(subject, member.stage)
            rng.shuffle(near)
            rng.shuffle(far)
            asked = [*near, *far][:WITNESSES]
            if voters:
                others = [*near, *far][WITNESSES:]
                asked += filter(ctx.log.keeps_log, others)
        self._number += 1
        inquiry = Inquiry(self._number, self._number, ctx.clock.now)
        before = self._inquiries.get(subject)
        if before is not None:
            inquiry.first, oldest = before.first, ctx.clock.now - keep_s
            inquiry.answers = {p: (a, at) for p, (a, at) in before.answers.items() if at > oldest}
        self._inquiries[subject] = inquiry
        for peer in asked:
            inquiry.answers.setdefault(peer, (None, ctx.clock.now))
            ctx.outbox.send(peer, Probe(self._number, subject, incarnation))

    def _candidates(self, subject: str, stage: int) -> tuple[list[str], list[str]]:
        """Linked members that can be asked about `subject`, as two lists: those at its stage or an adjacent
        one (probably linked to it) with the leader, and the others. In a large swarm only neighbours of
        `subject` and the leader."""
        ctx, stages = self.ctx, self.ctx.run.settings.stages + 1
        near: list[str] = []
        far: list[str] = []
        linked = ctx.run.near.all(stage, subject) | {ctx.log.leader} if ctx.run.near.crowded else None
        for peer in sorted(ctx.links.up):
            member = ctx.run.membership.members.get(peer)
            if member is None or peer == subject or not ctx.reachable(peer):
                continue
            if linked is not None and peer not in linked:
                continue  # no neighbour of the subject
            apart = (member.stage - stage) % stages
            (near if apart in (0, 1, stages - 1) or peer == ctx.log.leader else far).append(peer)
        return near, far

    def account(self, subject: str) -> ProbeReport:
        """Statements of the asked witnesses about `subject` so far."""
        inquiry = self._inquiries.get(subject)
        if inquiry is None:
            return ProbeReport(math.inf, {})
        now, answers = self.ctx.clock.now, inquiry.answers
        heard = [now - at for probed, at in answers.values() if probed is not None and probed.heard]
        words = {p: "" if probed is None else _words(probed, now - at) for p, (probed, at) in answers.items()}
        silent = (_silence_s(p, now - at) for p, at in answers.values() if p and p.linked and not p.heard)
        return ProbeReport(min(heard, default=math.inf), words, tuple(silent))

    def hearers(self, subject: str) -> list[str]:
        """Members that answered that they hear `subject`."""
        inquiry = self._inquiries.get(subject)
        answers = inquiry.answers.items() if inquiry is not None else ()
        return [witness for witness, (probed, _) in answers if probed is not None and probed.heard]

    def asked_at(self, subject: str) -> float:
        """Time (s) at which witnesses were last asked about `subject`; -inf if they were not since this peer
        last heard `subject`."""
        inquiry = self._inquiries.get(subject)
        return -math.inf if inquiry is None else inquiry.asked_at

    def forget(self, subject: str) -> None:
        """Drop questions and answers about `subject`, because it is heard again or is no member any more."""
        self._inquiries.pop(subject, None)

    # --- answering -----------------------------------------------------------------------------

    def received(self, peer: str, message: Probe | Probed) -> str | None:
        """Handle a question (`Probe`) or answer (`Probed`) of `peer`; returns the reason if it is refused, as
        it is of a peer that is no member, or another process than the member, else None."""
        ctx = self.ctx
        member = ctx.run.membership.members.get(peer)
        if member is None or ctx.links.incarnations.get(peer, member.incarnation) != member.incarnation:
            return "not a member"
        if isinstance(message, Probe):
            return self._asked(peer, message)
        return self._answered(peer, message)

    def _asked(self, peer: str, probe: Probe) -> str | None:
        ctx, subject = self.ctx, probe.subject
        member = ctx.run.membership.members.get(subject)
        if member is None or member.incarnation != probe.incarnation:
            return None  # asker and witness have not applied the same log entries yet
        if subject in (peer, ctx.me):
            return "a question about oneself"
        if subject not in ctx.links.up:
            ctx.outbox.send(peer, Probed(probe.number, subject, linked=False, heard=False, silence_s=0.0))
        elif (peer, subject) in self._questions or len(self._questions) < QUESTIONS_MAX:
            _, since = self._questions.get((peer, subject), (0, ctx.clock.now))
            self._questions[peer, subject] = (probe.number, since)
            if ctx.clock.now >= self._pinged.get(subject, -math.inf) + PING_S:
                self._pinged[subject] = ctx.clock.now
                self._ping(subject)
        return None

    def _answered(self, peer: str, probed: Probed) -> str | None:
        inquiry = self._inquiries.get(probed.subject)
        if inquiry is None or not inquiry.first <= probed.number <= inquiry.number:
            return None  # late
        if peer in inquiry.answers:
            inquiry.answers[peer] = (probed, self.ctx.clock.now)
            return None
        return "an answer from whom was not asked" if probed.number == inquiry.number else None

    def heard(self, subject: str) -> None:
        """Answer others' open questions about `subject`, of which a message has just arrived."""
        if not self._questions:
            return
        for (asker, about), (number, _) in list(self._questions.items()):
            if about == subject:
                del self._questions[asker, about]
                self.ctx.outbox.send(asker, Probed(number, subject, linked=True, heard=True, silence_s=0.0))

    def link_down(self, peer: str) -> None:
        """Drop the questions that `peer` asked, and answer those about `peer`: this member has no link to it
        any more."""
        for asker, subject in list(self._questions):
            if peer == subject:
                number, _ = self._questions[asker, subject]
                self.ctx.outbox.send(asker, Probed(number, subject, linked=False, heard=False, silence_s=0.0))
            if peer in (asker, subject):
                del self._questions[asker, subject]
        self._pinged.pop(peer, None)

    # --- time ----------------------------------------------------------------------------------

    def _answer_at(self, subject: str, since: float) -> float:
        """Time (s) at which a question asked at `since` is answered if the subject is not heard before. One
        that this peer doubts itself, too, has left its heartbeats unanswered."""
        at = since + ANSWER_HEARTBEATS * self.ctx.run.settings.heartbeat_s
        link = self.ctx.links.up.get(subject)
        return at if link is None else min(at, max(since + PING_S, link.doubted_at()))

    def tick(self) -> None:
        """Answer the questions that have waited long enough: this peer has not heard the subject
        meanwhile."""
        ctx = self.ctx
        for (asker, subject), (number, since) in list(self._questions.items()):
            if ctx.clock.now >= self._answer_at(subject, since):
                del self._questions[asker, subject]
                link = ctx.links.up.get(subject)
                silence_s = 0.0 if link is None else max(0.0, ctx.clock.now - link.last_heard)
                ctx.outbox.send(asker, Probed(number, subject, link is not None, False, silence_s))

    def deadline(self) -> float:
        """Time of the next `tick` (s); infinite without an open question."""
        if not self._questions:
            return math.inf
        asked = self._questions.items()
        return min((self._answer_at(about, since) for (_, about), (_, since) in asked))


def _words(probed: Probed, since_s: float) -> str:
    if not probed.linked:
        return "has no link to it"
    if probed.heard:
        return f"heard it {since_s:.1f} s ago"
    return f"has not heard it for {_silence_s(probed, since_s):.1f} s"


def _silence_s(probed: Probed, since_s: float) -> float:
    return (min(probed.silence_s, SILENCE_MAX_S) if probed.silence_s >= 0.0 else SILENCE_MAX_S) + since_s
