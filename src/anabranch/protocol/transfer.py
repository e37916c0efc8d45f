"""State on its way between peers: snapshots offered in pieces, pulled one by one (R14).

The puller sets the pace, so a joiner cannot crowd out training traffic; a source that is lost is replaced
by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from anabranch.protocol.core import Core
from anabranch.protocol.messages import FetchPiece, FetchState, Piece, StateOffer
from anabranch.protocol.tasks import Payload, Result, Snapshot
from anabranch.protocol.work import Rank

#: Snapshots kept for peers that are pulling them.
SNAPSHOTS_KEPT = 2
#: Seconds without an answer after which a source is asked again, or the next one; doubled each time.
ANSWER_S = 10.0
#: Pieces asked for ahead of those that came.
WINDOW = 2

Pieces = tuple[Payload, ...]


class StateServer:
    """Offers this replica's state, and (on the leader) the stages of a checkpoint on disk."""

    def __init__(self, core: Core, state_t: Callable[[], int], read_checkpoint: Callable[[int, int], bool]):
        self.core = core
        self._state_t = state_t
        self._read_checkpoint = read_checkpoint
        self._kept: dict[tuple[int, int], tuple[Pieces, str]] = {}
        self._waiting: dict[tuple[int, int], list[str]] = {}

    def on_fetch_state(self, peer: str, message: FetchState) -> None:
        stage = message.stage
        t = message.t if message.t >= 0 else self._state_t()
        if (stage, t) in self._kept:
            self._offer(peer, stage, t)
        elif stage == self.core.stage and t == self._state_t() and t >= 0:
            self._snapshot(peer, t)
        elif self._read_checkpoint(message.t, stage):
            self._waiting.setdefault((stage, message.t), []).append(peer)
        else:
            self.core.send(peer, StateOffer(stage, message.t, "", 0))

    def _snapshot(self, peer: str, t: int) -> None:
        waiting = self._waiting.setdefault((self.core.stage, t), [])
        waiting.append(peer)
        if len(waiting) > 1:
            return

        def taken(result: Result) -> None:
            asked = self._waiting.pop((self.core.stage, t), [])
            if self._state_t() == t and result.outputs:
                self._keep(self.core.stage, t, result.outputs, result.fingerprint)
                for other in asked:
                    self._offer(other, self.core.stage, t)
            else:
                for other in asked:
                    self.core.send(other, StateOffer(self.core.stage, t, "", 0))

        self.core.submit(Rank.STEP, Snapshot(t), (), taken)

    def checkpoint_read(self, asked_t: int, t: int, stage: int, fingerprint: str, pieces: Pieces) -> None:
        if pieces:
            self._keep(stage, t, pieces, fingerprint)
        for peer in self._waiting.pop((stage, asked_t), []):
            if pieces:
                self._offer(peer, stage, t)
            else:
                self.core.send(peer, StateOffer(stage, asked_t, "", 0))

    def _keep(self, stage: int, t: int, pieces: Pieces, fingerprint: str) -> None:
        self._kept[(stage, t)] = (pieces, fingerprint)
        own = sorted(key for key in self._kept if key[0] == stage)
        for key in own[:-SNAPSHOTS_KEPT]:
            del self._kept[key]

    def _offer(self, peer: str, stage: int, t: int) -> None:
        pieces, fingerprint = self._kept[(stage, t)]
        self.core.send(peer, StateOffer(stage, t, fingerprint, len(pieces)))

    def on_fetch_piece(self, peer: str, message: FetchPiece) -> None:
        kept = self._kept.get((message.stage, message.t))
        if kept is None or message.piece >= len(kept[0]):
            self.core.send(peer, StateOffer(message.stage, message.t, "", 0))
            return
        piece = Piece(message.stage, message.t, message.piece)
        self.core.send(peer, piece, kept[0][message.piece])


