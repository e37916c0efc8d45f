"""Fetching and loading the state of this peer's stage when it joins, moves, falls behind or is rolled back
(R14)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from anabranch.protocol import messages as msg
from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.links import LostLink
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.events import BuildStage, KeptState
from anabranch.protocol.interface.tasks import InitState, LoadFrozen, LoadState, Payload, Result
from anabranch.protocol.log.records import Rollback
from anabranch.protocol.membership.overlay import ALL_TIMES
from anabranch.protocol.peer.shared_state import SharedParts, Step
from anabranch.protocol.reduce.step_apply import StepApply
from anabranch.protocol.state.download import Download, State

#: Time (s) after which the leader is asked again for holders of the state: several round trips.
WHO_HAS_AGAIN_S = 2.0
#: First and longest wait (s) before an unavailable state is requested again, and number of tries: an hour.
FETCH_AGAIN = (2.0, 60.0, 60)
#: Questions to the leader, WHO_HAS_AGAIN_S apart, whether a fetched state is the run's, after which a replica
#: that serves works with it all the same. A choice: the run may wait for this replica.
CONFIRMATIONS = 3


@dataclass(frozen=True)
class AnnouncedState:
    """State that the leader or the log named: after iteration `t`, on `base`. fingerprint: hash of this
    stage's part ("" if unknown)."""

    t: int = 0
    base: str = ""
    fingerprint: str = ""


