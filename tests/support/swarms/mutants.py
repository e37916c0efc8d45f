"""Deliberate breakages of the protocol. Each is put in place by patching, from here only, and has the names
of the invariants one of which must catch it.

    python tests/support/swarms/mutants.py [--seeds A:B] [NAME ...]

runs them, each until it is caught, and prints the seed and the invariant.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.audit import contribution_monitor
from anabranch.protocol.audit.auditor import Auditor, _Job
from anabranch.protocol.audit.contribution_monitor import residuals
from anabranch.protocol.audit.draw import Drawn, drawn
from anabranch.protocol.audit.receipts import Receipt
from anabranch.protocol.audit.second_audits import Case
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.context.carriers import CarrierChoice
from anabranch.protocol.context.links import LinkTable
from anabranch.protocol.context.rate_limits_and_bans import RateLimits
from anabranch.protocol.context.task_queue import WorkQueue
from anabranch.protocol.coordinator import audit_cases, checkpoints, island_rounds, proposals, step_receipts
from anabranch.protocol.coordinator import reduce_attempts as reducing
from anabranch.protocol.coordinator.audit_cases import AuditCases
from anabranch.protocol.coordinator.coordinator import Coordinator
from anabranch.protocol.coordinator.newcomers import Newcomers
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.reports import Reports
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.coordinator.state_agreement import StateAgreement
from anabranch.protocol.coordinator.step_receipts import StepReceipts, unlinked
from anabranch.protocol.coordinator.witnessed_reduces import WitnessedReduces
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.interface.events import NEVER_EXPIRES_S, LinkUp, StageBuilt, VerifiedCredential
from anabranch.protocol.interface.tasks import (
    Forward,
    InputGradient,
    Payload,
    Result,
    Task,
    WeightGradient,
    embed_unit,
    head_unit,
)
from anabranch.protocol.log.records import Commit, Member, Members
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.peer import iterations
from anabranch.protocol.peer.fencing import MessageGate
from anabranch.protocol.peer.join import JoinProcess
from anabranch.protocol.peer.link_events import LinkEvents
from anabranch.protocol.peer.shared_state import Step
from anabranch.protocol.pipeline.claims import Claims
from anabranch.protocol.pipeline.credits import Credit, Grant, SlotLedger
from anabranch.protocol.pipeline.incoming import IncomingMicrobatch
from anabranch.protocol.pipeline.island_steps import CrewPass
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.pipeline.outgoing import OutgoingMicrobatch
from anabranch.protocol.pipeline.repair import Repairs
from anabranch.protocol.pipeline.sender import Sender
from anabranch.protocol.pipeline.source import Source
from anabranch.protocol.raft.election import Election
from anabranch.protocol.raft.state import VoterState
from anabranch.protocol.raft.types import Role
from anabranch.protocol.recovery.last_states import LastStates
from anabranch.protocol.recovery.relay_moves import RelayMoves
from anabranch.protocol.recovery.witnesses import Witnesses
from anabranch.protocol.reduce.all_reduce import AllReduce
from anabranch.protocol.reduce.step_apply import StepApply
from anabranch.protocol.rounds.plan import active
from anabranch.protocol.routing.flow_agent import FlowAgentDriver
from anabranch.protocol.state.download import Download
from anabranch.protocol.state.vouchers import Vouchers
from anabranch.sim.fuzz import tensor_world
from anabranch.sim.fuzz.runner import run_seed
from anabranch.sim.kernel.simulated_peer import Disk
from anabranch.sim.metrics.trial_result import Outcome
from anabranch.sim.network.fair_share import Traffic, _Lane
from anabranch.sim.workers import integer_worker
from anabranch.sim.workers.integer_slots import IslandSlots
from anabranch.sim.workers.integer_worker import Begun, IntegerWorker
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.stage import worker
from anabranch.train.stage.cuts import ACTIVATION, GRADIENT, Cuts, Place, _Crossing
from anabranch.train.stage.state import StageState
from anabranch.train.stage.worker import Worker

#: Seeds within which each must be caught.
SEEDS = 2000
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """breaks(patch) breaks the protocol. profile: the weather in which it shows. caught_by: any of these."""

    breaks: Callable[[Patch], None]
    profile: str
    caught_by: tuple[str, ...]


def settle_anyhow(patch: Patch) -> None:
    """Whoever claims anything is enough for a cover; what nobody claims the first member is said to own, and
    its loss is none."""
    settle = reducing.settle

    def settled(cover, claims, members, *named):  # type: ignore[no-untyped-def]
        claimed = {unit for units in claims.values() for unit in units}
        first = members[0]
        own = {first: set(claims.get(first, ())) | (cover - claimed)}
        return settle(cover, {**claims, **own}, members, *named)

    patch.setattr(reducing, "missing", lambda cover, claims: set() if any(claims.values()) else {0})

    def losses(self: ReduceAttempts, current: Round, heads: msg.Attempt) -> tuple[float, ...]:
        owners = [
            heads.members[heads.owners[head_unit(i)]] for i in range(self.ctx.run.settings.microbatches)
        ]
        return tuple(current.losses.get(owner, {}).get(i, 0.0) for i, owner in enumerate(owners))

    patch.setattr(reducing, "settle", settled)
    patch.setattr(ReduceAttempts, "_losses", losses)


def cover_unchecked(patch: Patch) -> None:
    """The leader reduces as soon as anybody claims anything, and replicas believe it."""
    settle_anyhow(patch)
    believe(patch)


def believe(patch: Patch) -> None:
    """A replica does not check that it holds what the attempt says it owns."""

    def on_attempt(self: AllReduce, message: msg.Attempt) -> str | None:
        current = self._announced
        if (current is None or message.attempt > current.attempt) and self.ctx.me in message.members:
            self._announced, self.reduce, self.prepared = message, None, None
            self.resume()
        return None

    patch.setattr(AllReduce, "on_attempt", on_attempt)
    patch.setattr(AllReduce, "_holds", lambda self, units: True)


def prepared_before_the_check(patch: Patch) -> None:
    """The leader orders a reduce of a cover that is not complete; replicas refuse, and nothing goes on."""
    settle_anyhow(patch)
    patch.setattr(ReduceAttempts, "stalled", lambda self, current: None)


def doubles_kept(patch: Patch) -> None:
    """A member that holds a unit that another owns does not subtract it."""
    patch.setattr(AllReduce, "_recount", lambda self, iteration, unit, sign: None)


def acknowledged_twice(patch: Patch) -> None:
    """A gradient that comes a second time is taken a second time."""
    arrived = Sender.on_backward

    def on_backward(self: Sender, peer: str, index: int, payload: Payload | None) -> tuple[bool, str | None]:
        item = self.items.get(index)
        if item is not None:
            item.returned = False
        return arrived(self, peer, index, payload)

    patch.setattr(Sender, "on_backward", on_backward)


def boundaries_dropped(patch: Patch) -> None:
    """Senders do not keep what they sent."""
    transmit = Sender._transmit

    def transmit_and_drop(self: Sender, item: OutgoingMicrobatch, peer: str) -> None:
        transmit(self, item, peer)
        item.payload = None

    patch.setattr(Sender, "_transmit", transmit_and_drop)


def old_incarnation_reduces(patch: Patch) -> None:
    """A process that starts again takes the place of the former one at once, and what that one said and did
    counts as its own. (That its messages are refused is one of three guards: links to it end, and the next
    process serves from an iteration that the former one had no part in.)"""
    fenced, apply, create = MessageGate.fenced, Membership.apply, Membership.__init__
    served: dict[int, dict[str, int]] = {}  # id of a membership -> peer -> iteration from which it served

    def unfenced(
        self: MessageGate, peer: str, message: msg.AnyMessage, payload: Payload | None, share: float = 0.0
    ) -> str | None:
        member = self._ctx.run.membership.members.get(peer)
        fence: msg.Fence = message.fence  # type: ignore[union-attr]
        if member is not None:
            fence = msgspec.structs.replace(fence, incarnation=member.incarnation)
        return fenced(self, peer, msgspec.structs.replace(message, fence=fence), payload, share)

    def founded(self: Membership) -> None:
        create(self)
        served[id(self)] = {}

    def in_its_place(self: Membership, record: Members) -> None:
        before = served[id(self)]
        before |= {peer: self.active_from[peer] for peer in record.removed if peer in self.active_from}
        again = {member.id: before[member.id] for member in record.joined if member.id in before}
        apply(self, msgspec.structs.replace(record, active_from={**record.active_from, **again}))

    patch.setattr(Membership, "__init__", founded)
    patch.setattr(MessageGate, "fenced", unfenced)
    patch.setattr(Membership, "apply", in_its_place)
    patch.setattr(Coordinator, "removed", lambda self, peer: None)
    believe(patch)


def one_prepared_is_enough(patch: Patch) -> None:
    def prepared(self: ReduceAttempts, current: Round, stage: int) -> msg.Prepared | None:
        return next(iter(current.prepared.get(stage, {}).values()), None)

    patch.setattr(ReduceAttempts, "prepared", prepared)


def deltas_instead_of_totals(patch: Patch) -> None:
    """A claim names only what was added since the last one."""
    send = Claims.send

    def only_new(self: Claims) -> None:
        held, told = self.held, getattr(self, "told", set())
        self.held = held - told
        send(self)
        self.held = held
        self.told = set(held)  # type: ignore[attr-defined]

    patch.setattr(Claims, "send", only_new)


def slots_by_deltas(patch: Patch) -> None:
    """A receiver says how many slots have come since it last said so, and the sender adds them up."""
    told, account = Grant.told, Credit.told

    def only_new(self: Grant, *args: object) -> msg.Slots:
        slots = told(self, *args)  # type: ignore[arg-type]
        before = getattr(self, "said", 0)
        self.said = slots.total  # type: ignore[attr-defined]
        return msgspec.structs.replace(slots, total=max(0, slots.total - before))

    def added_up(self: Credit, slots: msg.Slots, now: float) -> None:
        account(self, msgspec.structs.replace(slots, total=self.total + slots.total), now)

    patch.setattr(Grant, "told", only_new)
    patch.setattr(Credit, "told", added_up)


def ghost_flow_kept(patch: Patch) -> None:
    """The plan goes on counting on a neighbour whose connection is gone."""

    def link_down(self: FlowAgentDriver, peer: str) -> None:
        self.probes.link_down(peer)
        for key in [key for key in self.neighbours if key[0] == peer]:
            del self.neighbours[key]

    patch.setattr(FlowAgentDriver, "link_down", link_down)


def stale_base_served(patch: Patch) -> None:
    """A replica that has missed a step goes on as if it had taken it."""

    def advance(self: StepApply) -> None:
        following = self.pending.get(self.t + 1)
        if following is None or self._applying or self.t < 0:
            return
        record, base = following
        prepared = self.all_reduce.prepared
        if prepared is not None and prepared.fence.t == record.t:
            self._take(self._apply_task(record))
            return
        del self.pending[record.t]
        self.t = record.t
        self.all_reduce.close()
        self._on_applied(record.t, base, self.fingerprint)

    patch.setattr(StepApply, "advance", advance)


def slot_granted_twice(patch: Patch) -> None:
    reuse = SlotLedger._reuse

    def twice(self: SlotLedger, grant: Grant, peer: str) -> list[str]:
        self.pool += 1
        return reuse(self, grant, peer)

    patch.setattr(SlotLedger, "_reuse", twice)


def late_result_accepted(patch: Patch) -> None:
    """A gradient of the iteration before is taken for one of the iteration that is open."""
    fenced = MessageGate.fenced

    def unfenced(
        self: MessageGate, peer: str, message: msg.AnyMessage, payload: Payload | None, share: float = 0.0
    ) -> str | None:
        iteration = self.iterations.current
        if iteration is not None and isinstance(message, msg.Backward):
            fence = message.fence
            if fence.t == iteration.t - 1:
                now = msgspec.structs.replace(fence, t=iteration.t, base=iteration.base)
                message = msgspec.structs.replace(message, fence=now)
        return fenced(self, peer, message, payload, share)

    patch.setattr(MessageGate, "fenced", unfenced)


def late_work_done(patch: Patch) -> None:
    """Work that was left when an iteration ended is computed, and counts."""
    patch.setattr(WorkQueue, "drop", lambda self, t: None)


def repair_slot_for_admission(patch: Patch) -> None:
    ask = SlotLedger.ask

    def as_a_repair(self: SlotLedger, peer: str, index: int, repair: bool) -> list[str]:
        return ask(self, peer, index, True)

    patch.setattr(SlotLedger, "ask", as_a_repair)


def joiner_unchecked(patch: Patch) -> None:
    """A joiner serves in whatever state it is, and nobody compares fingerprints."""

    def built(self: JoinProcess, event: StageBuilt) -> None:
        lead, announced = self._coordination.coordinator, self.fetching.announced
        t, base = (lead.t, lead.base) if lead is not None else (announced.t, announced.base)
        if self.step is Step.BUILDING:
            self.fetching.have(t, base, event.fingerprint)

    def on_ready(
        self: Admission, peer: str, message: msg.Ready, fingerprint: str | None, proof: str | None
    ) -> None:
        member = self.ctx.run.membership.members.get(peer)
        if member is not None and peer not in self.ctx.run.membership.active_from:
            self.ready[peer] = member

    patch.setattr(JoinProcess, "built", built)
    patch.setattr(Admission, "on_ready", on_ready)


def removed_still_claims(patch: Patch) -> None:
    """Claims of a removed member count for another one of its stage, and replicas believe it."""
    removed = Coordinator.removed

    def handed_on(self: Coordinator, peer: str) -> None:
        current = self.round
        before = {stage: claims.get(peer) for stage, claims in current.claims.items()} if current else {}
        removed(self, peer)
        for stage, units in before.items():
            claims = current.claims[stage]  # type: ignore[union-attr]
            if units and claims:
                other = min(claims)
                claims[other] = claims[other] | units

    patch.setattr(Coordinator, "removed", handed_on)
    believe(patch)


def no_redo(patch: Patch) -> None:
    """Work that a removed member had returned is not done again."""
    patch.setattr(Repairs, "peer_removed", Repairs.peer_lost)


def indices_split_anew(patch: Patch) -> None:
    """Each data node takes what it believes is its share of the batch."""
    patch.setattr(Membership, "_hand_on", lambda self, peer: None)


def embedding_counted_twice(patch: Patch) -> None:
    """The embedding's gradient is added when it comes and once more when the claim is told."""
    added = Source._added

    def again(self: Source, index: int, result: Result) -> None:
        first = embed_unit(index) not in self.claims.held
        added(self, index, result)
        if first and index % 3 == 0:
            task = WeightGradient(self.t, embed_unit(index))
            inputs = (self.gradients[index],)
            self.ctx.tasks.submit(3, task, inputs, lambda result: None, index)  # type: ignore[arg-type]

    patch.setattr(Source, "_added", again)


