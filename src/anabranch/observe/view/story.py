"""Story of a run: sentences about its events, each with a subject by which it can be filtered."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from anabranch.observe import events as log
from anabranch.observe.view.peers import AUDITOR, Peers
from anabranch.observe.wording import counted, listed, number, plain, without_addresses

#: Subjects of sentences: membership, failures, their repair, progress, everything else.
SUBJECTS = ("crew", "trouble", "repair", "progress", "note")
#: Most iterations whose repairs wait for the commit, which names the new owners.
PENDING_MAX = 64
#: Least seconds between sentences about waiting: the reason changes with each peer that joins.
WAITING_S = 5.0
#: Class of a message at the beginning of the reason why it was refused, which people need not know.
_MESSAGE = re.compile(r"^[A-Z][A-Za-z]+: ")

Sentence = tuple[str, str, str]
"""(subject, peer that the sentence is about or "", text)."""


class Story:
    """Writer of sentences about events. Events come in the log's order: a run start names the founder, and of
    waits soon after each other one is told. peers: the peers' records, updated with each event before.
    detailed: True to keep network addresses and all reasons for waiting, for whoever leads the run."""

    def __init__(self, peers: Peers, detailed: bool = False) -> None:
        self._peers = peers
        self._detailed = detailed
        self._repairs: dict[int, dict[tuple[str, int], set[int]]] = {}
        self._waited_at = float("-inf")
        self._has_step = False
        self._founder = ""

    def heard(self, event: log.Event) -> bool:
        """True if another peer reported `event`: not the founder, nor the supervisor (no peer's name)."""
        return event.peer not in ("", self._founder)

    def says(self, event: log.Event) -> str:
        """Begin of a text about an event ("ada says: ") if another peer reported it (`heard`); else ""."""
        return f"{self._peers.called(event.peer)} says: " if self.heard(event) else ""

    def tell(self, event: log.Event) -> list[Sentence]:
        """Sentences about an event; [] if it needs none, and for events that another method is about. """
        name = self._peers.called
        match event:
            case log.RunStarted():
                self._founder = event.peer
                return [("progress", "", self._started(event))]
            case log.PeerJoined():
                return [("crew", event.subject, f"{name(event.subject)} joins as {_part(event)}")]
            case log.PeerActive() if event.from_iteration > 1:
                text = f"{name(event.subject)} serves from step {event.from_iteration} on"
                return [("crew", event.subject, text)]
            case log.Suspected():
                return [self._suspected(event)]
            case log.Evaluation():
                bits = f", {event.bits_per_byte:.3f} bits per byte" if event.bits_per_byte is not None else ""
                return [("progress", "", f"held out after step {event.t}: loss {number(event.loss)}{bits}")]
            case log.Skip():
                return [("trouble", "", _skipped(event))]
            case log.Audit() if event.verdict in ("different", "withheld", "expired"):
                return [("trouble", event.subject, self._finding(event))]
            case log.Refused() if event.count == 1:
                sender = f"{name(event.subject)}: " if event.subject else ""
                reason = _MESSAGE.sub("", event.reason)
                refused = f"refused {sender}{self._reason(reason)}"
                text = f"{name(event.peer)} {'says that it ' if self.heard(event) else ''}{refused}"
                return [("trouble", event.subject or event.peer, text)]
            case log.FaultDelivered():
                fault = f"{plain(event.fault)} at {plain(event.phase)}"
                if self.heard(event):
                    return [("note", event.peer, f"{self.says(event)}a planned fault struck it: {fault}")]
                return [("trouble", event.peer, f"a planned fault struck {name(event.peer)}: {fault}")]
            case log.Checkpoint():
                return [("progress", "", f"the state after step {event.t} is on disk")]
            case log.Waiting() if self.heard(event):
                text = f"{name(event.peer)} says that it waits: {self._reason(event.reason)}"
                return [("note", event.peer, text)]
            case log.Waiting() if self._detailed or event.time - self._waited_at >= WAITING_S:
                self._waited_at = event.time
                return [("trouble" if self._is_trouble(event) else "note", "", self._reason(event.reason))]
            case log.Rollback():
                why = f": {self._reason(event.reason)}" if event.reason else ""
                return [("repair", "", f"the run went back to the state after step {event.t}{why}")]
            case log.Controlled():
                return [("progress", "", plain(event.words()))]
            case log.RunFinished():
                return [("progress", "", f"the run ended after step {event.t}: {self._reason(event.reason)}")]
            case log.Note():
                text = self._reason(event.text)
                if not event.peer:  # from the supervisor, about one of its processes
                    return [("trouble" if "ended by" in text else "note", "", text)]
                if not self._peers.get(event.peer):  # not a member yet; a guest tells its user, too
                    return [] if self.heard(event) else [("note", "", text)]
                says = " says" if self.heard(event) else ""
                return [("note", event.peer, f"{name(event.peer)}{says}: {text}")]
        return []

    def removed(self, event: log.PeerRemoved, state: str) -> Sentence:
        """Sentence about a peer's removal from the run. state: "left", "moved" or "crashed", as
        `Peers.removed` found."""
        name, reason = self._peers.called(event.subject), self._reason(event.reason)
        if state == "left":
            return "crew", event.subject, f"{name} left stage {event.stage}: {reason.removeprefix('left: ')}"
        if state == "moved":
            return "crew", event.subject, f"{name} leaves stage {event.stage}: {reason}"
        others = self._peers.serving(event.stage)
        left = f"{counted(others, 'replica')} of" if others else "no replica of"
        rest = f"{left} stage {event.stage} {'are' if others > 1 else 'is'} left"
        return "trouble", event.subject, f"{name} is gone from stage {event.stage} ({reason}); {rest}"

    def repaired(self, event: log.Repair, newly_lost: bool) -> list[Sentence]:
        """Record for `committed` that a microbatch was sent to another replica. Returns a sentence if its
        former holder was not known as lost before (newly_lost), else []."""
        if event.t in self._repairs or len(self._repairs) < PENDING_MAX:
            groups = self._repairs.setdefault(event.t, defaultdict(set))
            groups[event.dead, event.stage].add(event.index)
        if not newly_lost:
            return []
        dead, observer = self._peers.called(event.dead), self._peers.called(event.peer)
        text = f"{dead} stopped answering {observer}; its work at stage {event.stage} goes to others"
        return [("trouble", event.dead, self.says(event) + text)]

    def committed(self, t: int, owners: Mapping[int, Mapping[int, str]]) -> list[Sentence]:
        """Sentences about committed step t: on the first step, and on who redid the step's microbatches that
        `repaired` recorded, which are forgotten then. owners: as of `events.Step`."""
        sentences: list[Sentence] = []
        if not self._has_step:
            self._has_step = True
            peers = counted(self._peers.present(), "peer")
            sentences.append(("progress", "", f"{peers} committed the first step, step {t}"))
        for (dead, stage), indices in self._repairs.pop(t, {}).items():
            units = owners.get(stage, {})
            holders = {units[index] for index in indices if index in units and stage > 0} - {dead}
            by = f" by {listed(sorted(map(self._peers.called, holders)))}" if holders else ""
            were = "was" if len(indices) == 1 else "were"
            of = f" of {self._peers.called(dead)}" if dead else ""
            text = f"{counted(len(indices), 'microbatch', 'es')}{of} at stage {stage} {were} redone{by}"
            sentences.append(("repair", dead, f"{text}; step {t} lost nothing"))
        for old in [other for other in self._repairs if other < t - PENDING_MAX]:
            del self._repairs[old]
        return sentences

    def _started(self, event: log.RunStarted) -> str:
        self._has_step = False
        begins = f"resumes from step {event.from_iteration}" if event.from_iteration else "begins"
        return (
            f"the run {begins}: {plain(event.model)}, {event.parameters:,} parameters, "
            f"{counted(event.stages, 'relay stage')}, {counted(event.microbatches, 'microbatch', 'es')} and "
            f"{event.tokens_per_iteration:,} tokens a step"
        )

    def _finding(self, event: log.Audit) -> str:
        what = f": {self._reason(event.what)}" if event.what else ""
        about = f"the work of {self._peers.called(event.subject)} at stage {event.stage} in step {event.t}"
        if event.verdict == "expired":
            return f"nobody reported in time whether {about} is right"
        return f"{self._peers.called(event.auditor)} finds {about} {event.verdict}{what}"

    def _suspected(self, event: log.Suspected) -> Sentence:
        subject, peer, text = self._verdict(event)
        return subject, peer, self.says(event) + text

    def _verdict(self, event: log.Suspected) -> Sentence:
        observer, suspect = self._peers.called(event.peer), self._peers.called(event.subject)
        match event.verdict:
            case "suspected":
                return "trouble", event.subject, f"{observer} does not hear {suspect} and works around it"
            case "refuted":
                return "repair", event.subject, f"{suspect} is heard again by {observer}"
            case "the link is bad":
                text = f"the link between {observer} and {suspect} is bad; it is reconnected"
                return "trouble", event.subject, text
            case "nobody is heard":
                return "trouble", event.peer, f"{observer} hears nobody: it seems to be cut off"
        return "trouble", event.subject, f"{observer} considers {suspect} gone: {self._reason(event.reason)}"

    def _reason(self, reason: str) -> str:
        named = self._peers.with_names(plain(reason))
        return named if self._detailed else without_addresses(named)

    def _is_trouble(self, event: log.Waiting) -> bool:
        """True if a wait is a sign of something wrong: the run has committed a step, and does not merely wait
        for a joiner to connect to the others."""
        return self._has_step and " is ready, but " not in event.reason


def _part(event: log.PeerJoined) -> str:
    """Words for the part that a new member takes in the run, such as "a relay of stage 2"."""
    if event.stage == 0:
        return "a data node"
    return f"{'an auditor' if event.role == AUDITOR else 'a relay'} of stage {event.stage}"


def _skipped(event: log.Skip) -> str:
    """Sentence about a skipped step or round."""
    if event.tensor == log.STRANDED:
        return f"round {event.t} was skipped: none of its slots had its machines any more"
    where = f"{plain(event.tensor)} of microbatch {event.index} at stage {event.stage}"
    return f"step {event.t} was skipped: {where} was not finite or out of range"
