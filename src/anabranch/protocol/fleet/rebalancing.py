"""Moves of relays between stages while the run goes on, decided by the leader from the rates of the stages.

Not here: links (`initial_assignment`, `admission`) and stages that lost all replicas (`protocol.recovery`).

The bottleneck is the stage with the fewest microbatches per second (`placement.rates.stage_rates`). Where two
stages are equally slow a single move gains nothing. Therefore a few moves are planned one after the other,
each the best for the stage that is then the slowest, and the first one, two, ... of them are made, whichever
number gains most: the time that later iterations save, less the time lost while the moving relays download
their new state.

Two rules prevent thrashing. Moves must pay in `settings.rebalance` consecutive iterations, and the count
restarts after each round of moves. If a relay departed, which is no noisy measurement, moves that pay are
made at once, unless the last round was less than `rebalance` iterations ago. SWARM (Ryabinin et al., ICML
2023, adaptive rebalancing) moves a peer from the least to the most loaded stage at fixed times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.placement.proven_speeds import ProvenSpeeds
from anabranch.protocol.placement.rates import pass_s, stage_rates, with_slots

#: Least relative gain in the lowest stage rate that justifies moves: measured rates are inexact (a choice).
GAIN = 0.05
#: Replicas that must remain at a stage when one leaves it: two, so that one crash loses no state.
KEEPS = 2
#: Iterations in which a moving relay does not work: the open one, and one for the download.
AWAY = 2
#: Most iterations over which a gain is counted, for membership changes (a choice).
HORIZON = 50
#: Most relays that move in one round, and most relays of a stage that are considered for one move (a choice:
#: bounds the leader's time).
TOGETHER, TRIED = 4, 8
#: Reason that the log states for a move.
REASON = "which holds the others up"


class Rebalancing:
    """Planner of moves between stages: plans once in each iteration, and decides when the moves are made."""

    def __init__(self, ctx: PeerContext, speeds: ProvenSpeeds | None = None) -> None:
        """speeds: limits to the pass times that relays state, from what they did in committed steps; without,
        none."""
        self.ctx, self._speeds = ctx, speeds or ProvenSpeeds()
        self._last_t = 0
        """Last iteration for which the plan was evaluated."""
        self._worthwhile = 0
        """Consecutive iterations in which moves would have paid."""
        self._since_round = math.inf
        """Iterations since the last round of moves."""
        self._incarnations: dict[str, int] = {}
        """Relay -> incarnation, in the last iteration."""
        self._departed = False
        """True if a relay departed and moves would have paid ever since."""
        self._plans: dict[tuple[int, int], dict[str, int]] = {}

    def decide(self, t: int, quiet: bool, applied: Mapping[int, Collection[str]]) -> Members | None:
        """Record of the moves to be made now, which the caller must log, or None (always without
        `settings.rebalance`, and before the run has begun). Each iteration counts once, however often this is
        called in it. t: last committed iteration. quiet: True while a move would lose little work. applied:
        stage -> peers that reported that they applied step t."""
        wanted = self.ctx.run.settings.rebalance
        if not wanted or not self.ctx.run.membership.begun:
            return None
        if t > self._last_t:
            self._last_t = t
            worthwhile = bool(self._plan(t))
            self._worthwhile = self._worthwhile + 1 if worthwhile else 0
            self._since_round += 1
            departed = self._has_departed() or self._departed
            self._departed = departed and worthwhile
        if not quiet or self._since_round < wanted or not (self._departed or self._worthwhile >= wanted):
            return None
        members, moves = self.ctx.run.membership.members, self._possible(t, self._plan(t), applied)
        if not moves:
            return None
        self._worthwhile, self._since_round, self._departed = 0, 0, False
        moved = tuple(msgspec.structs.replace(members[p], stage=stage) for p, stage in moves.items())
        reasons = {peer: f"moves to stage {stage}, {REASON}" for peer, stage in moves.items()}
        return Members(self.ctx.run.membership.number + 1, removed=reasons, joined=moved)

    def _has_departed(self) -> bool:
        """True if a relay that was a member at the last call has gone or restarted; the relays of now are
        kept for the next call."""
        members = self.ctx.run.membership.members
        before = self._incarnations
        self._incarnations = {p: m.incarnation for p, m in members.items() if m.stage and not m.is_auditor}
        return any(self._incarnations.get(peer) != number for peer, number in before.items())

    def _possible(
        self, t: int, plan: Mapping[str, int], applied: Mapping[int, Collection[str]]
    ) -> dict[str, int]:
        """Planned moves (relay -> new stage) that can be made now: at each stage KEEPS replicas with the
        state after step t remain. Empty until all active replicas of the stages that relays would leave have
        reported that they applied step t (`applied`): a relay that serves only from t + 1 on may have to
        fetch that step from one that would leave."""
        membership = self.ctx.run.membership
        serving = {peer: m.stage for peer, m in membership.members.items() if m.stage and self._serves(m, t)}
        going = {peer: to for peer, to in plan.items() if peer in serving and not self._stays(peer)}
        up_to_date = {peer: stage for peer, stage in serving.items() if peer in applied.get(stage, ())}
        for stage in {serving[peer] for peer in going}:
            if not all(peer in up_to_date for peer in membership.live(stage, t) if peer in serving):
                return {}
        left, moves = Counter(up_to_date.values()), dict[str, int]()
        for peer in sorted(up_to_date, key=lambda peer: (-left[up_to_date[peer]], peer)):
            stage = up_to_date[peer]
            if peer in going and left[stage] > KEEPS:
                left[stage] -= 1
                moves[peer] = going[peer]
        return moves

    def _plan(self, t: int) -> dict[str, int]:
        """Moves that would pay now (relay -> new stage), computed once per iteration and membership."""
        key = (t, self.ctx.run.membership.version)
        if key not in self._plans:
            self._plans = {key: self._best_moves(t)}
        return self._plans[key]

    def _best_moves(self, t: int) -> dict[str, int]:
        """Plan of up to TOGETHER moves that saves most time, relay -> new stage; empty if none pays."""
        relays = {member.id: member for member in self._relays()}
        now = min(self._rates(relays.values()))
        most = sum(1.0 / pass_s(member, 1) for member in relays.values()) / sum(self.ctx.run.settings.counts)
        if now <= 0.0 or most <= now * (1.0 + GAIN):
            return {}  # `stage_recovery` fills an empty stage; no assignment of these relays is much better
        best, plan, moved = 0.0, dict[str, int](), dict[str, int]()
        for _ in range(TOGETHER):
            following = self._next(t, relays, moved)
            if following is None:
                break
            moved[following.id] = following.stage
            relays[following.id] = following
            after = min(self._rates(relays.values()))
            away = min(self._rates([member for member in relays.values() if member.id not in moved]))
            saved_s = self._saved_s(t, now, away, after)
            if after > now * (1.0 + GAIN) and saved_s > best:
                best, plan = saved_s, dict(moved)
        return plan

    def _next(self, t: int, relays: dict[str, Member], moved: dict[str, int]) -> Member | None:
        """Best next move for a plan: relay and new stage that raise the sorted stage rates most, the slowest
        stage first; None if no move raises them. relays: members as the plan leaves them. moved: relays that
        the plan moves already."""
        rates = self._rates(relays.values())
        slowest = rates.index(min(rates)) + 1
        best, found = sorted(rates), None
        for member in self._candidates(t, relays.values(), slowest, moved):
            there = msgspec.structs.replace(member, stage=slowest)
            after = sorted(self._rates([*(m for m in relays.values() if m.id != member.id), there]))
            if after > best:
                best, found = after, there
        return found

    def _candidates(
        self, t: int, relays: Collection[Member], slowest: int, moved: dict[str, int]
    ) -> Iterator[Member]:
        """Candidates for a move to the stage `slowest`: of each other relay stage with more than KEEPS
        replicas up to TRIED that may move, spread evenly from its slowest to its fastest, without those that
        the plan has `moved`."""
        for stage in range(1, self.ctx.run.settings.stages + 1):
            here = [member for member in relays if member.stage == stage]
            if stage == slowest or min(len(here), self.ctx.run.membership.count(stage, t + 1)) <= KEEPS:
                continue
            able = [m for m in here if m.id not in moved and self._serves(m, t) and not self._stays(m.id)]
            able.sort(key=lambda member: (-pass_s(member, 1), member.id))
            step = max(1.0, (len(able) - 1) / (TRIED - 1))
            yield from [able[round(k * step)] for k in range(min(TRIED, len(able)))]

    def _serves(self, member: Member, t: int) -> bool:
        """True if the relay is active in iteration t + 1."""
        return self.ctx.run.membership.is_live(member.id, member.stage, t + 1)

    def _stays(self, peer: str) -> bool:
        """True for peers that are never moved: the leader, voters, walk-ins, and unreachable peers."""
        ctx = self.ctx
        bound = peer in ctx.run.membership.walk_ins or ctx.log.keeps_log(peer)
        return peer == ctx.me or bound or not ctx.reachable(peer)

    def _saved_s(self, t: int, now: float, away: float, after: float) -> float:
        """Seconds per microbatch that moves save in the later iterations (HORIZON at most), less those lost
        while the relays move; infinitely negative if a stage stands still meanwhile. The run gets shorter by
        that many seconds times the microbatches of an iteration.

        :param now: lowest stage rate at present, in microbatches per second, above 0.
        :param away: lowest stage rate while the moving relays do not work.
        :param after: lowest stage rate with the moving relays at their new stages.
        """
        left = min(HORIZON, self.ctx.run.steps - t - AWAY)
        cost = AWAY * (1.0 / away - 1.0 / now) if away > 0.0 else math.inf
        return left * (1.0 / now - 1.0 / after) - cost

    def _relays(self) -> list[Member]:
        """Relays of the run as Member records, with the pass times that their heartbeats last reported as far
        as they are believed, and their slots as the capacity."""
        ctx, found = self.ctx, []
        for member in ctx.run.membership.members.values():
            if not member.stage or member.is_auditor:
                continue
            blocks, costs = ctx.run.settings.counts[member.stage - 1], ctx.costs.neighbours.get(member.id)
            member = with_slots(member, ctx.run.settings)
            if costs is not None and costs.backward_s:
                passes = (costs.forward_s / blocks, (costs.work_s - costs.forward_s) / blocks)
                member = msgspec.structs.replace(member, forward_s=passes[0], backward_s=passes[1])
            found.append(member)
        return self._speeds.believed(found)

    def _rates(self, relays: Iterable[Member]) -> list[float]:
        return stage_rates(relays, self.ctx.run.settings.counts)
