"""Links and devices against what can be worked out by hand, to 1e-9."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from dataclasses import replace

import pytest

from anabranch.errors import UserError
from anabranch.net.connection_limits import Limits
from anabranch.net.tcp.sockets import UNSENT_BYTES
from anabranch.protocol.interface import tasks
from anabranch.sim.cluster.device_model import (
    Device,
    Machine,
    Workload,
    known_devices,
    parse_devices,
    shipped_devices,
)
from anabranch.sim.kernel.clock import Clock
from anabranch.sim.network.fair_share import HELD_BITS, Traffic
from anabranch.sim.network.shared_link import Line, SharedLink, spliced
from anabranch.train.model.sizes import block_flops, block_parameters, end_parameters, named_size

MB = 1_000_000
TINY = 1e-9
#: Seconds of the bytes that nothing overtakes, at a megabyte a second.
HELD_S = HELD_BITS / (8.0 * MB)


class Net:
    """Hosts with ways of their own; everything that arrives is noted."""

    def __init__(
        self,
        way: SharedLink,
        lines: dict[str, Line] | None = None,
        machines: dict[str, str] | None = None,
        **ways: SharedLink,
    ) -> None:
        self.clock = Clock()
        self.at: dict[str, float] = {}
        self.lost: dict[str, int] = {}
        lines, machines = lines or {}, machines or {}
        self.traffic = Traffic(
            self.clock,
            lambda a, b: ways.get(f"{a}_{b}", way),
            lambda host: lines.get(host, Line()),
            lambda host: machines.get(host, host),
        )

    def send(
        self, name: str, sender: str, receiver: str, size: float, priority: int = 0, via: str = ""
    ) -> None:
        def arrived() -> None:
            self.at.setdefault(name, self.clock.now)

        self.traffic.send(sender, receiver, size, arrived, priority, via)

    def rate_bps(self, sender: str, receiver: str) -> float:
        """Current rate between two hosts; 0 without payloads."""
        self.traffic._settle()
        lane = self.traffic._lanes.get((sender, receiver, ""))
        return lane.rate_bps if lane is not None else 0.0

    def run(self) -> dict[str, float]:
        while self.clock.step():
            pass
        return self.at


def test_a_link_that_bandwidth_binds() -> None:
    """Ten payloads one after another: all bytes at the link's rate, and the latency once."""
    net = Net(SharedLink(0.1, 8e6))
    for number in range(10):
        net.send(str(number), "a", "b", 0.5 * MB)
    at = net.run()
    expected = {str(n): 0.5 * (n + 1) + 0.1 for n in range(10)}
    assert at == pytest.approx(expected, abs=TINY)


def test_a_paced_connection_takes_its_share_of_a_round_trip_for_a_burst_however_quick_the_link_is() -> None:
    """Half a round trip of 0.4 s: for one payload as for ten together, once it has learnt to."""
    one, ten = (Net(SharedLink(0.2, 1e12, burst_trips=0.5)) for _ in range(2))
    for number in range(40):
        one.clock.at(float(number), lambda n=number: one.send(f"{n}", "a", "b", 0.5 * MB))
        for part in range(10):
            ten.clock.at(float(number), lambda n=number, p=part: ten.send(f"{n} {p}", "a", "b", 0.5 * MB))
    assert one.run()["39"] == pytest.approx(39.0 + 0.2 + 0.2, abs=TINY)
    at = ten.run()
    assert at["39 9"] == pytest.approx(39.0 + 0.2 + 0.2, abs=TINY)
    assert at["39 4"] == pytest.approx(39.0 + 0.1 + 0.2, abs=TINY)


def test_a_paced_connection_is_slow_at_first_and_after_a_break() -> None:
    """14.6 kB in half a round trip, and as much more as was carried: looked at once in a round trip."""
    net, first = Net(SharedLink(0.05, 1e12, burst_trips=0.5)), 14_600.0
    net.send("first", "a", "b", 7 * first)
    # In the first round trip of 0.1 s two are carried; then three go in half of one: five in 5/6 of it.
    seconds = 0.1 + 0.1 * 5 / 6
    net.clock.at(10.0, lambda: net.send("second", "a", "b", 7 * first))
    net.clock.at(20.0, lambda: net.traffic.drop("a", "b"))
    net.clock.at(20.0, lambda: net.send("again", "a", "b", 7 * first))
    assert net.run() == pytest.approx(
        {"first": seconds + 0.05, "second": 10.1, "again": 20.0 + seconds + 0.05}, abs=TINY
    )