def slots_never_freed(patch: Patch) -> None:
    def keep(self: Iteration, unit: IncomingMicrobatch) -> None:
        """The slot of a unit that is done is not given back."""

    patch.setattr(Iteration, "_release_slot", keep)


def anybody_leads(patch: Patch) -> None:
    """Messages of the leader are believed of anybody."""
    receive = MessageGate.receive

    def believe_all(
        self: MessageGate, peer: str, message: msg.AnyMessage, payload: Payload | None, share: float = 0.0
    ) -> None:
        words = (msg.Announce, msg.Release, msg.Welcome, msg.Refused, msg.About)
        receive(self, self._ctx.log.leader if isinstance(message, words) else peer, message, payload, share)

    patch.setattr(MessageGate, "receive", believe_all)


def minority_chooses(patch: Patch) -> None:
    """A leader takes half of the other voters, without itself, for a majority; and does not step down."""

    majority = VoterState.has_quorum

    def minority(self: VoterState, voters: set[str]) -> bool:
        if self.role is Role.LEADER:
            return 2 * len(voters & set(self.log.voters)) >= len(self.log.voters) - 1
        return majority(self, voters)

    patch.setattr(VoterState, "has_quorum", minority)


def elected_twice(patch: Patch) -> None:
    """Voters vote for whoever asks, and stand all at the same time: a term has several leaders."""
    grant = Election.grant

    def again(self: Election, message: msg.AskVote) -> bool:
        self._state.vote = ""
        return grant(self, message)

    def at_once(self: Election) -> None:
        self.deadline = self._state.now + self._state.timeout.patience_s

    patch.setattr(Election, "grant", again)
    patch.setattr(Election, "reset_timer", at_once)


