"""A live peer frees what finished steps held, whatever refers to whatever, so that memory is used again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import issue_certificate
from anabranch.node.driver.allocator import free_cycles, settle
from anabranch.node.driver.peer_driver import LivePeer
from anabranch.node.lifecycle.training_machine import TrainingMachine
from anabranch.protocol.interface.events import Note
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member
from anabranch.protocol.peer.peer import Peer


class Finished:
    """A step that refers to itself, as one does whose parts call it back, and holds an activation."""

    def __init__(self) -> None:
        self.activation = torch.zeros(8)
        self.itself = self


@pytest.fixture(autouse=True)
def what_is_loaded_is_not_looked_at() -> Iterator[None]:
    """Objects that other tests loaded are excluded from collections: each would take half a second more."""
    gc.freeze()
    yield
    gc.unfreeze()


def an_old_cycle() -> weakref.ref[Finished]:
    """Garbage in the oldest generation, which Python looks at most rarely."""
    finished = Finished()
    for _ in range(3):
        gc.collect()
    return weakref.ref(finished)


def test_free_cycles_frees_tensors_of_old_cycles() -> None:
    cycle = an_old_cycle()
    assert cycle() is not None
    free_cycles()
    assert cycle() is None


def test_settle_frees_garbage_and_exempts_what_is_loaded() -> None:
    cycle = an_old_cycle()
    loaded = [Finished() for _ in range(1000)]
    before = gc.get_freeze_count()
    settle()
    assert cycle() is None
    assert gc.get_freeze_count() >= before + len(loaded)
    assert len(gc.get_objects()) < 1000


def test_a_live_peer_frees_cycles_when_a_step_was_applied(tmp_path: Path) -> None:
    identity = Identity.from_seed(b"a peer that has applied a step..")
    me = identity.peer_id

    async def scenario() -> None:
        settings = Settings(run="r", epoch=0, stages=1, microbatches=1, steps=0)
        gate = Gate("r", me, lambda hello: None)
        live = LivePeer(
            Peer(me, 1, me, settings, 1),
            TrainingMachine(Member(me, 1, 1, "", 1), None),
            lambda accept: TcpTransport(identity, 1, gate, accept),
            issue_certificate(identity, run="r", peer_id=me, role="relay", expires_at_s=1 << 40),
            tmp_path / "events.jsonl",
        )
        running = asyncio.create_task(live.run())
        await asyncio.sleep(0)
        cycle = an_old_cycle()
        live._carry_out(Note("timing", {"t": 1, "stage": 1, "seconds": {}}))
        await asyncio.sleep(0)
        assert cycle() is None
        live.abort("the test is over")
        await running

    asyncio.run(scenario())
