"""Claims of one iteration (R6): what one replica tells the leader about its work. Each claim is cumulative:
all units whose weight gradient is in the replica's sum, with their losses. Overflows, the last one of each
microbatch, are sent beside them.

A claim lists units: a microbatch at a relay stage; its head, or its embedding, at stage 0.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.tasks import Result, head_unit
from anabranch.protocol.log.records import GIVEN_UP
from anabranch.protocol.messages import Claim, ContributionDigests, Overflow, SentOn


class Claims:
    """Results of iteration t at one replica, which `send` reports to the leader in cumulative claims. held:
    units whose weight gradient is in this replica's sum. losses, evaluations: microbatch index -> sum of its
    losses (nats), in training (entered by the caller, and reported once its head is held) and in evaluation.
    overflows: microbatch index -> its last overflow at this replica. changed: True if something is not
    reported yet. names_holders: True once the leader sent any `Missing`: claims say who has the microbatches
    that this replica sent on."""

    def __init__(self, ctx: PeerContext, t: int, base: str, holders: Callable[[], SentOn] = dict) -> None:
        """holders: returns, for `Claim.holders`, who has the microbatches that this replica sent on (peer of
        the next stage -> indices)."""
        self.ctx = ctx
        self.t = t
        self.base = base
        self.held: set[int] = set()
        self.losses: dict[int, float] = {}
        self.evaluations: dict[int, float] = {}
        self.overflows: dict[int, Overflow] = {}
        self.own: dict[int, Result] = {}
        """Slot whose data are this machine's own -> result with digest and loss sum of its contribution."""
        self.changed = False
        self.names_holders = False
        self._holders = holders
        self._manifest = ""

    def hold(self, unit: int, half: bool = False) -> None:
        """Add a unit whose weight gradient is now in this replica's sum, to be reported by the next `send`;
        one that is held already is only reported again. half: True if the report may wait for another unit
        that will soon follow."""
        self.held.add(unit)
        self.changed = self.changed or not half

    def evaluated(self, index: int, loss_sum: float) -> None:
        """Record the loss sum (nats) of evaluation microbatch `index` for the next `send`, in place of one
        recorded before."""
        self.evaluations[index] = loss_sum
        self.changed = True

    def in_range(self, index: int, result: Result, sender: str = "") -> bool:
        """True if the task of microbatch `index` found no overflow (non-finite or out-of-range value).
        Otherwise False, and the overflow is kept for the next `send`, in place of an earlier one of this
        microbatch, and noted in the event log; if the last one of this microbatch had the same sender,
        nothing changes. One of another sender is reported too, since the leader skips no step for overflows
        that all came with the inputs of one relay. sender: peer that sent the last input, and may be the
        cause ("": nobody did)."""
        if result.overflow and not self.overflowed(index, sender):
            fence = self.ctx.fence(self.t, self.base)
            self.overflows[index] = Overflow(fence, self.ctx.run.stage, index, result.overflow, sender)
            self.changed = True
            self.ctx.outbox.note(
                "overflow", t=self.t, stage=self.ctx.run.stage, index=index, tensor=result.overflow
            )
        return not result.overflow

    def give_up(self, slot: int, sender: str = "") -> None:
        """Keep for the next `send` that the crew of slot number `slot` does not go on, as a task of it failed
        at this machine. A second call with the same sender does nothing. sender: peer that sent the last
        input."""
        self.in_range(slot, Result(overflow=GIVEN_UP), sender)

    def overflowed(self, index: int, sender: str) -> bool:
        """True if the last overflow of microbatch `index` at this replica was with an input of `sender`."""
        return index in self.overflows and self.overflows[index].sender == sender

    def send(self) -> None:
        """Send the leader all overflows, and the whole claim so far with the members of this stage that this
        replica cannot reach (R6), also if nothing is new. The digests of contributions of own data go before
        the claim. No claim is sent while all of it is empty, but by a data node after a `Missing`: the leader
        may lack the hash of the batch, without which it skips no step."""
        self.changed = False
        for overflow in self.overflows.values():
            self.ctx.outbox.send(self.ctx.log.leader, overflow)
        apart = self.ctx.apart()
        batch = self.ctx.run.stage == 0 and self.names_holders
        if not (self.held or self.evaluations or apart or batch):
            return
        if self.ctx.run.stage == 0 and not self._manifest:
            self._manifest = self.ctx.run.manifest(self.t)
        losses = {index: self.losses[index] for index in self.losses if head_unit(index) in self.held}
        claim = Claim(
            self.ctx.fence(self.t, self.base),
            self.ctx.run.stage,
            tuple(sorted(self.held)),
            losses,
            dict(self.evaluations),
            self._manifest,
            apart,
            self._holders() if self.names_holders else {},
        )
        if self.own:  # first: a step may be committed as soon as the claim has come
            digests = {slot: result.digest for slot, result in self.own.items()}
            losses = {slot: result.loss_sum for slot, result in self.own.items()}
            report = ContributionDigests(claim.fence, claim.stage, digests, losses)
            self.ctx.outbox.send(self.ctx.log.leader, report)
        self.ctx.outbox.send(self.ctx.log.leader, claim)
