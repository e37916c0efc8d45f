"""Fold of a run's events into the bounded state that page and terminal show.

Sections of the state:

    run      key "": name, run_id, model, parameters, stages, microbatches, tokens, steps, t, phase, why,
             began, eta_s, held (step after which the run is paused, or null)
    nodes    `peers.py`
    flow     key "": hops, a list of [column, from, to, source, microbatches] of the last committed step,
             by keys of nodes
    totals   key "": repairs, doubles, skips, removals (of crashed peers), rollbacks, joins, refused,
             computed_s, sent, tokens, wasted_s (an estimate: passes of repaired microbatches at the lost
             peer, and of doubles); a rollback takes nothing from them
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.observe import events as log
from anabranch.observe.view.microbatch_flow import hops_of, shares_of
from anabranch.observe.view.peers import Peers, computing_s
from anabranch.observe.view.story import Sentence, Story
from anabranch.observe.view.time_series import BoundedList, Point, halved
from anabranch.observe.view.tracked_state import TrackedState
from anabranch.observe.wording import NAME_MAX, plain, without_addresses

#: Most steps, evaluations and sentences that are kept, to bound memory and the page's traffic.
STEPS_MAX, EVALUATIONS_MAX, STORY_MAX = 4000, 1000, 2500
#: Weight of the newest step in the moving average behind `eta_s`: about the last twenty steps count.
NEWEST = 0.1
#: Longest step that enters this average, in its means: a wait for peers or for another leader says nothing
#: about the steps to come. A plain choice; an iteration that stays slow is followed within ten steps.
LONGEST = 5.0

Line = list[float | str]
"""Line of the story: unix seconds, subject, key of the peer that it is about or "", text."""


class View:
    """State of one run as shown to people. state: sections of the module's docstring. peers: its section
    "nodes". steps, evaluations: points (columns: `time_series`). story: lines. time: latest time of an event
    (unix s). detailed: True to keep network addresses and all reasons for waiting in sentences, for whoever
    leads the run. on_sentence: called with each new sentence of the story."""

    def __init__(
        self, detailed: bool = False, on_sentence: Callable[[str], None] = lambda text: None
    ) -> None:
        self.state = TrackedState()
        self.peers = Peers(self.state)
        self.steps: BoundedList[Point] = BoundedList(STEPS_MAX, halved)
        self.evaluations: BoundedList[Point] = BoundedList(EVALUATIONS_MAX, halved)
        self.story: BoundedList[Line] = BoundedList(STORY_MAX, _shortened)
        self.time = 0.0
        self._story = Story(self.peers, detailed)
        self._on_sentence = on_sentence
        self._totals: dict[str, float] = {}
        self._seconds = 0.0
        self._steps_seen = 0
        self._split_t = self._split_count = 0
        self._split = [0.0] * 4

    def take(self, event: log.Event | log.Unknown) -> None:
        """Update state and story by one event, in file order; an unknown one changes nothing."""
        if isinstance(event, log.Unknown):
            return
        if self.time < event.time < 1e11:
            self.time = event.time
        if isinstance(event, log.Timing):  # most events are: fast path
            return self._timing(event)
        match event:
            case log.RunStarted():
                self._started(event)
            case log.PeerJoined():
                self.peers.joined(event)
                self._count("joins")
            case log.PeerActive():
                self.peers.active(event)
            case log.PeerRemoved():
                state = self.peers.removed(event)
                self._count("removals", state == "crashed")
                self._say(self._story.removed(event, state))
            case log.Suspected():
                self.peers.suspected(event, self._story.says(event))
            case log.Repair():
                self._repaired(event)
            case log.Step():
                self._step(event)
            case log.Evaluation():
                self.evaluations.add([event.time, event.t, event.loss, event.bits_per_byte])
            case log.Skip():
                self._count("skips")
            case log.Double():
                self._doubled(event)
            case log.Audit():
                self.peers.audited(event)
            case log.Refused():
                self._count("refused")
            case log.Rollback():
                self._count("rollbacks")
                self.peers.subtract_shares_after(event.t)
                self.state.set("run", "", t=event.t)
            case log.Controlled():
                self._controlled(event)
            case log.Waiting() if not self._story.heard(event) and self._held is None:
                self.state.set("run", "", phase="waiting", why=without_addresses(plain(event.reason)))
            case log.RunFinished():
                self.state.set("run", "", phase="finished", why=plain(event.reason), eta_s=0.0)
            case log.Vitals():
                self.peers.vitals(event)
        self._say(*self._story.tell(event))

    @property
    def _held(self) -> object:
        """Step after which the owner paused the run; None if it is not paused."""
        return self.state.get("run", "").get("held")

    # --- inside ----------------------------------------------------------------------------------

    def _say(self, *sentences: Sentence) -> None:
        """Add sentences to the story and hand them to `on_sentence`. Their time is the latest of all events
        so far: the story's lines are searched by time, and the clock of a stranger that lags would lead the
        search past the lines around it."""
        for subject, peer, text in sentences:
            key = self.peers.key(peer) if self.peers.get(peer) else ""
            self.story.add([self.time, subject, key, plain(text)])
            self._on_sentence(plain(text))

    def _count(self, name: str, by: float = 1) -> None:
        self._totals[name] = self._totals.get(name, 0) + by
        self.state.set("totals", "", **{name: round(self._totals[name], 3)})

    def _started(self, event: log.RunStarted) -> None:
        self._steps_seen = 0
        self.state.set(
            "run", "", name=plain(event.run, NAME_MAX), run_id=plain(event.run_id, NAME_MAX),
            model=plain(event.model, NAME_MAX), parameters=event.parameters, stages=min(event.stages, 1024),
            microbatches=event.microbatches, tokens=event.tokens_per_iteration, steps=event.steps,
            t=event.from_iteration, phase="waiting", why="", eta_s=None, held=None,
            began=self.state.get("run", "").get("began") or event.time,
        )  # fmt: skip

    def _controlled(self, event: log.Controlled) -> None:
        match event.action:
            case "pause":
                why = f"by its owner, after step {event.t}"
                self.state.set("run", "", phase="paused", why=why, held=event.t, eta_s=None)
            case "continue":
                self.state.set("run", "", phase="training", why="", held=None)
            case "steps":
                self.state.set("run", "", steps=event.t)

    def _repaired(self, event: log.Repair) -> None:
        self._count("repairs")
        node = self.peers.get(event.dead)
        if node:
            passes = node["forward_s"] + (node["backward_s"] if event.reason.startswith("redo") else 0.0)
            self._count("wasted_s", max(0.0, passes))
        newly_lost = self.peers.lost(event.dead, self._story.says(event) + event.reason, event.time)
        self._say(*self._story.repaired(event, newly_lost))

    def _doubled(self, event: log.Double) -> None:
        node = self.peers.get(event.subtracted)
        self._count("doubles")
        if node:
            self._count("wasted_s", max(0.0, node["forward_s"] + node["backward_s"]))

    def _step(self, event: log.Step) -> None:
        stages = self.state.get("run", "").get("stages", 0)
        self.peers.stepped(event.t, shares_of(event.owners), event.time)
        if event.owners:
            key = self.peers.key
            hops = [
                [column, key(start), key(end), key(source), count]
                for (column, start, end, source), count in sorted(hops_of(event.owners, stages).items())
            ]
            self.state.set("flow", "", hops=hops)
        self._say(*self._story.committed(event.t, event.owners))
        # The first step's seconds include the start of the swarm; the mean begins with the second.
        self._steps_seen += 1
        if event.seconds > 0:
            weight = 1.0 if self._steps_seen <= 2 else NEWEST
            seconds = event.seconds if weight == 1.0 else min(event.seconds, LONGEST * self._seconds)
            self._seconds = (1 - weight) * self._seconds + weight * seconds
        left = max(0, self.state.get("run", "").get("steps", 0) - event.t)
        self.state.set("run", "", t=event.t)
        if self.state.get("run", "").get("held") is None:
            self.state.set("run", "", phase="training", why="", eta_s=round(left * self._seconds, 1))
        rate = event.tokens / event.seconds if event.seconds > 0 else None
        self._totals["tokens"] = self._totals.get("tokens", 0) + event.tokens
        self.state.set("totals", "", **{name: round(total, 3) for name, total in self._totals.items()})
        self._split_t, self._split_count, self._split = event.t, 0, [0.0] * 4
        self.steps.add(
            [event.time, event.t, event.loss, rate, event.seconds or None, None, None, None, None,
             sum(event.alive), event.grad_norm, event.learning_rate]
        )  # fmt: skip

    def _timing(self, event: log.Timing) -> None:
        self.peers.timed(event)
        totals = self._totals  # shown with the next step
        totals["computed_s"] = totals.get("computed_s", 0.0) + max(0.0, computing_s(event))
        totals["sent"] = totals.get("sent", 0) + max(0, event.bytes_activations + event.bytes_reduce)
        if event.stage == 0 or event.t != self._split_t or not self.steps.items or event.span_s <= 0:
            return
        compute = event.forward_s + event.input_gradient_s + event.weight_gradient_s
        waiting = max(0.0, event.span_s - compute - event.transfer_s - event.reducing_s)
        parts = (compute, event.transfer_s, event.reducing_s, waiting)
        self._split_count += 1
        self._split = [total + part for total, part in zip(self._split, parts, strict=True)]
        means = [round(total / self._split_count, 5) for total in self._split]
        last = self.steps.items[-1]
        self.steps.replace_last([*last[:5], *means, *last[9:]])


def _shortened(lines: list[Line]) -> list[Line]:
    """Story without a fifth of its lines: the least important of them go, of these the oldest first; the
    latest 200 stay."""
    worth = {"note": 0, "progress": 1, "crew": 2, "repair": 3, "trouble": 4}
    order = sorted(range(len(lines) - 200), key=lambda at: (worth[str(lines[at][1])], at))
    gone = set(order[: len(lines) // 5])
    return [line for at, line in enumerate(lines) if at not in gone]
