"""Snapshots held by one peer: those of its own stage, and copies of other stages' states.

Every `snapshot_every` iterations each replica copies its state and continues. Peers of other stages, chosen
by the leader, download the copy and keep it. Each peer reports its snapshots to the leader, which derives
from the reports to which iterations the run can be rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.protocol.messages import Held, Holds, Keep
from anabranch.protocol.state.download import Download, State
from anabranch.protocol.state.server import Key, StateServer

#: Copies that are downloaded at the same time. Plain choice.
PULLED_AT_ONCE = 2
#: Newest snapshots of a stage that a peer holds, besides the last complete one.
KEPT_PER_STAGE = 2


class Snapshots(Timer):
    """Snapshots that this peer holds: copies of its own stage's state, and of other stages' that the leader
    ordered. complete_t: last iteration for which enough peers are known to hold a snapshot of every stage; -1
    before the first."""

    def __init__(self, ctx: PeerContext, states: StateServer) -> None:
        self.ctx = ctx
        self.states = states
        self.complete_t = -1
        self.downloads: dict[Key, Download] = {}
        self._orders: dict[Key, Keep] = {}
        self._no_room: set[Key] = set()
        self._reports = 0

    # --- own state ----------------------------------------------------------------------------

    def applied(self, t: int) -> None:
        """Copy the state after step t, which was just applied, if a snapshot is due; it is held and reported
        to the leader once the copy is made."""
        if self.ctx.run.settings.snapshots_at(t):
            self.states.snapshot(self._pin_own)

    def loaded(self, state: State) -> None:
        """Hold a downloaded state, which this replica now uses, as a snapshot, and report it to the leader,
        if its iteration is a snapshot iteration."""
        if self.ctx.run.settings.snapshots_at(state.t):
            self._pin_own(state)

    def _pin_own(self, state: State) -> None:
        self._pin(state)
        self.report()

    def _pin(self, state: State) -> None:
        """Hold a snapshot. Of its stage only the newest KEPT_PER_STAGE and the last complete one stay: what
        others report never makes this peer hold more and more."""
        self.states.pinned[state.stage, state.t] = state
        for key in sorted(key for key in self.states.pinned if key[0] == state.stage)[:-KEPT_PER_STAGE]:
            if key[1] != self.complete_t:
                del self.states.pinned[key]

    # --- copies for others ---------------------------------------------------------------------

    def on_keep(self, order: Keep) -> str | None:
        """Handle the leader's order to copy another stage's state: download it, or report again if this peer
        holds it, or has no room for it; an order older than `complete_t` is ignored. Returns the reason if it
        is refused: no such stage, or this peer does not serve yet."""
        key = (order.stage, order.t)
        if order.stage > self.ctx.run.settings.stages:
            return f"there is no stage {order.stage}"
        if self.ctx.me not in self.ctx.run.membership.active_from:
            return "I do not serve yet"  # the order was for this peer's former process
        if key in self.states.pinned or key in self._no_room:
            self.report()
        elif key not in self.downloads and order.t >= self.complete_t:
            self._orders[key] = order
            self._pull_next()
        return None

    def _pull_next(self) -> None:
        while self._orders and len(self.downloads) < PULLED_AT_ONCE:
            key = min(self._orders)
            order = self._orders.pop(key)
            then = partial(self._done, key), partial(self._failed, key)
            download = Download(self.ctx, order.stage, order.t, order.sources, *then, order.fingerprint)
            self.downloads[key] = download
            download.start()

    def _done(self, key: Key, state: State) -> None:
        """Keep the downloaded snapshot `key` if there is room for it; report to the leader and begin the next
        download in any case."""
        self.downloads.pop(key, None)
        if self._has_room(state):
            self._pin(state)
        else:
            self._no_room.add(key)
        self.report()
        self._pull_next()

    def _failed(self, key: Key, reason: str) -> None:
        """Give up the download of a copy and begin the next one; the leader orders it again if it is still
        wanted."""
        self.downloads.pop(key, None)
        self._pull_next()

    def _has_room(self, state: State) -> bool:
        """True if a copy of `state` (of another stage) fits the memory budget beside the copies of the same
        iteration. These may take half of it, since the copies of the next one arrive before they are
        dropped."""
        held = [s for s in self.states.pinned.values() if s.stage != self.ctx.run.stage and s.t == state.t]
        pieces = len(state.pieces) + sum(len(other.pieces) for other in held)
        return 2 * pieces * PIECE_BYTES <= self.ctx.run.settings.snapshot_budget_bytes

    # --- all snapshots -----------------------------------------------------------------------------

    def report(self) -> None:
        """Send the leader the list of all snapshots that this peer holds, and of ordered copies for which
        there is no room (with fingerprint ""). Nothing is sent in a run without snapshots."""
        if self.ctx.run.settings.snapshot_every == 0:
            return
        held = [Held(s.stage, s.t, s.fingerprint) for _, s in sorted(self.states.pinned.items())]
        held += [Held(stage, t, "") for stage, t in sorted(self._no_room)]
        self._reports += 1
        self.ctx.outbox.send(self.ctx.log.leader, Holds(tuple(held), self._reports))

    def complete(self, t: int) -> None:
        """Drop snapshots, orders and downloads older than t: enough peers hold all states after t."""
        self.complete_t = max(t, self.complete_t)
        for key in [key for key in self.states.pinned if key[1] < t]:
            del self.states.pinned[key]
        self._no_room = {key for key in self._no_room if key[1] >= t}
        self._forget(lambda key: key[1] < t)

    def rolled_back(self, t: int) -> None:
        """Drop orders and downloads of iterations after t, because the run was rolled back to t, and report
        to the leader. The server has dropped their snapshots."""
        self.complete_t = min(self.complete_t, t)
        self._no_room = {key for key in self._no_room if key[1] <= t}
        self._forget(lambda key: key[1] > t)
        self.report()

    def moved(self) -> None:
        """Drop all orders and cancel all downloads, because this peer moves to another stage; the leader
        repeats its orders."""
        self._forget(lambda key: True)

    def _forget(self, void: Callable[[Key], bool]) -> None:
        self._orders = {key: order for key, order in self._orders.items() if not void(key)}
        for key in [key for key in self.downloads if void(key)]:
            self.downloads.pop(key).cancel()
        self._pull_next()

    def tick(self) -> None:
        for download in list(self.downloads.values()):
            download.tick()

    def deadline(self) -> float:
        return min((download.deadline() for download in self.downloads.values()), default=math.inf)
