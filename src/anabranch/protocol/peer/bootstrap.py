"""Start of a founder's peer: first records of a new run, or of a run that is resumed from its directory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from anabranch.protocol.consensus.log_replay import LogReplay, fold
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.signatures import Signer
from anabranch.protocol.log.records import AnyRecord, Control, Genesis, Member, Members, Rollback, Voters
from anabranch.protocol.log.step_parameters import Schedule
from anabranch.protocol.peer.peer import Peer, no_certificate
from anabranch.protocol.peer.takeover import Certify
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.types import peer_of, voter_id
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint
from anabranch.protocol.rounds.plan import freed


@dataclass(frozen=True)
class SavedCheckpoint:
    """Complete checkpoint on disk: fingerprint of the state after iteration `t` of each stage, from 0 on."""

    t: int
    fingerprints: tuple[str, ...]


def lead(
    member: Member,
    settings: Settings,
    schedule: Schedule,
    genesis: Genesis,
    kept: SavedVoterState | None = None,
    saved: SavedCheckpoint | None = None,
    model_hash: str = "",
    certify: Certify = no_certificate,
    unheard: Collection[str] = (),
    signer: Signer | None = None,
) -> Peer:
    """Make the peer that founds a run or resumes it.

    genesis: first record, if the run is new; else the one in the log counts. kept: the log so far (none: a
    new run). saved: newest checkpoint (none: the initial state). model_hash: of the model that this machine
    trains. certify, unheard, signer: as for `Peer`. If the log has other voters, the founder does not lead at
    once: it asks at the addresses of the log's members and joins the leader if there is one. If there is none
    and a majority of the voters is present, it may be elected, and resumes the run from its checkpoint.
    Raises ValueError if a log that it resumes at once lacks its genesis record.
    """
    kept = _own(kept or SavedVoterState(), member.id)
    history = fold(kept.lines)
    voters = RaftLog(kept.lines, kept.start, kept.founders).voters
    returns = voters != (voter_id(member.id, kept.nonce),)
    members = history.membership.members.values() if returns else ()
    doors = {m.id: m.address for m in members if m.id != member.id and m.address}
    leader = min(doors, default="") if returns else member.id
    peer = Peer(
        member.id, member.incarnation, leader, settings, 0, kept,
        founder=True, doors=doors, certify=certify, unheard=unheard, signer=signer,
    )  # fmt: skip
    founding = history.genesis or genesis
    if history.epoch:
        founding = msgspec.structs.replace(founding, epoch=history.epoch)  # joiners need the present epoch
    peer.shared.entry.learn_genesis(founding)
    peer.joining.model_hash = model_hash
    peer.ctx.run.describe(schedule)
    peer.ctx.run.revoked.add(history.revoked.reasons)
    peer.ctx.run.use_carriers(history.carriers)

    def take_up(lines: Sequence[bytes]) -> None:
        past = fold(lines)
        _take_up(peer, past, _taken_up(past, founding, member, saved), saved)

    if returns:
        peer.leadership.comes_back(take_up, len(kept.lines))
        if saved is not None and saved.t <= history.t:
            step = _adam_step(history, saved.t)
            peer.ctx.run.plan_round(saved.t + 1, history.plans.get(saved.t + 1, ()))
            peer.shared.summary.has_checkpoint(RestorePoint(saved.t, saved.fingerprints, step, on_disk=True))
    elif kept.lines:
        take_up(kept.lines)
    else:
        joined = msgspec.structs.replace(member, stage=0)
        first = Members(1, joined=(joined,))
        peer.leadership.coordinate([genesis, Voters((peer.voter.raft.me,)), first])
    return peer


def first_door(peer: Peer) -> tuple[str, str] | None:
    """(id, address) of the peer that a founder coming back to its run dials first; None if it asks nobody:
    the log has no other voter (then the founder leads the run), or no other member has an address."""
    leader = peer.ctx.log.leader
    return (leader, peer.joining.doors[leader]) if leader in peer.joining.doors else None


def _own(kept: SavedVoterState, me: str) -> SavedVoterState:
    """Saved voter state in which the founder is the only voter, for as long as the log names no voters. If
    the log's only voter is peer `me`, the name of the disk (`nonce`) becomes the one in that voter's id: such
    a log was written on this disk alone."""
    voters = RaftLog(kept.lines).voters
    if len(voters) == 1 and peer_of(voters[0]) == me:
        kept = replace(kept, nonce=voters[0].partition("/")[2])
    return replace(kept, founders=(voter_id(me, kept.nonce),))


def _taken_up(
    history: LogReplay, genesis: Genesis, member: Member, saved: SavedCheckpoint | None
) -> list[AnyRecord]:
    """First records, in order, of a founder that resumes a run: removal of all former members, rollback to
    the checkpoint `saved` (None: to the initial state) if the log is past it, end of a pause, and its own
    admission. What does not apply is left out; the last always comes."""
    number = history.membership.number
    records: list[AnyRecord] = []
    gone = dict.fromkeys(history.membership.members, "the run was taken up again")
    if gone:
        number += 1
        records.append(Members(number, removed=gone))
    t = saved.t if saved is not None else 0
    if t < history.t:
        step = _adam_step(history, t)
        fingerprints = saved.fingerprints if saved is not None else genesis.fingerprints
        reason = f"taken up from the checkpoint of iteration {t}"
        slots = freed(history.plans.get(t + 1, ())) or msgspec.UNSET
        records.append(Rollback(t, step, reason, fingerprints, slots))
    if history.course.held >= 0:
        records.append(Control("continue"))
    records.append(Members(number + 1, joined=(msgspec.structs.replace(member, stage=0),)))
    return records


def _adam_step(history: LogReplay, t: int) -> int:
    """Step count of the optimizer after iteration `t`; 0 if the log has no commit of it."""
    return next((commit.adam_step for commit in history.commits if commit.t == t), 0)


def _take_up(
    peer: Peer, history: LogReplay, opening: Sequence[AnyRecord], saved: SavedCheckpoint | None
) -> None:
    """Resume the run as leader from the end of the log on disk. history: replay of that log. opening: records
    that are logged first. saved: newest checkpoint, to which they roll the run back (None: the initial
    state). Raises ValueError if the log has no genesis record."""
    run = peer.ctx.run
    if history.genesis is None:
        raise ValueError("the log does not begin with a genesis record")
    coordinator = peer.leadership.coordinate(opening)
    fingerprints = saved.fingerprints if saved is not None else history.genesis.fingerprints
    coordinator.restore(history.t, history.base, history.adam_step, fingerprints)
    peer.progress.start(history.position, history.base, history.t)
    peer.shared.summary.start(history.adam_step, fingerprints)
    peer.ctx.log.elect(peer.voter.raft.log.voters)
    run.resume_course(history.course)
    for t, plan in sorted(history.plans.items()):
        run.plan_round(t, plan)
    run.membership.enter(tuple(history.membership.members.values()), {}, history.membership.number)
    run.membership.remember(history.membership)