def test_a_paced_connection_takes_no_more_than_its_link_and_its_line_have() -> None:
    net = Net(
        SharedLink(0.01, 8e6, burst_trips=0.5),
        {"a": Line(up_bps=4e6)},
        a_c=SharedLink(0.01, 8e6, burst_trips=0.5),
    )
    for number in range(30):
        net.clock.at(10.0 * number, lambda n=number: net.send(f"b {n}", "a", "b", MB))
        net.clock.at(10.0 * number, lambda n=number: net.send(f"c {n}", "a", "c", MB))
    at = net.run()
    assert at["b 29"] == at["c 29"] == pytest.approx(290.0 + 4.0 + 0.01, abs=TINY)


def seconds_of_a_large_burst(small: int, beside: int) -> float:
    """Seconds of a burst of 200 first windows, after `small` small ones and beside payloads of a byte."""
    net, first = Net(SharedLink(0.05, 1e12, burst_trips=0.5)), 14_600.0
    for number in range(small):
        net.clock.at(float(number), lambda: net.send("small", "a", "b", first))
    net.clock.at(1000.0, lambda: net.send("large", "a", "b", 200 * first))
    for number in range(beside):
        net.clock.at(1000.001 + number / 500.0, lambda: net.send("beside", "a", "b", 1.0))
    return net.run()["large"] - 1000.0


def test_what_was_learnt_is_what_was_carried_when_more_was_given() -> None:
    """Small bursts, of which each went at once, teach nothing of a large one; and what is put beside it at
    other moments does not make it learn sooner."""
    alone = seconds_of_a_large_burst(0, 0)
    # In round trips of 0.1 s 2, 6, 18 and 54 windows are carried; of the other 120 81 go in half of one.
    assert alone == pytest.approx(4 * 0.1 + 120 / 81 * 0.05 + 0.05, abs=TINY)
    assert seconds_of_a_large_burst(400, 0) == pytest.approx(alone, abs=TINY)
    assert seconds_of_a_large_burst(0, 50) == pytest.approx(alone, rel=1e-3)


def test_nothing_at_all_arrives_and_a_connection_that_its_link_binds_is_not_looked_at() -> None:
    net = Net(SharedLink(1e-5, 8e6, burst_trips=0.5))
    net.send("nothing", "a", "b", 0.0)
    net.send("long", "a", "b", 100 * MB)
    steps = 0
    while net.clock.step():
        steps += 1
    assert net.at == pytest.approx({"nothing": 1e-5, "long": 100.0 + 1e-5}, abs=1e-6)
    assert steps < 20


def test_directions_do_not_disturb_each_other_and_differ() -> None:
    net = Net(SharedLink(0.1, 8e6), b_a=SharedLink(0.3, 2e6))
    net.send("there", "a", "b", MB)
    net.send("back", "b", "a", MB)
    assert net.run() == pytest.approx({"there": 1.1, "back": 4.3}, abs=TINY)


def test_a_shared_uplink() -> None:
    """Three ways of 8 Mbit/s over an uplink of 12: 4 Mbit/s each, then what the first leaves is shared."""
    net = Net(SharedLink(0.0, 8e6), {"a": Line(up_bps=12e6)})
    net.send("short", "a", "b", 0.5 * MB)
    net.send("one", "a", "c", MB)
    net.send("two", "a", "d", 2 * MB)
    # Short: 4 Mbit at 4 = 1 s. Then 6 each: one has 4 Mbit left, 2/3 s. Then two: 8 Mbit left of 12, at 8.
    assert net.run() == pytest.approx({"short": 1.0, "one": 1.0 + 2 / 3, "two": 1.0 + 2 / 3 + 1.0}, abs=TINY)


