"""Proposal of the next log record by the leader: a step, a skipped step, or the last evaluation (R8, R13)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET

from anabranch.protocol.audit.second_audits import SecondAudits
from anabranch.protocol.consensus.raft_node import Voter
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.island_rounds import IslandRounds
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.coordinator.state_agreement import StateAgreement
from anabranch.protocol.coordinator.step_receipts import StepReceipts
from anabranch.protocol.log.records import AnyRecord, Closing, Commit, Evaluation, StageCommit, Witness
from anabranch.protocol.log.step_parameters import Schedule
from anabranch.protocol.messages import Attempt, Prepared
from anabranch.protocol.reduce.coverage import global_norm
from anabranch.protocol.rounds.plan import filled


@dataclass(eq=False)
class Proposals:
    """Builder of the next log record about the open iteration from reports, reduces and releases."""

    ctx: PeerContext
    log: Voter
    tip: LogTip
    schedule: Schedule
    reducing: ReduceAttempts
    released: StateAgreement
    second: SecondAudits
    receipts: StepReceipts
    rounds: IslandRounds

    def record(self, current: Round) -> AnyRecord | None:
        """Record of the open step `current`, for the caller to log, if it may be proposed now; else None. It
        may be if all stages are PREPARED with receipts that agree, the batch's hash is known, the last step
        is released, the held-out windows are evaluated, and no difference that an audit found has to be
        checked before (`SecondAudits.holds`). A skipped step (`Round.witness`: an overflow, or a round whose
        slots nobody can fill) needs only the release, the batch's hash, and no such difference. After the
        run's last step: the record of the last evaluation. Not a mere query: where reports or receipts
        differ, it removes or convicts members, and gives reduces up (`ReduceAttempts.prepared`,
        `StepReceipts.consistent`)."""
        if not self.released.last:
            return None
        evaluation = self._evaluation(current)
        if current.t > self.ctx.run.steps:
            return Closing(self.tip.t, evaluation) if evaluation is not None else None
        if not current.manifest:
            return None
        if current.witness is not None:
            skip = self._record(current, self.tip.adam_step, 0.0, (), (), None, current.witness)
            return None if self.second.holds(current.t) else skip
        if evaluation is None and self.tip.windows(current):
            return None
        if not current.attempts:
            return None  # no reduce was ordered yet
        prepared = {s: self.reducing.prepared(current, s) for s in range(self.ctx.run.settings.stages + 1)}
        if current.slots and any(
            current.covers[stage] != current.counts(stage) for stage in current.attempts
        ):
            return None  # a slot was dropped after one stage's reduce was ordered
        messages = [message for message in prepared.values() if message is not None]
        if len(messages) < len(prepared) or not self.receipts.consistent(current):
            return None
        if self.second.holds(current.t):
            return None
        return self._commit(current, messages, evaluation)

    def _evaluation(self, current: Round) -> Evaluation | None:
        """Held-out evaluation of the state before iteration `current`; None until all its windows are
        reported, and if it has none."""
        windows = self.tip.windows(current)
        if not windows or any(index not in current.evaluations for index in windows):
            return None
        sums = tuple(current.evaluations[index] for index in windows)
        return Evaluation(t=current.t - 1, loss_sums=sums, tokens=len(windows) * self.schedule.window_tokens)

    def _commit(self, current: Round, prepared: list[Prepared], evaluation: Evaluation | None) -> Commit:
        """Record of the optimizer step of iteration `current`, all of whose stages have an attempt. To be
        called once: it chooses and notes contributions that are far off. prepared: the agreed report of each
        stage, by stage. evaluation: of the state before, if it was evaluated."""
        stages = []
        for stage, message in enumerate(prepared):
            attempt = current.attempts[stage]
            stages.append(
                StageCommit(
                    fingerprint_before=self.tip.fingerprints[stage],
                    digest=message.digest,
                    squares=dict(sorted(message.squares.items())),
                    members=attempt.members,
                    classes=current.classes[stage],
                    owners=attempt.owners,
                    receipts=self.receipts.hashes(current, attempt),
                    disputed=self.receipts.disputed(current, attempt),
                    contributions=_digests(current, attempt),
                    far_off=self.receipts.far_off(
                        current, attempt, self.reducing.witnessing.moments(attempt)
                    ),
                )
            )
        norm = global_norm(message.squares for message in prepared)
        adam_step = self.tip.adam_step + (not current.slots)
        return self._record(current, adam_step, norm, _losses(current), tuple(stages), evaluation)

    def _record(
        self,
        current: Round,
        adam_step: int,
        norm: float,
        loss_sums: tuple[float, ...],
        stages: tuple[StageCommit, ...],
        evaluation: Evaluation | None,
        witness: Witness | None = None,
    ) -> Commit:
        """Record of the step of iteration `current`. adam_step: Adam's counter after it. norm: of the whole
        gradient. loss_sums: in nats, by microbatch or slot. stages: one entry a stage, () if skipped.
        witness: reason why the step is skipped (an overflow, or slots that nobody can fill); None for a step
        that is taken."""
        tokens, step = self.schedule.tokens, self.schedule.step(current.t, max(1, adam_step), norm)
        accepted = filled(current.slots, stages)
        if current.slots:
            assert self.schedule.outer is not None
            steps = sum(current.slots[slot].weight for slot in accepted)
            tokens, step = steps * self.schedule.inner_tokens, self.schedule.outer(max(1, steps))
        return Commit(
            run=self.ctx.run.settings.run,
            epoch=self.ctx.run.settings.epoch,
            term=self.log.raft.term,
            t=current.t,
            previous_base=self.tip.base,
            manifest=current.manifest,
            verdict="skip" if witness is not None else "step",
            tokens=tokens,
            loss_sums=loss_sums,
            stages=stages,
            norm=norm,
            clip_factor=0.0 if witness is not None else step.clip_factor,
            learning_rate=step.learning_rate,
            bias_correction1=step.bias_correction1,
            bias_correction2=step.bias_correction2,
            adam_step=adam_step,
            evaluation=evaluation,
            witness=witness,
            slots=self.rounds.next(current, accepted) or UNSET,
        )


def _digests(current: Round, attempt: Attempt) -> tuple[str, ...]:
    """Digest of each slot's contribution, as its owner reported it; "" for a slot that does not count, and if
    the owner reported none. () in a run without private data, and at other stages than 1."""
    if attempt.stage != 1 or not current.own:
        return ()
    return tuple(digest for digest, _ in _own_work(current, attempt))


def _losses(current: Round) -> tuple[float, ...]:
    """Loss sum (nats) of each microbatch or slot, 0.0 for a dropped slot; on private data as the owner of the
    contribution reported it, or if it reported none, the owner of the head."""
    if not current.own:
        return current.counted_losses
    known = (loss for _, loss in _own_work(current, current.attempts[1]))
    losses = zip(known, current.counted_losses, strict=True)
    return tuple(of_head if math.isnan(loss) else loss for loss, of_head in losses)


def _own_work(current: Round, attempt: Attempt) -> Iterator[tuple[str, float]]:
    """Digest and loss sum of each slot's contribution as its owner reported them; ("", NaN) if none did."""
    for slot, owner in enumerate(attempt.owners):
        peer = attempt.members[owner] if owner >= 0 else ""
        yield current.own.get(peer, {}).get(slot, ("", math.nan))