def amnesiac_voter(patch: Patch) -> None:
    """A process that starts again votes in the name of its disk, and has forgotten all that was on it."""
    patch.setattr(Disk, "kept", lambda self, seed: SavedVoterState(self.nonce, seed=seed))


def absent_members_vote(patch: Patch) -> None:
    """All members of a stage count in a dispute about its state, whether they serve or not."""

    def members(self: StateAgreement, stage: int) -> tuple[list[str], dict[str, str]]:
        peers = [p for p, member in self.ctx.run.membership.members.items() if member.stage == stage]
        return peers, {peer: known for peer, known in self.applied.get(stage, {}).items() if peer in peers}

    patch.setattr(StateAgreement, "_reported", members)


def lowest_id_decides(patch: Patch) -> None:
    """The state that the lowest id reports is taken for the stage's."""

    def lowest(self: StateAgreement, live: list[str], applied: dict[str, str]) -> str | None:
        return applied[min(applied)]

    patch.setattr(StateAgreement, "_majority", lowest)


def workers_alone_decide(patch: Patch) -> None:
    """More than half of those that work decide on a gradient, however many standbys there are."""

    def enough(self: ReduceAttempts, members: list[str], agreeing: set[str]) -> bool:
        working = self.admission.absent.jury(members)
        return 2 * len(agreeing & working) > len(working)

    patch.setattr(ReduceAttempts, "_enough", enough)


