"""Peers that ask for the whole log all the time: a short question with a long answer (I7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.context.rate_limits_and_bans import LOG_BYTES, SHARED
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Genesis
from anabranch.sim.kernel.simulated_peer import Node, TaskExecutor
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world

#: Bytes of the log's first line; seconds between two questions of a key, and of asking in all.
LINE_BYTES, EVERY_S, ASKED_S = 400_000, 0.15, 60.0


def waiting_run() -> World:
    """Run with a long first log line and one relay, which waits for a second one."""

    def make(
        seed: int,
        settings: Settings,
        genesis: Genesis,
        worker: Callable[[int], TaskExecutor],
        model: Model | None,
    ) -> World:
        long = msgspec.structs.replace(genesis, config="#" * LINE_BYTES)
        return World(seed, settings, long, worker, model)

    settings = Settings("long", 1, 1, 4, 4, min_replicas=2)
    return counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1)], 1, make_world=make)


@pytest.mark.parametrize("strangers", [0, 40])
def test_the_log_is_sent_at_the_rate_of_a_slow_line(strangers: int) -> None:
    """A member took three megabytes a second of each voter's line, and each key of a ticket as much."""
    world, sent = waiting_run(), Counter[str]()
    askers = [f"key{number}" for number in range(strangers)] or ["r1.0"]
    carry = world.carry

    def count(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if peer in askers and isinstance(msg.decode(message), msg.Announce):
            sent[peer] += len(message)
        carry(sender, peer, message, payload)

    def ask() -> None:
        for asker in askers:
            world.nodes["d0"].handle(ev.Received(asker, msg.FetchLog(0), None))
        world.clock.after(EVERY_S, ask)

    def begin() -> None:
        shown = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, "ticket")
        for key in askers if strangers else ():
            world.nodes["d0"].handle(ev.LinkUp(key, 1, shown))
        ask()

    world.carry = count  # type: ignore[method-assign]
    world.clock.after(2.0, begin)
    while world.clock.now < 2.0 + ASKED_S:
        world.clock.step()
    most = (LOG_BYTES.burst + LOG_BYTES.per_s * ASKED_S) * (SHARED if strangers else 1.0)
    assert LINE_BYTES < sent.total() <= most + LINE_BYTES
