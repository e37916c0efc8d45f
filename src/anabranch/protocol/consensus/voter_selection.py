"""Choice of the log's voters: data nodes first, then relays; 1 or 3 voters, 5 above fifty active members."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from anabranch.protocol.consensus.raft_node import Voter
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.log.records import Voters
from anabranch.protocol.raft.types import majority, peer_of, voter_id

#: Active members above which there are five voters.
MANY = 50


@dataclass(frozen=True)
class Candidate:
    """Active member considered as a voter. voter: its voter id. order: rank in the order of joining. founder:
    True if it has the run's directory."""

    voter: str
    stage: int
    order: int
    founder: bool = False


def size(serving: int, most: int) -> int:
    """Number of voters that a run with `serving` active members should have: 1 below three of them, 5 above
    MANY, else 3; at most `most`."""
    return min(most, 5 if serving > MANY else 3 if serving >= 3 else 1)


def wanted(kept: Sequence[str], candidates: Collection[Candidate], count: int) -> list[str]:
    """Ids of the voters that there should be: the present ones `kept` (at least one), filled up to `count`
    from the `candidates`, data nodes before relays, and relays of stages without a voter before others. A
    founder among the candidates is always included, if need be in place of the last of `kept` (never of the
    first). No further one is added if that would make the number even."""
    chosen = list(kept)
    returned = [c.voter for c in candidates if c.founder and c.voter not in kept]
    if returned:
        chosen[max(1, count - 1) :] = returned
    stages = {candidate.stage for candidate in candidates if candidate.voter in chosen}
    rest = [candidate for candidate in candidates if candidate.voter not in chosen]
    while rest and len(chosen) < count:
        best = min(rest, key=lambda c: (c.stage > 0, c.stage > 0 and c.stage in stages, c.order))
        rest.remove(best)
        stages.add(best.stage)
        chosen.append(best.voter)
    even = len(chosen) % 2 == 0 and len(chosen) > max(len(kept), 1 + len(returned))
    return chosen[:-1] if even else chosen


def next_voters(
    voters: Sequence[str], target: Sequence[str], ready: Collection[str], alive: Collection[str]
) -> tuple[str, ...] | None:
    """Voter ids after the next change of one voter, on the way from the set `voters` to the set `target`;
    None: the sets are equal, or no change is possible. All new voters must be `ready` (have the whole log)
    before the first is added; then others are removed, dead ones first. A majority of the resulting voters
    must be `alive`."""
    added = [voter for voter in target if voter not in voters]
    if any(voter not in ready for voter in added):
        return None
    removed = sorted((voter for voter in voters if voter not in target), key=lambda voter: voter in alive)
    if added:
        following = (*voters, added[0])
    elif removed:
        following = tuple(voter for voter in voters if voter != removed[0])
    else:
        return None
    return following if majority(following, alive) else None


def target(ctx: PeerContext, voter: Voter, leaving: Collection[str] = ()) -> list[str]:
    """Voter ids that the log should have, the leader's first: the present ones that are still members with
    the same disk and can catch up, and new ones among the active members within reach that have an address
    and a disk. leaving: members that want to leave the run and should vote no longer; while one of them is
    still a voter, voters out of reach are left out, too.

    An even number of voters tolerates no more losses than the odd number below it. So a founder that leads
    does without a second voter, and of four or more voters one is left out. (Of two whose leader is not the
    founder both stay.)
    """
    membership, raft = ctx.run.membership, voter.raft
    members = membership.members
    disks = {voter_id(peer, member.disk): peer for peer, member in members.items() if member.disk}
    disks = {name: peer for name, peer in disks.items() if peer not in leaving}
    candidates = [
        Candidate(name, members[peer].stage, membership.order[peer], peer == ctx.run.founder)
        for name, peer in disks.items()
        if peer in membership.active_from
        and (members[peer].address or peer == ctx.run.founder)
        and ctx.reachable(peer)
        and not raft.lags(name)
    ]
    kept = [raft.me] + [v for v in raft.log.voters if v in disks and v != raft.me and not raft.lags(v)]
    if any(peer_of(v) in leaving for v in raft.log.voters):  # remove unreachable voters before its vote goes
        kept = [v for v in kept if ctx.reachable(peer_of(v))]
    count = size(len(membership.active_from.keys() - set(leaving)), ctx.run.settings.voters)
    names = wanted(kept, candidates, max(count, len(kept)))
    if len(names) == 2 and ctx.me == ctx.run.founder:
        return [raft.me]
    if len(names) % 2 == 0 and len(names) > 2:
        alive = voter.heard()
        spare = [name for name in names[1:] if peer_of(name) != ctx.run.founder]
        names.remove(min(reversed(spare), key=lambda name: name in alive))
    return names


def change(ctx: PeerContext, voter: Voter, leaving: Collection[str] = ()) -> Voters | None:
    """Record of the next change of voters that the leader should log, or None. A voter that is still missing
    is made a learner by this call, so that it gets the log; a later call then adds it. leaving: members that
    want to leave."""
    raft, names = voter.raft, target(ctx, voter, leaving)
    for name in names:
        if name not in raft.log.voters:
            raft.add_learner(name)
    ready = [name for name in names if raft.caught_up(name)]
    following = next_voters(raft.log.voters, names, ready, voter.heard())
    if following is None or raft.change_problem(following):
        return None
    return Voters(following)


def fewer(ctx: PeerContext, voter: Voter) -> Voters | None:
    """Record that removes one voter, on the way to the leader as the only voter; None: none can be removed.
    Dead voters go first, and any voter only while all that remain answered a moment ago (two voters tolerate
    no loss)."""
    raft, alive = voter.raft, voter.heard()
    others = [v for v in raft.log.voters if v != raft.me]
    removed = min(others, key=lambda v: (v in alive, raft.replication.heard_at(v)), default=None)
    if removed is None or any(v not in alive for v in others if v != removed):
        return None
    following = tuple(v for v in raft.log.voters if v != removed)
    return None if raft.change_problem(following) else Voters(following)