def test_a_shared_downlink_and_a_narrow_way_leave_the_rest_to_others() -> None:
    """Max-min: a way of 1 Mbit/s takes no more, the other two share what is left of the downlink."""
    net = Net(SharedLink(0.0, 8e6), {"d": Line(down_bps=9e6)}, a_d=SharedLink(0.0, 1e6))
    for sender in "abc":
        net.send(sender, sender, "d", MB)
    assert net.rate_bps("a", "d") == 1e6
    assert net.rate_bps("b", "d") == net.rate_bps("c", "d") == 4e6
    assert net.run() == pytest.approx({"a": 8.0, "b": 2.0, "c": 2.0}, abs=TINY)


def test_urgent_payloads_overtake_and_lose_nothing() -> None:
    """All but the bytes that the kernel has: once, however many payloads wait for these."""
    net = Net(SharedLink(0.0, 8e6))
    net.send("state", "a", "b", 2 * MB, priority=4)
    net.clock.at(0.5, lambda: net.send("sum", "a", "b", MB, priority=2))
    net.clock.at(0.6, lambda: net.send("gradient", "a", "b", MB))
    at = net.run()
    assert at == pytest.approx({"gradient": 1.5 + HELD_S, "sum": 2.5 + HELD_S, "state": 4.0}, abs=TINY)


def test_held_bits_are_those_of_a_live_connection() -> None:
    assert 8.0 * (UNSENT_BYTES + Limits().chunk_bytes / 2) == HELD_BITS


def test_nothing_overtakes_the_rest_of_a_payload_that_the_kernel_has() -> None:
    net = Net(SharedLink(0.0, 8e6))
    net.send("state", "a", "b", 0.6 * MB, priority=4)
    net.clock.at(0.5, lambda: net.send("gradient", "a", "b", MB))
    assert net.run() == pytest.approx({"state": 0.6, "gradient": 1.6}, abs=TINY)


def test_a_payload_that_the_kernel_has_in_part_is_lost_once() -> None:
    net = Net(SharedLink(0.0, 8e6))
    net.send("state", "a", "b", 2 * MB, priority=4)
    net.clock.at(0.5, lambda: net.send("gradient", "a", "b", MB))
    net.clock.at(0.6, lambda: net.lost.update(net.traffic.drop("a", "b")))
    assert net.run() == {} and net.lost == {"a": 2}


def test_what_is_told_of_a_line_is_by_priority_and_without_gaps() -> None:
    net, told = Net(SharedLink(0.0, 8e6)), []
    net.traffic.watch = lambda *what: told.append(what)
    net.send("state", "a", "b", 2 * MB, priority=4)
    net.clock.at(0.5, lambda: net.send("gradient", "a", "b", MB))
    net.clock.at(0.6, lambda: net.send("another", "a", "b", MB))
    net.run()
    assert [priority for *_, priority in told] == [4, 0, 4]
    assert [begin for _, _, begin, _, _ in told] == pytest.approx([0.0, 0.5 + HELD_S, 2.5 + HELD_S], abs=TINY)
    assert [end for _, _, _, end, _ in told] == pytest.approx([0.5 + HELD_S, 2.5 + HELD_S, 4.0], abs=TINY)


def test_what_is_dropped_never_arrives_and_its_share_is_free() -> None:
    net = Net(SharedLink(0.0, 8e6), {"a": Line(up_bps=8e6)})
    net.send("lost", "a", "b", MB)
    net.send("kept", "a", "c", MB)
    net.clock.at(0.5, lambda: net.traffic.drop("b", "a"))
    assert net.run() == pytest.approx({"kept": 0.5 + 0.75}, abs=TINY)


