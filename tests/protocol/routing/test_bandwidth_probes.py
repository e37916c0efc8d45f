"""When a link is probed, and what is made of it."""

from __future__ import annotations

import math

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.interface.events import Dial, Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Burst, GotBurst, Measured
from anabranch.protocol.routing.bandwidth_probes import (
    AGAIN_S,
    FIRST,
    LINE_TRIALS,
    PADDING_BYTES,
    TRIAL_BYTES,
    TRIAL_HEARTBEATS,
    BandwidthProbes,
    trial_bytes,
)
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.protocol.telemetry.estimators import PaddedEstimate
from anabranch.protocol.telemetry.peer_costs import LEAST_BPS


class Node:
    """Relay `r` between data node `d` and relays `a` and `b` of the next stage; `s` is beside it."""

    def __init__(
        self, activation_bytes: int = 1 << 20, deal: str = "arrival", spare: str = "never"
    ) -> None:
        settings = Settings("x", 1, 2, 4, 1, activation_bytes=activation_bytes, deal=deal, spare=spare)
        self.ctx = make_context("r", 1, 1, settings, "d")
        stages = {"d": 0, "r": 1, "s": 1, "a": 2, "b": 2}
        self.ctx.run.membership.apply(
            Members(1, joined=tuple(Member(peer, stage, 1, "", 1) for peer, stage in stages.items()))
        )
        for peer in "dsab":
            self.ctx.links.up[peer] = AdaptiveTimeout(0.0, 1.0)
            self.ctx.costs.answered(peer, 0.02, 0.0)
        self.probes = BandwidthProbes(self.ctx)

    def tick(self, now: float) -> list[str]:
        self.ctx.clock.now, self.ctx.outbox.effects = now, []
        self.probes.tick()
        sends = [effect for effect in self.ctx.outbox.effects if isinstance(effect, Send)]
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
    node.ctx.costs.delivered("a", 0.5, 99.0)
    node.ctx.links.up["new"] = AdaptiveTimeout(0.0, 1.0)
    assert {peer for second in range(100, 140) for peer in node.tick(float(second))} == {"b", "d"}
    assert "a" in {peer for second in range(20) for peer in node.tick(100.0 + AGAIN_S + second)}
    small = Node(activation_bytes=40_000)
    assert small.tick(100.0) == []


def test_never_while_a_microbatch_waits_or_a_payload_was_just_sent() -> None:
    node = Node()
    node.ctx.outbox.backlog = 1
    assert node.tick(100.0) == []
    node.ctx.outbox.backlog = 0
    node.ctx.clock.now = 101.9
    node.ctx.outbox.send("a", GotBurst(1), payload=b"x")
    assert node.tick(102.0) == []
    assert len(node.tick(103.0)) == 1


def test_an_answer_to_the_last_probe_counts_and_no_other() -> None:
    node = Node()
    (peer,) = node.tick(100.0)
    node.ctx.clock.now = 100.52
    node.probes.answered(peer, GotBurst(7))
    node.probes.answered("s", GotBurst(1))
    link = node.ctx.costs.of(peer).link
    assert link.out_bps(1 << 20) is None
    node.probes.answered(peer, GotBurst(1))
    assert link.out_bps(1 << 20) == pytest.approx(8 * PADDING_BYTES / 0.5)
    assert node.ctx.costs.of(peer).hop_s > 40.0
    node.ctx.costs.delivered(peer, 1.0, 200.0)  # traffic knows better
    assert link.out_bps(1 << 20) == pytest.approx(8 * (1 << 20) / 0.98)


def test_jitter_is_not_taken_for_a_slow_link() -> None:
    padded = PaddedEstimate()
    assert padded.bps(0.1) is None
    padded.add(12_000, 0.12, 0.0)
    assert padded.bps(0.1) is None
    padded.add(12_000, 0.8, 1.0)
    assert padded.bps(0.1) is None
    slow = PaddedEstimate()
    slow.add(12_000, 0.2, 0.0)
    assert slow.bps(0.1) == pytest.approx(960_000.0)


