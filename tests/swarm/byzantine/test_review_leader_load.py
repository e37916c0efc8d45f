"""Messages of a single guest that kept the leader's loop, memory or disk busy, found by review."""

from __future__ import annotations

from typing import Any

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet import admission
from anabranch.protocol.fleet.admission import CHOSEN_S, SEARCHES, Admission
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import FetchState, Held, Holds, JoinRequest
from anabranch.protocol.recovery.snapshot_catalog import HELD_PER_STAGE, SnapshotCatalog
from anabranch.protocol.state.download import State
from anabranch.protocol.state.server import StateServer
from support.admission import DATA_TICKETS


def leader(*relays: str) -> PeerContext:
    """Context of the data node d0, which leads; the relays are members of stage 1."""
    ctx = make_context("d0", 1, 0, Settings("load", 1, 2, 4, 100), "d0")
    joined = Member("d0", 0, 1, "", 4), *(Member(relay, 1, 1, "", 4) for relay in relays)
    ctx.run.membership.apply(Members(1, joined=joined))
    return ctx


def test_a_relay_that_asks_for_states_all_the_time_gets_one_read_at_a_time() -> None:
    """Each of its requests read a stage's state from the disk, on the thread that also keeps the log."""
    reads: list[tuple[int, int]] = []
    server = StateServer(leader("guest", "honest"), lambda: 7, lambda t, stage: not reads.append((stage, t)))
    for _ in range(64):
        server.on_fetch_state("guest", FetchState(1, -1))
    for t in range(64):
        server.on_fetch_state("guest", FetchState(1, 1000 + t))
    server.on_fetch_state("honest", FetchState(1, 4))
    assert reads == [(1, -1)]
    server.checkpoint_read(-1, State(1, 6, "fingerprint", ("piece",), ("hash",)), 1)
    assert reads == [(1, -1), (1, 1063)]
    server.checkpoint_read(1063, None, 1)
    assert reads == [(1, -1), (1, 1063), (1, 4)]
    server.checkpoint_read(4, None, 1)
    for _ in range(64):
        server.on_fetch_state("guest", FetchState(1, -1))
    assert len(reads) == 3, "the newest is known until another is written"
    server.checkpoint_written(7)
    server.on_fetch_state("guest", FetchState(1, -1))
    assert reads[3:] == [(1, -1)]


def test_who_is_no_member_holds_nothing_that_the_leader_keeps() -> None:
    """A report of 16,384 states took 63 ms of the leader, and 5.6 MB until its link broke."""
    catalog = SnapshotCatalog(leader("guest"))
    most = HELD_PER_STAGE * 3
    report = Holds(tuple(Held(k % 3, k, "f") for k in range(most)), 1)
    assert catalog.on_holds("stranger", report) is None and not catalog._states._of
    assert catalog.on_holds("guest", report) is None and len(catalog._states._of["guest"]) == most
    for peer in ("stranger", "guest"):
        assert catalog.on_holds(peer, Holds(tuple(Held(0, k, "f") for k in range(most + 1)), 2)) is not None


def test_who_asks_for_a_seat_and_leaves_all_the_time_is_placed_once(monkeypatch: Any) -> None:
    """Each of its requests searched for the best stage: 0.2 s of the leader in a swarm of 64."""
    searched: list[str] = []
    monkeypatch.setattr(admission, "best_stage", lambda joiner, *_: searched.append(joiner.id) or 1)
    ctx = leader()
    machines = [Member(f"r{n}", 1 + n % 2, 1, "", 4, forward_s=0.01) for n in range(8)]
    ctx.run.membership.apply(Members(2, joined=tuple(machines)))
    door = Admission(ctx, Connections(ctx), "", "", "", print, DATA_TICKETS, lambda *_: None)
    for a in machines:
        door.ways.told(a.id, {b.id: (0.05, 1e8) for b in machines if b is not a})

    def ask(peer: str) -> None:
        member = Member(peer, 0, 1, "", 4, forward_s=0.01)
        assert door.on_join(peer, JoinRequest(member, -1, PROTOCOL_VERSION, "", "")) is None
        door.leave(peer, "")

    for _ in range(100):
        ask("guest")
    assert searched == ["guest"]
    for n in range(100):
        ask(f"guest{n}")
    assert len(searched) == SEARCHES.burst
    ctx.clock.now += CHOSEN_S
    ask("guest")
    assert searched[-1] == "guest"
