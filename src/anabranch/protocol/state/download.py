"""Download of one stage's state from several peers at once (R14), each piece checked by its hash.

The downloading peer requests piece after piece, so the download cannot crowd out training traffic. Sources
that offer the same bytes share the pieces; a piece that one does not deliver is requested from another. When
all pieces have arrived, one task hashes them. A piece with another hash than offered disqualifies its source;
pieces that together are not the state disqualify all sources of that offer.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import PIECES_MAX, CheckState, Payload, Result
from anabranch.protocol.messages import FetchPiece, FetchState, Piece, Spoilt, StateOffer

#: Seconds without an answer after which a source is asked again, or the next source; doubled each time. The
#: wait for pieces is at least their transfer time over the slowest plausible link.
ANSWER_S = 10.0
#: Pieces requested from one source at a time.
WINDOW = 2
#: Sources that deliver at the same time.
AT_ONCE = 4
#: Number of times that each source is asked before the download fails.
ROUNDS = 3
#: Pieces that an offer may have, as a multiple of the stage's weights and moments, and some for the smallest
#: stages. Plain choice: covers what delayed iterations keep of the next step.
PIECES_SHARE, PIECES_MORE = 2.0, 8
#: Source of the pieces that this machine kept; no peer has this id.
_DISK = ""

Pieces = tuple[Payload, ...]


@dataclass(frozen=True)
class State:
    """Serialised state (weights, moments, counters) of a stage after iteration t: pieces and their hashes."""

    stage: int
    t: int
    fingerprint: str
    pieces: Pieces
    hashes: tuple[str, ...]


class SourceStatus(Enum):
    """Status of one source peer in a download: not asked, asked, delivering, or of no use."""

    IDLE = "not asked"
    ASKED = "asked what it has"
    PULLED = "pulled from"
    OUT = "of no use"


@dataclass
class Source:
    """Source of a download: a peer that may have the state. An IDLE source with an offer has other bytes than
    those being downloaded. tries: number of times that it may still be asked. patience_s: wait for its next
    answer. due: time (s) at which that is overdue. asked: pieces that were requested from it and have not
    arrived. slow: number of times that the bytes which it offered were given up for others. returns: number
    of times that its link may still come back and give it the time anew, before it sends a piece."""

    peer: str
    tries: int = ROUNDS
    status: SourceStatus = SourceStatus.IDLE
    patience_s: float = ANSWER_S
    due: float = math.inf
    offer: StateOffer | None = None
    asked: set[int] = field(default_factory=set)
    slow: int = 0
    returns: int = ROUNDS


class Download:
    """Download of the state of `stage` after iteration `t` (-1: the latest that the first source has).

    fingerprint: fingerprint that the state must have ("": any offer is accepted, and the caller checks the
    state). on_done(state), on_fail(reason): callbacks, one of which is called unless the download is
    cancelled; it fails when no source can deliver the state. check: True if the worker hashes the pieces at
    the end, when it is idle; else nothing is checked. first: source whose offer was chosen. kept: state of
    the stage that this machine has on disk; its pieces that are the offered ones are not requested (without
    `check` all are).
    """

    def __init__(
        self,
        ctx: PeerContext,
        stage: int,
        t: int,
        sources: Sequence[str],
        on_done: Callable[[State], None],
        on_fail: Callable[[str], None],
        fingerprint: str = "",
        check: bool = True,
        kept: State | None = None,
    ) -> None:
        self.ctx = ctx
        self.stage = stage
        self.asked_t = t
        self.over, self.first = False, ""
        self.sources = {peer: Source(peer) for peer in sources}
        self._fingerprint = fingerprint
        self._check = check
        self._kept = kept
        self._chosen: StateOffer | None = None
        self._pieces: dict[int, tuple[Payload, str]] = {}
        self._pending: deque[int] = deque()
        self._until = math.inf
        """Time (s) at which the chosen bytes are given up if another source offers others."""
        self._reason = "no source offers it"
        self._on_done = on_done
        self._on_fail = on_fail

    def start(self) -> None:
        self._ask()

    def cancel(self) -> None:
        """End the download, without either callback; nothing if it is over. Messages that arrive later are
        ignored."""
        self.over = True

    @property
    def givers(self) -> set[str]:
        """Sources that offered the state which is, or was, downloaded; empty before the first offer is
        chosen."""
        return {s.peer for s in self.sources.values() if self._chosen is not None and s.offer == self._chosen}

    @property
    def is_sure(self) -> bool:
        """True if the fingerprint was known before: what is downloaded is that very state."""
        return bool(self._fingerprint)

    @property
    def _t(self) -> int:
        return self._chosen.t if self._chosen is not None else self.asked_t

    # --- asking --------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask idle sources what they offer, so that up to AT_ONCE sources are busy; only one while the newest
        state is wanted (t = -1), since its offer fixes the iteration. If nobody is busy or can be asked:
        download other bytes that a source offered before, or fail."""
        if self.over:
            return
        busy = sum(s.status in (SourceStatus.ASKED, SourceStatus.PULLED) for s in self.sources.values())
        idle = [s for s in self.sources.values() if s.status is SourceStatus.IDLE and s.tries > 0]
        idle.sort(key=lambda source: -source.tries)
        room = (AT_ONCE if self._t >= 0 else 1) - busy
        for source in idle[: max(0, room)]:
            self._ask_source(source)
            busy += 1
        if busy:
            return
        if others := self._others():
            self._choose_anew(others)
        else:
            self.over = True
            self._on_fail(f"the state of stage {self.stage} could not be fetched: {self._reason}")

    def _others(self) -> list[Source]:
        """Sources that offered other bytes than those being downloaded, or are past that iteration while the
        newest state is wanted, and whose turn it is: those that were given up least often, so that a few that
        alternate do not keep another one out."""
        idle = [source for source in self.sources.values() if source.status is SourceStatus.IDLE]
        others = [source for source in idle if source.offer not in (None, self._chosen)]
        fewest = min((source.slow for source in others), default=0)
        return [source for source in others if source.slow == fewest]

    def _ask_source(self, source: Source) -> None:
        source.tries -= 1
        source.status, source.offer = SourceStatus.ASKED, None
        self.ctx.dialer.reach(source.peer)
        # An unreachable source is passed over soon; its link may come back by its next turn.
        reachable = self.ctx.reachable(source.peer)
        source.due = self.ctx.clock.now + (source.patience_s if reachable else ANSWER_S / 10.0)
        self.ctx.outbox.send(source.peer, FetchState(self.stage, self._t))

    def on_offer(self, peer: str, offer: StateOffer) -> None:
        source = self.sources.get(peer)
        if self.over or source is None or offer.stage != self.stage or source.status is SourceStatus.OUT:
            return
        if self._t >= 0 and offer.t != self._t:
            return  # an answer to another download
        if offer.pieces and self._implausible(offer):
            self._condemn(source, "StateOffer: not the state that the run has")
            self._ask()
        elif self._t >= 0 and offer.pieces == 0:
            # The source is past that iteration and will never have its state again, but may have a newer one.
            self._reason = f"no source has the state after iteration {self._t} any more"
            if self.asked_t < 0 and source.status is SourceStatus.ASKED:
                source.offer = offer
                self._put_aside(source, SourceStatus.IDLE, tries=0)
            else:
                self._put_aside(source, SourceStatus.OUT)
            self._ask()
        elif offer.pieces == 0:
            if source.status is SourceStatus.ASKED:
                self._reason = f"{peer[:8]} does not have it"
                source.due = min(source.due, self.ctx.clock.now + ANSWER_S / 10.0)  # however often it says so
        elif source.status is SourceStatus.ASKED:
            source.offer = offer
            first = self._chosen is None
            if first:
                self._choose(peer, offer)
            if offer == self._chosen:
                source.status = SourceStatus.PULLED
                source.patience_s = max(source.patience_s, self._pieces_s(source))
                source.due = self.ctx.clock.now + source.patience_s
                self._pull(source)
                if first and len(self._pieces) == offer.pieces:  # all are on disk
                    self._complete(offer)
                    return
            else:
                self._put_aside(source, SourceStatus.IDLE, tries=0)
            self._ask()

    def _choose(self, peer: str, offer: StateOffer) -> None:
        """Download the bytes of the `offer` of a peer, but for the pieces that this machine has on disk. Each
        time that they were given up before doubles the time that they have: an honest source may serve
        several joiners, and train."""
        self._chosen, self.first, kept = offer, peer, self._kept
        whole_s = self.ctx.costs.coming_s(peer, self.ctx.run.settings.state_bytes_of(self.stage))
        self._until = self.ctx.clock.now + ANSWER_S + whole_s * 2.0 ** self.sources[peer].slow
        if kept is not None and self._check:
            hashes = offer.hashes
            if (kept.t, kept.fingerprint, len(kept.pieces)) == (offer.t, offer.fingerprint, offer.pieces):
                hashes = kept.hashes
            known = dict(zip(kept.hashes, kept.pieces, strict=True))
            self._pieces = {n: (known[one], _DISK) for n, one in enumerate(hashes) if one in known}
        if self._pieces:
            stage, text = self.stage, f"{len(self._pieces)} of {offer.pieces} pieces"
            text = f"{text} of the state of stage {stage} are on this machine's disk: they are not fetched"
            self.ctx.outbox.note("note", text=text)
        self._pending = deque(piece for piece in range(offer.pieces) if piece not in self._pieces)

    def _implausible(self, offer: StateOffer) -> bool:
        """True if an offer cannot be the state: it has another fingerprint than wanted, more pieces than a
        state of that stage can have, or not one hash per piece."""
        hashes, settings = len(offer.hashes), self.ctx.run.settings
        pieces = settings.state_bytes_of(self.stage) / settings.piece_bytes or math.inf
        most = min(PIECES_MAX, PIECES_SHARE * pieces + PIECES_MORE)
        if (hashes and hashes != offer.pieces) or offer.pieces > most:
            return True
        return bool(self._fingerprint) and offer.fingerprint != self._fingerprint

    def _condemn(self, source: Source, reason: str) -> None:
        """Exclude a source that sent wrong bytes, and report it to the leader if the fingerprint of the state
        is known."""
        self.ctx.outbox.note("refused", subject=source.peer, reason=reason, count=1)
        self._reason = f"{source.peer[:8]} sent what is not the state"
        if self._fingerprint:
            self.ctx.outbox.send(self.ctx.log.leader, Spoilt(self.stage, self._t, source.peer))
        self._put_aside(source, SourceStatus.OUT)

    def _put_aside(self, source: Source, status: SourceStatus, tries: int | None = None) -> None:
        """Stop to download from a source, for the reason in `status`; the pieces that it owes are requested
        from others. tries: times that it may still be asked (None: as before)."""
        source.status, source.due = status, math.inf
        owed, source.asked = source.asked, set()
        elsewhere = {piece for other in self.sources.values() for piece in other.asked}
        self._pending.extendleft(sorted(owed - elsewhere - self._pieces.keys(), reverse=True))
        source.tries = source.tries if tries is None else tries

    # --- pieces --------------------------------------------------------------------------------

    def _pull(self, source: Source) -> None:
        """Request the next pieces from a source, until WINDOW pieces are outstanding; without any its answer
        is no longer awaited. An offer must be chosen."""
        assert self._chosen is not None
        for piece in list(self._wanted(source)):
            source.asked.add(piece)
            self.ctx.outbox.send(source.peer, FetchPiece(self.stage, self._chosen.t, piece))
        if not source.asked:
            source.due = math.inf

    def _pull_all(self) -> None:
        for source in self.sources.values():
            if source.status is SourceStatus.PULLED:
                self._pull(source)

    def _pieces_s(self, source: Source) -> float:
        """Longest plausible seconds until WINDOW pieces from a source have arrived."""
        assert self._chosen is not None
        settings = self.ctx.run.settings
        piece_bytes = min(settings.piece_bytes, settings.state_bytes_of(self.stage) / self._chosen.pieces)
        return self.ctx.costs.coming_s(source.peer, WINDOW * piece_bytes)

    def _wanted(self, source: Source) -> Iterator[int]:
        """Pieces to request from a source: unrequested ones first, then those that exactly one other source
        was asked for and has not delivered."""
        room = WINDOW - len(source.asked)
        while room > 0 and self._pending:
            room -= 1
            yield self._pending.popleft()
        owed = Counter(piece for other in self.sources.values() for piece in other.asked)
        for piece in sorted(owed):
            if room > 0 and owed[piece] == 1 and piece not in source.asked and piece not in self._pieces:
                room -= 1
                yield piece

    def on_piece(self, peer: str, message: Piece, payload: Payload | None) -> None:
        source = self.sources.get(peer)
        if self.over or source is None or source.offer is None or payload is None:
            return
        if source.offer != self._chosen or message.stage != self.stage or message.t != self._t:
            return
        if message.piece not in source.asked:
            return
        source.asked.discard(message.piece)
        source.returns = ROUNDS
        self.ctx.links.payloads_come(peer)
        source.due = self.ctx.clock.now + source.patience_s
        self._pieces.setdefault(message.piece, (payload, peer))
        self._pull_all()
        if len(self._pieces) == self._chosen.pieces:
            self._complete(self._chosen)

    def _complete(self, offer: StateOffer) -> None:
        """Check the hashes of an offer whose pieces have all arrived, and deliver the state, or fetch wrong
        pieces from others."""
        for source in self.sources.values():
            source.due = math.inf
            source.asked.clear()
        pieces = tuple(self._pieces[piece][0] for piece in range(offer.pieces))
        state = State(self.stage, offer.t, offer.fingerprint, pieces, offer.hashes)
        if not self._check:
            self.over = True
            self._on_done(state)
            return

        def checked(result: Result) -> None:
            if self.over:
                return
            pairs = zip(result.hashes, offer.hashes, strict=False)  # a checkpoint's offer may have no hashes
            wrong = [piece for piece, (found, offered) in enumerate(pairs) if found != offered]
            from_disk = [piece for piece, (_, peer) in self._pieces.items() if peer == _DISK]
            if wrong:
                self._replace(wrong)
            elif from_disk and not offer.hashes and (result.error or result.fingerprint != offer.fingerprint):
                self._replace(from_disk)  # they may be what is damaged
            elif result.error or result.fingerprint != offer.fingerprint:
                self._start_over(offer)
            else:
                self.over = True
                self._on_done(state)

        self.ctx.tasks.submit(TaskPriority.BACKGROUND, CheckState(offer.t, self.stage), pieces, checked)

    def _replace(self, wrong: Sequence[int]) -> None:
        """Request the pieces `wrong` again: each has a wrong hash, or comes from disk and may be what is
        damaged. Peers that sent one are excluded, and reported to the leader if the fingerprint was known; if
        one is from disk, nothing more is taken from there."""
        for piece in wrong:
            _, peer = self._pieces.pop(piece)
            self._pending.append(piece)
            if peer == _DISK:
                self._kept = None
            elif self.sources[peer].status is not SourceStatus.OUT:
                self._condemn(self.sources[peer], f"Piece {piece} of stage {self.stage}: not what it offered")
        for source in self.sources.values():
            if source.status is SourceStatus.PULLED:
                source.due = self.ctx.clock.now + source.patience_s
                self._pull(source)
        self._ask()

    def _start_over(self, offer: StateOffer) -> None:
        """Disqualify all sources of an offer whose pieces together are not the state, although none has
        another hash than offered, drop the pieces, and ask others. One that offers the same only then is
        asked for all its pieces."""
        for source in self.sources.values():
            if source.offer == offer and source.status is not SourceStatus.OUT:
                self._condemn(source, f"StateOffer of stage {self.stage}: its pieces are not that state")
        self._choose_anew(self._others())

    def _choose_anew(self, sources: Sequence[Source]) -> None:
        """Change to another offer, because no usable source is left for the present one, they took too long,
        or it is false: drop its pieces and ask the other `sources`."""
        self._chosen, self._until = None, math.inf
        self._pieces.clear()
        self._pending.clear()
        for source in sources:
            source.tries, source.offer = 1, None
        self._ask()

    # --- links and time ------------------------------------------------------------------------

    def link_down(self, peer: str) -> None:
        """Shorten the wait for a source whose link broke, so that another (or the same) is asked soon;
        nothing for a peer that is no source, or from which nothing is awaited."""
        source = self.sources.get(peer)
        if source is not None and source.due < math.inf:
            source.due = min(source.due, self.ctx.clock.now + ANSWER_S / 10.0)

    def link_up(self, peer: str) -> None:
        """Repeat the outstanding requests to a source whose link is (back) up, and wait for it anew; not anew
        when the link came back ROUNDS times since the last piece."""
        source = self.sources.get(peer)
        if self.over or source is None or source.due == math.inf:
            return
        if source.returns > 0:
            source.returns -= 1
            source.due = self.ctx.clock.now + source.patience_s
        if source.status is SourceStatus.ASKED:
            self.ctx.outbox.send(peer, FetchState(self.stage, self._t))
        for piece in sorted(source.asked):
            self.ctx.outbox.send(peer, FetchPiece(self.stage, self._t, piece))

    def tick(self) -> None:
        if self.over:
            return
        if self.ctx.clock.now >= self._until and self._others():
            others = self._others()
            for source in self.sources.values():
                if source.offer == self._chosen and source.status is not SourceStatus.OUT:
                    self._put_aside(source, SourceStatus.IDLE, tries=0)
                    source.slow += 1
            self._reason = "the sources of one offer took too long"
            self._choose_anew(others)
        late = [source for source in self.sources.values() if self.ctx.clock.now >= source.due]
        for source in late:
            self._overdue(source)
        if late:
            self._ask()

    def _overdue(self, source: Source) -> None:
        """Give up waiting for a source that did not answer in time. Its outstanding pieces are requested from
        other sources first. A reachable source that was delivering then goes on, for one of its tries; any
        other may be asked again, and is OUT once it has no tries left. Where the source is reachable its
        patience doubles, and the first of its pieces counts as late (`LinkTable.payload_late`): a carrier may
        drop them. The caller calls `_ask` afterwards."""
        self._reason = f"{source.peer[:8]} did not answer"
        reachable = self.ctx.reachable(source.peer)
        if reachable and source.asked:
            late_s = source.patience_s - self._pieces_s(source)
            name = ("state", self._t, min(source.asked), source.tries)
            self.ctx.links.payload_late(source.peer, name, late_s)
        if reachable:
            source.patience_s *= 2.0  # the link may be slow; doubling finds a wait that is long enough
        pulled = source.status is SourceStatus.PULLED
        self._put_aside(source, SourceStatus.IDLE if source.tries > 0 else SourceStatus.OUT)
        self._pull_all()
        if pulled and reachable and source.tries > 0:
            source.tries -= 1
            source.status = SourceStatus.PULLED
            source.due = self.ctx.clock.now + source.patience_s
            self._pull(source)

    def deadline(self) -> float:
        if self.over:
            return math.inf
        due = min((source.due for source in self.sources.values()), default=math.inf)
        return min(due, self._until) if self._until < due and self._others() else due