class Download:
    """Pulls one stage's state from the first of `sources` that has it.

    on_done(t, pieces, fingerprint); on_fail(reason) when every source was tried `rounds` times.
    """

    def __init__(
        self,
        core: Core,
        stage: int,
        t: int,
        sources: Sequence[str],
        on_done: Callable[[int, Pieces, str], None],
        on_fail: Callable[[str], None],
        rounds: int = 3,
    ) -> None:
        self.core = core
        self.stage = stage
        self.asked_t = t
        self.sources = list(sources)
        self.offer: StateOffer | None = None
        self.over = False
        self._pieces: dict[int, Payload] = {}
        self._asked: set[int] = set()
        self._patience_s = ANSWER_S
        self._tries = rounds * len(self.sources)
        self._position = -1
        self._answer_by = float("inf")
        self._on_done = on_done
        self._on_fail = on_fail

    @property
    def source(self) -> str:
        return self.sources[self._position % len(self.sources)] if self.sources else ""

    def start(self) -> None:
        self._next_source("no source offers it")

    def _next_source(self, reason: str) -> None:
        if self.over:
            return
        if self._tries <= 0 or not self.sources:
            self.over = True
            self._on_fail(f"the state of stage {self.stage} could not be fetched: {reason}")
            return
        self._tries -= 1
        if self._position >= 0 and self.core.reachable(self.source):
            self._patience_s *= 2.0  # the link may be slow; what is patient enough is found by doubling
        self._position += 1
        self.offer = None
        self._pieces.clear()
        self._asked.clear()
        # One that cannot be reached now is passed over soon; its link may come back by its next turn.
        reachable = self.core.reachable(self.source)
        self._answer_by = self.core.now + (self._patience_s if reachable else ANSWER_S / 10.0)
        self.core.send(self.source, FetchState(self.stage, self.asked_t))

    def on_offer(self, peer: str, offer: StateOffer) -> None:
        if self.over or peer != self.source or offer.stage != self.stage:
            return
        if self.asked_t >= 0 and (offer.pieces == 0 or offer.t != self.asked_t):
            # It is past that iteration, and will never have its state again.
            self.sources.remove(peer)
            self._position -= 1
            self._next_source(f"no source has the state after iteration {self.asked_t} any more")
        elif offer.pieces == 0:
            self._answer_by = self.core.now + ANSWER_S / 10.0
            self.offer = None
        elif self.offer is None:
            self.offer = offer
            self._answer_by = self.core.now + self._patience_s
            self._pull()

    def _pull(self) -> None:
        """Ask for the next pieces, so many ahead of those that came."""
        assert self.offer is not None
        wanted = (piece for piece in range(self.offer.pieces) if piece not in self._asked)
        for piece in islice(wanted, WINDOW - len(self._asked - self._pieces.keys())):
            self._asked.add(piece)
            self.core.send(self.source, FetchPiece(self.stage, self.offer.t, piece))

    def on_piece(self, peer: str, message: Piece, payload: Payload | None) -> None:
        offer = self.offer
        if self.over or offer is None or peer != self.source or payload is None:
            return
        if (message.stage, message.t) != (offer.stage, offer.t) or message.piece >= offer.pieces:
            return
        if message.piece in self._pieces:
            return
        self._pieces[message.piece] = payload
        self._answer_by = self.core.now + self._patience_s
        self._pull()
        if len(self._pieces) == offer.pieces:
            self.over = True
            pieces = tuple(self._pieces[piece] for piece in range(offer.pieces))
            self._on_done(offer.t, pieces, offer.fingerprint)

    @property
    def progress(self) -> tuple[int, int]:
        """Pieces that came, and all pieces (0 while there is no offer)."""
        return len(self._pieces), 0 if self.offer is None else self.offer.pieces

    def link_down(self, peer: str) -> None:
        """The source is lost: the next one is asked soon, or the same again."""
        if not self.over and peer == self.source:
            self._answer_by = min(self._answer_by, self.core.now + ANSWER_S / 10.0)

    def link_up(self, peer: str) -> None:
        """A source whose link was down when it was asked is asked now."""
        if not self.over and peer == self.source and self.offer is None:
            self.core.send(peer, FetchState(self.stage, self.asked_t))

    def tick(self) -> None:
        if self.over or self.core.now < self._answer_by:
            return
        if self.offer is not None and self._tries > 0 and self.core.reachable(self.source):
            # What came stays; what did not come is asked for again.
            self._tries -= 1
            self._patience_s *= 2.0
            self._answer_by = self.core.now + self._patience_s
            self._asked = set(self._pieces)
            self._pull()
        else:
            self._next_source(f"{self.source[:8]} did not answer")

    def deadline(self) -> float:
        return float("inf") if self.over else self._answer_by
