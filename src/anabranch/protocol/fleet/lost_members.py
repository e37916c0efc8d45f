"""Lost members: those whose links are down, or that are silent; whether the coordinator removes them (R3).

A member whose link is down is dialled again; if nothing answers, other members are asked before the verdict
(`failure_detection.verdict`). The last replica of a stage is waited for longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.failure_detection.verdict import LAST, ROUNDING, Overdue, Verdict
from anabranch.protocol.fleet.stragglers import LostMember, Stragglers
from anabranch.protocol.interface.events import Dial

#: Time (s) between attempts to reach a member without a link that is not removed.
REACH_AGAIN_S = 8.0
#: First wait (s) after a dial that failed without being refused: a dying process still holds its port when
#: its connections are reset.
DIAL_AGAIN_S = 0.1
#: Steps whose time a data node that is silent to all may cost. A choice: it takes longer to come back.
HELD_UP = 2.0


@dataclass(frozen=True)
class StepQueries:
    """Functions that answer questions about the coordinator's open step. has_last(peer): True if the member
    reported that it applied the last step, or work of the open one. waits_for(stage): True if the open step
    still waits for something from the stage. worth_s(peer): seconds for which it pays to wait for the last
    replica of a stage instead of restoring the stage. step_s(): seconds of the last step; 0: not known.
    fetching(stage): replicas that are not removed for want of the last step's state. sums(stage): have the
    coordinator sum the parts of the stage's replicas from now on, for a while; False if it cannot."""

    has_last: Callable[[str], bool] = lambda peer: False
    waits_for: Callable[[int], bool] = lambda stage: True
    worth_s: Callable[[str], float] = lambda peer: math.inf
    step_s: Callable[[], float] = lambda: 0.0
    sums: Callable[[int], bool] = lambda stage: False
    fetching: Callable[[int], Collection[str]] = lambda stage: ()


