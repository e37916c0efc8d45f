"""The log's leader: admits and removes members, settles covers, proposes the step (R3, R6–R9, R11, R14).

It decides from what peers report, logs what it decided, and announces what is chosen. It holds nothing
that cannot be told again: after each change `consider` looks at the whole picture and takes the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from anabranch.protocol import electorate
from anabranch.protocol.admission import Admission
from anabranch.protocol.backoff import Backoff
from anabranch.protocol.collecting import Checkpoint
from anabranch.protocol.control import Asked
from anabranch.protocol.core import Core
from anabranch.protocol.cover import global_norm, missing, plausible, settle
from anabranch.protocol.download import Download, State
from anabranch.protocol.events import WriteCheckpoint
from anabranch.protocol.keeping import Keeping, Point
from anabranch.protocol.messages import (
    Applied,
    Attempt,
    AttemptId,
    Claim,
    Missing,
    Overflow,
    Prepared,
    Release,
)
from anabranch.protocol.rebalancing import Rebalancing
from anabranch.protocol.records import (
    AnyRecord,
    Closing,
    Commit,
    Control,
    Evaluation,
    Genesis,
    Members,
    Rollback,
    StageCommit,
    Voters,
    Witness,
)
from anabranch.protocol.restoring import Restoring
from anabranch.protocol.schedule import Schedule
from anabranch.protocol.tasks import head_unit
from anabranch.protocol.telling import Telling
from anabranch.protocol.voter import Voter

#: Skipped steps in a row after which the run stops.
SKIPS_IN_A_ROW = 3
#: Iterations whose agreed fingerprints are remembered, for those whose state took long to come.
AGREED_KEPT = 1024
#: Seconds without progress after which the leader asks after what is missing (grows with the usual step).
STALL_FLOOR_S = 5.0
STALL_FACTOR = 4.0
#: The checkpoint of the last step is tried again: first and longest wait (s), and how often.
LAST_CHECKPOINT = (1.0, 8.0, 6)


#: What a stage's attempt follows from: reports of new units, the membership's version, who is silent.
Look = tuple[int, int, frozenset[str]]


@dataclass
class Round:
    """What is known of iteration t."""

    t: int
    base: str
    opened_at: float
    claims: dict[int, dict[str, frozenset[int]]] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    classes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    counted_losses: tuple[float, ...] = ()
    prepared: dict[int, dict[str, Prepared]] = field(default_factory=dict)
    manifest: str = ""
    witness: Witness | None = None
    progress_at: float = 0.0
    stalls: int = 0
    spread: float = 1.0
    retries: dict[int, int] = field(default_factory=dict)
    redone: dict[int, set[str]] = field(default_factory=dict)
    """By stage: members that this step does without; others do again what they had added."""
    reported: dict[int, int] = field(default_factory=dict)
    """By stage: reports of new units so far."""
    looked: dict[int, Look] = field(default_factory=dict)
    """By stage: the look at its cover, or its attempt, after which there was nothing to do."""
    agreed: dict[int, tuple[tuple[AttemptId, int, int], Prepared | None]] = field(default_factory=dict)
    """By stage: of which attempt, so many PREPARED and membership it was found who agrees; the answer."""

    def give_up(self, stage: int) -> dict[str, Prepared]:
        """Forget a stage's attempt; who was PREPARED for it."""
        self.attempts.pop(stage, None)
        self.looked.pop(stage, None)
        self.agreed.pop(stage, None)
        return self.prepared.pop(stage, {})