def late_without_end(patch: Patch) -> None:
    """A member that blocks a reduce that the coordinator sums is given more time again and again."""
    at_fault = WitnessedReduces.at_fault

    def patient(self: WitnessedReduces, current: Round, *of_attempt: Any) -> Any:
        found = at_fault(self, current, *of_attempt)
        return found and ({}, [*found[0], *found[1]])

    patch.setattr(WitnessedReduces, "at_fault", patient)


def one_word_skips(patch: Patch) -> None:
    """A step is skipped on a single report of an overflow."""
    patch.setattr(Reports, "_needed", lambda self, serving: 1)


def possession_unproven(patch: Patch) -> None:
    """A joiner comes to serve with the right hash of its state, which it was told, and no proof."""
    patch.setattr(Vouchers, "proves", lambda self, t, stage, proof: True)


def initial_state_unproven(patch: Patch) -> None:
    """A joiner with the initial state comes to serve at any time, as it did before the first step."""
    proves = Vouchers.proves

    def initially(self: Vouchers, t: int, stage: int, proof: str) -> bool | None:
        return True if t == 0 else proves(self, t, stage, proof)

    patch.setattr(Vouchers, "proves", initially)


def budget_by_key(patch: Patch) -> None:
    """Budgets and bans are by key alone: not by ticket, nor by address block."""
    patch.setattr(RateLimits, "_shared", lambda self, peer: ())


def role_of_the_link(patch: Patch) -> None:
    """A link that this side dialled has the role of a data node, whatever its peer showed before."""
    link_up = LinkEvents.link_up

    def trusting(self: LinkEvents, event: LinkUp) -> None:
        shown = event.credential or VerifiedCredential("data", NEVER_EXPIRES_S)
        link_up(self, msgspec.structs.replace(event, credential=shown))

    patch.setattr(LinkEvents, "link_up", trusting)


def carriers_never_left(patch: Patch) -> None:
    """Circuits that broke and carriers that did not answer are forgotten."""
    ways = CarrierChoice.ways

    def as_ever(self: CarrierChoice, peer: str) -> list[str]:
        links: Any = SimpleNamespace(
            suspects=self.links.suspects, broken_circuits=Counter(), tried_carriers=Counter()
        )
        return ways(replace(self, links=links), peer)

    patch.setattr(CarrierChoice, "ways", as_ever)


def dead_carrier_kept(patch: Patch) -> None:
    """A pair that met at a carrier dials no other one, although that one has died."""
    ways, opened = CarrierChoice.ways, LinkTable.opened
    met: dict[tuple[int, str], str] = {}  # (id of a table of links, peer) -> carrier

    def remember(self: LinkTable, peer: str, incarnation: int, via: str = "") -> None:
        opened(self, peer, incarnation, via)
        if via:
            met.setdefault((id(self), peer), via)

    def the_same(self: CarrierChoice, peer: str) -> list[str]:
        carrier = met.get((id(self.links), peer))
        return [way for way in ways(self, peer) if carrier in (None, way.rpartition("/")[2])]

    patch.setattr(LinkTable, "opened", remember)
    patch.setattr(CarrierChoice, "ways", the_same)


def carried_work_given_up(patch: Patch) -> None:
    """Microbatches that were under way over a carrier that died are not sent again."""
    link_down = Repairs.link_down

    def unless_carried(self: Repairs, peer: str, reason: str) -> None:
        if "carrier" not in reason:  # it is gone, or left by one end
            link_down(self, peer, reason)

    patch.setattr(Repairs, "link_down", unless_carried)


def line_not_shared(patch: Patch) -> None:
    """Carried payloads take nothing from the carrier's line, in the simulated network."""
    patch.setattr(Traffic, "_wires_of_carrier", lambda self, via, up, down: ())


def carried_twice(patch: Patch) -> None:
    """A carrier hands on each payload twice, in the simulated network."""
    departs = Traffic._departs

    def twice(self: Traffic, lane: _Lane, plan: int) -> None:
        if lane.plan == plan and lane.key[2]:
            self.clock.after(lane.link.latency_s, lane.waiting[0].arrived)
        departs(self, lane, plan)

    patch.setattr(Traffic, "_departs", twice)


def audits_pass(patch: Patch) -> None:
    """Auditors find nothing."""
    report = Auditor._report

    def same(self: Auditor, job: _Job, verdict: str, *found: str) -> None:
        report(self, job, "same" if verdict == "different" else verdict, *found)

    patch.setattr(Auditor, "_report", same)


def one_auditor_convicts(patch: Patch) -> None:
    """A difference that one auditor found revokes the key of its subject."""
    weigh = AuditCases._weigh

    def at_once(self: AuditCases, case: Case, what: str = "") -> None:
        if "different" in case.verdicts.values():
            self.convictions.convict(case.drawn.subject, what, case.drawn.t)
        weigh(self, case, what)

    patch.setattr(AuditCases, "_weigh", at_once)


def no_return(patch: Patch) -> None:
    """A liar is convicted, and its false step stays in the log."""
    patch.setattr(Convictions, "go_back", lambda self, reason, t: None)


def receipts_of_the_gone(patch: Patch) -> None:
    """A sum counts without the receipts of those whose parts are in it."""
    patch.setattr(StepReceipts, "complete", lambda self, attempt, prepared: True)


def ends_unread(patch: Patch) -> None:
    """Nobody reads the receipts of data nodes."""

    def relays_only(receipts: list[Receipt]) -> str:
        return unlinked([msgspec.structs.replace(receipt, ends=()) for receipt in receipts])

    patch.setattr(step_receipts, "unlinked", relays_only)