def test_rates_are_max_min_fair_in_a_tangle() -> None:
    """No lane can have more without taking it from one that has no more: each has a bound that is full, on
    which nobody has more than it."""
    lines = {f"h{n}": Line(up_bps=(3 + n) * 1e6, down_bps=(9 - n) * 1e6) for n in range(6)}
    net = Net(SharedLink(0.01, 4e6), lines)
    pairs = [(a, b) for a, b in itertools.permutations(sorted(lines), 2) if (int(a[1]) + 2 * int(b[1])) % 3]
    for sender, receiver in pairs:
        net.send(f"{sender}{receiver}", sender, receiver, MB)
    rate = {pair: net.rate_bps(*pair) for pair in pairs}
    for sender, receiver in pairs:
        mine = rate[sender, receiver]
        up = [rate[pair] for pair in pairs if pair[0] == sender]
        down = [rate[pair] for pair in pairs if pair[1] == receiver]
        assert sum(up) <= lines[sender].up_bps * (1 + TINY)
        assert sum(down) <= lines[receiver].down_bps * (1 + TINY)
        bound = [mine >= 4e6]
        bound.append(math.isclose(sum(up), lines[sender].up_bps) and mine >= max(up) - 1e-3)
        bound.append(math.isclose(sum(down), lines[receiver].down_bps) and mine >= max(down) - 1e-3)
        assert any(bound), (sender, receiver)
    assert len(net.run()) == len(pairs)


@pytest.mark.parametrize("line", [Line(10e6, 10e6), Line(up_bps=10e6), Line(down_bps=10e6)])
def test_payloads_share_the_line_of_their_carrier(line: Line) -> None:
    """Two of 8 Mbit/s over 10 Mbit/s: 5 each; what the short one leaves is more than the other's slower link
    takes. Bytes are passed on as they come, and take the latencies of both links."""
    net = Net(SharedLink(0.1, 8e6), {"c": line}, c_b=SharedLink(0.2, 9e6), c_e=SharedLink(0.2, 9e6))
    net.send("long", "a", "b", MB, via="c")
    net.send("short", "d", "e", 0.5 * MB, via="c")
    # Short: 4 Mbit at 5. Then long has 4 Mbit left, at 8.
    assert net.run() == pytest.approx({"short": 0.8 + 0.3, "long": 0.8 + 0.5 + 0.3}, abs=TINY)


def test_what_a_carrier_sends_itself_and_the_ends_lines_count_too() -> None:
    """The carrier's uplink of 6 Mbit/s is shared with its own payload; the receiver's line takes 2."""
    net = Net(SharedLink(0.0, 8e6), {"c": Line(up_bps=6e6), "b": Line(down_bps=2e6)})
    net.send("carried", "a", "b", MB, via="c")
    net.send("other", "a", "e", MB, via="c")
    net.send("own", "c", "d", MB)
    # 2 Mbit/s to b, and 2 each of the others; these leave at 4 s, when carried has none left, too.
    assert net.run() == pytest.approx({"carried": 4.0, "other": 4.0, "own": 4.0}, abs=TINY)


@pytest.mark.parametrize(("sender", "receiver"), [("a", "b"), ("b", "a")])
def test_a_carrier_on_the_machine_of_an_end_takes_its_line_once(sender: str, receiver: str) -> None:
    net = Net(SharedLink(0.0, 1e9), {"a": Line(4e6, 4e6), "b": Line(8e6, 8e6)}, machines={"c": "a"})
    net.send("carried", sender, receiver, MB, via="c")
    net.send("back", receiver, sender, MB, via="c")
    assert net.run() == pytest.approx({"carried": 2.0, "back": 2.0}, abs=TINY)


def test_a_dead_carrier_takes_what_it_carries_and_nothing_else() -> None:
    net = Net(SharedLink(0.0, 8e6), {"c": Line(8e6, 8e6)})
    net.send("lost", "a", "b", MB, via="c")
    net.send("direct", "a", "b", MB)
    net.send("kept", "d", "b", MB, via="c")
    net.clock.at(0.5, lambda: net.lost.update(net.traffic.drop("b", "a", "c")))
    assert net.run() == pytest.approx({"direct": 1.0, "kept": 0.5 + 0.75}, abs=TINY)
    assert net.lost == {"a": 1}