class Leader:
    """`fingerprints` are the agreed states of all stages after iteration `t`. has_directory: checkpoints can
    be written here."""

    def __init__(
        self,
        core: Core,
        log: Voter,
        schedule: Schedule,
        admission: Admission,
        has_directory: bool,
    ) -> None:
        self.core = core
        self.opening: list[AnyRecord] = []
        self.log = log
        self.schedule = schedule
        self.admission = admission
        self.has_directory = has_directory
        self.asked = Asked(core)
        self.telling = Telling(core)
        self.keeping = Keeping(core)
        self.restoring = Restoring(core, self.admission, self.keeping)
        self.rebalancing = Rebalancing(core)
        self.admission.has_last = self._has_last
        self.admission.absent.waits = self._waits_for
        self.admission.worth_s = lambda peer: self.restoring.worth_s(peer, self.t, self._step_s)
        self.t = 0
        self.base = ""
        self.adam_step = 0
        self.fingerprints: tuple[str, ...] = ()
        self.round: Round | None = None
        self.finished = False
        self._applied: dict[int, dict[str, str]] = {}
        self._unchecked: list[tuple[str, int]] = []
        """Who reported the last step, and is yet to be compared with what was agreed; its stage."""
        self._agreed: dict[int, tuple[str, ...]] = {}
        self._released = 0
        self._attempt_number = 0
        self._skips = 0
        self._stop_reason: str | None = None
        self._stop_logged = False
        self._closed = False
        self._checkpoint: Checkpoint | None = None
        self._checkpointed = -1
        self._checkpoint_at = 0.0
        self._checkpoint_again = Backoff(core.dice, *LAST_CHECKPOINT)
        self._step_s = 0.0
        self._voters_at = 0.0
        self._waiting_for = ""

    @property
    def last_t(self) -> int:
        return self.core.steps

    def restore(self, t: int, base: str, adam_step: int, fingerprints: tuple[str, ...]) -> None:
        """Where the log stands when this process begins to lead."""
        self.t, self.base, self.adam_step, self.fingerprints = t, base, adam_step, fingerprints
        self._agreed = {t: fingerprints}
        self._released = t
        self._checkpointed = t
        on_disk = self.has_directory and t not in self.keeping.points
        self.keeping.begin(Point(t, fingerprints, adam_step, on_disk=on_disk))

    def _roll_back(self, record: Rollback, base: str) -> None:
        """The run goes on from an earlier iteration: what was reported since is void."""
        checkpointed = min(self._checkpointed, record.t)
        self.restore(record.t, base, record.adam_step, record.fingerprints)
        self._checkpointed = checkpointed
        self.round, self._applied, self._skips, self._closed = None, {}, 0, False
        self._checkpoint = None
        self.admission.ready.clear()
        self.restoring.rolled_back()

    def take_over(
        self, t: int, base: str, adam_step: int, fingerprints: tuple[str, ...], skips: int, closed: bool
    ) -> None:
        """Where the log stands when this peer succeeds another leader. fingerprints: known where the log went
        back to t; empty where it came to t by a step, which is released once the replicas have said again
        what they have (R9)."""
        self.t, self.base, self.adam_step, self.fingerprints = t, base, adam_step, fingerprints
        self._agreed = {t: fingerprints} if fingerprints else {}
        self._released = t if fingerprints or t == 0 else t - 1
        self._skips, self._closed = skips, closed
        self.admission.absent.take_over()
        self._open_round()

    # --- reports -------------------------------------------------------------------------------

    def _current(self, peer: str, stage: int, t: int, base: str) -> Round | None:
        """The open round, if the report is about it and `peer` is a live member of `stage`."""
        current = self.round
        if current is None or current.t != t or current.base != base:
            return None
        return current if self.core.membership.is_live(peer, stage, t) else None

    def on_claim(self, peer: str, message: Claim) -> str | None:
        """A replica tells what it holds; returns why that is refused, if it is."""
        current = self._current(peer, message.stage, message.fence.t, message.fence.base)
        if current is None:
            return None
        units = frozenset(message.units) & self.core.settings.cover(message.stage)
        wrong = self._contradiction(current, message, units)
        if wrong is not None:
            return wrong
        claims = current.claims.setdefault(message.stage, {})
        known = claims.get(peer, frozenset())
        if units - known:
            current.progress_at, current.stalls = self.core.now, 0
            current.reported[message.stage] = current.reported.get(message.stage, 0) + 1
        claims[peer] = units | known
        self.admission.absent.back(peer)
        self.admission.parted.told(peer, message.apart)
        if message.stage == 0:
            current.manifest = current.manifest or message.manifest
            current.losses.setdefault(peer, {}).update(message.losses)
            for index, loss in message.evaluations.items():
                if index not in current.evaluations:
                    current.evaluations[index] = loss
                    current.progress_at = self.core.now
        return None

    def _contradiction(self, current: Round, message: Claim, units: frozenset[int]) -> str | None:
        """Why no honest replica says this, if none does. (A loss that is no number is an overflow.)"""
        if len(units) < len(set(message.units)):
            return "units that are not in the batch"
        losses, evaluations = message.losses, message.evaluations
        if message.stage != 0:
            return "losses from a relay" if losses or evaluations else None
        heads = {unit // 2 for unit in units if unit % 2 == 0}
        if losses.keys() != heads:
            return "losses that are not those of the microbatches claimed"
        if not evaluations.keys() <= set(self._windows(current)):
            return "windows that are not evaluated"
        if not all(map(math.isfinite, [*losses.values(), *evaluations.values()])):
            return "a loss that is not finite"
        return None

    def on_prepared(self, peer: str, message: Prepared) -> str | None:
        """A replica is PREPARED; returns why that is refused, if it is."""
        current = self._current(peer, message.stage, message.fence.t, message.fence.base)
        attempt = current.attempts.get(message.stage) if current else None
        if current is None or attempt is None or attempt.attempt != message.attempt:
            return None
        if not message.digest or not plausible(message.squares):
            return "a digest or sums of squares that no gradient has"
        prepared = current.prepared.setdefault(message.stage, {})
        if peer in attempt.members and peer not in prepared:
            prepared[peer] = message
            current.progress_at, current.stalls = self.core.now, 0
        return None

    def on_applied(self, peer: str, message: Applied) -> None:
        if message.fence.t != self.t or message.fence.base != self.base:
            if self.fingerprint_at(message.fence.t, message.stage) == message.fingerprint:
                self.admission.absent.has(peer, message.fence.t)
            return
        if self.core.membership.stage_of(peer) == message.stage:
            self._applied.setdefault(message.stage, {})[peer] = message.fingerprint
            self.admission.ways.told(peer, message.links)
            self._unchecked.append((peer, message.stage))
            self.admission.absent.back(peer)
            self.restoring.caught_up(peer)

    def _has_last(self, peer: str) -> bool:
        """Whether a member has said that it has the last step: it took it, or works on the next one."""
        stage = self.core.membership.stage_of(peer)
        if stage is None:
            return False
        claims = self.round.claims.get(stage, {}) if self.round is not None else {}
        return peer in self._applied.get(stage, {}) or peer in claims

    def _waits_for(self, stage: int) -> bool:
        """Whether there is an open step, and something of a stage is not there yet: its reduce, or the step
        before on enough replicas."""
        current = self.round
        if current is None:
            return False
        return self._released < self.t or self._prepared(current, stage) is None

    def on_overflow(self, peer: str, message: Overflow) -> None:
        current = self._current(peer, message.stage, message.fence.t, message.fence.base)
        if current is not None and current.witness is None:
            current.witness = Witness(peer, message.stage, message.index, message.tensor)

    def removed(self, peer: str) -> None:
        """The log removed a member: its claims leave with it; a reduce that needed it is given up."""
        self.keeping.removed(peer)
        self.restoring.removed(peer)
        self.admission.parted.removed(peer)
        self.admission.absent.removed(peer)
        self.admission.ways.removed(peer)
        for applied in self._applied.values():
            applied.pop(peer, None)
        current = self.round
        if current is None:
            return
        current.losses.pop(peer, None)
        for stage, claims in current.claims.items():
            claims.pop(peer, None)
            current.prepared.get(stage, {}).pop(peer, None)
            attempt = current.attempts.get(stage)
            if attempt and peer in attempt.members and not self._prepared(current, stage):
                current.give_up(stage)

    def stop(self, reason: str) -> None:
        """The owner wants the run to end after the present iteration."""
        if self._stop_reason is None:
            self._stop_reason = reason

    # --- decisions -----------------------------------------------------------------------------

    def consider(self) -> None:
        """Take the next step that the present picture allows."""
        if self.finished or self.log.busy:
            return
        if self.opening:
            self._append(self.opening.pop(0))
            return
        quiet = self.round is None or not any(self.round.claims.values())
        self.admission.let_go(quiet and self._released == self.t)
        may_change = self.telling.changes_at() <= self.core.now
        change: Members | Voters | None = None
        if may_change:
            active_from, current = self._active_from(), self.round
            begun = current.attempts if current is not None and current.t == active_from else ()
            change = self.admission.change(active_from, begun)
        change = change or self._voters()
        if change is not None:
            self._append(change)
        if self.log.busy:
            return  # that is on its way, or the lead is handed over
        if self._stop_reason is None:
            settled = quiet and self._released == self.t
            restored = self.restoring.decide(self.t, quiet, self._applied)
            moved = restored or self.rebalancing.decide(self.t, settled)
            if moved is not None:
                self._append(moved)
                return
        if self._stop_reason is not None and self.round is not None and not self.round.claims:
            self.round = None
        self._open_round()
        wished = self.asked.record(self.t, self.round is not None) if self._stop_reason is None else None
        if wished is not None:
            self._append(wished)
            return
        self._release()
        if self.round is not None:
            self._attempts(self.round)
            if self._propose(self.round):
                return
            self._stalled(self.round)
        self._checkpoint_due()
        self._finish()

    def _voters(self) -> Voters | None:
        """The next change of voters. Towards its end a run is left to the one that has its directory."""
        if self.core.settings.voters == 1 or self.core.now < self._voters_at:
            return None
        if not self.has_directory and self._give_back():
            return None
        ending = self.has_directory and self._over()
        record = None if ending else electorate.change(self.core, self.log, self.admission.leaving)
        if record is None and not self.log.raft.learners:
            self._voters_at = self.core.now + self.core.settings.heartbeat_s / 4.0
        return record

    def _give_back(self) -> bool:
        """The run's directory is with its founder: once that serves and votes again, it leads."""
        founder, active_from = self.core.founder, self.core.membership.active_from
        serves = founder in active_from and (active_from[founder] <= self.t + 1 or self._over())
        return serves and self.log.hand_over_to(founder)

    def _active_from(self) -> int | None:
        """From which iteration those who are ready may serve; None while the run waits to begin.

        Before C_{t+1} is proposed nobody has opened t + 2; and while no stage lacks a live member t + 1 is
        open, so it is too late for that one.
        """
        t = self.t + 1
        membership, stages = self.core.membership, range(self.core.settings.stages + 1)
        if all(membership.count(stage, t) for stage in stages):
            return t + 1
        ready = self.admission.ready
        begun = membership.begun
        needed = 1 if begun else self.core.settings.min_replicas
        short = []
        for stage in stages:
            live = membership.count(stage, t)
            if not live and begun:
                self.admission.serve_at_once(stage, t)
            count = live + sum(1 for member in ready.values() if member.stage == stage)
            if count < (1 if stage == 0 else needed):
                short.append(f"stage {stage} ({count} of {1 if stage == 0 else needed})")
        if not short:
            self._waiting_for = ""
            return t
        self._wait("waiting for peers of " + ", ".join(short))
        return None

    def _wait(self, reason: str) -> None:
        if reason != self._waiting_for:
            self._waiting_for = reason
            self.core.note("waiting", reason=reason)

    def _open_round(self) -> None:
        """Note that iteration t + 1 is open (nobody starts it: R1)."""
        t = self.t + 1
        if self.round is not None or self._stop_reason is not None or not self.core.course.opens(t):
            return
        if t > self.last_t and (self._closed or not self.core.settings.evaluates(self.t, self.last_t)):
            return
        stages = range(self.core.settings.stages + 1)
        if all(self.core.membership.count(stage, t) for stage in stages):
            self.round = Round(t, self.base, self.core.now, progress_at=self.core.now)
            if self.schedule.manifest is not None:
                self.round.manifest = self.schedule.manifest(t)

    def _release(self) -> None:
        if self._released >= self.t:
            return
        for stage in range(self.core.settings.stages + 1):
            applied = self._applied.get(stage, {})
            # Those who serve from the next iteration on stand in for a stage that died after the commit.
            membership = self.core.membership
            live = membership.live(stage, self.t) or membership.live(stage, self.t + 1)
            if len([p for p in live if p in applied]) < min(2, len(live)) or not live:
                return
        agreed = []
        for stage in range(self.core.settings.stages + 1):
            applied = self._applied[stage]
            reference = min(peer for peer in applied)
            agreed.append(applied[reference])
        self.fingerprints = tuple(agreed)
        self._agreed[self.t] = self.fingerprints
        self._agreed.pop(self.t - AGREED_KEPT, None)
        self.keeping.released(self.t, self.fingerprints, self.adam_step)
        self._released = self.t
        fence = self.core.fence(self.t, self.base)
        for peer in list(self.core.membership.members):
            self.core.send(peer, Release(fence))

    def check_parity(self) -> None:
        """A replica whose state drifted is removed; it comes back like a joiner (I2)."""
        if self._released < self.t:
            return
        unchecked, self._unchecked = self._unchecked, []
        for peer, stage in unchecked:
            fingerprint = self._applied.get(stage, {}).get(peer)
            if fingerprint is not None and fingerprint != self.fingerprints[stage]:
                reason = f"state after iteration {self.t} differs from its stage's"
                self.admission.remove(peer, reason)

    def _attempts(self, current: Round) -> None:
        if current.t > self.last_t:
            return
        absent, version = self.admission.absent, self.core.membership.version
        silent = absent.silent()
        for stage in range(self.core.settings.stages + 1):
            look = (current.reported.get(stage, 0), version, silent)
            if current.looked.get(stage) == look:
                continue
            members = absent.present(stage, current.t)
            if stage in current.attempts:
                if set(current.attempts[stage].members) <= set(members):
                    current.looked[stage] = look
                    continue
                if not self._without(current, stage):
                    continue
            cover = self.core.settings.cover(stage)
            claims = {p: u for p, u in current.claims.get(stage, {}).items() if p in members}
            if not members:
                continue
            if lacking := missing(cover, claims):
                current.looked[stage] = look
                self._redo(current, stage, members, lacking)
                continue
            self._attempt_number += 1
            message = Attempt(
                self.core.fence(current.t, current.base),
                stage,
                AttemptId(self.log.term, self._attempt_number),
                self.core.membership.number,
                tuple(members),
                settle(cover, claims, members),
            )
            current.attempts[stage] = message
            # Kept with the attempt: an owner may be removed after it has prepared.
            classes = (self.core.membership.members[peer].numerics_class for peer in members)
            current.classes[stage] = tuple(classes)
            if stage == 0:
                current.counted_losses = self._losses(current, message)
            current.prepared[stage] = {}
            current.progress_at = self.core.now
            for peer in members:
                self.core.send(peer, message)

    def _without(self, current: Round, stage: int) -> bool:
        """Give up a stage's attempt, which cannot end because of a member that the step does without, unless
        it has ended; whether it is given up."""
        if self._prepared(current, stage):
            return False
        current.give_up(stage)
        return True

    def _redo(self, current: Round, stage: int, members: list[str], lacking: set[int]) -> None:
        """What members have added that the step does without, others do again: whoever sent it on sees to
        that (R6)."""
        membership, told = self.core.membership, current.redone.setdefault(stage, set())
        away = set(membership.live(stage, current.t)) - set(members)
        away &= self.admission.absent.without(current.t)
        if away <= told:
            return
        told |= away
        names = " and ".join(peer[:8] for peer in sorted(away))
        text = f"goes on without {names} of stage {stage}, not heard: {len(lacking)} units go to others"
        self.core.note("waiting", reason=f"iteration {current.t} {text}")
        for peer in membership.live(stage - 1, current.t):
            fence = self.core.fence(current.t, current.base)
            self.core.send(peer, Missing(fence, {stage: tuple(sorted(lacking))}))

    def repeat(self, peer: str) -> None:
        """The link to a peer is (back) up: tell it the attempt that it may have missed."""
        if self.round is not None:
            for attempt in self.round.attempts.values():
                if peer in attempt.members:
                    self.core.send(peer, attempt)
        if self._released == self.t and self.t > 0:
            self.core.send(peer, Release(self.core.fence(self.t, self.base)))
        self.keeping.repeat(peer)

    def _prepared(self, current: Round, stage: int) -> Prepared | None:
        """A PREPARED of the stage, if min(2, live) replicas agree on its digest."""
        attempt = current.attempts.get(stage)
        prepared = current.prepared.get(stage, {})
        if attempt is None or not prepared:
            return None
        found = (attempt.attempt, len(prepared), self.core.membership.version)
        known = current.agreed.get(stage)
        if known is not None and known[0] == found:
            return known[1]
        live = self.core.membership.live(stage, current.t)
        agreeing = [prepared[peer] for peer in live if peer in prepared]
        current.agreed[stage] = (found, None)
        if len(agreeing) < min(2, len(live)) or not agreeing:
            return None
        if len({(message.digest, *sorted(message.squares.items())) for message in agreeing}) > 1:
            text = f"stage {stage}: digests of iteration {current.t} differ; reducing again"
            self.core.note("note", text=text)
            current.give_up(stage)
            return None
        current.agreed[stage] = (found, agreeing[0])
        return agreeing[0]

    def _safe(self, current: Round, stage: int, prepared: Prepared | None) -> bool:
        """Whether the stage's gradient cannot be lost with the stage, if the run wants that."""
        if prepared is None:
            return False
        have_it = sorted(current.prepared[stage])
        return self.restoring.safekeeping.secure(current.t, stage, prepared.digest, have_it)

    def _windows(self, current: Round) -> range:
        """Held-out windows that travel with this iteration (of the state before it)."""
        settings = self.core.settings
        count = settings.windows if settings.evaluates(current.t - 1, self.last_t) else 0
        return range(settings.microbatches, settings.microbatches + count)

    def _evaluation(self, current: Round) -> Evaluation | None:
        """The evaluation of the state before this iteration, once all its windows are in."""
        windows = self._windows(current)
        if not windows or any(index not in current.evaluations for index in windows):
            return None
        sums = tuple(current.evaluations[index] for index in windows)
        return Evaluation(current.t - 1, sums, len(windows) * self.schedule.window_tokens)

    def _propose(self, current: Round) -> bool:
        """Propose C_t if it may be: every stage PREPARED, the step before released, windows evaluated."""
        if self._released < self.t:
            return False
        evaluation = self._evaluation(current)
        if current.t > self.last_t:
            if evaluation is not None:
                self._append(Closing(self.t, evaluation))
                return True
            return False
        if not current.manifest:
            return False
        if current.witness is not None:
            self._append(self._skip(current, current.witness))
            return True
        if evaluation is None and self._windows(current):
            return False
        prepared = {s: self._prepared(current, s) for s in range(self.core.settings.stages + 1)}
        messages = [message for message in prepared.values() if message is not None]
        safe = [self._safe(current, stage, message) for stage, message in prepared.items()]
        if not all(safe):
            return False
        self._append(self._commit(current, messages, evaluation))
        return True

    def _commit(self, current: Round, prepared: list[Prepared], evaluation: Evaluation | None) -> Commit:
        norm = global_norm(message.squares for message in prepared)
        step = self.schedule.step(current.t, self.adam_step + 1, norm)
        stages = []
        for stage, message in enumerate(prepared):
            attempt = current.attempts[stage]
            stages.append(
                StageCommit(
                    self.fingerprints[stage],
                    message.digest,
                    dict(sorted(message.squares.items())),
                    attempt.members,
                    current.classes[stage],
                    attempt.owners,
                )
            )
        return Commit(
            self.core.settings.run,
            self.core.settings.epoch,
            self.log.term,
            current.t,
            current.base,
            current.manifest,
            "step",
            self.schedule.tokens,
            current.counted_losses,
            tuple(stages),
            norm,
            step.clip_factor,
            step.learning_rate,
            step.bias_correction1,
            step.bias_correction2,
            self.adam_step + 1,
            evaluation,
        )

    def _losses(self, current: Round, heads: Attempt) -> tuple[float, ...]:
        """The loss sum of each microbatch as the owner of (index, head) reported it."""
        owners = [heads.members[heads.owners[head_unit(i)]] for i in range(self.core.settings.microbatches)]
        return tuple(current.losses[owner][index] for index, owner in enumerate(owners))

    def _skip(self, current: Round, witness: Witness) -> Commit:
        step = self.schedule.step(current.t, max(1, self.adam_step), 0.0)
        return Commit(
            self.core.settings.run,
            self.core.settings.epoch,
            self.log.term,
            current.t,
            current.base,
            current.manifest,
            "skip",
            self.schedule.tokens,
            (),
            (),
            0.0,
            0.0,
            step.learning_rate,
            step.bias_correction1,
            step.bias_correction2,
            self.adam_step,
            None,
            witness,
        )

    # --- the log -------------------------------------------------------------------------------

    def _append(self, record: AnyRecord) -> None:
        self.log.append(record)

    def chosen(self, record: AnyRecord, base: str) -> None:
        """Fold a chosen record (called by the peer in log order)."""
        if isinstance(record, Commit):
            self._step_s = self.core.now - self.round.opened_at if self.round else self._step_s
            if record.stages:
                before = tuple(stage.fingerprint_before for stage in record.stages)
                self.keeping.logged(Point(record.t - 1, before, self.adam_step))
            self.t, self.base, self.adam_step = record.t, base, record.adam_step
            self._applied = {}
            self.round = None
            self._skips = self._skips + 1 if record.verdict == "skip" else 0
            if self._skips >= SKIPS_IN_A_ROW and record.witness is not None:
                where = f"stage {record.witness.stage}, {record.witness.tensor}"
                self.stop(f"{SKIPS_IN_A_ROW} skipped steps in a row (overflow at {where})")
        elif isinstance(record, Genesis):
            self.restore(0, base, 0, record.fingerprints)
        elif isinstance(record, Rollback):
            self._roll_back(record, base)
        elif isinstance(record, Closing):
            self._closed = True
            self.round = None
        elif isinstance(record, Members):
            for peer in record.removed:
                self.removed(peer)
            self.keeping.members_changed()
        elif isinstance(record, Control) and record.action == "stop":
            self.finished = True

    # --- checkpoints and the end ---------------------------------------------------------------

    def _over(self) -> bool:
        """Whether no further iteration will be opened."""
        if self.round is not None:
            return False
        return self._stop_reason is not None or self.t >= self.last_t

    def _checkpoint_due(self) -> None:
        if self._checkpoint is not None and self._checkpoint.t < self.t and self._over():
            self._checkpoint = None  # the one of the last step is what matters now
        if self._checkpoint is not None or self._released < self.t or self._checkpointed >= self.t:
            return
        if self.core.now < self._checkpoint_at or not self.has_directory:
            return
        every = self.core.settings.checkpoint_every
        if self._over() or (every and self.t % every == 0):
            self._checkpoint = Checkpoint(self.core, self.t, self.base, self._applied, self._collected)
            self._checkpoint.start()

    def _collected(self, t: int, stages: dict[int, State] | None, reason: str) -> None:
        base = self._checkpoint.base if self._checkpoint else self.base
        if stages is None:
            self._checkpoint = None
            self.core.note("note", text=f"no checkpoint of iteration {t}: {reason}")
            wait_s = self._checkpoint_again.next() if self._over() else None
            if wait_s is None:
                self._checkpointed = t
            else:
                self._checkpoint_at = self.core.now + wait_s
        else:
            written = {stage: (state.pieces, state.fingerprint) for stage, state in stages.items()}
            self.core.effects.append(WriteCheckpoint(t, base, written))

    def checkpoint_written(self, t: int) -> None:
        self.keeping.written(t)
        self._checkpointed = max(self._checkpointed, t)
        if self._checkpoint is not None and self._checkpoint.t <= t:
            self._checkpoint = None

    @property
    def downloads(self) -> list[Download]:
        return list(self._checkpoint.downloads.values()) if self._checkpoint is not None else []

    def _finish(self) -> None:
        closing = self.t >= self.last_t and self._stop_reason is None and not self._closed
        if closing and self.core.settings.evaluates(self.t, self.last_t):
            return
        if not self._over() or self._stop_logged:
            return
        if not self.has_directory:
            self._wait(
                "all steps are committed, but the data node with the run's directory is away: it has to come "
                "back (`anabranch resume`) to write the last checkpoint"
            )
        elif self._checkpointed >= self.t:
            last = electorate.fewer(self.core, self.log) if len(self.log.raft.log.voters) > 1 else None
            if last is not None:
                self._append(last)
            elif len(self.log.raft.log.voters) == 1:
                self._stop_logged = True
                self._append(Control("stop", self.t))

    @property
    def end_reason(self) -> str:
        return self._stop_reason or f"all {self.last_t} steps are committed"

    # --- time ----------------------------------------------------------------------------------

    def _patience_s(self, current: Round) -> float:
        doubled = min(current.stalls, 5) + min(sum(current.retries.values()), 10)
        return max(STALL_FLOOR_S, STALL_FACTOR * self._step_s) * 2.0**doubled * current.spread

    def _stalled(self, current: Round) -> None:
        """Nothing came for long: ask after what is missing, and try a stuck reduce again."""
        if self.core.now < current.progress_at + self._patience_s(current):
            return
        current.spread = self.core.dice.uniform(0.75, 1.0)
        current.progress_at = self.core.now
        lacking: dict[int, tuple[int, ...]] = {}
        tried = len(current.attempts)
        for stage in range(self.core.settings.stages + 1):
            claims = current.claims.get(stage, {})
            units = missing(self.core.settings.cover(stage), claims) if current.t <= self.last_t else set()
            if units:
                lacking[stage] = tuple(sorted(units))
            elif (attempt := current.attempts.get(stage)) and self._prepared(current, stage) is None:
                self._reduce_again(current, attempt)
        if len(current.attempts) == tried:
            current.stalls += 1
        if lacking:
            where = ", ".join(f"{len(units)} at stage {stage}" for stage, units in lacking.items())
            self.core.note("waiting", reason=f"iteration {current.t} lacks units: {where}")
        for peer in list(self.core.membership.members):
            self.core.send(peer, Missing(self.core.fence(current.t, current.base), lacking))

    def _reduce_again(self, current: Round, attempt: Attempt) -> None:
        """A reduce is stuck: once more, without those who keep it from ending."""
        stage = attempt.stage
        tries = current.retries[stage] = current.retries.get(stage, 0) + 1
        text = f"stage {stage}: the reduce of iteration {current.t} is stuck; once more"
        self.core.note("note", text=text)
        held, prepared = current.claims.get(stage, {}), current.give_up(stage)
        for peer, reason in self.admission.parted.take_out(attempt.members, tries, held, prepared).items():
            self.admission.remove(peer, reason)

    def deadline(self) -> float:
        times = [download.deadline() for download in self.downloads]
        times += [self.admission.deadline(), self.keeping.deadline(), self.restoring.deadline()]
        times.append(self.telling.deadline())
        changes_at = self.telling.changes_at() if self.admission.waiting else 0.0
        if changes_at > self.core.now:
            times.append(changes_at)
        if self._checkpoint_at > self.core.now:
            times.append(self._checkpoint_at)
        if self.round is not None and not self.log.busy:
            times.append(self.round.progress_at + self._patience_s(self.round))
        return min(times)

    def tick(self) -> None:
        self.admission.tick()
        self.keeping.tick()
        self.telling.tick()
        for download in self.downloads:
            download.tick()

    def fingerprint_at(self, t: int, stage: int) -> str | None:
        """The agreed fingerprint of a stage after one of the last iterations; None if not known."""
        agreed = self._agreed.get(t)
        return None if agreed is None or stage >= len(agreed) else agreed[stage]
