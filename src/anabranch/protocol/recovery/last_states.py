"""States after the last step: who reported its stage's, who says that it cannot get it, and how long that may
take."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.messages import Behind
from anabranch.protocol.recovery.snapshot_catalog import SnapshotCatalog

#: Times what a step usually takes, and least time (s), within which a state is given: before that nobody is
#: doubted. Plain choices: as for data nodes (`late_data_nodes`).
LONG_STEPS, LONG_S = 12.0, 50.0
#: Times as long as a stage's state takes over links like the leader's, after which nobody waits for it any
#: more. A plain choice: volunteers' lines may be several times slower.
FETCHED = 8.0


class LastStates:
    """Members' reports about the states after the last step, at the leader. t, since: last committed
    iteration, and time (s) since which this peer knows it. applied: stage -> peers that reported its state.
    step_s: usual seconds of a step; 0: not known."""

    def __init__(self, ctx: PeerContext, admission: Admission, catalog: SnapshotCatalog) -> None:
        self.ctx = ctx
        self._admission, self._catalog = admission, catalog
        self.t, self.since = -1, 0.0
        self.applied: Mapping[int, Collection[str]] = {}
        self.step_s = 0.0
        self._behind: dict[str, int] = {}
        """Replica that cannot get its stage's state -> last iteration of the state that it lacks."""
        self._got: dict[str, int] = {}
        """Member that does not serve yet -> iteration after which it has the state that a replica of its
        stage reported."""

    @property
    def lacked(self) -> bool:
        """True if a replica says that it cannot get a state."""
        return bool(self._behind)

    def look(self, t: int, applied: Mapping[int, Collection[str]], step_s: float) -> bool:
        """Enter what is known now: the last committed iteration `t`, and `applied` and `step_s` as the
        attributes of these names. True if t is another iteration than at the last call; then `since` is
        now."""
        self.applied, self.step_s = applied, step_s
        if t == self.t:
            return False
        self.t, self.since = t, self.ctx.clock.now
        return True

    def on_behind(self, peer: str, message: Behind) -> None:
        """Enter a replica's report that it cannot get what it needs to apply step message.t (R12); ignored
        unless the peer is a member of message.stage."""
        if self.ctx.run.membership.stage_of(peer) == message.stage:
            self._behind[peer] = message.t

    def on_ready(self, peer: str, t: int) -> None:
        """Note that a member that does not serve yet has the state after iteration t that a replica of its
        stage reported, though it may not be agreed yet: that replica gave it."""
        self._got[peer] = t

    def got(self, peer: str, t: int) -> bool:
        """True if `peer` reported such a state after iteration t last."""
        return self._got.get(peer) == t

    def forget(self, peer: str) -> None:
        """Forget the reports of `peer`, which has applied the last step, or was removed."""
        self._behind.pop(peer, None)
        self._got.pop(peer, None)

    def rolled_back(self) -> None:
        """Forget all reports after a rollback."""
        self._behind.clear()
        self._got.clear()
        self.t, self.since = -1, 0.0

    def lacking(self, peers: Collection[str], t: int) -> list[str]:
        """Those of `peers` whose last report says that they cannot get the state after iteration t; not those
        that lack the state after another iteration."""
        return [peer for peer in peers if self._behind.get(peer) == t]

    def having(self, stage: int, t: int) -> list[str]:
        """Replicas that serve a stage in iteration t + 1 and reported its state after iteration t, the last
        committed one."""
        applied = self.applied.get(stage, ())
        return [peer for peer in self.ctx.run.membership.live(stage, t + 1) if peer in applied]

    def knows(self, peer: str) -> bool:
        """True if `peer` has or once had its stage's state: it reported ready, or the log names an iteration
        from which it serves."""
        return peer in self._admission.ready or peer in self.ctx.run.membership.active_from

    def outvoted(self, stage: int, t: int) -> bool:
        """True if more than half of those that serve a stage say that they cannot get its state after
        iteration t, which others of it reported, and there is a snapshot to go back to. False in runs without
        snapshots."""
        live = self.ctx.run.membership.live(stage, t + 1) if self._behind else []
        most = 2 * len(self.lacking(live, t)) > len(live) and self.having(stage, t)
        return bool(most) and self.ctx.run.settings.snapshot_every > 0 and self._catalog.newest(t) is not None

    def fetch_s(self, stage: int, t: int) -> float:
        """Seconds that a replica may take to get its stage's state after iteration t: the longest of LONG_S,
        of LONG_STEPS steps, of the steps since the newest restore point (in runs with snapshots), and of
        FETCHED times what the state takes over links like the leader's."""
        settings = self.ctx.run.settings
        point = self._catalog.newest(t + 1) if settings.snapshot_every else None
        steps = max(LONG_STEPS, t + 1 - point.t if point is not None else 0)
        state_s = FETCHED * self.ctx.costs.reduce_s(settings.state_bytes_of(stage))
        return max(LONG_S, steps * self.step_s, state_s)