def test_a_line_that_narrows_slows_what_is_in_flight_until_it_is_wide_again() -> None:
    """8 Mbit/s for 0.5 s, then a tenth for 1 s, then 8 again for the 3.2 Mbit that are left."""
    net = Net(SharedLink(0.0, 9e6), {"c": Line(8e6, 16e6)})
    net.send("carried", "a", "b", MB, via="c")
    net.send("direct", "a", "d", MB)
    net.clock.at(0.5, lambda: net.traffic.scale_line("c", 0.1))
    net.clock.at(1.5, lambda: net.traffic.scale_line("c", 10.0))
    assert net.run() == pytest.approx({"carried": 1.5 + 3.2 / 8.0, "direct": 8.0 / 9.0}, abs=TINY)
    line = net.traffic.line("c")
    assert (line.up_bps, line.down_bps) == pytest.approx((8e6, 16e6))


def test_a_carried_burst_takes_the_share_of_the_longer_round_trip() -> None:
    """Each half of the way is a connection of its own, with its own loss: half of 0.6 s, and 0.4 s to go."""
    net = Net(SharedLink(0.1, 1e12, burst_trips=0.5), c_b=SharedLink(0.3, 1e12, burst_trips=0.5))
    for number in range(40):
        net.clock.at(2.0 * number, lambda n=number: net.send(f"{n}", "a", "b", 0.5 * MB, via="c"))
    assert net.run()["39"] == pytest.approx(78.0 + 0.3 + 0.4, abs=TINY)
    near, far = (SharedLink(latency, 1e9, loss=1e-4) for latency in (0.05, 0.02))
    assert spliced(near, far).rate_bps == near.rate_bps
    assert spliced(SharedLink(0.0, 1e6), SharedLink(0.0, 2e6)) == SharedLink(0.0, 1e6)


def tangle(hosts: int, carried: int = 0) -> Net:
    """Each host sends to each other one; lines and links all differ. carried: one of so many payloads goes
    through a third host (0: none)."""
    names = [f"h{k:02}" for k in range(hosts)]
    lines = {name: Line(1e6 * (1 + k % 7), 1.3e6 * (1 + k % 5)) for k, name in enumerate(names)}
    ways = {f"{a}_{b}": SharedLink(0.01, 1e5 * (1 + (i * j) % 11)) for i, a in enumerate(names)
            for j, b in enumerate(names)}  # fmt: skip
    net = Net(SharedLink(0.01, 1e6), lines, **ways)
    for i, sender in enumerate(names):
        for j, receiver in enumerate(names):
            if i != j:
                via = names[(2 * i + j + 1) % hosts] if carried and not (i + j) % carried else ""
                net.send(f"{sender} {receiver}", sender, receiver, 1e4 * (1 + (i + j) % 9), via=via)
    return net