# --- before a run whose stages are dealt by links ---------------------------------------------------


def trials(node: Node, now: float) -> list[tuple[str, int]]:
    """Links that it probes now, with the bytes of each."""
    node.ctx.clock.now, node.ctx.outbox.effects = now, []
    node.probes.tick()
    sends = [effect for effect in node.ctx.outbox.effects if isinstance(effect, Send)]
    assert all(isinstance(send.message, Burst) and not send.message.padding for send in sends)
    return [(send.peer, len(send.payload)) for send in sends if isinstance(send.payload, bytes)]


def test_all_links_are_tried_one_after_the_other_and_once() -> None:
    node = Node(1 << 20, "links")
    now, order = 10.0, []
    for number in range(1, 5):
        ((peer, size),) = trials(node, now)
        assert size == 1 << 20 and trials(node, now + 0.1) == []
        node.ctx.clock.now = now + 0.5
        node.probes.answered(peer, GotBurst(number))
        link = node.ctx.costs.of(peer).link
        assert link.out_bps(1 << 20) == pytest.approx(8 * (1 << 20) / 0.48)
        order.append(peer)
        now += 0.5
    assert order == ["s", "a", "b", "d"]
    assert trials(node, now) == [] and node.probes.deadline() == math.inf
    assert all(node.ctx.costs.links("sabd")[peer][1] > 0.0 for peer in "sabd")


def test_one_that_does_not_answer_a_trial_holds_nobody_up() -> None:
    node = Node(deal="links")
    assert [peer for peer, _ in trials(node, 10.0)] == ["s"]
    assert trials(node, 10.0 + TRIAL_HEARTBEATS - 0.5) == []
    assert [peer for peer, _ in trials(node, 10.0 + TRIAL_HEARTBEATS)] == ["a"]
    node.probes.answered("s", GotBurst(1))  # late, and still a measurement
    assert node.ctx.costs.of("s").link.out_bps(1 << 20)
    node.probes.link_down("a")
    del node.ctx.links.up["a"]
    assert [peer for peer, _ in trials(node, 11.0 + TRIAL_HEARTBEATS)] == ["b"]


def test_a_trial_that_was_answered_is_not_repeated_over_the_next_link() -> None:
    """The far end has a budget of trials, and some links break every few seconds for as long as the run waits
    for peers."""
    node = Node(deal="links")
    for number, answers in enumerate((False, True, True), 1):
        assert [peer for peer, _ in trials(node, 10.0 * number)] == (["s"] if number < 3 else ["a"])
        if answers and number < 3:
            node.probes.answered("s", GotBurst(number))
        node.probes.link_down("s")


def test_trials_of_all_peers_of_a_process_have_one_payload_object() -> None:
    payloads = []
    for _ in range(2):
        node = Node(1 << 20, "links")
        trials(node, 10.0)
        payloads += [send.payload for send in node.ctx.outbox.effects if isinstance(send, Send)]
    assert len(payloads) == 2 and payloads[0] is payloads[1]


def test_trials_end_when_the_run_begins_and_are_of_bounded_size() -> None:
    node = Node(deal="links")
    node.ctx.run.membership.apply(Members(2, active_from={"d": 1}))
    node.ctx.run.membership.open(1, 0)
    assert len(node.tick(100.0)) == 1  # as ever
    assert trial_bytes(Settings("x", 1, 2, 4, 1, activation_bytes=1 << 30)) == TRIAL_BYTES
    assert trial_bytes(Settings("x", 1, 2, 4, 1, activation_bytes=100, block_bytes=5000)) == 5000
    nothing = Node(0, "links")
    assert trials(nothing, 10.0) == [] and nothing.probes.deadline() == math.inf


# --- where the leader is to know whose line is thin --------------------------------------------------


