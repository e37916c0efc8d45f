"""How a leader begins: the first records of a new run, or of a run that is taken up again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from anabranch.protocol.core import Core
from anabranch.protocol.history import History, fold
from anabranch.protocol.leader import Leader, Schedule
from anabranch.protocol.log import CommitLog
from anabranch.protocol.peer import Peer
from anabranch.protocol.records import AnyRecord, Genesis, Member, Members, NoOp, Rollback, Voters
from anabranch.protocol.settings import Settings


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk: every stage's state after iteration t."""

    t: int
    fingerprints: tuple[str, ...]


def lead(
    member: Member,
    settings: Settings,
    schedule: Schedule,
    genesis: Genesis,
    lines: Sequence[bytes] = (),
    saved: Saved | None = None,
    model_hash: str = "",
) -> Peer:
    """The peer that keeps the log. `lines` is the log so far (empty: a new run); `saved` the newest
    checkpoint to continue from (None: the initial state)."""
    history = fold(lines)
    log = CommitLog(lines, term=history.term + 1)
    peer = Peer(member.id, member.incarnation, member.id, settings, stage_wanted=0)
    founder = history.genesis or genesis
    peer.joining.set_genesis(founder)

    def make(core: Core, on_chosen) -> Leader:  # type: ignore[no-untyped-def]
        return Leader(
            core,
            log,
            schedule,
            founder.numerics_class,
            founder.corpus_fingerprint,
            model_hash,
            on_chosen,
            peer.welcome,
        )

    leader = peer.become_leader(make)
    if lines:
        leader.opening = _taken_up(history, founder, member, saved)
        _take_up(peer, leader, history, saved)
    else:
        joined = msgspec.structs.replace(member, stage=0)
        leader.opening = [genesis, Voters((member.id,)), Members(1, joined=(joined,))]
    return peer


def _taken_up(history: History, genesis: Genesis, member: Member, saved: Saved | None) -> list[AnyRecord]:
    """Nobody of the former swarm is there; what was committed after the checkpoint is done again."""
    number = history.membership.number
    records: list[AnyRecord] = [NoOp()]
    gone = dict.fromkeys(history.membership.members, "the run was taken up again")
    if gone:
        number += 1
        records.append(Members(number, removed=gone))
    t = saved.t if saved is not None else 0
    if t < history.t:
        step = next((commit.adam_step for commit in history.commits if commit.t == t), 0)
        fingerprints = saved.fingerprints if saved is not None else genesis.fingerprints
        reason = f"taken up from the checkpoint of iteration {t}"
        records.append(Rollback(t, step, reason, fingerprints))
    records.append(Members(number + 1, joined=(msgspec.structs.replace(member, stage=0),)))
    return records


def _take_up(peer: Peer, leader: Leader, history: History, saved: Saved | None) -> None:
    fingerprints = saved.fingerprints if saved is not None else leader_genesis(history).fingerprints
    leader.restore(history.t, history.base, history.adam_step, fingerprints)
    peer.position = history.position
    peer.base = history.base
    for former in history.membership.members.values():
        peer.core.membership.restore(former)
    peer.core.membership.number = history.membership.number
    peer.core.membership.incarnations.update(history.membership.incarnations)


def leader_genesis(history: History) -> Genesis:
    if history.genesis is None:
        raise ValueError("the log does not begin with a genesis record")
    return history.genesis