def test_intervals_of_a_crowd_hardly_delay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rates are computed at intervals, everything arrives, and hardly later."""
    exact = tangle(12, 3).run()
    monkeypatch.setattr("anabranch.sim.network.fair_share.MANY", 50)
    at = tangle(12, 3).run()
    assert at.keys() == exact.keys()
    assert at != exact
    assert max(exact.values()) <= max(at.values()) < 1.05 * max(exact.values())


@pytest.mark.parametrize("carried", [0, 3])
def test_rates_are_those_of_filling_by_levels_to_the_last_bit(carried: int) -> None:
    """All lanes are looked at at every level here, as the definition says; `_share` looks at each once."""
    net = tangle(12, carried)
    net.rate_bps("h00", "h01")
    rising = list(net.traffic._lanes.values())
    room = {wire: wire.most_bps for lane in rising for wire in lane.wires}
    levels = 0
    while rising:
        count = {wire: sum(wire in lane.wires for lane in rising) for wire in room}
        share = {wire: room[wire] / count[wire] for wire in room if count[wire]}
        level = min([*share.values(), *(lane.most_bps for lane in rising)])
        for lane in rising[:]:
            if lane.most_bps <= level or any(share[wire] <= level for wire in lane.wires):
                assert lane.rate_bps == level, lane.key
                rising.remove(lane)
                for wire in lane.wires:
                    room[wire] -= level
        levels += 1
    assert levels > 10


def test_loss_bounds_what_a_connection_reaches() -> None:
    lossy = SharedLink(0.05, 1e9, loss=1e-4)
    assert lossy.rate_bps == pytest.approx(1460 * 8 / 0.1 * math.sqrt(1.5e4))
    assert SharedLink(0.05, 1e9).rate_bps == 1e9


# --- pipelines ----------------------------------------------------------------------------------------


def pipeline_s(
    stages: int, replicas: int, microbatches: int, compute_s: float, way: SharedLink, size: float
) -> float:
    """Virtual seconds until all microbatches have passed all stages; each node computes one at a time."""
    clock = Clock()
    traffic = Traffic(clock, lambda a, b: way, lambda host: Line())
    queues: dict[str, list[int]] = {}
    busy: set[str] = set()
    done: list[float] = []

    def receive(stage: int, index: int) -> None:
        if stage == stages:
            done.append(clock.now)
            return
        heapq.heappush(queues.setdefault(f"{stage}.{index % replicas}", []), index)
        start(stage, index % replicas)

    def start(stage: int, replica: int) -> None:
        name = f"{stage}.{replica}"
        if name not in busy and queues[name]:
            busy.add(name)
            index = heapq.heappop(queues[name])
            clock.after(compute_s, lambda: computed(stage, replica, index))

    def computed(stage: int, replica: int, index: int) -> None:
        busy.discard(f"{stage}.{replica}")
        receiver = f"{stage + 1}.{index % replicas}"
        traffic.send(f"{stage}.{replica}", receiver, size, lambda: receive(stage + 1, index))
        start(stage, replica)

    for index in range(microbatches):
        receive(0, index)
    while clock.step():
        pass
    assert len(done) == microbatches
    return max(done)


def test_fill_drain_and_bubble_of_a_single_pipeline() -> None:
    """S stages, m microbatches, c seconds each, hop h: fill and drain S·(c + h), and m − 1 more beats of the
    slower of computing and sending; the bubble of a free network is (S − 1)/(m + S − 1)."""
    way, size = SharedLink(0.02, 8e6), 0.25 * MB
    assert pipeline_s(4, 1, 10, 1.0, way, size) == pytest.approx(4 * (1.0 + 0.27) + 9 * 1.0, abs=TINY)
    narrow = SharedLink(0.02, 1e6)  # 2 s a payload: the link beats
    assert pipeline_s(4, 1, 10, 1.0, narrow, size) == pytest.approx(4 * (1.0 + 2.02) + 9 * 2.0, abs=TINY)
    free = pipeline_s(4, 1, 10, 1.0, SharedLink(0.0, 1e30), 0.0)
    assert 1.0 - 10 * 1.0 / free == pytest.approx(3 / 13, abs=TINY)


def test_two_replicas_in_parallel() -> None:
    way, size = SharedLink(0.02, 8e6), 0.25 * MB
    assert pipeline_s(4, 2, 10, 1.0, way, size) == pytest.approx(4 * 1.27 + 4 * 1.0, abs=TINY)


# --- devices ------------------------------------------------------------------------------------------

SLOW = Device("slow", "made up", 1e12, 2e12, 1e9, 1e30)


def test_seconds_follow_from_flops() -> None:
    """A backward is twice a forward, as always; half of it, less half of the attention's, waits."""
    work = Workload(named_size("llama-160m"), 6, 2, 512)
    machine = Machine(SLOW, work, achieved=0.5)
    flops = 2 * 1024 * block_flops(work.model, 512)
    attention = 2 * 1024 * 4 * 512 * 768
    assert machine.seconds(1, tasks.Forward) == pytest.approx(flops / 0.5e12, rel=TINY)
    assert machine.seconds(1, tasks.InputGradient) == pytest.approx((flops + attention) / 0.5e12, rel=TINY)
    assert machine.seconds(1, tasks.WeightGradient) == pytest.approx((flops - attention) / 0.5e12, rel=TINY)
    assert machine.microbatch_s(1) == pytest.approx(3 * flops / 0.5e12, rel=TINY)
    twice = 1.5 * flops / 0.5e12
    assert Machine(SLOW, work, 0.5, speed=2.0).microbatch_s(3) == pytest.approx(twice, rel=TINY)
    half = Workload(work.model, 6, 2, 512, "fp16")
    assert Machine(SLOW, half, 0.5).microbatch_s(1) == pytest.approx(twice, rel=TINY)


