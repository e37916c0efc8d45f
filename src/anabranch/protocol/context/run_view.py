"""Read-only views for all parts of a peer: of the run (settings, members, own stage, pause), of the log's
leader and voters, and of the standby replicas. Each field is replaced by the method that names the reason;
parts only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UnsetType

from anabranch.counter_rng import CounterRng
from anabranch.flow.dispatch.next_hop_policies import Policy
from anabranch.flow.policies.registry import make_policy
from anabranch.protocol.context.revocations import Revocations
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import AnyRecord, Control, Rollback
from anabranch.protocol.log.step_parameters import Schedule
from anabranch.protocol.membership.assignment import Assignment
from anabranch.protocol.membership.overlay import Overlay
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.messages import Spared
from anabranch.protocol.placement.rates import SEARCHED
from anabranch.protocol.rounds.plan import Plan, sets_of

#: Longest time (s) for which a sender may be asked to wait before it uses a standby; longer ones are refused
#: as implausible.
MOST_S = 300.0
#: Rounds whose plans are kept, for a rollback to one of them. More than the snapshots of any run reach back.
PLANS_KEPT = 1024


@dataclass
class RunCourse:
    """Number of steps and pause of a run, folded from the `Control` records of its log.

    steps: number of optimizer steps; 0 leaves it to the run file. held: last iteration to be opened during a
    pause, lowered by a `Rollback`; -1 where the run is not paused.
    """

    steps: int = 0
    held: int = -1

    def fold(self, record: AnyRecord) -> None:
        match record:
            case Control("pause", t):
                self.held = t
            case Control("continue"):
                self.held = -1
            case Control("steps", steps):
                self.steps = steps
            case Rollback(t):  # a paused run is rolled back, and does not repeat the steps
                self.held = min(self.held, t)

    def opens(self, t: int) -> bool:
        """True if iteration `t` may be opened: the run is not paused, or pauses only after `t`."""
        return self.held < 0 or t <= self.held


class RunView:
    """A peer's view of the run: settings, members, its own stage, pause and length (`course`), revocations,
    plans of rounds, routing policy (`policy`) and overlay graph of neighbours (`near`).
    `shared_state.Progress` says which step is committed. memberships: factory of an empty membership."""

    policy: Policy
    near: Overlay

    def __init__(
        self,
        me: str,
        policy_seed: tuple[int, int],
        stage: int,
        settings: Settings,
        memberships: Callable[[], Membership] = Membership,
    ) -> None:
        self._me = me
        self._policy_seed = policy_seed
        self.stage = stage
        self.settings = settings
        self._memberships = memberships
        self.membership = memberships()
        self.course = RunCourse()
        self.revoked = Revocations()
        self.carriers: dict[str, str] = {}
        """Dedicated carriers by the log, with their addresses."""
        self.schedule: Schedule | None = None
        """Parameters of steps as functions; None until the driver has described the run."""
        self._plans: dict[int, Plan] = {}
        """Round -> its slots, from the log."""
        self._next = 0
        """Iteration after the last one in the log."""
        self.founder = ""
        """Peer with the run's directory ("" if unknown)."""
        self.use_settings(settings)

    def use_settings(self, settings: Settings) -> None:
        """Replace the settings of the run, and with them routing policy and overlay, which begin anew;
        members and plans stay."""
        self.settings = settings
        self.policy = make_policy(settings.policy, CounterRng(*self._policy_seed))
        self.near = Overlay(self._me, lambda: self.membership, settings.neighbours, settings.stages)

    def assign_stage(self, stage: int) -> None:
        self.stage = stage

    def describe(self, schedule: Schedule | None) -> None:
        self.schedule = schedule

    def found_by(self, founder: str) -> None:
        self.founder = founder

    def resume_course(self, course: RunCourse) -> None:
        """Replace the pause and the number of steps by those of `course`, which come from the log."""
        self.course = course

    def use_carriers(self, addresses: Mapping[str, str]) -> None:
        """Replace the dedicated carriers by those that the log lists now."""
        self.carriers = dict(addresses)

    # --- rounds --------------------------------------------------------------------------------

    def plan_round(self, t: int, plan: Plan | UnsetType) -> str:
        """Store the plan of iteration t, the next one, from the log (UNSET: it has none), in place of one
        stored for it, and drop those of later rounds and of rounds PLANS_KEPT or more before it. Returns "",
        or the reason why no honest leader would log this plan; then none is stored for t."""
        slots = plan or ()
        self._plans = {k: v for k, v in self._plans.items() if t - PLANS_KEPT < k < t}
        wrong = sets_of(slots).problem(self.settings.rounds, t, self.settings.stages)
        if slots and not wrong:
            self._plans[t] = slots
        self._next = t
        return wrong

    def plan(self, t: int) -> Plan:
        """Slots of iteration t; () if it is no round, or its plan is not known, as of one before this peer
        knew the log."""
        return self._plans.get(t, ())

    def can_open(self, t: int) -> bool:
        """True if iteration t can be opened: it is no round, or its plan is known."""
        return not self.settings.rounds.has(t) or t in self._plans

    @property
    def in_rounds(self) -> bool:
        """True once the log has planned a round."""
        return bool(self._plans)

    @property
    def next_is_round(self) -> bool:
        """True if the iteration after the last one in the log is a round."""
        return self._next in self._plans

    def batch(self, t: int) -> tuple[int, ...]:
        """Indices of the microbatches of iteration t; of its slots that take part, if it is a round, () if
        the plan of that is not known."""
        if self.settings.rounds.has(t):
            return sets_of(self.plan(t)).active
        return tuple(range(self.settings.microbatches))

    def split(self, t: int) -> Assignment:
        """Data node of each microbatch of iteration t's batch; in a round of pipeline islands that of the
        crew, for each slot that has one. The caller may change the result, a copy."""
        split = self.membership.assignment(t, self.batch(t))
        if self.settings.rounds.pipeline and self.settings.rounds.has(t):
            crews = {slot: self.plan(t)[slot].crew for slot in self.batch(t)}
            split.give({slot: crew[-1] for slot, crew in crews.items() if crew})
        return split

    def cover(self, stage: int, t: int) -> frozenset[int]:
        """Units that iteration t counts at a stage if no slot is late; empty for a round whose plan is not
        known."""
        if self.settings.rounds.has(t):
            return sets_of(self.plan(t)).cover(stage)
        return self.settings.cover(stage)

    def manifest(self, t: int) -> str:
        """Hash of the batch of iteration t. In a round it is the hash of the plan, which has only the slots'
        inner steps: plans for other machines have the same hash, and a plan that is not known the hash of an
        empty one. Outside rounds "" if this peer does not have the corpus, or the driver has not described
        the run yet."""
        if self.settings.rounds.has(t):
            return sets_of(self.plan(t)).batch_hash
        return "" if self.schedule is None or self.schedule.manifest is None else self.schedule.manifest(t)

    def forget_members(self) -> None:
        """Start from an empty membership, because the log is applied again from its first record."""
        self.membership = self._memberships()

    @property
    def steps(self) -> int:
        """Number of iterations of the run: the run file's, unless a `Control` record in the log changed it
        (which counts optimizer steps)."""
        return self.settings.rounds.iterations(self.course.steps) or self.settings.steps

    @property
    def deals(self) -> bool:
        """True before the first iteration of a run whose stages are assigned by measured links: until then
        every peer measures its links to all members. False while there are more than SEARCHED members."""
        waits = self.settings.deal == "links" and not self.membership.begun
        return waits and len(self.membership.members) <= SEARCHED

    def next_stage(self) -> int:
        """Stage after this peer's on a microbatch's path; after the last stage comes stage 0 (the head)."""
        return (self.stage + 1) % (self.settings.stages + 1)

    def previous_stage(self) -> int:
        return (self.stage - 1) % (self.settings.stages + 1)