def predictable_draw(patch: Patch) -> None:
    """Audits are drawn from the hash that the iteration began with, which all know before they compute."""

    def early(
        record: Commit,
        base: str,
        share: float,
        walk_ins: Mapping[str, int],
        auditors: Mapping[str, Member],
        in_round: bool,
    ) -> list[Drawn]:
        found = drawn(record, record.previous_base, share, walk_ins, auditors, in_round)
        return [replace(each, base=base) for each in found]

    patch.setattr(audit_cases, "drawn", early)
    patch.setattr(iterations, "drawn", early)


def far_off_by_one_word(patch: Patch) -> None:
    """A norm is far off by the word of any peer that sums a part."""

    def widest(values: Mapping[str, tuple[list[float], ...]]) -> dict[str, float]:
        found = []
        for part in range(len(next(iter(values.values()))[0])):
            of_part = {peer: tuple([each[part]] for each in lists) for peer, lists in values.items()}
            found.append(residuals(of_part))
        return {peer: max((each[peer] for each in found), key=abs) for peer in values}

    patch.setattr(contribution_monitor, "residuals", widest)


def old_words_count(patch: Patch) -> None:
    """A replica lacks the last state if it lacked any state before."""

    def lacking(self: LastStates, peers: Iterable[str], t: int) -> list[str]:
        return [peer for peer in peers if self._behind.get(peer, t + 1) <= t]

    patch.setattr(LastStates, "lacking", lacking)


def ends_of_a_dead_carrier_wait(patch: Patch) -> None:
    """Two peers whose carrier is silent, too, keep their link."""
    patch.setattr(Connections, "stranded", lambda self, peer: [])


def nobody_called_in(patch: Patch) -> None:
    """Newcomers that are to serve from the next iteration do not serve in one that stalls."""
    patch.setattr(Newcomers, "call_in", lambda self: None)


def early_slot_stays(patch: Patch) -> None:
    """The contribution of a slot that is claimed before its gradient came is not subtracted again."""
    inputs_of = Iteration.inputs_of

    def both(self: Iteration, unit: int) -> tuple[Payload, ...]:
        held = self.units.get(unit) if self.ctx.run.stage else None
        return inputs_of(self, unit) if held is None else (held.received, held.gradient_in)

    patch.setattr(Iteration, "inputs_of", both)


def checkpoint_unchecked(patch: Patch) -> None:
    """A checkpoint has the states that the first replica gives, whatever hash the leader released."""

    def anything(*of_download: Any, check: bool) -> Download:
        return Download(*of_download[:-1], check=False)

    patch.setattr(checkpoints, "Download", anything)


def first_answer_believed(patch: Patch) -> None:
    """A replica that was away works with the state that the first replica gives."""
    patch.setattr(Download, "is_sure", True)


def withholders_stay(patch: Patch) -> None:
    """Replicas of a doubted stage that give its state to no witness keep their seats."""
    patch.setattr(RelayMoves, "replaceable", lambda self, peers, t: False)


def one_word_against_several(patch: Patch) -> None:
    """All replicas of a doubted stage are removed on the word of the first member that waits there."""
    patch.setattr(Witnesses, "_enough", lambda self, waiting, suspects: bool(waiting))


def every_stage_doubted(patch: Patch) -> None:
    """Replicas that reported their state are doubted, too, while others' reports of that step lack."""
    patch.setattr(StateAgreement, "lacks", lambda self, stage: True)


def overdue_stays(patch: Patch) -> None:
    """An overdue microbatch is never sent to another replica."""
    patch.setattr(Sender, "overdue_at", lambda self, item: float("inf"))
    patch.setattr(Sender, "others_could", lambda self, item: False)


def codec_at_one_end_only(patch: Patch, kind: str = GRADIENT) -> None:
    """Workers send input gradients (or activations) as they are, where the run has a codec for them."""
    begin, plain = Cuts.__init__, kind

    def without(self: Cuts, run: RunConfig, model: ModelConfig) -> None:
        begin(self, run, model)
        self._of_reference = dict(self._codecs)  # type: ignore[attr-defined]
        self._codecs[plain] = None

    def received(self: Cuts, kind: str, values: Tensor, place: Place) -> Tensor:
        codec = self._of_reference[kind]  # type: ignore[attr-defined]
        if codec is None:
            return values
        return codec.decode(codec.encode(values, self._key(kind, place)), values.shape, values.dtype)

    def passing(self: Cuts, x: Tensor, place: Place) -> Tensor:
        values = _Crossing.apply(self._stream.values(x), self, place)  # type: ignore[no-untyped-call]
        return self._stream.moved(x, values)

    patch.setattr(Cuts, "__init__", without)
    patch.setattr(Cuts, "received", received)
    patch.setattr(Cuts, "pass_through", passing)


def activations_at_one_end_only(patch: Patch) -> None:
    codec_at_one_end_only(patch, ACTIVATION)


def draws_by_attempt(patch: Patch) -> None:
    """Stochastic rounding draws anew each time: a redo sends other bytes than the first computation."""
    encode, times = Cuts.encode, count()

    def anew(self: Cuts, kind: str, values: Tensor, place: Place) -> Tensor:
        return encode(self, kind, values, replace(place, t=next(times)))

    patch.setattr(Cuts, "encode", anew)


def units_of_the_state_before(patch: Patch) -> None:
    """Replicas round contributions to the units of the step before."""
    find, last = worker.next_units, {}

    def late(run: RunConfig, state: StageState) -> Tensor | None:
        former = last.get(id(state))
        last[id(state)] = find(run, state)
        return last[id(state)] if former is None else former

    patch.setattr(worker, "next_units", late)


