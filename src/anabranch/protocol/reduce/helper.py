"""Reduce helper: a peer that adds up parts of the gradient of another stage, besides its own work.

The leader assigns the parts (`coordinator.reduce_schedule`): some to peers of adjacent stages, or all parts
of a reduce that failed to itself (`coordinator.witnessed_reduces`). The sums are of integers, so the result
does not depend on which peer adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from anabranch.protocol.audit.seals import PART, REDUCED, part_name, seal_text
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import Assemble, Moments, Payload, Result
from anabranch.protocol.messages import Attempt, ReducedPart, ReducePart
from anabranch.protocol.reduce.partial_sums import (
    TOO_LARGE,
    EarlyParts,
    PartialSums,
    PartMemory,
    ReduceAccount,
    account_of,
    collectors,
    contributors,
    misdealt,
    over_parts,
    witnessed,
)


@dataclass
class _Help:
    """Attempt that this peer helps with. summing: its sums of the parts. reduced: part -> reduced part.
    memory: of the parts that came. came, seals: seals of the parts that came, by (part, position), and of the
    reduced parts, where runs are audited. moments: of the contributions, by part. result: digest and sums of
    squares of the gradient, if this peer sums all parts; None until they are known."""

    message: Attempt
    summing: PartialSums
    reduced: dict[int, Payload] = field(default_factory=dict)
    memory: PartMemory = field(default_factory=PartMemory)
    came: dict[tuple[int, int], bytes] = field(default_factory=dict)
    seals: dict[int, bytes] = field(default_factory=dict)
    moments: dict[int, tuple[Moments, ...]] = field(default_factory=dict)
    result: tuple[str, dict[str, float]] | None = None


class ReduceHelper:
    """Attempts of other stages whose gradient parts this peer adds up in the open iteration: of adjacent
    stages, or, at the leader, of any stage."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._helps: dict[int, _Help] = {}
        self._early: dict[int, EarlyParts] = {}

    def forget(self) -> None:
        """Forget all attempts and parts, at the end of an iteration; sums under way are dropped."""
        self._helps.clear()
        self._early.clear()

    def forget_attempts(self, term: int) -> None:
        """Forget reduce attempts ordered in a log term above `term`: their sender was not the leader. Parts
        that came early stay."""
        self._helps = {s: help for s, help in self._helps.items() if help.message.attempt.term <= term}

    @property
    def partners(self) -> set[str]:
        """Members of the reduces that this peer helps with, of other stages; itself never."""
        return {member for help in self._helps.values() for member in help.message.members}

    @property
    def early(self) -> int:
        """Number of parts kept that arrived before their attempt was announced, for the check of memory
        bounds."""
        return sum(map(len, self._early.values()))

    def parts(self, stage: int) -> int:
        """Number of parts of the gradient of a helped stage; 1 if this peer does not help the stage."""
        help = self._helps.get(stage)
        return len(help.message.sums) if help is not None else 1

    def on_attempt(self, message: Attempt) -> str | None:
        """Begin to help with an attempt of an adjacent stage (the leader: of any other), and add up those of
        its parts that came early. Returns why it is refused: it is of another stage, does not name this peer
        as a helper, or deals its parts wrongly (`misdealt`). None if it is taken, or ignored as it is no
        newer than the known one. Its iteration is not checked here."""
        ctx, known = self.ctx, self._helps.get(message.stage)
        if known is not None and message.attempt <= known.message.attempt:
            return None
        beside = message.stage in (ctx.run.previous_stage(), ctx.run.next_stage())
        if (not beside and ctx.me != ctx.log.leader) or message.stage == ctx.run.stage:
            return f"stage {message.stage} is not beside mine"
        if ctx.me not in message.helpers:
            return "a reduce that I am not to help with"
        if (wrong := misdealt(message)) is not None:
            return wrong
        mine = [part for part, peer in enumerate(collectors(message)) if peer == ctx.me]
        weighed = ctx.run.settings.audits and message.stage > 0
        senders = contributors(message)
        summing = PartialSums(ctx, message.fence.t, mine, senders, True, weighed, self._summed)
        if witnessed(message, ctx.me):
            summing.keep()
        self._helps[message.stage] = _Help(message, summing)
        for peer, part, payload, share in self._of(message.stage).take():
            self.on_part(peer, part, payload, share)
        return None

    def on_part(
        self, peer: str, message: ReducePart | ReducedPart, payload: Payload | None, share: float = 0.0
    ) -> str | None:
        """Take a part of its sum from a member of a helped stage; return why it is refused, or None. A part
        of an attempt that is not announced yet is kept; one of an older attempt, and a second one, is
        dropped. share: memory of the payload, in largest payloads of the run."""
        ctx = self.ctx
        never = ctx.run.settings.spread == "never" and ctx.me != ctx.log.leader
        if payload is None or isinstance(message, ReducedPart) or never:
            return "no part of a sum that I am to add up"
        help = self._helps.get(message.stage)
        if help is None or message.attempt > help.message.attempt:
            return self._of(message.stage).keep(peer, message, payload, share)
        if message.attempt != help.message.attempt:
            return None
        members = help.message.members
        if peer not in members or members.index(peer) not in contributors(help.message):
            return "a part from a peer that has none in the attempt"
        if message.part not in help.summing.mine:
            return "a part that another sums"
        if help.memory.exceeded(peer, message, share):
            return TOO_LARGE
        help.came.setdefault((message.part, members.index(peer)), message.seal)
        help.summing.add(message.part, members.index(peer), payload)
        return None

    def link_up(self, peer: str) -> None:
        """Send `peer`, whose link is back, the reduced parts that it may have missed of each reduce that it
        is a member of."""
        for help in self._helps.values():
            if peer in help.message.members:
                for part in help.reduced:
                    self._send(help, part, peer)

    def _of(self, stage: int) -> EarlyParts:
        return self._early.setdefault(stage, EarlyParts())

    def _summed(
        self, summing: PartialSums, part: int, inputs: tuple[Payload, ...], result: Result
    ) -> None:
        help = next((help for help in self._helps.values() if help.summing is summing), None)
        if help is None:
            return
        message = help.message
        if not result.outputs:
            what = f"the sum for stage {message.stage} in iteration {message.fence.t}"
            self.ctx.outbox.note("note", text=f"{what} failed: {result.error}")
            summing.examine(message.stage)
            return  # the leader orders the reduce again, without helpers
        if self._unsealed(help, part, result.hashes):
            return  # the leader orders the reduce again, without who sent it
        help.reduced[part], help.moments[part] = result.outputs[0], result.moments
        text = self._text(message, REDUCED, part, result.hashes[-1]) if result.hashes else b""
        help.seals[part] = self.ctx.signer.sign(text) if text else b""
        for member in message.members:
            self._send(help, part, member)
        if witnessed(message, self.ctx.me) and len(help.reduced) == len(message.sums):
            inputs = tuple(help.reduced[part] for part in range(len(message.sums)))
            task = Assemble(message.fence.t, message.stage)
            then = partial(self._assembled, help)
            self.ctx.tasks.submit(TaskPriority.STEP, task, inputs, then)

    def _assembled(self, help: _Help, result: Result) -> None:
        """Store the gradient's digest and squares where this peer summed all parts of a reduce. If they make
        no gradient (overflow, or parts that do not fit), have the members' contributions examined one by
        one."""
        if result.digest and not result.error and not result.overflow:
            help.result = result.digest, result.squares
            return
        why = result.error or f"{result.overflow} is not finite"
        what = f"the sum for stage {help.message.stage} in iteration {help.message.fence.t}"
        self.ctx.outbox.note("note", text=f"{what} is no gradient: {why}")
        help.summing.examine(help.message.stage)

    def account(self, message: Attempt) -> ReduceAccount | None:
        """Account of an attempt that this peer helps with: members whose parts are lacking or unusable, and
        the result, as far as this peer knows them. None if it has not begun this attempt."""
        help = self._helps.get(message.stage)
        if help is None or help.message.attempt != message.attempt:
            return None
        account = account_of(message, help.summing, len(help.reduced), help.result)
        return account._replace(moments=over_parts(help.moments.values()))

    def _send(self, help: _Help, part: int, member: str) -> None:
        message = help.message
        fence = self.ctx.fence(message.fence.t, message.fence.base)
        self.ctx.outbox.send(
            member,
            ReducedPart(fence, message.stage, message.attempt, part, help.seals[part]),
            help.reduced[part],
        )

    def _unsealed(self, help: _Help, part: int, hashes: tuple[str, ...]) -> bool:
        """In audited runs, check the seals of the parts that were added up; enter members whose part lacks
        their own seal as unusable for the account of the attempt. True if there is any. hashes: of these
        parts, then of their sum."""
        message, found = help.message, False
        for position, payload_hash in zip(contributors(message), hashes[:-1], strict=False):
            peer, seal = message.members[position], help.came.get((part, position), b"")
            if not self.ctx.signer.verify(peer, self._text(message, PART, part, payload_hash), seal):
                self.ctx.outbox.refuse(peer, "ReducePart", "without the seal of its sender")
                help.summing.unusable.add(position)
                found = True
        return found

    def _text(self, message: Attempt, kind: str, part: int, payload_hash: str) -> bytes:
        """Text that the seal of a part signs. kind: PART (of a member's sum) or REDUCED. payload_hash: hash
        of the part."""
        run, name = self.ctx.run.settings.run, part_name(message.attempt.term, message.attempt.number, part)
        return seal_text(run, message.fence.base, message.stage, kind, name, payload_hash)