def measured(node: Node) -> list[Measured]:
    """Measurements that the leader is told."""
    sends = [effect for effect in node.ctx.outbox.effects if isinstance(effect, Send)]
    return [send.message for send in sends if isinstance(send.message, Measured) and send.peer == "d"]


def line_trials(node: Node, now: float, padding_s: float = 0.0) -> list[tuple[str, int]]:
    """Lines that it probes from now on, with the bytes of each. Small probes, each of which is answered after
    a round trip and `padding_s`, come first."""
    while True:
        node.ctx.clock.now, node.ctx.outbox.effects = now, []
        node.probes.tick()
        bursts = [e for e in node.ctx.outbox.effects if isinstance(e, Send) and isinstance(e.message, Burst)]
        if measured(node) or not bursts or bursts[0].payload is not None:
            return [(send.peer, len(send.payload)) for send in bursts if isinstance(send.payload, bytes)]
        (send,) = bursts
        assert isinstance(send.message, Burst) and len(send.message.padding) == PADDING_BYTES
        node.ctx.clock.now = now + 0.02 + padding_s
        node.probes.answered(send.peer, GotBurst(send.message.number))
        now = node.ctx.clock.now + 0.25


def answer(node: Node, peer: str, seconds: float) -> None:
    """To the last probe or trial."""
    node.ctx.clock.now += seconds
    node.probes.answered(peer, GotBurst(node.probes._sent[peer].number))


def test_a_relay_that_has_sent_nothing_tries_its_line_and_tells_it_once() -> None:
    node = Node(spare="links")
    order = []
    for number in range(1, LINE_TRIALS + 1):
        ((peer, _),) = line_trials(node, 10.0 * number)
        answer(node, peer, 0.5)
        order.append(peer)
    assert order == ["s", "a", "b"]
    node.ctx.clock.now, node.ctx.outbox.effects = 50.0, []
    node.probes.tick()
    (told,) = measured(node)
    assert {peer for peer, (_, bps) in told.links.items() if bps} == set(order)
    assert [send.peer for send in node.ctx.outbox.effects if isinstance(send, Send)] == ["d", "d"]
    assert node.tick(51.0) == ["d"]  # small probes, as ever
    assert measured(node) == []


def test_every_link_beside_it_has_had_a_small_probe_before_the_first_trial() -> None:
    """A sender with a microbatch meanwhile knows how long it takes."""
    node = Node(spare="links")
    probed = {node.tick(10.0 + number / 4.0)[0] for number in range(3)}
    assert probed == set("abd")


def test_a_link_that_is_slow_by_a_small_probe_is_known_well_enough() -> None:
    """A trial would be long on it, and whatever comes after it would wait."""
    node = Node(activation_bytes=TRIAL_BYTES, spare="links")
    assert line_trials(node, 10.0, padding_s=0.1) == []
    assert line_trials(node, node.ctx.clock.now + 0.25) == []
    (told,) = measured(node)
    rates = [bps for _, bps in told.links.values() if bps]
    assert rates == [pytest.approx(8 * PADDING_BYTES / 0.1)] * len(rates) and len(rates) >= LINE_TRIALS


def test_one_that_is_slow_and_not_too_slow_is_tried() -> None:
    node = Node(activation_bytes=TRIAL_BYTES, spare="links")
    assert line_trials(node, 10.0, padding_s=0.02) == [("s", TRIAL_BYTES)]


def test_who_does_not_answer_is_not_waited_for_and_no_more_are_tried() -> None:
    node = Node(spare="links")
    now, tried = 10.0, []
    while not measured(node):
        tried += [peer for peer, _ in line_trials(node, now)]
        now = node.ctx.clock.now + TRIAL_HEARTBEATS + 1.0
    assert tried == ["s", "a", "b"]