def delayed_on_the_weights_of_the_state(patch: Patch) -> None:
    """Replicas compute a delayed iteration with the weights of their state, not with predicted ones."""
    look = Worker._look_ahead

    def mixed(self: Worker, state: StageState) -> None:
        look(self, state)
        if self._ahead is not None:
            weights = self._working_weights(state)  # cloned, as the step changes them in place
            self._ahead_stage.weights = {name: tensor.clone() for name, tensor in weights.items()}

    patch.setattr(Worker, "_look_ahead", mixed)


def delayed_in_units_of_the_open_iteration(patch: Patch) -> None:
    """Replicas round contributions to a delayed iteration to the units of the one before it."""
    look = Worker._look_ahead

    def mixed(self: Worker, state: StageState) -> None:
        look(self, state)
        if self._ahead is not None:
            self._ahead_stage.accumulator.prepare(worker.next_units(self._run, state))

    patch.setattr(Worker, "_look_ahead", mixed)


def slot_repeats_its_batches(patch: Patch) -> None:
    """The counter of a slot stands still though its contribution counted."""
    plan = island_rounds.next_plan
    patch.setattr(island_rounds, "next_plan", lambda now, accepted, *rest: plan(now, {}, *rest))


def dropped_slot_skips_its_batches(patch: Patch) -> None:
    """The counter of a slot rises though it was left out."""
    plan = island_rounds.next_plan

    def skips(now, accepted, *rest):  # type: ignore[no-untyped-def]
        return plan(now, dict.fromkeys(active(now), "") if accepted else {}, *rest)

    patch.setattr(island_rounds, "next_plan", skips)


def step_ahead_left_out(patch: Patch) -> None:
    """A machine keeps the state of its slot without the steps ahead of the next round."""
    patch.setattr(integer_worker, "after_step_ahead", lambda number: number)


def late_slot_merged(patch: Patch) -> None:
    """A replica leaves a slot in its sum that the attempt does not count."""
    recount = AllReduce._recount

    def kept(self: AllReduce, iteration: Iteration, unit: int, sign: int) -> None:
        message = self._announced
        if message is None or not iteration.source.slots or message.owners[unit] >= 0:
            recount(self, iteration, unit, sign)

    patch.setattr(AllReduce, "_recount", kept)


def backward_on_other_weights(patch: Patch) -> None:
    """A gradient is computed with the weights of the state, not with those of its forward."""
    weights = IntegerWorker._weights

    def other(self: IntegerWorker, task: Task) -> int:
        return self.state if isinstance(task, InputGradient) else weights(self, task)

    patch.setattr(IntegerWorker, "_weights", other)


def predicted_at_one_end_only(patch: Patch) -> None:
    """Data nodes compute delayed iterations with the weights of the state."""
    weights = IntegerWorker._weights

    def other(self: IntegerWorker, task: Task) -> int:
        return weights(self, task) if self.stage else self.state

    patch.setattr(IntegerWorker, "_weights", other)


def claims_of_two_iterations(patch: Patch) -> None:
    """A replica claims for the first of two iterations in flight what it added to the second, and does not
    check that it holds what an attempt says it owns. (That check alone holds the step back.)"""
    send = iterations.Iterations.send_changed_claim

    def merged(self: iterations.Iterations) -> bool:
        if self.current is None or self.ahead is None:
            return send(self)
        claims = self.current.claims
        held, claims.held = claims.held, claims.held | self.ahead.claims.held
        sent = send(self)
        claims.held = held
        return sent

    patch.setattr(iterations.Iterations, "send_changed_claim", merged)
    believe(patch)


def state_survives_its_reset(patch: Patch) -> None:
    """A machine goes on with what it carries of a slot that begins anew."""
    begin = IntegerWorker._begin_slot

    def kept(self: IntegerWorker, task: Forward, work: Begun, weights: int, x: int) -> int:
        if not task.carried and (task.index, task.t - 1) in self._slots:
            task = msgspec.structs.replace(task, carried=task.t - 1)
        return begin(self, task, work, weights, x)

    patch.setattr(IntegerWorker, "_begin_slot", kept)


def late_merged_unlogged(patch: Patch) -> None:
    """A machine adds its contribution to the round before once more, without a word of it in the plan."""
    begin = IntegerWorker._begin_slot

    def added(self: IntegerWorker, task: Forward, work: Begun, weights: int, x: int) -> int:
        y = begin(self, task, work, weights, x)
        if task.carried and not task.late:
            work.slots[task.index] = (work.slots[task.index][0],) * 2
        return y

    patch.setattr(IntegerWorker, "_begin_slot", added)


def late_forgotten(patch: Patch) -> None:
    """A machine leaves out the late contribution that the plan merges."""
    begin = IntegerWorker._begin_slot

    def without(self: IntegerWorker, task: Forward, work: Begun, weights: int, x: int) -> int:
        return begin(self, msgspec.structs.replace(task, late=0), work, weights, x)

    patch.setattr(IntegerWorker, "_begin_slot", without)


def late_merged_twice(patch: Patch) -> None:
    """A late contribution is merged in the next round, and in the one after it."""
    plan = island_rounds.next_plan

    def again(now, *rest):  # type: ignore[no-untyped-def]
        following = plan(now, *rest)
        return tuple(
            msgspec.structs.replace(slot, late=was.late) if was.late and slot.carried else slot
            for was, slot in zip(now, following, strict=True)
        )

    patch.setattr(island_rounds, "next_plan", again)


def loss_of_another_machine(patch: Patch) -> None:
    """A slot on private data has the loss of the first machine that reported one, whichever one counts."""
    own = proposals._own_work

    def first(current: Round, attempt: msg.Attempt) -> Iterator[tuple[str, float]]:
        for slot, (digest, loss) in enumerate(own(current, attempt)):
            known = [made[slot][1] for made in current.own.values() if slot in made]
            yield digest, known[0] if known and digest else loss

    patch.setattr(proposals, "_own_work", first)


