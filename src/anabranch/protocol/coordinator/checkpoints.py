"""Checkpoints in the run's directory: every stage's state after one iteration, downloaded from live
replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import LogTip
from anabranch.protocol.coordinator.state_agreement import StateAgreement
from anabranch.protocol.interface.events import WriteCheckpoint
from anabranch.protocol.recovery.snapshot_catalog import SnapshotCatalog
from anabranch.protocol.state.download import Download, State

#: Retries of the last step's checkpoint: first and longest wait (s), number of tries.
LAST_CHECKPOINT = (1.0, 8.0, 6)
#: Checkpoints in a row for which a stage's only replica does not give its state, after which it is reported.
#: A plain choice: each had three tries, of 70 s in all.
WITHHELD_MOST = 2


@dataclass
class Collection:
    """Checkpoint of iteration `t` in progress: a download for each stage, and the states that have arrived.
    base: hash of the log entry of t."""

    t: int
    base: str
    downloads: dict[int, Download] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)


class Checkpoints:
    """Schedule of checkpoints and the one in progress. t: last step that has a checkpoint, or whose
    checkpoint was given up. has_directory: True if checkpoints can be written on this machine.
    withholds(peer): called when the state of a stage could not be downloaded from its only replica, though
    that is within reach, for WITHHELD_MOST checkpoints running."""

    def __init__(
        self,
        ctx: PeerContext,
        tip: LogTip,
        released: StateAgreement,
        catalog: SnapshotCatalog,
        has_directory: bool,
        withholds: Callable[[str], object] = lambda peer: None,
    ) -> None:
        self.ctx, self.tip, self.released, self.catalog = ctx, tip, released, catalog
        self.has_directory = has_directory
        self.t = -1
        self._open: Collection | None = None
        self._withholds = withholds
        self._withheld: dict[str, int] = {}
        """Only replica of its stage -> checkpoints in a row for which it did not give its state."""
        self._written: dict[str, int] = {}
        """Base of a checkpoint that was given to the driver -> its iteration, unless that was rolled back."""
        self._again_at = 0.0
        self._again = Backoff(ctx.rng, *LAST_CHECKPOINT)

    @property
    def done(self) -> bool:
        """True if the last committed step has its checkpoint, or that checkpoint was given up."""
        return self.t >= self.tip.t

    def set_last(self, t: int) -> None:
        """Set t as the last step that has a checkpoint, and drop a checkpoint in progress."""
        self.t, self._open = t, None

    def rolled_back(self, t: int) -> None:
        """Forget the checkpoints of iterations after t that the driver is writing, as the log went back to t:
        `written` refuses them later, as these iterations may be taken again, on other bases, before the files
        are written."""
        self._written = {base: at for base, at in self._written.items() if at <= t}

    def due(self) -> None:
        """Begin a checkpoint of the last step if the step is released, none is in progress, and one is due:
        by the settings, if the last checkpoint, which it replaces on disk, is not in doubt for an open audit.
        When no further iteration opens, one of the last step is always due, and replaces one in progress.
        Nothing on a machine without the run's directory, or before a retry's back-off is over."""
        if self._open is not None and self._open.t < self.tip.t and self.tip.over:
            self._open = None  # the checkpoint of the last step replaces it
        if self._open is not None or not self.released.last or self.done:
            return
        if self.ctx.clock.now < self._again_at or not self.has_directory:
            return
        due = self.ctx.run.settings.checkpoints_at(self.tip.t) and self.catalog.leaves_sound_checkpoint()
        if self.tip.over or due:
            self._collect(Collection(self.tip.t, self.tip.base))

    def _collect(self, checkpoint: Collection) -> None:
        """Download every stage's state after `checkpoint.t` from replicas that applied that step (stage 0
        from this peer), checked against the fingerprints on which its reports agree, and have the driver
        write the checkpoint once all have arrived. If a download fails, `_not_fetched` gives the checkpoint
        up."""
        self._open, agreed = checkpoint, self.tip.fingerprints
        members = self.ctx.run.membership.members
        self._withheld = {peer: count for peer, count in self._withheld.items() if peer in members}

        def fetched(state: State) -> None:
            checkpoint.states[state.stage] = state
            for peer in checkpoint.downloads[state.stage].sources:
                self._withheld.pop(peer, None)
            if len(checkpoint.states) == len(checkpoint.downloads):
                stages = {stage: (got.pieces, got.fingerprint) for stage, got in checkpoint.states.items()}
                self._written[checkpoint.base] = checkpoint.t
                self.ctx.outbox.emit(WriteCheckpoint(checkpoint.t, checkpoint.base, stages))

        for stage in range(self.ctx.run.settings.stages + 1):
            sources = sorted(self.released.applied.get(stage, {})) if stage else [self.ctx.me]
            failed = partial(self._not_fetched, checkpoint.t, sources)
            fingerprint = agreed[stage] if stage and stage < len(agreed) else ""
            checkpoint.downloads[stage] = Download(
                self.ctx, stage, checkpoint.t, sources, fetched, failed, fingerprint, check=bool(stage)
            )
        for download in checkpoint.downloads.values():
            download.start()

    def _not_fetched(self, t: int, sources: Sequence[str], reason: str) -> None:
        """Give the checkpoint of step t up or retry it (`failed`), as none of `sources` gave a stage's state.
        If the only source is another peer within reach, count that against it, and report it as one that
        withholds after WITHHELD_MOST in a row. reason: for the event log."""
        if len(sources) == 1 and sources[0] != self.ctx.me and self.ctx.reachable(sources[0]):
            [peer] = sources
            self._withheld[peer] = self._withheld.get(peer, 0) + 1
            if self._withheld[peer] >= WITHHELD_MOST:
                del self._withheld[peer]
                self._withholds(peer)
        self.failed(t, reason)

    def failed(self, t: int, reason: str) -> None:
        """Drop the checkpoint of step t, which failed. That of the run's last step is tried again after a
        back-off, as often as LAST_CHECKPOINT says; any other is given up, and `t` counts as done. The run
        goes on, and the last checkpoint that was written stays. reason: for the event log."""
        self._open = None
        self.ctx.outbox.note("note", text=f"no checkpoint of iteration {t}: {reason}")
        # The last step's states are evaluated in an iteration of their own, until which the run is not over.
        wait_s = self._again.next() if self.tip.over or t >= self.ctx.run.steps else None
        if wait_s is None:
            self.t = t
        else:
            self._again_at = self.ctx.clock.now + wait_s

    def written(self, t: int, base: str, reached: bool) -> bool:
        """Note that the checkpoint of iteration t on `base` is on disk. True if it is one of the run's
        present history: then no earlier one is due, and one in progress up to t is dropped. False if a
        rollback overtook it; then it counts for nothing. reached: True if that history is known to have
        reached t on that base, as an earlier lead of this peer may have begun the checkpoint."""
        sound = reached or base in self._written
        self.catalog.written(t, sound)
        if sound:
            self._written = {other: at for other, at in self._written.items() if at >= t}
            self.t = max(self.t, t)
            if self._open is not None and self._open.t <= t:
                self._open = None
        return sound

    @property
    def downloads(self) -> list[Download]:
        return list(self._open.downloads.values()) if self._open is not None else []

    def deadline(self) -> float:
        times = [download.deadline() for download in self.downloads]
        if self._again_at > self.ctx.clock.now:
            times.append(self._again_at)
        return min(times, default=float("inf"))

    def tick(self) -> None:
        for download in self.downloads:
            download.tick()