class LostMembers(Timer):
    """Members that this coordinator cannot reach, and the decision to remove them. step: answers about the
    open step. going(): members whose removal is planned or logged. remove(peer, reason): plans a removal.
    wait(reason): notes why the run waits."""

    _cut_off = False
    """True if this peer heard nobody when it last judged a lost member."""

    def __init__(
        self,
        ctx: PeerContext,
        connections: Connections,
        step: StepQueries,
        going: Callable[[], Collection[str]],
        remove: Callable[[str, str], None],
        wait: Callable[[str], None],
    ) -> None:
        self.ctx, self._connections, self._step = ctx, connections, step
        self._going, self._remove, self._wait = going, remove, wait
        self.known: dict[str, LostMember] = {}
        """Members whose link is down."""
        self.absent = Stragglers(ctx, connections.indirect_probes, self.known, going, step.waits_for)

    def forget(self, peer: str) -> None:
        """Count a peer as lost no longer: a link leads to it, or its removal is planned. Nothing for one that
        is not lost."""
        self.known.pop(peer, None)

    def link_down(self, peer: str, reason: str, refused: bool, patience_s: float) -> None:
        """Handle a member's only link that broke, or a failed dial. It is dialled again, and when it is lost
        first, others are asked about it. refused: True if nothing listens at its address; then it is removed.
        A member that this peer has banned is removed, too, unless it is the last replica of its stage.
        reason: for the log. patience_s: silence timeout of the peer (s)."""
        if refused:
            self._remove(peer, f"{reason}; nobody listens at its address any more")
            return
        if self._expendable(peer):  # others may hear it for long
            self._remove(peer, reason)
            return
        if peer in self.known:
            lost = self.known[peer]
            lost.dial_at = self.ctx.clock.now + (lost.waits.next() or REACH_AGAIN_S)
            return
        self._lose(peer, reason, patience_s)

    def _lose(self, peer: str, reason: str, patience_s: float) -> None:
        """Begin to count the silence of a member without a link, dial it, and ask others about it."""
        now, waits = self.ctx.clock.now, Backoff(self.ctx.rng, DIAL_AGAIN_S, REACH_AGAIN_S)
        self.known[peer] = LostMember(reason, now, patience_s, now + patience_s, waits)
        self._dial(peer, again=False)
        self._connections.indirect_probes.ask(peer)

    def tick(self) -> None:
        """Dial the members whose links are down, and decide whether to remove them, where that is due. Once
        this peer hears somebody again after it was cut off, their silences begin anew."""
        now, connections = self.ctx.clock.now, self._connections
        if self._cut_off and not self.ctx.hears_nobody():
            self._cut_off = False
            for peer, lost in list(self.known.items()):
                if peer in self.ctx.run.membership.members:
                    self._lose(peer, lost.reason, lost.patience_s)
        for peer, lost in list(self.known.items()):
            if peer not in self.ctx.run.membership.members:
                del self.known[peer]  # its link broke while its removal was written
                continue
            if self._expendable(peer):  # this peer did not lead then, or its stage has another replica now
                self._remove(peer, lost.reason)
                continue
            if now >= lost.dial_at:
                lost.dial_at = math.inf
                self._dial(peer)
            if now < lost.until:
                continue
            # A lost link is one patience of silence already.
            overdue = connections.overdue(peer, now - lost.since + lost.patience_s, lost.patience_s)
            if overdue.verdict is Verdict.GONE and not self._waits_for(overdue):
                self._remove(peer, f"{lost.reason}, and it did not come back: {overdue}")
                continue
            self._cut_off |= overdue.verdict is Verdict.CUT_OFF
            if overdue.verdict is not Verdict.GONE:
                self._doubt(overdue)
            lost.until = now + min(REACH_AGAIN_S, lost.patience_s) * self.ctx.rng.uniform(0.75, 1.0)
            self._dial(peer)
            # A leader that cannot reach a member on which the run waits gives way to a voter that hears it.
            connections.indirect_probes.ask(peer, lost.patience_s, voters=self.last_of_its_stage(peer))

    def silent(self, overdue: Overdue) -> None:
        """Decide about a linked member that was silent for longer than its timeout, or that nobody hears. It
        is removed if the verdict is GONE; and if nobody hears it, the open step waits for it, and its timeout
        is over (for a data node the time of HELD_UP steps, if that is shorter). The last replica of a stage
        is waited for longer. A member that stays although the verdict is CUT_OFF is noted."""
        patience_s = overdue.patience_s
        if self.ctx.run.membership.stage_of(overdue.peer) == 0:
            patience_s = min(patience_s, HELD_UP * self._step.step_s() or patience_s)
        needed = overdue.silence_s + ROUNDING >= patience_s and self.absent.needed(overdue.peer)
        gone = overdue.verdict is Verdict.GONE or (overdue.to_all and needed)
        if gone and not self._waits_for(overdue):
            self._remove(overdue.peer, str(overdue))
        elif overdue.verdict is Verdict.CUT_OFF:
            self._doubt(overdue)

    def _doubt(self, overdue: Overdue) -> None:
        """Note in the event log (as a reason why the run waits) that a member which is not heard is not
        removed, and why."""
        if overdue.verdict is Verdict.CUT_OFF:
            self._wait("nobody is heard: this machine's own connection may be gone")
        else:
            self._wait(f"no connection to {overdue.peer[:8]}, which others hear: {overdue.account}")

    def _waits_for(self, overdue: Overdue) -> bool:
        """True, with a note, if a member with the verdict GONE stays for now, because it is the last replica
        of its stage: for the longer of LAST times its silence timeout and `StepQueries.worth_s`."""
        peer = overdue.peer
        if not self.last_of_its_stage(peer):
            return False
        if overdue.silence_s >= max(LAST * overdue.patience_s, self._step.worth_s(peer)):
            return False
        stage = self.ctx.run.membership.stage_of(peer)
        self._wait(f"{peer[:8]}, the last replica of stage {stage}, is out of reach: waiting for it")
        return True

    def _expendable(self, peer: str) -> bool:
        """True for a member that this peer has banned, unless it is the last replica of its stage: the run
        would stop, and an honest process may have been taken for a flood."""
        return self.ctx.rate_limits.banned(peer, self.ctx.clock.now) and not self.last_of_its_stage(peer)

    def held_up_by(self) -> list[str]:
        """Lost members for which the run waits: each is the only one with its stage's state, and has been
        silent for LAST times its silence timeout."""
        now, lost = self.ctx.clock.now, self.known.items()
        unreached = [p for p, known in lost if now - known.since >= (LAST - 1.0) * known.patience_s]
        return [peer for peer in unreached if self.last_of_its_stage(peer)]

    def last_of_its_stage(self, peer: str) -> bool:
        """True if `peer` is the only member with its stage's state. Other replicas that still have to fetch
        the last step do not count; reachable members that are to serve later do, for they have the state."""
        membership = self.ctx.run.membership
        stage = membership.stage_of(peer)
        serving = membership.serving(stage) if stage is not None else []
        others = [p for p in serving if p != peer and not self.absent.lacks(p)]
        if self._step.has_last(peer):
            others = [p for p in others if self._step.has_last(p)]
        others += [
            p
            for p in membership.active_from
            if p not in serving and membership.stage_of(p) == stage and self.ctx.reachable(p)
        ]
        return peer in serving and set(others) <= {peer, *self._going()}

    def _dial(self, peer: str, again: bool = True) -> None:
        """Dial a lost member: the first time (`again` False) at its own address, later also through carriers.
        Nothing if it has no address of that kind."""
        dialer, address = self.ctx.dialer, self.ctx.run.membership.members[peer].address
        if again or address:
            address = dialer.addresses(peer, again)
        if address:
            self.ctx.outbox.emit(Dial(peer, address))

    def deadline(self) -> float:
        """Time of the next `tick` (s)."""
        if not self.known:
            return self.absent.deadline()  # nearly always
        dials = [min(lost.until, lost.dial_at) for lost in self.known.values()]
        return min([*dials, self.absent.deadline()])