def late_batches_skipped(patch: Patch) -> None:
    """A late contribution that came to nothing leaves a gap: its batches do not come again."""
    plan = island_rounds.next_plan

    def skips(now, accepted, *rest):  # type: ignore[no-untyped-def]
        following = plan(now, accepted, *rest)
        return tuple(
            msgspec.structs.replace(slot, first=slot.first + was.late * (k not in accepted))
            for k, (was, slot) in enumerate(zip(now, following, strict=True))
        )

    patch.setattr(island_rounds, "next_plan", skips)


def carried_by_another(patch: Patch) -> None:
    """The plan says of every machine with a slot that it carries the slot's state."""
    plan = island_rounds.next_plan

    def everybody(now, accepted, rounds, rates, t=0, lost=(), sends_s=()):  # type: ignore[no-untyped-def]
        following = plan(now, accepted, rounds, rates, t, lost, dict(sends_s))
        return tuple(
            msgspec.structs.replace(slot, carried=t) if slot.peer and t > rounds.start else slot
            for slot in following
        )

    patch.setattr(island_rounds, "next_plan", everybody)


def lost_contribution_merged(patch: Patch) -> None:
    """The plan merges late what a machine lost when it left, or what overflowed."""
    patch.setattr(island_rounds.IslandRounds, "_lost", lambda self, current: frozenset())


def stale_outer_state(patch: Patch) -> None:
    """A machine takes inner steps from the state before the last outer step."""
    go_on, weights = IntegerWorker._go_on, IntegerWorker._weights
    before: dict[int, int] = {}

    def noted(self: IntegerWorker, t: int, state: int) -> None:
        before[id(self)] = self.state
        go_on(self, t, state)

    def stale(self: IntegerWorker, task: Task) -> int:
        if self.stage and isinstance(task, Forward) and task.steps and task.t == 5:
            return before.get(id(self), self.state)
        return weights(self, task)

    patch.setattr(IntegerWorker, "_go_on", noted)
    patch.setattr(IntegerWorker, "_weights", stale)


def inner_microbatch_left_out(patch: Patch) -> None:
    """All machines of a crew agree that an inner step has a microbatch less than it has."""

    def shorter(self: CrewPass, count: int) -> None:
        self.__dict__["fewer"] = max(1, count - 1)

    fewer = property(lambda self: self.__dict__["fewer"], shorter)
    patch.setattr(CrewPass, "count", fewer, raising=False)


def island_of_a_stale_state(patch: Patch) -> None:
    """A pipeline island begins at one of its stages from the state before the last outer step."""
    go_on, begin = IntegerWorker._go_on, IslandSlots._begin
    before: dict[int, int] = {}

    def noted(self: IntegerWorker, t: int, state: int) -> None:
        before[id(self._islands)] = self.state
        go_on(self, t, state)

    def stale(self: IslandSlots, task: Any, state: int, x: int) -> Result:
        return begin(self, task, before.get(id(self), state) if self._stage == 2 else state, x)

    patch.setattr(IntegerWorker, "_go_on", noted)
    patch.setattr(IslandSlots, "_begin", stale)


def inner_activations_exchanged(patch: Patch) -> None:
    """A relay takes the first two activations of an inner step for each other's."""
    take = CrewPass.on_activation

    def exchanged(self: CrewPass, peer: str, step: int, number: int, payload: Payload) -> str | None:
        number = 1 - number if not self._is_source and self.count > 1 and number < 2 else number
        return take(self, peer, step, number, payload)

    patch.setattr(CrewPass, "on_activation", exchanged)