class CatchUp(Timer):
    """Download and load of the state of this peer's stage. It advances the peer's entry into the run
    (`shared_state.Entry`) from FETCHING over LOADING to READY.

    initial: fingerprint of the stage's state as the seed gives it ("" if unknown).
    """

    def __init__(self, shared: SharedParts, replica: StepApply, on_ready: Callable[[], None]) -> None:
        self._ctx, self._progress, self._exit = shared.ctx, shared.progress, shared.exit
        self._entry, self._states, self._snapshots = shared.entry, shared.states, shared.snapshots
        self._replica, self._on_ready = replica, on_ready
        self.download: Download | None = None
        self.announced = AnnouncedState()
        self.initial = ""
        self._failure, self._retries = "", Backoff(shared.ctx.rng, *FETCH_AGAIN)
        self._wanted_t = self._least_t = -1
        self._kept: State | None = None
        """State of the stage that this machine has on disk, until a state is loaded."""
        self._frozen = ""
        """Hash of the stage's frozen weights while they are not loaded."""
        self._unconfirmed: State | None = None
        """State that a serving replica has loaded, and works with only once the leader or the log confirms
        that it is the run's; None: there is none."""
        self._questions = 0
        """Questions to the leader about it."""
        self._givers: set[str] = set()
        """Peers of which the present state was fetched."""
        self._doubted: set[str] = set()
        """Peers that gave a state which was not the run's: they are asked last."""
        self._behind: set[str] = set()
        """Peers whose newest state was too old, since one was not: they are asked after others."""

    def announce(self, t: int, base: str, fingerprint: str) -> None:
        """Set the state that this stage has to reach: after iteration `t`, on the log entry with hash `base`;
        fingerprint: hash of the stage's part ("" if unknown). Nothing is fetched by that (`begin`,
        `built`)."""
        self.announced = AnnouncedState(t, base, fingerprint)

    def built(self, fingerprint: str, kept: KeptState | None = None) -> None:
        """Load the stage's frozen weights, if it has some. Then start from its initial state (hash
        `fingerprint`), or from the `kept` one on this machine's disk, if that is the announced one; else
        fetch the state, without the pieces that are kept."""
        self.initial, self._kept = fingerprint, None
        if kept is not None:
            stage = self._ctx.run.stage
            self._kept = State(stage, kept.t, kept.fingerprint, kept.pieces, kept.hashes)
        self._frozen = self._ctx.run.settings.frozen_hash(self._ctx.run.stage)
        if self._frozen:
            self._load_frozen()
        else:
            self._begin_first()

    def _begin_first(self) -> None:
        fingerprint, announced = self.initial, self.announced
        follows = self._base_after(announced.t) is not None  # else the steps after it came while it was built
        if fingerprint and fingerprint == announced.fingerprint and follows:
            self.have(announced.t, announced.base, fingerprint)
        elif not self._use_kept(self.announced.t, self.announced.fingerprint):
            self.begin()

    def _use_kept(self, t: int, fingerprint: str) -> bool:
        """Begin to load the state on this machine's disk, once, if it is that after iteration `t`, with this
        fingerprint; True then. False if it is not: also when it was tried before, and was damaged."""
        kept = self._kept
        if kept is None or not fingerprint or (kept.t, kept.fingerprint) != (t, fingerprint):
            return False
        self._kept = None
        text = f"the state of stage {kept.stage} after iteration {t} is on this machine's disk: not fetched"
        self._ctx.outbox.note("note", text=text)
        self._load(kept, hashed=False)
        return True

    def begin(self) -> None:
        """Fetch the state of this stage (its frozen weights first): start a download, or ask the leader who
        has it, or whether the loaded one is right. Called again for each further try; after a rollback it is
        the state of that iteration, else the latest.

        Sources: replicas for the latest state; its holders, or the leader's checkpoint, for one that the run
        was rolled back to; the leader's checkpoint where no snapshots are kept and no replica is left. (Such
        a checkpoint may be gone when replicas have gone on, so they are asked in every second try.)
        """
        if self._frozen:
            self._fetch_frozen()
            return
        if self._unconfirmed is not None:
            self._confirm(self._unconfirmed)
            return
        ctx, run = self._ctx, self._ctx.run
        self._entry.advance(Step.FETCHING)
        live = [p for p in run.membership.live(run.stage, ALL_TIMES) if p != ctx.me]
        even, snapshots = self._retries.tries % 2 == 0, run.settings.snapshot_every > 0
        if even:  # if there are many replicas, linked ones first
            near = run.near.active_neighbours(run.stage, run.stage, ALL_TIMES)
            live = [p for p in near if p != ctx.me] or live
        if ctx.me in run.membership.auditors:
            ctx.rng.shuffle(live)  # the state that one gave may prove false
        live.sort(key=lambda peer: (peer in self._doubted, peer in self._behind))
        if (self._wanted_t >= 0 and (snapshots or even)) or (snapshots and not live):
            ctx.outbox.send(ctx.log.leader, msg.WhoHas(run.stage, self._wanted_t))
            self._entry.repeat_at = ctx.clock.now + WHO_HAS_AGAIN_S
        else:
            self._download(run.stage, -1, live or [ctx.log.leader], self._fetched)

    def fell_behind(self, step: int) -> None:
        """Fetch the state after iteration `step` (no peer has its gradient any more), or a later state."""
        self._least_t = step
        self.begin()

    # --- frozen weights --------------------------------------------------------------------------

    def _load_frozen(self, state: State | None = None) -> None:
        """Load the stage's frozen weights: those downloaded, or those of this machine, if it has them; fetch
        them otherwise. Once they are loaded, other peers can have them, and this peer goes on with the
        stage's state. state: pieces that were downloaded; None: none were."""
        wanted, stage, self.download = self._frozen, self._ctx.run.stage, None
        self._entry.advance(Step.LOADING)

        def loaded(result: Result) -> None:
            if self._frozen != wanted or self._ctx.run.stage != stage:
                return  # this peer was moved meanwhile
            if result.fingerprint == wanted:
                self._frozen, number = "", self._ctx.run.settings.frozen_number(stage)
                self._states.frozen = {(number, 0): State(number, 0, wanted, result.outputs, ())}
                self._retries.reset()
                self._begin_first() if self._wanted_t < 0 else self.begin()
            elif state is None:
                self._fetch_frozen()
            else:
                self._fetch_failed(result.error or "the pieces are not the frozen weights of the run")

        pieces = () if state is None else state.pieces
        self._ctx.tasks.submit(TaskPriority.STEP, LoadFrozen(0), pieces, loaded)

    def _fetch_frozen(self) -> None:
        """Download the stage's frozen weights, from its replicas, the leader and the other data nodes, and
        load them (`_load_frozen`)."""
        ctx, run = self._ctx, self._ctx.run
        self._entry.advance(Step.FETCHING)
        replicas, data = (run.membership.live(stage, ALL_TIMES) for stage in (run.stage, 0))
        sources = [p for p in dict.fromkeys((*replicas, ctx.log.leader, *data)) if p not in ("", ctx.me)]
        number = run.settings.frozen_number(run.stage)
        self._download(number, 0, sources, self._load_frozen, self._frozen)

    # --- the leader's answers ------------------------------------------------------------------

    def on_holders(self, message: msg.Holders) -> None:
        """Take the state that the leader names from the first of: this peer's own snapshots, its disk, the
        seed (t = 0), the holders named. Retried later if there is none; ignored unless this peer waits for
        the answer. If a loaded state is to be confirmed, the answer is compared with that; an answer that
        names no holders may prove the state of a joiner false (`_proved_false`)."""
        stage, t = self._ctx.run.stage, message.t
        if self._unconfirmed is not None:
            if (message.stage, t) == (stage, self._unconfirmed.t):
                self._judge(self._unconfirmed, message.fingerprint)
            return
        nobody = message.stage == stage and message.fingerprint and not message.peers
        if nobody and self._proved_false(t, message.fingerprint):
            return
        if not self._waits_for(message.stage):
            return
        own = self._states.find(stage, t)
        if own is not None and own.fingerprint == message.fingerprint:
            self._fetched(own)
        elif self._use_kept(t, message.fingerprint):
            return
        elif t == 0 and message.fingerprint == self.initial != "":
            base = self._base_after(0)
            if base is None:  # the message arrived before the steps after it
                self._fetch_failed(self._too_old(0))
            else:
                self._begin_anew(base)
        elif not message.peers:
            self._fetch_failed(f"nobody has the state of stage {stage} after iteration {t} yet")
        elif self._wanted_t in (-1, t):
            self._download(stage, t, list(message.peers), self._fetched, message.fingerprint)

    def _proved_false(self, t: int, fingerprint: str) -> bool:
        """Fetch another state, from other peers if there are some, and return True, if this peer waits to
        serve: the leader says that the state which it reported after iteration t is not the run's, whoever
        gave it. False if it does not wait, or has the state with this fingerprint: the answer is an old
        one."""
        ctx = self._ctx
        if self._entry.step is not Step.READY or ctx.me in ctx.run.membership.active_from:
            return False
        if (self._replica.t, self._replica.fingerprint) == (t, fingerprint):
            return False
        self._note_false(t)
        self._replica.start_anew()
        return True

    def _note_false(self, t: int) -> None:
        """Note that those who gave the present state gave one that is not the run's after iteration t; they
        are asked last from now on."""
        self._doubted |= self._givers
        who = " and ".join(peer[:8] for peer in sorted(self._givers)) or "nobody"
        text = f"the state that {who} gave is not the run's after iteration {t}: another is fetched"
        self._ctx.outbox.note("note", text=text)

    def _waits_for(self, stage: int) -> bool:
        """True if this peer waits for the leader's answer where the state of `stage` is."""
        fetching = self._entry.step is Step.FETCHING and self.download is None
        return fetching and stage == self._ctx.run.stage

    # --- download and load ---------------------------------------------------------------------

    def _download(
        self, stage: int, t: int, sources: list[str], done: Callable[[State], None], fingerprint: str = ""
    ) -> None:
        self._entry.repeat_at = math.inf
        kept = self._kept if stage == self._ctx.run.stage else None
        failed = self._fetch_failed
        self.download = Download(self._ctx, stage, t, sources, done, failed, fingerprint, kept=kept)
        self.download.start()

    def _fetched(self, state: State) -> None:
        if state.t < self._least_t:
            self._fetch_failed(self._too_old(state.t))
            return
        self._givers = self.download.givers if self.download is not None else set()
        self._load(state, hashed=True, sure=self.download is None or self.download.is_sure)

    def _load(self, state: State, hashed: bool, sure: bool = True) -> None:
        """Load a state, and continue from it; if it does not have its fingerprint, or is too old, fetch it
        again. hashed: True if its pieces were compared with their hashes; only such a state is offered to
        others as a snapshot, as they would blame the one that offers it. sure: False if its fingerprint is
        the word of those who gave it: a replica that serves has it confirmed before it works with it. A
        joiner is told by the leader."""
        self._entry.advance(Step.LOADING)

        def loaded(result: Result) -> None:
            base = self._base_after(state.t)
            if result.error or result.fingerprint != state.fingerprint:
                self._fetch_failed(result.error or "the pieces do not have the fingerprint that was offered")
            elif base is None:
                self._fetch_failed(self._too_old(state.t))
            elif not sure and self._ctx.me in self._ctx.run.membership.active_from:
                self._unconfirmed, self._questions = state, 0
                self._confirm(state)
            else:
                if hashed:
                    self._snapshots.loaded(state)
                self.have(state.t, base, state.fingerprint)

        self._ctx.tasks.submit(TaskPriority.STEP, LoadState(state.t), state.pieces, loaded)

    def _confirm(self, state: State) -> None:
        """Compare a loaded state with the log, if that names it, or else ask the leader, who is asked again
        after a while. After CONFIRMATIONS questions it is taken as it is."""
        ctx, following = self._ctx, self._replica.pending.get(state.t + 1)
        if not state.t:
            self._judge(state, self._entry.genesis.fingerprints[ctx.run.stage])
        elif following is not None and following[0].verdict == "step":
            self._judge(state, following[0].stages[ctx.run.stage].fingerprint_before)
        elif self._questions >= CONFIRMATIONS:
            self._judge(state, state.fingerprint)
        else:
            self._questions += 1
            self._entry.repeat_at = ctx.clock.now + WHO_HAS_AGAIN_S
            ctx.outbox.send(ctx.log.leader, msg.Ready(state.t, ctx.run.stage, state.fingerprint))

    def _judge(self, state: State, fingerprint: str) -> None:
        """Continue from a loaded state, or fetch another one if the run's has another `fingerprint`. If that
        is not known yet ("") the state is taken where no other replica could give one, else later."""
        ctx = self._ctx
        others = set(ctx.run.membership.live(ctx.run.stage, ALL_TIMES)) - {ctx.me, *self._givers}
        if not fingerprint and others:
            return
        self._unconfirmed, base = None, self._base_after(state.t)
        if fingerprint not in ("", state.fingerprint):
            self._note_false(state.t)
            self.download = None
            if others - self._doubted:
                self.begin()
            else:
                self._fetch_failed("all states that are offered are not the run's")
        elif base is None:
            self._fetch_failed(self._too_old(state.t))
        else:
            self._snapshots.loaded(state)
            self.have(state.t, base, state.fingerprint)

    def _begin_anew(self, base: str) -> None:
        """Load the stage's initial state, made from the seed, and continue from it. base: hash of the log
        entry that led to that state. The stage must be built."""
        self._entry.advance(Step.LOADING)
        initial = self.initial
        self._ctx.tasks.submit(
            TaskPriority.STEP, InitState(0), (), lambda result: self.have(0, base, initial)
        )

    def have(self, t: int, base: str, fingerprint: str) -> None:
        """Continue from the state after iteration `t`, which the worker has loaded: this peer is READY,
        applies the steps after it, and reports it. base: hash of its log entry. fingerprint: its hash."""
        self._entry.advance(Step.READY)
        self.download = self._kept = self._unconfirmed = None
        self._failure, self._wanted_t, self._least_t = "", -1, -1
        self._retries.reset()
        self._behind.clear()
        self._replica.loaded(t, base, fingerprint)
        self._on_ready()

    def _fetch_failed(self, reason: str) -> None:
        """Plan to fetch the state again after a back-off, or stop this peer after the last try. Writes a note
        if `reason` is new; a serving replica also tells the leader that it is behind."""
        ctx = self._ctx
        if reason != self._failure:
            ctx.outbox.note("note", text=f"{reason}; trying again")
        self._failure, self.download, self._unconfirmed = reason, None, None
        self._entry.advance(Step.FETCHING)
        if ctx.me in ctx.run.membership.active_from:
            ctx.outbox.send(ctx.log.leader, msg.Behind(self._progress.committed, ctx.run.stage))
        wait_s = self._retries.next()
        if wait_s is None:
            self._exit.stop(f"{reason}, after {self._retries.tries} tries", ok=False, again=True)
        else:
            self._entry.repeat_at = ctx.clock.now + wait_s

    def _base_after(self, t: int) -> str | None:
        """Base of the state after iteration `t` (hash of the log entry that led to it), from which this peer
        can apply the steps that follow; None if it lacks records of these steps, or does not know that
        entry."""
        pending = self._replica.pending
        if t + 1 < min(pending, default=0):
            return None
        if t == self.announced.t:
            return self.announced.base
        following = pending.get(t)
        return following[1] if following is not None else None

    def _too_old(self, t: int) -> str:
        """Note that the newest state of the peer that was asked first is that after iteration t, which is too
        old; returns words for it."""
        run, me = self._ctx.run, self._ctx.me
        if self.download is not None:
            self._behind.add(self.download.first)
        text = f"the state of stage {run.stage} that there is is that after iteration {t}, which is too old"
        if not any(peer != me for peer in run.membership.live(run.stage, ALL_TIMES)):
            text += (
                "; no replica of the stage is left: unless one comes back, stop the run where it is led "
                "and go on with `anabranch resume`"
            )
        return text

    # --- rollback and change of stage ----------------------------------------------------------

    def roll_back(self, record: Rollback, base: str) -> None:
        """Return to the state after record.t: by this peer's own snapshot, or the seed (t = 0), or the state
        on its disk, else by fetching it. A download in progress is cancelled. Before this peer has built its
        stage only the state to reach is noted. base: hash of the record's log entry."""
        t, stage = record.t, self._ctx.run.stage
        wanted = record.fingerprints[stage]
        self.announce(t, base, wanted)
        if self._entry.step not in (Step.FETCHING, Step.LOADING, Step.READY):
            return
        self._cancel()
        self._wanted_t, self._least_t = t, -1
        self._retries.reset()
        own = self._states.find(stage, t)
        if self._frozen:
            self.begin()
        elif own is not None and own.fingerprint == wanted:
            self._fetched(own)
        elif t == 0 and self.initial == wanted:
            self._begin_anew(base)
        elif not self._use_kept(t, wanted):
            self.begin()

    def move(self) -> None:
        """Have the driver build the stage that this peer was moved to (`RunView.stage`, set before), then
        fetch its state as a joiner does. What was loaded or is being fetched of the former stage counts no
        more."""
        ctx, committed = self._ctx, self._progress.committed
        self._cancel()
        self._wanted_t, self._least_t, self.initial, self._frozen = -1, -1, "", ""
        self._kept = None
        first = self._entry.genesis.fingerprints[ctx.run.stage] if committed == 0 else ""
        self.announce(committed, self._progress.base, first)
        self._entry.repeat_at = math.inf
        self._entry.advance(Step.BUILDING)
        ctx.outbox.emit(BuildStage(ctx.run.stage))

    def _cancel(self) -> None:
        self._unconfirmed = None
        if self.download is not None:
            self.download.cancel()
            self.download = None

    def downloads(self) -> list[Download]:
        """Running download of the stage's state, if any."""
        return [] if self.download is None else [self.download]

    # --- time ----------------------------------------------------------------------------------

    def deadline(self) -> float:
        return math.inf if self.download is None else self.download.deadline()

    def tick(self) -> None:
        if self.download is not None:
            self.download.tick()


class Downloads:
    """Dispatcher that hands offers, pieces and link changes to all running downloads of this peer (its
    stage's state, copies of other stages, a checkpoint), and keeps the links to their peers in use.

    listings: functions that return running downloads.
    """

    def __init__(self, ctx: PeerContext, *listings: Callable[[], Iterable[Download]]) -> None:
        self._listings: Sequence[Callable[[], Iterable[Download]]] = listings
        ctx.links.register_user(self._partners)

    def _all(self) -> list[Download]:
        return [download for listing in self._listings for download in listing()]

    def _partners(self) -> set[str]:
        return {peer for download in self._all() for peer in download.sources}

    def on_offer(self, peer: str, message: msg.StateOffer, payload: Payload | None) -> None:
        for download in self._all():
            download.on_offer(peer, message)

    def on_piece(self, peer: str, message: msg.Piece, payload: Payload | None) -> None:
        for download in self._all():
            download.on_piece(peer, message, payload)

    def link_up(self, peer: str) -> None:
        for download in self._all():
            download.link_up(peer)

    def link_down(self, lost: LostLink) -> None:
        for download in self._all():
            download.link_down(lost.peer)
