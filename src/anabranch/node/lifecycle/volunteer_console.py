"""Messages for a volunteer: progress of joining the run, then this machine's share of the committed work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack

from anabranch.node.driver.peer_driver import LivePeer
from anabranch.observe.console.progress import Advance, progress
from anabranch.observe.events import Event, Note
from anabranch.observe.wording import duration
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.protocol.log.records import Commit, loss_total
from anabranch.protocol.messages import Audited, Piece, StateOffer, Welcome

#: Seconds between lines about committed steps.
EVERY_S = 10.0
#: Seconds without a step, and multiples of the last step's duration, after which a volunteer is told of the
#: wait; then it is told after twice as long each time. Plain choices: twice EVERY_S, and more than a repair.
STILL_S, STILL_STEPS = 20.0, 4.0


class VolunteerConsole:
    """Printer of messages about the peer `me` for the user of its machine. say: prints a sentence. steps():
    number of steps of the run. now(): clock, in seconds. total: units of work that the peer computed for
    committed steps, over all its parts in the run."""

    def __init__(
        self,
        me: str,
        say: Callable[[str], None],
        steps: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._say, self._run_steps, self._now = say, steps, now
        self._first: tuple[int, float] | None = None
        self._stage = 0
        self._admitted = self._serving = False
        self._bar = ExitStack()
        self._advance: Advance | None = None
        self._printed_at = float("-inf")
        self._stepped_at = self._tell_at = math.inf
        self._steps = 0
        self._mine = 0
        self._all = 0
        self._audits = 0
        self.total = 0

    def begin(self) -> None:
        """Reset progress and counts (not `total`), because this machine joins the run, or joins it again."""
        self._bar.close()
        self._advance, self._admitted, self._serving, self._first = None, False, False, None
        self._steps = self._mine = self._all = 0
        self._stepped_at = self._tell_at = math.inf

    def on_effect(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Describe():
                self._say("measuring this machine")
            case ev.Admitted(stage, _):
                self._stage, self._admitted = stage, True
                self._say(f"admitted to stage {stage}; initializing it")
                self._moves(self._now())
            case ev.BuildStage(stage) if self._admitted and stage != self._stage:
                self._stage, self._serving = stage, False
                self._steps = self._mine = self._all = 0
                self._say(f"moved to stage {stage} by the run; initializing it")
            case ev.Note("peer_active", fields) if fields["subject"] == self._me:
                self._serving = True
                self._say(f"serving stage {self._stage} from iteration {fields['from_iteration']} on")
            case ev.Send(_, Audited() as found):
                self._audited(found)
            case ev.Note("step", fields):
                self._step(fields["record"])
            case ev.Note("control", {"action": "pause", "t": t}):
                self._say(f"the run's owner pauses it after step {t}; this machine stays, and waits")
                self._tell_at = math.inf
            case ev.Note("control", {"action": "continue"}):
                self._moves(self._now())
                self._say("the run's owner lets it go on")

    def watch(self, live: LivePeer, event: ev.Event) -> None:
        """Show the download of the stage's state, a pause that goes on, and a run that stands still; to be
        called after each event of the peer."""
        if self._now() >= self._tell_at:
            self._stands_still(live)
        match event:
            case ev.Received(_, Welcome(t=t, held=held)) if 0 <= held <= t and not self._serving:
                self._tell_at = math.inf
                self._say(f"the run is paused by its owner after step {held}; this machine waits")
            case ev.Received(_, StateOffer(_, t, _, pieces)) if pieces and not self._serving:
                self._bar.close()
                label = f"fetching the state after iteration {t}"
                size = pieces * PIECE_BYTES / (1 << 20)
                self._say(f"{label}: at most {size:,.0f} MiB, from the run's peers")
                self._advance = self._bar.enter_context(progress(label, pieces * PIECE_BYTES, unit="bytes"))
            case ev.Received(_, Piece(), payload) if payload is not None and self._advance is not None:
                self._advance(PIECE_BYTES)
            case ev.Finished() if self._advance is not None:
                self._bar.close()
                self._advance = None

    def on_event(self, event: Event) -> None:
        if isinstance(event, Note):
            self._say(event.text)

    def _moves(self, now: float, still_s: float = STILL_S) -> None:
        """Note that the run made progress at the time `now` (s). The user is told that it stands still (by
        `watch`) once `still_s` seconds have passed since then."""
        self._stepped_at, self._tell_at = now, now + still_s

    def _stands_still(self, live: LivePeer) -> None:
        """Tell for how long no step was committed, and which stages nobody holds, if there are such."""
        waited = self._now() - self._stepped_at
        self._tell_at = self._stepped_at + 2.0 * waited
        run = live.peer.ctx.run
        held = {member.stage for member in run.membership.members.values()}
        lost = [stage for stage in range(run.settings.stages + 1) if stage not in held]
        why = f"the run waits for peers of stage {', '.join(map(str, lost))}; " if lost else ""
        self._say(f"no step was committed for {duration(waited)}; {why}this machine stays (Ctrl+C leaves)")

    def _step(self, record: Commit) -> None:
        if self._tell_at < math.inf:
            now = self._now()
            self._moves(now, max(STILL_S, STILL_STEPS * (now - self._stepped_at)))
        if not self._serving or self._stage >= len(record.stages):
            return
        stage = record.stages[self._stage]
        if self._me not in stage.members:
            return
        mine = stage.owners.count(stage.members.index(self._me))
        self._steps += 1
        self._mine += mine
        self._all += len(stage.owners)
        self.total += mine
        self._first = self._first or (record.t, self._now())
        if self._now() - self._printed_at >= EVERY_S:
            self._printed_at = self._now()
            steps = "this step's" if self._steps == 1 else f"the last {self._steps} steps'"
            self._say(
                f"step {record.t} of {self._run_steps()} is committed{self._loss_and_eta(record)}: this "
                f"machine computed {self._mine} of {steps} {self._all} units of work at stage {self._stage}, "
                f"{self.total} in all"
            )
            self._steps = self._mine = self._all = 0

    def _loss_and_eta(self, record: Commit) -> str:
        """Words ", loss X, eta Y" on a step: its loss (left out if not finite), and the time until the run's
        last step by the pace since the first in which this machine took part (left out in that one)."""
        loss = loss_total(record) / record.tokens if record.tokens else math.nan
        text = f", loss {loss:.3f}" if math.isfinite(loss) else ""
        t, at = self._first or (record.t, 0.0)
        if record.t <= t:
            return text
        left = max(0, self._run_steps() - record.t)
        return f"{text}, eta {duration(left * (self._now() - at) / (record.t - t))}"

    def _audited(self, found: Audited) -> None:
        """Tell the user of an audit's result (`found`): at once of a difference, or of what could not be had;
        of other audits now and then."""
        self._audits += 1
        if found.verdict == "same" and self._now() - self._printed_at < EVERY_S:
            return
        self._printed_at = self._now()
        what = f" ({found.what})" if found.what else ""
        text = f"audited the work of {found.subject[:8]} in step {found.t}: {found.verdict}{what}"
        self._say(f"{text}; {self._audits} audits here so far")

    def end(self) -> None:
        self._bar.close()
        if self.total:
            self._say(f"in all, {self.total} committed units of work were computed here; thank you")
