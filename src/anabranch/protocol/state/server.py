"""Server of stage states: offers this peer's state, copies kept for other stages, and checkpoints (R14)."""

from __future__ import annotations

import math
from collections.abc import Callable

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import Result, Snapshot
from anabranch.protocol.messages import FetchPiece, FetchState, Piece, StateOffer
from anabranch.protocol.state.download import State

#: States of one stage kept while peers download them, besides the pinned ones, and that for the leader's
#: checkpoint. Plain choice.
RECENT_KEPT = 2
#: Requests kept of peers that this peer does not know as members yet. Plain choice: more join at once seldom.
EARLY_KEPT = 64

Key = tuple[int, int]
"""(stage, iteration)"""


class StateServer:
    """Server of this replica's state and of pinned snapshots; at the founder, while it leads, also of the
    checkpoints on disk. pinned: snapshots kept until their owner (`snapshots`) removes them. state_t:
    function that returns the iteration of this replica's state, -1 without one. read_checkpoint: starts to
    read the state of (t, stage) from disk, which `checkpoint_read` ends, also if there is none; False if this
    peer cannot read checkpoints."""

    def __init__(
        self, ctx: PeerContext, state_t: Callable[[], int], read_checkpoint: Callable[[int, int], bool]
    ):
        self.ctx = ctx
        self.pinned: dict[Key, State] = {}
        self.frozen: dict[Key, State] = {}
        """Frozen weights of this peer's stage, under their own number: no snapshot, and never dropped."""
        self._state_t = state_t
        self._read_checkpoint = read_checkpoint
        self._recent: dict[Key, State] = {}
        self._checkpointed: Key = -1, -1
        """State of a checkpoint that the leader asked for last. It is kept, however many others come to be
        pinned or asked for: who does not give it may lose its seat."""
        self._newest: dict[int, int] = {}
        """Stage -> iteration of the newest checkpoint, where that was read."""
        self._sound_t: float = math.inf
        """Checkpoints of later iterations on the disk are of steps that were rolled back."""
        self._reading = False
        self._wanted: dict[tuple[str, int], int] = {}
        """(peer, stage) -> iteration of the state to read next: the last that the peer asked for."""
        self._waiting: dict[Key, set[str]] = {}
        self._taking: set[Key] = set()
        self._ahead: dict[int, set[str]] = {}
        self._early: dict[str, FetchState] = {}
        """Last request of each peer that may not have the state, as far as this peer knows now."""

    def find(self, stage: int, t: int) -> State | None:
        key = stage, t
        return self.frozen.get(key) or self.pinned.get(key) or self._recent.get(key)

    def _needs(self, peer: str, stage: int) -> bool:
        """True if `peer` may have states of `stage`: it was given that stage, is a data node (checkpoints),
        serves another stage of a run with snapshots, so that it can be told to keep copies, or leads and is
        no member as far as this peer knows. Strangers, observers and newcomers of other stages have no need
        of them."""
        membership, settings = self.ctx.run.membership, self.ctx.run.settings
        given = membership.stage_of(peer)
        if given is None:
            return peer == self.ctx.log.leader
        own = (given, settings.frozen_number(given))
        keeps = settings.snapshot_every > 0 and peer in membership.active_from
        return stage in own or given == 0 or keeps

    def members_changed(self) -> None:
        """Answer requests that came before the log entry that made their senders members."""
        early, self._early = self._early, {}
        for peer, message in early.items():
            self.on_fetch_state(peer, message)

    def on_fetch_state(self, peer: str, message: FetchState) -> None:
        """Answer a request for a state: offer it (at once, or when it is copied or read from disk), or say
        that this peer does not have it. A request for the state after the next step is answered once that
        step is applied. The request of a peer that may not have states of the stage (`_needs`) is kept until
        the members change, as this peer may not have the log entry that admits it yet; beyond EARLY_KEPT such
        peers it is dropped."""
        if not self._needs(peer, message.stage):
            if len(self._early) < EARLY_KEPT or peer in self._early:
                self._early[peer] = message
            return
        stage, mine = message.stage, self._state_t()
        t = message.t if message.t >= 0 else mine
        if peer == self.ctx.log.leader and self.ctx.run.settings.checkpoints_at(t):
            self._checkpointed = stage, t
        state = self.find(stage, t)
        if state is not None:
            if (stage, t) == self._checkpointed:
                self._keep(state)  # it may be pinned for a shorter time than the leader takes
            self._offer(peer, state)
        elif stage == self.ctx.run.stage and t == mine and t >= 0:
            self._waiting.setdefault((stage, t), set()).add(peer)
            self.snapshot()
        elif stage == self.ctx.run.stage and t == mine + 1 and mine >= 0:
            self._ahead.setdefault(t, set()).add(peer)  # another replica has applied this step already
        else:
            self._from_disk(peer, stage, message.t)

    def _from_disk(self, peer: str, stage: int, t: int) -> None:
        """Answer a request for a state of a checkpoint (t = -1: of the newest). One state is read at a time,
        as the leader's log is kept by the same thread."""
        known = self.find(stage, self._newest.get(stage, -1)) if t < 0 else None
        if known is not None:
            self._offer(peer, known)
        elif (stage, t) in self._waiting:
            self._waiting[stage, t].add(peer)
        elif self._reading:
            self._wanted[peer, stage] = t
        elif t <= self._sound_t and self._read_checkpoint(t, stage):
            self._reading = True
            self._waiting[stage, t] = {peer}
        else:
            self._lack(peer, stage, t)

    def checkpoint_written(self, t: int) -> None:
        """Note that the checkpoint of step t, newer than those that were read, was written, and that no
        rollback overtook it: the newest is read anew when it is asked for."""
        self._newest.clear()
        self._sound_t = max(self._sound_t, t)

    def applied(self, t: int) -> None:
        """Offer the state after step t, which was just applied, to the peers that asked for it early. Early
        requests for other steps are dropped: their senders ask again."""
        asked, self._ahead = self._ahead.pop(t, set()), {}
        if asked:
            self._waiting.setdefault((self.ctx.run.stage, t), set()).update(asked)
            self.snapshot()

    def snapshot(self, pin: Callable[[State], None] | None = None) -> None:
        """Copy the current state before any later step is applied, and offer the copy to the peers that wait
        for it (or say that there is none, if that fails). pin: callback with the copy, for an owner that
        keeps it; not called if copying fails. Without it, nothing if a copy of this state is being made. This
        peer must have a state."""
        stage, t = key = self.ctx.run.stage, self._state_t()
        if key in self._taking and pin is None:
            return

        def taken(result: Result) -> None:
            self._taking.discard(key)
            asked = sorted(self._waiting.pop(key, set()))
            if not result.outputs:
                for peer in asked:
                    self._lack(peer, stage, t)
                return
            state = State(stage, t, result.fingerprint, result.outputs, result.hashes)
            if pin is not None:
                pin(state)
            if (pin is None and asked) or key == self._checkpointed:
                self._keep(state)
            for peer in asked:
                self._offer(peer, state)

        self._taking.add(key)
        self.ctx.tasks.submit(TaskPriority.STEP, Snapshot(t), (), taken)

    def keep_ahead(self) -> None:
        """Copy the current state and keep the copy for joiners, before this replica takes the inner steps of
        a round, which change its state."""
        self.snapshot(self._keep)

    def checkpoint_read(self, asked_t: int, state: State | None, stage: int) -> None:
        """Offer a state read from disk (None: it could not be read) to the peers that wait for it. asked_t:
        iteration that they asked for (-1: the newest). A state of steps that were rolled back meanwhile is
        none. Then the requests are answered that came while the disk was read."""
        if state is not None and state.t > self._sound_t:
            state = None
        if state is not None:
            self._keep(state)
            if asked_t < 0:
                self._newest[stage] = state.t
        for peer in sorted(self._waiting.pop((stage, asked_t), set())):
            if state is not None:
                self._offer(peer, state)
            else:
                self._lack(peer, stage, asked_t)
        self._reading, wanted = False, self._wanted
        self._wanted = {}
        for (peer, of_stage), t in wanted.items():
            self.on_fetch_state(peer, FetchState(of_stage, t))

    def rolled_back(self, t: int) -> None:
        """Drop states of iterations after t, and answer the requests for them that there are none, because
        the run was rolled back to t."""
        self.pinned = {key: state for key, state in self.pinned.items() if key[1] <= t}
        self._recent = {key: state for key, state in self._recent.items() if key[1] <= t}
        self._newest = {stage: newest for stage, newest in self._newest.items() if newest <= t}
        self._sound_t = min(self._sound_t, t)
        self.abandon(t)

    def abandon(self, t: int) -> None:
        """Tell peers that wait for states after t that there are none, as the worker's tasks were dropped.
        Those that asked for a step that is not applied yet get no answer, and ask again."""
        void = [key for key in self._waiting if key[1] > t]
        for stage, later in void:
            for peer in sorted(self._waiting.pop((stage, later))):
                self._lack(peer, stage, later)
        self._taking = {key for key in self._taking if key[1] <= t}
        self._ahead = {}

    def _keep(self, state: State) -> None:
        self._recent[state.stage, state.t] = state
        asked = self._checkpointed
        of_stage = sorted(key for key in self._recent if key[0] == state.stage and key != asked)
        for key in of_stage[:-RECENT_KEPT]:
            del self._recent[key]

    def _offer(self, peer: str, state: State) -> None:
        offer = StateOffer(state.stage, state.t, state.fingerprint, len(state.pieces), state.hashes)
        self.ctx.outbox.send(peer, offer)

    def _lack(self, peer: str, stage: int, t: int) -> None:
        """Answer `peer` that this peer does not have the state it asked for."""
        self.ctx.outbox.send(peer, StateOffer(stage, t, "", 0))

    def on_fetch_piece(self, peer: str, message: FetchPiece) -> str | None:
        """Send a piece of a state, or say that this peer does not have it; returns why the request is refused
        (by `_needs`), or None."""
        if not self._needs(peer, message.stage):
            return f"a state of stage {message.stage}, for which it has no need"
        state = self.find(message.stage, message.t)
        if state is None or message.piece >= len(state.pieces):
            self._lack(peer, message.stage, message.t)
            return None
        piece = Piece(message.stage, message.t, message.piece)
        self.ctx.outbox.send(peer, piece, state.pieces[message.piece])
        return None
