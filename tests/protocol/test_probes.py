"""When a link is probed, and what is made of it."""

from __future__ import annotations

import pytest

from anabranch.protocol.bursts import AGAIN_S, FIRST, PADDING_BYTES, Probes
from anabranch.protocol.core import Core
from anabranch.protocol.detector import Silence
from anabranch.protocol.estimates import Padded
from anabranch.protocol.events import Send
from anabranch.protocol.messages import Burst, GotBurst
from anabranch.protocol.records import Member, Members
from anabranch.protocol.settings import Settings


class Node:
    """Relay `r` between data node `d` and relays `a` and `b` of the next stage; `s` is beside it."""

    def __init__(self, activation_bytes: int = 1 << 20) -> None:
        self.core = Core("r", 1, 1, Settings("x", 1, 2, 4, 1, activation_bytes=activation_bytes), "d")
        stages = {"d": 0, "r": 1, "s": 1, "a": 2, "b": 2}
        self.core.membership.apply(
            Members(1, joined=tuple(Member(peer, stage, 1, "", 1) for peer, stage in stages.items()))
        )
        for peer in "dsab":
            self.core.links[peer] = Silence(0.0, 1.0)
            self.core.costs.answered(peer, 0.02, 0.0)
        self.probes = Probes(self.core)

    def tick(self, now: float) -> list[str]:
        self.core.now, self.core.effects = now, []
        self.probes.tick()
        sends = [effect for effect in self.core.effects if isinstance(effect, Send)]
        assert all(isinstance(effect.message, Burst) for effect in sends)
        return [effect.peer for effect in sends]


def test_one_link_a_heartbeat_and_each_only_a_few_times() -> None:
    node = Node()
    sent = [peer for second in range(100, 140) for peer in node.tick(float(second))]
    assert sorted(sent) == sorted("abd" * FIRST)
    assert len(set(sent[:3])) == 3  # by turns
    assert node.tick(140.5) == [] == node.tick(140.0 + AGAIN_S / 2)
    assert len(node.tick(140.0 + AGAIN_S)) == 1


def test_what_has_traffic_or_is_unknown_is_left_alone() -> None:
    node = Node()
    node.core.costs.delivered("a", 0.5, 99.0)
    node.core.links["new"] = Silence(0.0, 1.0)
    assert {peer for second in range(100, 140) for peer in node.tick(float(second))} == {"b", "d"}
    assert "a" in {peer for second in range(20) for peer in node.tick(100.0 + AGAIN_S + second)}
    small = Node(activation_bytes=40_000)
    assert small.tick(100.0) == []


def test_never_while_a_microbatch_waits_or_a_payload_was_just_sent() -> None:
    node = Node()
    node.core.unsent = 1
    assert node.tick(100.0) == []
    node.core.unsent = 0
    node.core.now = 101.9
    node.core.send("a", GotBurst(1), payload=b"x")
    assert node.tick(102.0) == []
    assert len(node.tick(103.0)) == 1


def test_an_answer_to_the_last_probe_counts_and_no_other() -> None:
    node = Node()
    (peer,) = node.tick(100.0)
    node.core.now = 100.52
    node.probes.answered(peer, GotBurst(7))
    node.probes.answered("s", GotBurst(1))
    link = node.core.costs.of(peer).link
    assert link.out_bps(1 << 20) is None
    node.probes.answered(peer, GotBurst(1))
    assert link.out_bps(1 << 20) == pytest.approx(8 * PADDING_BYTES / 0.5)
    assert node.core.costs.of(peer).hop_s > 40.0
    node.core.costs.delivered(peer, 1.0, 200.0)  # traffic knows better
    assert link.out_bps(1 << 20) == pytest.approx(8 * (1 << 20) / 0.98)


def test_jitter_is_not_taken_for_a_slow_link() -> None:
    padded = Padded()
    assert padded.bps(0.1) is None
    padded.add(12_000, 0.12, 0.0)
    assert padded.bps(0.1) is None
    padded.add(12_000, 0.8, 1.0)
    assert padded.bps(0.1) is None
    slow = Padded()
    slow.add(12_000, 0.2, 0.0)
    assert slow.bps(0.1) == pytest.approx(960_000.0)