MUTANTS: dict[str, Mutant] = {
    "a microbatch of inner steps left out": Mutant(inner_microbatch_left_out, "rounds", ("I3",)),
    "an island of a stale state": Mutant(island_of_a_stale_state, "rounds", ("I3",)),
    "activations of inner steps exchanged": Mutant(inner_activations_exchanged, "rounds", ("I3",)),
    "backward on other weights": Mutant(backward_on_other_weights, "delayed", ("I3",)),
    "weights predicted at one end": Mutant(predicted_at_one_end_only, "delayed", ("I3",)),
    "claims of two iterations": Mutant(claims_of_two_iterations, "delayed", ("I1", "I3", "I4")),
    "state of a slot survives its reset": Mutant(state_survives_its_reset, "rounds", ("I3",)),
    "a contribution merged once more": Mutant(late_merged_unlogged, "rounds", ("I3",)),
    "a late contribution forgotten": Mutant(late_forgotten, "rounds", ("I3",)),
    "a late contribution merged twice": Mutant(late_merged_twice, "rounds", ("I1",)),
    "batches of a late contribution skipped": Mutant(late_batches_skipped, "rounds", ("I1",)),
    "state of a slot at another machine": Mutant(carried_by_another, "rounds", ("I1", "I4")),
    "a stale outer state": Mutant(stale_outer_state, "rounds", ("I3",)),
    "a codec at one end only": Mutant(codec_at_one_end_only, "churn20", ("I3",)),
    "a codec of activations at one end only": Mutant(activations_at_one_end_only, "churn20", ("I3",)),
    "a delayed iteration on the state's weights": Mutant(
        delayed_on_the_weights_of_the_state, "delayed", ("I3",)
    ),
    "a delayed iteration in units of the open one": Mutant(
        delayed_in_units_of_the_open_iteration, "delayed", ("I3",)
    ),
    "draws by attempt": Mutant(draws_by_attempt, "churn20", ("I3",)),
    "units of the state before": Mutant(units_of_the_state_before, "churn20", ("I3",)),
    "a slot repeats its batches": Mutant(slot_repeats_its_batches, "rounds", ("I1",)),
    "a step ahead left out": Mutant(step_ahead_left_out, "rounds", ("I3",)),
    "a dropped slot skips its batches": Mutant(dropped_slot_skips_its_batches, "rounds", ("I1",)),
    "the loss of a machine that does not count": Mutant(loss_of_another_machine, "private", ("I3",)),
    "a late slot merged": Mutant(late_slot_merged, "rounds", ("I3",)),
    "cover unchecked": Mutant(cover_unchecked, "churn20", ("I1", "I3")),
    "PREPARED before the cover check": Mutant(prepared_before_the_check, "churn20", ("I4",)),
    "doubles kept": Mutant(doubles_kept, "partition", ("I3",)),
    "acknowledged twice": Mutant(acknowledged_twice, "partition", ("I1", "I3", "I6", "I7")),
    "boundaries dropped": Mutant(boundaries_dropped, "churn20", ("I4",)),
    "an old incarnation reduces": Mutant(old_incarnation_reduces, "churn20", ("I1", "I3")),
    "commit with one PREPARED": Mutant(one_prepared_is_enough, "calm", ("I4",)),
    "deltas instead of cumulative totals": Mutant(deltas_instead_of_totals, "partition", ("I4",)),
    "slots by deltas": Mutant(slots_by_deltas, "partition", ("I5",)),
    "a ghost flow kept": Mutant(ghost_flow_kept, "churn20", ("I5",)),
    "a stale base served": Mutant(stale_base_served, "partition", ("I2", "I3")),
    "a slot granted twice": Mutant(slot_granted_twice, "calm", ("I5",)),
    "a late result accepted": Mutant(late_result_accepted, "partition", ("I1", "I3", "I4", "I7")),
    "late work done": Mutant(late_work_done, "churn20", ("I1", "I3", "I7")),
    "a repair slot used by admission": Mutant(repair_slot_for_admission, "calm", ("I5",)),
    "a joiner serving before its fingerprint is checked": Mutant(
        joiner_unchecked,
        "churn20",
        ("I2", "I3", "I7"),  # I7: its worker refuses a step that does not follow
    ),
    "claims of the removed": Mutant(removed_still_claims, "churn20", ("I1", "I3")),
    "no redo": Mutant(no_redo, "churn20", ("I4",)),
    "indices split anew": Mutant(indices_split_anew, "churn20", ("I4", "I6")),
    "an embedding counted twice": Mutant(embedding_counted_twice, "calm", ("I1",)),
    "slots never freed": Mutant(slots_never_freed, "calm", ("I4",)),
    "a commit on a minority": Mutant(minority_chooses, "partition", ("I4",)),
    "two leaders of one term": Mutant(elected_twice, "partition", ("I4",)),
    "an amnesiac voter": Mutant(amnesiac_voter, "churn20", ("I4",)),
    "anybody leads": Mutant(anybody_leads, "hostile", ("I4", "I7")),
    "a majority of the absent": Mutant(absent_members_vote, "hostile", ("G1", "G2", "G3", "I2", "I3", "I4")),
    "the lowest id decides": Mutant(lowest_id_decides, "hostile", ("G2", "G3", "I2", "I3")),
    "the late are waited for without end": Mutant(late_without_end, "undefended", ("G1",)),
    "one word skips a step": Mutant(one_word_skips, "hostile", ("G1",)),
    "overdue microbatches stay": Mutant(overdue_stays, "hostile", ("G1", "I4")),
    "possession unproven": Mutant(possession_unproven, "hostile", ("G4",)),
    "the initial state unproven": Mutant(initial_state_unproven, "hostile", ("G4",)),
    "the role of the link": Mutant(role_of_the_link, "hostile", ("G4",)),
    "carriers never left": Mutant(carriers_never_left, "hostile", ("G5",)),
    "ends of a dead carrier wait": Mutant(ends_of_a_dead_carrier_wait, "rounds", ("I4",)),
    "a dead carrier is kept": Mutant(dead_carrier_kept, "carriers", ("C1",)),
    "work under way over a dead carrier is given up": Mutant(carried_work_given_up, "carriers", ("C2", "I4")),
    "a carrier's line is not shared": Mutant(line_not_shared, "carriers", ("C3",)),
    "carried bytes arrive twice": Mutant(carried_twice, "carriers", ("C3",)),
    "audits that find nothing": Mutant(audits_pass, "hostile", ("G3", "I3")),
    "one auditor convicts": Mutant(one_auditor_convicts, "hostile", ("G2",)),
    "a conviction without a return": Mutant(no_return, "hostile", ("I3",)),
    "sums without receipts": Mutant(receipts_of_the_gone, "hostile", ("I3",)),
    "receipts of data nodes unread": Mutant(ends_unread, "hostile", ("I3",)),
}


def check_mutant_fits(outcome: Outcome) -> None:
    """Raise RuntimeError if the seed failed since the patch of the mutant names an attribute that the program
    no longer has, or takes other arguments than the function that it replaces: such a mutant breaks no rule,
    and counts neither as caught nor as alive."""
    reason = outcome.violation.partition(": ")[2]
    gone = reason.startswith("AttributeError: ") and "'NoneType'" not in reason
    if gone or (reason.startswith("TypeError: ") and ".<locals>." in reason and "argument" in reason):
        raise RuntimeError(f"the mutant does not fit the program: {reason}")


def caught(name: str, seeds: Iterable[int]) -> Outcome | None:
    """The first seed that catches the mutant by one of the invariants that should; None if it survives."""
    mutant = MUTANTS[name]
    tensor_world._single_machine.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            mutant.breaks(patch)
            for seed in seeds:
                outcome = run_seed(seed, mutant.profile)
                check_mutant_fits(outcome)
                if outcome.invariant in mutant.caught_by:
                    return outcome
    finally:
        tensor_world._single_machine.cache_clear()  # its results may have come from broken code
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--seeds", default=f"0:{SEEDS}", metavar="A:B")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split(":"))
    survivors = 0
    for name in args.names or MUTANTS:
        outcome = caught(name, range(first, last))
        survivors += outcome is None
        where = "SURVIVES" if outcome is None else f"seed {outcome.seed:4}  {outcome.violation}"
        if outcome is not None and run_seed(outcome.seed, outcome.profile).failed:
            where += " (but this seed fails without it, too)"
        print(f"{name:52} {MUTANTS[name].profile:10} {where}", flush=True)
    return survivors


if __name__ == "__main__":
    raise SystemExit(main())
