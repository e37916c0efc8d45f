"""A link without traffic is probed: a slow one is known as such before an activation gets stuck on it."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Burst, Forward
from anabranch.protocol.routing.bandwidth_probes import BandwidthProbes
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

ACTIVATION_BYTES, BULK_S, SLOW = 1 << 20, 0.1, 100.0


def forwards(probing: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], float | None]:
    """How many activations each of three relays got, one of them far away over links with a hundredth of
    the others' bandwidth; and that bandwidth as the data node knows it in the end (bits per second)."""
    if not probing:
        monkeypatch.setattr(BandwidthProbes, "_wanted", lambda self, peer: False)
    settings = Settings(
        "probed", 1, 1, 8, 12, policy="auction", activation_bytes=ACTIVATION_BYTES, heartbeat_s=0.25
    )
    machines = [Machine("d0", 0, 8), Machine("a", 1, 4), Machine("b", 1, 4), Machine("far", 1, 4)]
    model = Model((0.001, 0.0011), BULK_S, {"Forward": 0.5, "Head": 0.05, "InputGradient": 0.5})
    world = counting_world(settings, machines, 1, model)
    world.slow[frozenset(("d0", "far"))] = SLOW
    sent: Counter[str] = Counter()

    def look(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received):
            sent[node.id] += isinstance(event.message, Forward)
            assert not isinstance(event.message, Burst) or len(event.message.padding) <= 12_000

    world.watchers.append(look)
    world.run()
    assert not wrong_states(world) and sent["a"] + sent["b"] + sent["far"] >= 96
    return sent, world.nodes["d0"].peer.ctx.costs.of("far").link.out_bps(ACTIVATION_BYTES)


def test_a_slow_link_is_known_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, bps = forwards(True, monkeypatch)
    assert not sent["far"]
    assert bps == pytest.approx(8 * ACTIVATION_BYTES / (BULK_S * SLOW), rel=0.1)


def test_without_probes_an_activation_gets_stuck_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, _ = forwards(False, monkeypatch)
    assert sent["far"]