class LogView:
    """A peer's view of the log's leader, term and voters. leads: term in which this peer itself leads the
    log, 0 if it does not."""

    def __init__(self, leader: str) -> None:
        self.leader = leader
        self.term = 0
        self.leads = 0
        self.voters: tuple[str, ...] = ()
        """Voter ids: `peer/disk` each."""
        self.voting_peers: frozenset[str] = frozenset()

    def follow(self, leader: str, term: int) -> None:
        self.leader, self.term = leader, term

    def follow_leader(self, leader: str) -> None:
        """Regard `leader` ("": not known) as the log's leader in the known term."""
        self.leader = leader

    def take_lead(self, term: int) -> None:
        """Note that this peer leads the log in `term`; 0: it leads no longer."""
        self.leads = term

    def elect(self, voters: tuple[str, ...]) -> None:
        """Replace the log's voters. voters: their ids (`peer/disk`)."""
        self.voters = voters
        self.voting_peers = frozenset(voter.partition("/")[0] for voter in voters)

    def keeps_log(self, peer: str) -> bool:
        """True if `peer` is a voter."""
        return peer in self.voting_peers


class StandbyView:
    """Standby replicas (those that get no microbatches while others can take them), as the coordinator last
    announced them. waits: by standby, seconds that a sender waits for another replica before it uses the
    standby."""

    def __init__(self) -> None:
        self.waits: Mapping[str, float] = {}
        self._latest = (0, 0)
        """Term and number of the last announcement."""

    def announced(self, term: int, message: Spared) -> str | None:
        """Store the standbys that the leader of `term` announced, unless this or a later announcement is
        known. Returns the reason if it is refused (too many standbys, or an implausible wait), else None."""
        waits = message.waits
        if len(waits) > SEARCHED or not all(0.0 <= wait_s <= MOST_S for wait_s in waits.values()):
            return "replicas that nobody spares so"
        if (term, message.number) > self._latest:
            self._latest, self.waits = (term, message.number), waits
        return None

    @property
    def number(self) -> int:
        """Running number, within the leader's term, of its newest announcement of standbys that this peer
        knows."""
        return self._latest[1]

    def working(self, peers: Sequence[str]) -> Sequence[str]:
        """Those of `peers` that are no standbys, in order; all of them if all are standbys."""
        if not self.waits:
            return peers
        return [peer for peer in peers if peer not in self.waits] or peers