def test_a_task_that_only_moves_bytes_takes_the_memorys_time() -> None:
    work = Workload(named_size("llama-160m"), 6, 2, 512)
    machine = Machine(Device("narrow", "made up", 1e30, 1e30, 1e9, 1e9), work)
    assert machine.seconds(1, tasks.Apply) == pytest.approx(28 * work.parameters(1) / 1e9, rel=TINY)


def test_memory_gives_capacity() -> None:
    work = Workload(named_size("llama-160m"), 6, 2, 512)
    state = 24 * work.parameters(1)
    for count in (1, 7):
        memory = state + count * work.kept_bytes(1)
        assert Machine(Device("", "x", 1e12, 1e12, memory, 1e9), work).capacity(1) == count
        assert Machine(Device("", "x", 1e12, 1e12, memory - 1, 1e9), work).capacity(1) == count - 1
    assert sum(map(work.blocks, range(1, 7))) == work.model.blocks


def test_devices_that_hold_a_stage_together_have_the_room_of_all_and_the_speed_of_one() -> None:
    devices = known_devices("")
    assert "2xt4" in devices and not any(name in devices for name in ("1xt4", "9xt4", "2xnone", "2x", "x"))
    model = named_size("llama-160m")
    work, half = (Workload(replace(model, blocks=blocks), 3, 2, 512) for blocks in (12, 6))
    alone, together = (Machine(devices[name], work) for name in ("t4", "2xt4"))
    assert together.device.name == "2xt4"
    assert together.seconds(1, tasks.Forward) == alone.seconds(1, tasks.Forward)
    assert together.capacity(1) == Machine(devices["t4"], half).capacity(1) > 2 * alone.capacity(1)
    assert together.capacity(0) == alone.capacity(0), "a data node holds no blocks"
    assert Machine(devices["2xt4"], Workload(model, 12, 2, 512)).capacity(1) == 0, "more devices than blocks"
    uneven = Machine(devices["2xt4"], Workload(replace(model, blocks=9), 3, 2, 512))
    assert uneven.capacity(1) == together.capacity(1), "two of three blocks are on one of them"
    whole = Workload(model, 1, 2, 512, whole=True)
    room = devices["2xt4"].memory_bytes - 24 * (end_parameters(model) + 6 * block_parameters(model))
    assert Machine(devices["2xt4"], whole).capacity(1) == room // (whole.kept_bytes(1) // 2)


def test_shipped_devices_are_fine_and_cite_a_source() -> None:
    devices = shipped_devices()
    assert {"t4", "v100", "rtx3090"} <= devices.keys()
    assert all("NVIDIA" in device.source for device in devices.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory_bytes": 16}, "my.json: t4: Expected `float` >= 100000000.0 - at `$.memory_bytes`"),
        ({"memory_bytes": 10**400}, "my.json: "),
        ({"fp32_flops_per_s": "8.1"}, "my.json: t4: Expected `float`, got `str` - at `$.fp32_flops_per_s`"),
        ({"memory_bytes_per_s": 320e15}, "`float` <= 1000000000000000.0 - at `$.memory_bytes_per_s`"),
        ({"memory_bytes_per_s": float("nan")}, "my.json: JSON is malformed"),
        ({"source": ""}, "my.json: t4: Expected `str` matching regex '\\\\S' - at `$.source`"),
        ({"memory": 3}, "my.json: t4: Object contains unknown field `memory`"),
    ],
)
def test_wrong_devices_are_refused_by_file_key_and_range(change: dict[str, object], says: str) -> None:
    device = shipped_devices()["t4"]
    good = {key: getattr(device, key) for key in device.__struct_fields__ if key != "name"}
    with pytest.raises(UserError, match=r"my\.json") as refused:
        parse_devices(json.dumps({"t4": good | change}), "my.json")
    assert says in str(refused.value)
