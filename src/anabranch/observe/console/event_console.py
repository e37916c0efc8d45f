"""Terminal output of a run, as text or JSON: the step line of each step, and sentences about other events."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import IO

from anabranch.observe import events as log
from anabranch.observe.console.progress import Ticker
from anabranch.observe.console.step_line import StepLine, wants_colour
from anabranch.observe.view.run_view import View
from anabranch.observe.wording import escaped, plain_lines

#: Events whose sentences are left to the page: too frequent for a terminal, or without news for its reader.
_OMITTED = (log.Suspected, log.Checkpoint, log.FaultDelivered, log.PeerActive)


class Console:
    """Printer of a run's events on a stream (None: stdout): a step line for each step, a sentence for most
    other events. steps: number of the run's steps, until an event tells. While its context is entered, a
    terminal's last line tells how long the next step has been under way."""

    def __init__(self, steps: int = 0, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._line = StepLine(wants_colour(self._stream))
        self._ticker = Ticker(self._stream, plain=False)
        self._view = View(detailed=True, on_sentence=self._say_of_event)
        self._omits = False
        self._sentence = ""
        # Peer id -> its stage and the first iteration that it serves.
        self._serving: dict[str, tuple[int, int]] = {}
        self._has_step = False
        self.steps = steps
        self.last_evaluation: log.Evaluation | None = None
        self.first_evaluation: log.Evaluation | None = None

    def __enter__(self) -> Console:
        self._ticker.__enter__()
        self._ticker.begin("waiting for the next step")
        return self

    def __exit__(self, *_: object) -> None:
        self._ticker.__exit__()

    def say(self, text: str) -> None:
        """Print a text that is not about an event, without control characters."""
        self._print(plain_lines(text))

    def _print(self, text: str) -> None:
        """Print a text as it is, with this program's own colours. Control characters of others must be gone
        by now."""
        with self._ticker.aside():
            print(text, file=self._stream, flush=True)

    def on_event(self, event: log.Event) -> None:
        # A resumed run first removes the peers of its former part, which this console never saw.
        unseen = isinstance(event, log.PeerRemoved) and not self._view.peers.get(event.subject)
        self._omits = unseen or isinstance(event, _OMITTED)
        self._view.take(event)
        match event:
            case log.RunStarted():
                self.steps = event.steps
            case log.PeerActive():
                self._serving[event.subject] = event.stage, event.from_iteration
            case log.PeerRemoved():
                self._serving.pop(event.subject, None)
            case log.Step():
                # The first step's seconds include the start of the swarm, which says little about the rest.
                eta_s = self._view.state.get("run", "").get("eta_s") if self._has_step else None
                self._has_step = True
                shares = [self._share(event, stage) for stage in sorted(event.owners) if stage > 0]
                self._say_of_event(self._line.format(event, self.steps, eta_s, shares))
                self._ticker.begin(f"step {event.t + 1}" if event.t < self.steps else "ending the run")
            case log.Evaluation():
                self.first_evaluation = self.first_evaluation or event
                self.last_evaluation = event
            case log.Controlled(action="steps"):
                self.steps = event.t

    def _say_of_event(self, text: str) -> None:
        """Print a text about the current event. Nothing if events of its kind are omitted, or if the text is
        the same as the last one: what is tried again fails, or waits, in the same words."""
        if not self._omits and text != self._sentence:
            self._sentence = text
            self._print(text)

    def _share(self, event: log.Step, stage: int) -> list[int]:
        """Microbatches of a step at each replica that serves a relay stage (0 for an idle one), in the order
        of the replicas' names."""
        served = Counter(event.owners[stage].values())
        idle = {peer for peer, (at, first) in self._serving.items() if at == stage and first <= event.t}
        names = {peer: self._view.peers.called(peer) for peer in served.keys() | idle}
        return [served[peer] for peer in sorted(names, key=lambda peer: (names[peer], peer))]


def said(text: str, stream: IO[str] | None = None) -> None:
    """Print a sentence on `stream` (None: stdout) as a line of JSON: {"kind": "said", "time": unix seconds,
    "text": ...}."""
    line = {"kind": "said", "time": time.time(), "text": text}
    print(escaped(json.dumps(line, ensure_ascii=False)), file=stream or sys.stdout, flush=True)


class JsonConsole(Console):
    """Printer of events as lines of JSON, as they are in the event log, and of sentences as `said` prints
    them. No step lines, colours or times are shown."""

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing else than JSON was shown."""

    def say(self, text: str) -> None:
        said(text, self._stream)

    def on_event(self, event: log.Event) -> None:
        print(escaped(log.encode_event(event).decode()), file=self._stream, flush=True)
        super().on_event(event)

    def _say_of_event(self, text: str) -> None:
        """Print nothing: the event itself was printed already, and tells all that the sentence does."""