def test_small_activations_are_no_reason_for_a_small_probe_that_is_larger() -> None:
    """Heartbeats would wait behind it, on a link over which an activation takes long."""
    node = Node(activation_bytes=512, spare="links")
    for number in range(1, LINE_TRIALS + 1):
        ((peer, _),) = trials(node, 10.0 * number)
        answer(node, peer, 0.5)
    node.ctx.clock.now, node.ctx.outbox.effects = 50.0, []
    node.probes.tick()
    assert len(measured(node)) == 1 and len(node.ctx.outbox.effects) == 1
    assert node.tick(51.0) == []


def test_one_that_has_sent_enough_tries_nothing_and_tells_it() -> None:
    node = Node(spare="links")
    for peer in "abd":
        node.ctx.costs.delivered(peer, 0.5, 9.0)
    node.ctx.clock.now = 10.0
    node.probes.tick()
    assert len(measured(node)) == 1 and len(node.ctx.outbox.effects) == 1


def test_links_that_have_answered_no_heartbeat_yet_are_not_told() -> None:
    """They are not reported: payloads come before the first heartbeat."""
    node = Node(spare="links")
    node.ctx.costs.neighbours.clear()
    for peer in "abd":
        node.ctx.costs.delivered(peer, 0.5, 9.0)
    assert node.tick(10.0) == [] == measured(node)
    for peer in "abd":
        node.ctx.costs.answered(peer, 0.02, 11.0)
    node.ctx.clock.now = 12.0
    node.probes.tick()
    (told,) = measured(node)
    assert all(bps for _, bps in told.links.values())


def test_one_that_has_few_links_tells_what_they_are_like() -> None:
    node = Node(spare="links")
    for peer in "sab":
        del node.ctx.links.up[peer]
    assert line_trials(node, 10.0) == [("d", 1 << 20)]
    answer(node, "d", 0.5)
    node.ctx.clock.now, node.ctx.outbox.effects = 20.0, []
    node.probes.tick()
    assert len(measured(node)) == 1 and node.probes.deadline() > 20.0


def test_a_thin_line_has_the_time_that_a_trial_needs() -> None:
    """The next one would share it with the one that is under way, and so would microbatches."""
    node = Node(activation_bytes=TRIAL_BYTES, spare="links")
    assert line_trials(node, 10.0) == [("s", TRIAL_BYTES)]
    needs_s, sent_at = 8.0 * TRIAL_BYTES / LEAST_BPS, node.ctx.clock.now
    assert needs_s > TRIAL_HEARTBEATS and line_trials(node, sent_at + needs_s - 0.5) == []
    assert line_trials(node, sent_at + needs_s) == [("a", TRIAL_BYTES)]


def test_what_is_sent_after_a_trial_has_the_time_of_both() -> None:
    node = Node(spare="links")
    ((peer, size),) = line_trials(node, 10.0)
    assert node.ctx.costs.hand(peer, node.ctx.clock.now) == size + node.ctx.costs.activation_bytes


def test_no_trial_while_there_is_something_to_send() -> None:
    node = Node(spare="links")
    node.ctx.outbox.backlog = 1
    assert line_trials(node, 10.0) == []
    node.ctx.outbox.backlog = 0
    assert len(line_trials(node, 11.0)) == 1


def test_until_then_links_are_kept_with_everybody() -> None:
    ctx = make_context("r", 1, 1, Settings("x", 1, 4, 4, 1, deal="links"), "d")
    stages = {"d": 0, "far": 3, "r": 1}
    ctx.run.membership.apply(
        Members(1, joined=tuple(Member(p, s, 1, "", 1, address=f"{p}:1") for p, s in stages.items()))
    )
    connections = Connections(ctx)
    connections.connect()
    assert {effect.peer for effect in ctx.outbox.effects if isinstance(effect, Dial)} == {"d", "far"}
    ctx.outbox.effects = []
    ctx.run.membership.apply(Members(2, active_from={"d": 1}))
    ctx.run.membership.open(1, 0)
    fresh = Connections(ctx)
    ctx.dialer.cancel("d")
    fresh.connect()
    assert {effect.peer for effect in ctx.outbox.effects if isinstance(effect, Dial)} == {"d"}
