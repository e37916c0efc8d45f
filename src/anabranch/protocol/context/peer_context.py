"""Shared context of one peer's parts: identity, clock, outbox, task queue and read-only views.

Each component is a class of its own whose methods alone change it. A part that needs only one or two of them
takes those; the others take the whole context, which itself never changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from anabranch.counter_rng import CounterRng
from anabranch.protocol.context.carriers import CarrierChoice
from anabranch.protocol.context.clock import Clock
from anabranch.protocol.context.dialer import Dialer
from anabranch.protocol.context.links import LinkTable
from anabranch.protocol.context.outbox import Outbox
from anabranch.protocol.context.rate_limits_and_bans import RateLimits
from anabranch.protocol.context.run_view import LogView, RunView, StandbyView
from anabranch.protocol.context.task_queue import WorkQueue
from anabranch.protocol.interface.events import Run
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.signatures import NoSigner, Signer
from anabranch.protocol.membership.overlay import ALL_TIMES
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.messages import Fence
from anabranch.protocol.telemetry.peer_costs import PeerCosts


@dataclass(frozen=True)
class PeerContext:
    """Components that all parts of one peer share; `make_context` builds it."""

    me: str
    incarnation: int
    clock: Clock
    outbox: Outbox
    tasks: WorkQueue
    links: LinkTable
    dialer: Dialer
    run: RunView
    log: LogView
    costs: PeerCosts
    rate_limits: RateLimits
    rng: CounterRng
    standby_view: StandbyView
    uses: dict[str, float]
    """Recent use of credits: upstream peer -> number that it used for new microbatches, decaying."""
    signer: Signer

    def use_settings(self, settings: Settings) -> None:
        """Replace this peer's settings by those of the run that it joins; the order of its tasks and the size
        of an activation, by which costs are estimated, follow from them."""
        self.run.use_settings(settings)
        self.tasks.put_iterations_first(bool(settings.delay.start))
        self.costs.activation_bytes = settings.activation_bytes

    def fence(self, t: int, base: str) -> Fence:
        """Fence of a message about iteration `t` on `base` (hash of the log entry that it builds on): with
        this peer's epoch, incarnation, stage."""
        return Fence(self.run.settings.epoch, self.incarnation, t, base, self.run.stage)

    def start_next(self) -> bool:
        """Have the driver run the next waiting task if the worker is free; True if one was started."""
        job = self.tasks.next()
        if job is None:
            return False
        self.outbox.emit(Run(*job))
        return True

    def admitted(self) -> bool:
        """True if this process is a member according to the log, as far as this peer has applied it."""
        member = self.run.membership.members.get(self.me)
        return member is not None and member.incarnation == self.incarnation

    def knows_process(self, peer: str) -> bool:
        """True if the log has the process of `peer` that was linked last as a member, not an earlier or later
        process."""
        member = self.run.membership.members.get(peer)
        return member is not None and self.links.incarnations.get(peer) == member.incarnation

    def reachable(self, peer: str) -> bool:
        """True if `peer` can be sent work now: it is this peer itself, or is linked, not suspected, and no
        forger (`LinkTable.forgers`)."""
        links = self.links
        if links.forgers and links.is_forger(peer):
            return False
        return peer == self.me or (peer in links.up and peer not in links.suspects)

    def hears_nobody(self) -> bool:
        """True if no other member can be sent work, although there are some: this peer's own line may be
        down."""
        members = self.run.membership.members
        if any(peer != self.me and self.reachable(peer) for peer in members):
            return False
        return not members.keys() <= {self.me}

    def apart(self) -> tuple[str, ...]:
        """Replicas of this peer's stage that it cannot reach, among those that serve or will serve, for its
        claims to the leader; in a large stage only overlay neighbours and the replicas that it exchanges
        reduce parts with."""
        run, stage = self.run, self.run.stage
        if run.near.crowded:
            fellows = run.near.neighbours_at(stage, self.me, stage) | self.links.in_use()
        else:
            fellows = frozenset(run.membership.live(stage, ALL_TIMES))
        unreached = [peer for peer in fellows if not self.reachable(peer)]
        return tuple(sorted(peer for peer in unreached if run.membership.is_live(peer, stage, ALL_TIMES)))


def make_context(
    me: str,
    incarnation: int,
    stage: int,
    settings: Settings,
    leader: str,
    unheard: Collection[str] = (),
    memberships: Callable[[], Membership] = Membership,
    signer: Signer | None = None,
) -> PeerContext:
    """Make the context of peer `me`. leader: assumed leader of the log at the start.

    Its random streams are functions of its id and incarnation. unheard: kinds of event-log notes that the
    driver does not use. memberships: factory of an empty membership. signer: signatures of this peer, for
    runs that are audited.
    """
    seed = zlib.crc32(me.encode())
    run = RunView(me, (incarnation, seed), stage, settings, memberships)
    rate_limits = RateLimits(lambda peer: peer in run.membership.members)
    clock, links, rng = Clock(), LinkTable(), CounterRng(seed, incarnation)
    outbox, log, costs = Outbox(me, clock, links, rate_limits, unheard), LogView(leader), PeerCosts()
    carriers = CarrierChoice(me, run, log, links, costs)
    dialer = Dialer(me, clock, links, outbox, run, rng, carriers)
    context = PeerContext(
        me, incarnation, clock, outbox, WorkQueue(), links, dialer, run, log, costs, rate_limits, rng,
        StandbyView(), {},
        signer or NoSigner(),
    )  # fmt: skip
    context.use_settings(settings)
    return context
