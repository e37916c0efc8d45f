"""Checkpoints on the leader's disk of steps that were rolled back: nobody gets their states."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import FetchState
from anabranch.protocol.state.download import State
from anabranch.protocol.state.server import StateServer


def test_a_checkpoint_of_steps_that_were_rolled_back_is_not_served() -> None:
    """A read of it that was under way at the rollback came after it, and was served as the state after the
    same step when that was taken again: so it came into that step's checkpoint (seen in a live run)."""
    ctx = make_context("d0", 1, 0, Settings("void", 1, 2, 4, 100), "d0")
    ctx.run.membership.apply(Members(1, joined=(Member("d0", 0, 1, "", 4), Member("r", 1, 1, "", 4))))
    t, reads = 4, list[int]()
    server = StateServer(ctx, lambda: t, lambda asked, stage: not reads.append(asked))
    void, true = (State(1, 4, name, ("piece",), ("hash",)) for name in ("void", "true"))

    server.on_fetch_state("r", FetchState(1, 4))
    t = 2
    server.rolled_back(2)
    server.checkpoint_read(4, void, 1)
    assert reads == [4] and server.find(1, 4) is None
    server.on_fetch_state("r", FetchState(1, 4))
    assert reads == [4], "it is not read again"
    server.on_fetch_state("r", FetchState(1, -1))
    server.checkpoint_read(-1, void, 1)
    assert server.find(1, 4) is None

    t = 4
    server.on_fetch_state("r", FetchState(1, 4))
    assert reads == [4, -1], "the step was taken again, and the file is still the former one"
    server.checkpoint_written(4)
    server.on_fetch_state("r", FetchState(1, 4))
    server.checkpoint_read(4, true, 1)
    assert server.find(1, 4) == true


def test_a_sound_checkpoint_is_served_whatever_the_replica_has_now() -> None:
    """The run was rolled back to a later step while it was written, and the replica loads that state."""
    ctx = make_context("d0", 1, 0, Settings("void", 1, 2, 4, 100), "d0")
    ctx.run.membership.apply(Members(1, joined=(Member("d0", 0, 1, "", 4), Member("r", 1, 1, "", 4))))
    t, reads = 10, list[int]()
    server = StateServer(ctx, lambda: t, lambda asked, stage: not reads.append(asked))
    server.rolled_back(10)
    t = -1
    server.rolled_back(25)
    server.checkpoint_written(20)
    t = 25
    server.on_fetch_state("r", FetchState(1, 20))
    assert reads == [20]
