"""Recovery of a run that lost the majority of its voters for good: a new epoch with one voter."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.net.identity import Identity
from anabranch.node.driver.raft_storage import RaftStorage
from anabranch.node.lifecycle.create_run import LEADER_NAME
from anabranch.protocol.consensus.log_replay import fold
from anabranch.protocol.interface.events import Persist
from anabranch.protocol.log.hash_chain import LogError
from anabranch.protocol.log.records import Entry, Epoch, encode_entry
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.types import voter_id


@dataclass(frozen=True)
class RecoveredRun:
    """Result of a recovery. epoch: number of the new epoch. t: last committed step in the founder's log (0:
    none; later ones are lost). given_up: voter ids (`peer/disk`) of the removed voters, at least one."""

    epoch: int
    t: int
    given_up: tuple[str, ...]


def recover(directory: RunDirectory) -> RecoveredRun:
    """Make the founder of a run its only voter, by an entry at the end of the log in its directory; the run
    is then to be resumed there. No process may lead the run meanwhile, which is not checked here. Steps that
    only the other voters have recorded are lost; recomputing them gives the same results. Raises UserError if
    no run was founded here, the log is damaged, or the run has no other voters."""
    folder = directory.peer(LEADER_NAME)
    disk = RaftStorage(directory.log, folder / "vote.json")
    kept = disk.load()
    try:
        log, history = RaftLog(kept.lines), fold(kept.lines)
    except LogError as error:
        raise UserError(f"{directory.log}: {error}; restore the file from a copy") from None
    if history.genesis is None:
        raise UserError(f"{directory.log}: no run has begun here; there is nothing to recover")
    me = voter_id(Identity.load_or_create(folder / "key").peer_id, kept.nonce)
    others = tuple(voter for voter in log.voters if voter != me)
    if not others:
        raise UserError(f"this machine is the run's only voter: use `anabranch resume {directory.path}`")
    term = max(kept.term, log.last_term) + 1
    record = Epoch(epoch=history.epoch + 1, ids=(me,), reason="the owner gave up the former voters")
    line = encode_entry(Entry(index=log.length, term=term, previous=log.position.previous, record=record))
    disk.do(Persist(1, term, me, log.length, (line,)))
    return RecoveredRun(record.epoch, history.t, others)
