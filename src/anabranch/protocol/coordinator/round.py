"""The coordinator's records of the last step (tip of the log) and of the open iteration after it (round)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from anabranch.protocol.audit.receipts import Receipt
from anabranch.protocol.audit.tracing import DisputedResult
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from anabranch.protocol.log.records import Witness
from anabranch.protocol.messages import Attempt, AttemptId, Prepared, SentOn
from anabranch.protocol.rounds.plan import Plan, sets_of, units_of

#: Inputs of the decision on a stage's reduce: number of reports of new units, membership version, silent
#: members.
Look = tuple[int, int, frozenset[str]]
#: Inputs of a comparison of PREPARED reports: attempt, number of reports, membership version, True if the
#: stage is in `Round.torn`, silent members.
Compared = tuple[AttemptId, int, int, bool, frozenset[str]]


@dataclass
class Round:
    """Members' reports about the open iteration `t`, and the coordinator's decisions on it. Fields without a
    note are by stage: claims (replica -> units), attempts, ordered_at (times of their orders, s), classes
    (numerics classes of an attempt's members), prepared (member -> report), retries (number of repeated
    reduces); or losses (head's owner -> microbatch -> loss sum), evaluations (held-out window -> loss sum),
    counted_losses (by microbatch, for the commit), manifest (hash of the batch), progress_at (time of the
    last report that was news, s), stalls (number of times that no news came for too long since), spread
    (random factor of the wait for the next)."""

    t: int
    base: str
    opened_at: float
    begun_at: float = math.inf
    """Time (s) at which a new leader opened the iteration as a member, later by the time in which nobody led,
    and by long waits; infinite: no earlier than it led."""
    claims: dict[int, dict[str, frozenset[int]]] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    own: dict[str, dict[int, tuple[str, float]]] = field(default_factory=dict)
    """Machine -> slot -> digest and loss sum of its contribution, where the run's data are private."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    ordered_at: dict[int, float] = field(default_factory=dict)
    classes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    counted_losses: tuple[float, ...] = ()
    prepared: dict[int, dict[str, Prepared]] = field(default_factory=dict)
    receipts: dict[int, dict[str, Receipt]] = field(default_factory=dict)
    """Stage -> member -> receipt of its work, in runs that are audited."""
    disputed: list[DisputedResult] = field(default_factory=list)
    """Results that the receipts of two relays contradict."""
    unlisted_since: float = math.inf
    """Time (s) since which a receipt is lacking that a contradiction leads to."""
    repeat: set[int] = field(default_factory=set)
    """Stages whose reduce is to be repeated, all parts summed by the leader, as a member lacks a receipt."""
    repeated: set[int] = field(default_factory=set)
    """Stages for which that was decided before."""
    served: set[tuple[int, str]] = field(default_factory=set)
    """(stage, peer) of those that served in the iteration, removed ones too; empty without audits."""
    manifest: str = ""
    witnesses: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    """(stage, microbatch) -> tensor that overflowed there, by the peer that reported it."""
    sources: dict[tuple[int, int], dict[str, list[str]]] = field(default_factory=dict)
    """(stage, microbatch) -> peer that reported its overflow -> relays that sent it the last input, the first
    report first; "": no relay of an adjacent stage."""
    witness: Witness | None = None
    """Overflow that enough replicas found, or end of a stranded round: the step is skipped for it."""
    progress_at: float = 0.0
    worked_s: float = 0.0
    """Seconds from the opening until the units of a first stage were all claimed."""
    waited_s: float = 0.0
    """Seconds without news before the stalls of the round, and before late claims."""
    reports_s: float = 0.0
    """Seconds without news before PREPARED reports, held-out losses, and the step's record."""
    counted_at: float = 0.0
    """Time (s) up to which waits for claims that are no news are counted in `waited_s`."""
    held_s: dict[str, float] = field(default_factory=dict)
    """Peer -> seconds for which nothing but its claims was waited for."""
    late: bool = False
    """True if a claim came after a longer time without news than the last step took."""
    stalls: int = 0
    called_in: int = 0
    """Number of stalls and repeated reduces (`waits`) at the last look whether newcomers should serve in this
    iteration at once."""
    spread: float = 1.0
    retries: dict[int, int] = field(default_factory=dict)
    slots: Plan = ()
    """Plan of the round; () in a synchronous iteration."""
    ready_at: float = math.inf
    """Time (s) at which so many slots were ready as `ready_share` says."""
    ready_s: float = 0.0
    """Seconds that this took, without what was before `cut_off_at`, in a run that waits for late slots."""
    ready_share: float = 0.0
    """Slots that were ready at `ready_at`, as a share of those after which others can be late; at most 1."""
    half_at: float = math.inf
    """Time (s) at which half of the slots were ready, in a run that waits for late slots."""
    planned_s: Mapping[int, float] = field(default_factory=dict)
    """Slot of a round -> seconds that it should take (`IslandRounds.planned_s`)."""
    longest_s: float | None = None
    """Longest of these seconds (`IslandRounds._longest`), of slots with more than the fewest steps; None: not
    worked out yet."""
    stretch: float = 1.0
    """Times as long as the slots that were ready at `ready_at` that all others should take."""
    cut_off_at: float = -math.inf
    """Last time (s) at which the leader of a round that waits for late slots heard no other member, a data
    node with slots that were claimed left, or a machine with a slot came: machines have the time of a slot
    anew after it."""
    dropped: frozenset[int] = frozenset()
    """Slots without which the round ends."""
    witnessed: dict[int, int] = field(default_factory=dict)
    """Stage -> number of stuck reduces whose parts were all summed by the coordinator."""
    hurried: dict[int, frozenset[str]] = field(default_factory=dict)
    """Stage whose reduce was repeated early, as members said that they cannot reach each other -> those of
    whom none of the others said so."""
    even: set[int] = field(default_factory=set)
    """Stages of which a helper fell silent: their reduce gets no helpers any more."""
    early: set[int] = field(default_factory=set)
    """Stages whose reduce was ordered while some of its slots were still computed."""
    torn: set[int] = field(default_factory=set)
    """Stages whose reduce lost a member; the reduce may still end if that member had sent everything."""
    redone: dict[int, set[str]] = field(default_factory=dict)
    """Stage -> members that this step goes on without; other replicas repeat their units."""
    reported: dict[int, int] = field(default_factory=dict)
    """Stage -> number of reports so far that may change the decision on its reduce: of new units, and for a
    doubted stage of who sent or gave back units."""
    looked: dict[int, Look] = field(default_factory=dict)
    """Stage -> inputs of the last decision on its reduce, if that decided nothing."""
    agreed: dict[int, tuple[Compared, Prepared | None]] = field(default_factory=dict)
    """Stage -> (inputs, result) of the last comparison of PREPARED reports."""

    doubted: dict[int, bool] = field(default_factory=dict)
    """Stage whose claims need the word of the stage before (`DoubleClaims`) -> True while its reduce waits
    for that."""
    holders: dict[int, dict[str, SentOn]] = field(default_factory=dict)
    """Stage -> peer of the stage before -> who has the microbatches that it sent on (`Claim.holders`)."""
    asked: set[str] = field(default_factory=set)
    """Peers that were asked for these."""
    overruled: dict[int, set[int]] = field(default_factory=dict)
    """Stage -> units for whose owner an attempt was given up (`DoubleClaims.wrong`)."""
    claimed: dict[int, set[int]] = field(default_factory=dict)
    """Stage -> units that any member claims."""
    complete: set[int] = field(default_factory=set)
    """Slots of a round whose units are all claimed."""
    covers: dict[int, frozenset[int]] = field(default_factory=dict)
    """Stage -> units that its reduce counts."""
    late_look: tuple[object, ...] = ()
    """Inputs of the last decision on late slots, if that decided nothing."""
    left: tuple[tuple[int, int], frozenset[int]] = (-1, -1), frozenset()
    """Slots that are lost, after the membership version and number of overflows that they follow from."""
    unheard: tuple[tuple[int, int, frozenset[str]], frozenset[int]] = (-1, -1, frozenset()), frozenset()
    """Complete slots whose claims are of silent members alone, after the membership version, number of
    reports of new units, and silent members that they follow from."""
    _counts: tuple[frozenset[int], dict[int, frozenset[int]]] = (frozenset(), {})

    @property
    def of_crews(self) -> bool:
        """True for a round of pipeline islands whose plan names their crews."""
        return sets_of(self.slots).of_crews

    @property
    def since(self) -> float:
        """Time (s) since which the members work on the iteration, as far as this leader knows."""
        return min(self.opened_at, self.begun_at)

    @property
    def waits(self) -> int:
        """Stalls since the last news, and repeated reduces."""
        return self.stalls + sum(self.retries.values())

    def has_seat(self, peer: str, stage: int, slot: int) -> bool:
        """True if a peer fills a slot of the round at a stage, by its plan; False for a number that no slot
        has, and for a slot that anybody may fill."""
        return slot < len(self.slots) and (stage, peer) in self.slots[slot].seats()

    def counts(self, stage: int) -> frozenset[int]:
        """Units of the round that count at a stage: those of slots that were not dropped. Empty in a
        synchronous iteration (`Settings.cover` has its units)."""
        if not self.dropped:
            return sets_of(self.slots).cover(stage)
        if self._counts[0] is not self.dropped:
            self._counts = self.dropped, {}
        known = self._counts[1]
        if stage not in known:
            known[stage] = units_of(stage, sets_of(self.slots).slots - self.dropped)
        return known[stage]

    def took(self, stage: int, units: Collection[int], stages: int) -> bool:
        """Note units of `stage` that a member claims for the first time, and in a round of islands the slots
        of which now all units are claimed (`complete`). Returns True if another member claims one of the
        units, too. stages: number of relay stages."""
        claimed = self.claimed.setdefault(stage, set())
        doubled = not claimed.isdisjoint(units)
        claimed.update(units)
        if self.slots:
            self._complete(stage, units, stages)
        return doubled

    def _complete(self, stage: int, units: Collection[int], stages: int) -> None:
        ends, relays = self.claimed.get(0, set()), [self.claimed.get(s, set()) for s in range(1, stages + 1)]
        for slot in {unit if stage else unit // 2 for unit in units}:
            if head_unit(slot) in ends and embed_unit(slot) in ends and all(slot in of for of in relays):
                self.complete.add(slot)

    def recount(self, stages: int) -> None:
        """Work out anew which units are claimed and which slots are complete, after the claims of a removed
        member were dropped. stages: number of relay stages."""
        self.claimed, self.complete = {}, set()
        for stage, claims in self.claims.items():
            self.took(stage, frozenset().union(*claims.values()), stages)

    def give_up(self, stage: int) -> None:
        """Forget a stage's reduce attempt, its PREPARED reports and receipts, if there is one; nobody is
        told. The next `ReduceAttempts.attempt` may order another."""
        self.torn.discard(stage)
        self.early.discard(stage)
        self.attempts.pop(stage, None)
        self.looked.pop(stage, None)
        self.agreed.pop(stage, None)
        self.covers.pop(stage, None)
        self.receipts.pop(stage, None)
        self.prepared.pop(stage, None)


class LogTip:
    """Last step in the log, and the round of the open iteration. t, base: last committed iteration and hash
    of its log entry. adam_step: Adam's counter after it (skipped steps and rounds are not counted).
    fingerprints: agreed state hashes of all stages after the last *released* step, which may be the one
    before it; () if this leader has seen none. round: open iteration, None between two. stop_reason: why no
    further iteration is opened, or None."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self.t = 0
        self.base = ""
        self.adam_step = 0
        self.fingerprints: tuple[str, ...] = ()
        self.round: Round | None = None
        self.stop_reason: str | None = None

    def move(self, t: int, base: str, adam_step: int, fingerprints: tuple[str, ...]) -> None:
        """Set the last committed step t, its base (hash of its log entry), Adam's counter and the
        fingerprints of all stages after it (empty: not agreed yet). The round is left as it is."""
        self.t, self.base, self.adam_step, self.fingerprints = t, base, adam_step, fingerprints

    @property
    def over(self) -> bool:
        """True if no iteration is open and no further step will be taken, as the run stops or all steps are
        committed. The iteration of the last evaluation may be yet to open."""
        if self.round is not None:
            return False
        return self.stop_reason is not None or self.t >= self.ctx.run.steps

    def current(self, peer: str, stage: int, t: int, base: str) -> Round | None:
        """The open round, if it is of iteration `t` on `base` and `peer` serves `stage` in it; else None."""
        current = self.round
        if current is None or current.t != t or current.base != base:
            return None
        return current if self.ctx.run.membership.is_live(peer, stage, t) else None

    def windows(self, current: Round) -> range:
        """Indices of the held-out windows that pass the pipeline in this iteration, to evaluate the state
        before it; empty if that is not evaluated."""
        settings = self.ctx.run.settings
        count = settings.windows if settings.evaluates(current.t - 1, self.ctx.run.steps) else 0
        return range(settings.microbatches, settings.microbatches + count)
