"""Swarms in which not everybody is everybody's neighbour, and large stages reduce in cells."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.peer import iterations
from anabranch.protocol.reduce.hierarchy import FLAT
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms.fault_points import Fault, added_in_mid_backward, kill

STAGES, REPLICAS, STEPS, PICKS = 2, 9, 3, 2


def crowded(model: Model | None = None) -> World:
    settings = Settings("crowded", 1, STAGES, 18, STEPS, min_replicas=REPLICAS, neighbours=PICKS)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{s}.{n}", s) for s in range(1, STAGES + 1) for n in range(REPLICAS)]
    return counting_world(settings, machines, 4, model)


class Heard:
    """Messages that came, by receiver, kind and sender."""

    def __init__(self, world: World) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        world.watchers.append(self)

    def __call__(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received):
            self.counts[node.id, type(event.message).__name__, event.peer] += 1

    def senders(self, peer: str, *kinds: type[msg.Message]) -> set[str]:
        names = {kind.__name__ for kind in kinds}
        return {sender for receiver, kind, sender in self.counts if receiver == peer and kind in names}


def test_a_relay_shares_work_with_its_neighbours_alone_and_every_step_is_right() -> None:
    world = crowded()
    heard = Heard(world)
    near: dict[str, frozenset[str]] = {}

    def look(node: Node, event: ev.Event) -> None:
        if node.peer.iteration is not None and node.id not in near:
            assert node.peer.ctx.run.near.crowded
            near[node.id] = node.peer.ctx.run.near.all(node.peer.ctx.run.stage)

    world.watchers.append(look)
    world.run()
    assert not wrong_states(world)
    assert len(world.history().commits) == STEPS
    assert REPLICAS > FLAT * PICKS
    for relay in (peer for peer in world.nodes if peer.startswith("r")):
        assert heard.senders(relay, msg.Forward, msg.Backward, msg.Slots, msg.Ask) <= near[relay]
        assert len(near[relay]) < 2 * REPLICAS
        parts = sum(
            count
            for (receiver, kind, _), count in heard.counts.items()
            if receiver == relay and kind in ("ReducePart", "ReducedPart")
        )
        assert parts < STEPS * (REPLICAS - 1), "fewer than half of what all with all would be"


def test_a_replacement_finds_who_has_the_microbatch_though_it_is_no_neighbour_of_it() -> None:
    world = crowded()
    heard = Heard(world)
    fault = Fault(world, tuple(f"r1.{n}" for n in range(REPLICAS)), added_in_mid_backward(2), kill())
    world.watchers.append(fault)
    world.run()
    assert fault.delivered
    assert not wrong_states(world)
    assert len(world.history().commits) == STEPS
    repairs = [fields for _, _, kind, fields in world.notes if kind == "repair"]
    assert repairs
    assert any(kind == "Have" for _, kind, _ in heard.counts)
    assert not [fields for _, _, kind, fields in world.notes if kind == "double"]


def test_who_leaves_a_large_swarm_is_told_so_and_not_sent_away() -> None:
    """It is told at once what others are told a moment later: then it is no member any more."""
    world = crowded()
    leaver = world.nodes["r1.1"]
    asked: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        iteration = leaver.peer.iteration
        if node is leaver and iteration is not None and iteration.t == 2 and not asked:
            asked.append(world.clock.now)
            leaver.handle(ev.Stopping("stopped by its user"))

    world.watchers.append(look)
    world.run()
    assert asked and leaver.stopped == ("left: stopped by its user", True)
    assert not wrong_states(world) and len(world.history().commits) == STEPS


def test_nobody_waits_for_ever_for_one_that_cannot_be_reached() -> None:
    """Most relays cannot be dialled: of those who may have a microbatch some are never linked, or only when
    the swarm has become small."""
    settings = Settings("crowded", 1, STAGES, 18, STEPS, min_replicas=REPLICAS, neighbours=PICKS)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [
        Machine(f"r{s}.{n}", s, reachable=n < 2) for s in range(1, STAGES + 1) for n in range(REPLICAS)
    ]
    world = counting_world(settings, machines, seed=0)
    world.run(300.0)
    assert not wrong_states(world) and len(world.history().commits) == STEPS


def test_heartbeats_of_a_large_swarm() -> None:
    """A heartbeat pings one of two neighbours, not both: an answer is a word, too. Both measure the link.
    Those of one that dies find others with their next heartbeat, not at once: somebody comes or goes all the
    time."""
    world = crowded(Model(task_s={"Forward": 1.0, "InputGradient": 1.0, "WeightGradient": 1.0}))
    heard, dies = Heard(world), "r1.3"
    relays = [node.peer for node in world.nodes.values() if node.id.startswith("r") and node.id != dies]
    looked: list[str] = []

    def look() -> None:
        for peer in relays:
            ctx = peer.ctx
            assert dies not in ctx.run.membership.members
            assert ctx.run.near.all(ctx.run.stage) <= ctx.links.up.keys()
            looked.append(ctx.me)

    world.clock.at(4.0, lambda: world.crash(dies))
    world.clock.at(8.0, look)
    world.run()
    assert len(looked) == len(relays)
    assert not wrong_states(world) and not [f for _, _, kind, f in world.notes if kind == "suspected"]
    pairs = [(peer, other) for peer in relays for other in relays if peer.ctx.me < other.ctx.me]
    near = [(one, other) for one, other in pairs if other.ctx.me in one.ctx.run.near.all(one.ctx.run.stage)]
    by_lower = sum(heard.counts[other.ctx.me, "Ping", one.ctx.me] for one, other in near)
    by_higher = sum(heard.counts[one.ctx.me, "Ping", other.ctx.me] for one, other in near)
    beats = world.clock.now / world.settings.heartbeat_s
    assert 0.5 * beats < (by_lower + by_higher) / len(near) < 1.2 * beats
    assert min(by_lower, by_higher) > 0.2 * (by_lower + by_higher)
    for one, other in near:
        for peer, beside in ((one, other.ctx.me), (other, one.ctx.me)):
            assert peer.ctx.costs.of(beside).link.latency.round_trip_s() is not None


@pytest.mark.costly
def test_who_missed_a_step_and_has_no_neighbour_left_asks_strangers_for_its_gradient() -> None:
    """Only neighbours of a large stage are linked. Where these are out of reach others have the gradient,
    too: who waited until it gave up, and then fetched the whole state, held everybody up meanwhile."""
    world = crowded(Model(task_s={"Forward": 4.0, "InputGradient": 4.0, "WeightGradient": 4.0}))
    heard, misses = Heard(world), "r1.3"
    missed: list[float] = []
    taken: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        peer = world.nodes[misses].peer
        if not missed and node.id == "d0" and peer.replica.t == 1 and node.peer.committed == 2:
            missed.append(world.clock.now)
            peer.replica.all_reduce.prepared = None
            near = peer.ctx.run.near.all(peer.ctx.run.stage)
            for other in [other for other in world.nodes if other.startswith("r1.") and other != misses]:
                world.cut(misses, other, 120.0 if other in near else 0.0)
        if missed and not taken and peer.replica.t >= 2:
            taken.append(world.clock.now)

    world.watchers.append(look)
    world.run()
    assert missed and taken
    askers = {sender for _, kind, sender in heard.counts if kind == "FetchGradient"}
    assert askers == {misses}
    assert not any(kind == "FetchState" and sender == misses for _, kind, sender in heard.counts)
    assert not wrong_states(world) and len(world.history().commits) == STEPS


def partners_of_reduce(node: Node) -> list[str]:
    """Peers that a relay exchanges parts with now and that are not its neighbours; [] without a reduce."""
    ctx, reduce = node.peer.ctx, node.peer.replica.all_reduce.reduce
    if not ctx.run.stage or reduce is None or not reduce.parts or node.peer.replica.all_reduce.prepared:
        return []
    return [peer for peer in reduce.partners if peer not in ctx.run.near.all(ctx.run.stage)]


def test_partners_of_a_reduce_are_pinged_only_if_they_are_late() -> None:
    """The exchange takes several heartbeats, and the leader watches all members meanwhile."""
    world = crowded(Model(bulk_s=3.0))
    exchanging, pinged = Counter[str](), Counter[str]()

    def look(node: Node, event: ev.Event) -> None:
        partners = partners_of_reduce(node)
        late = node.peer.replica.all_reduce.late
        exchanging[node.id] += len(partners) > len(set(late) & set(partners))
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Pong):
            pinged[node.id] += event.peer in partners and event.peer not in late

    world.watchers.append(look)
    world.run()
    assert len(exchanging) > STAGES * REPLICAS and exchanging.total() > 100 and not pinged.total()
    assert not wrong_states(world) and not [f for _, _, kind, f in world.notes if kind == "suspected"]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_link_that_swallows_parts_of_a_reduce_holds_no_step_up(share: float) -> None:
    """Also where nothing of what a member awaits comes, so that no part seems late (I4). share: of that
    member's links to partners that are no neighbours; at least one."""
    world = crowded()
    swallowed: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        partners = [] if swallowed else partners_of_reduce(node)
        for other in partners[: max(1, round(share * len(partners)))]:
            swallowed.append(world.clock.now)
            world.trouble.swallow([(other, node.id), (node.id, other)], float("inf"))

    world.watchers.append(look)
    world.run(60.0)
    assert len(swallowed) >= (2 if share else 1)
    assert not wrong_states(world) and len(world.history().commits) == STEPS


def test_members_of_one_region_reduce_in_the_same_cell() -> None:
    """Two of three payloads of a reduce in cells stay within the cell: lines there are quick where it is one
    place."""
    world = crowded()
    for number, node in enumerate(world.nodes.values()):
        node.member = structs.replace(node.member, region=("sea", "land", "air")[number % 3])
    orders: list[list[str]] = []

    def look(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Attempt) and event.message.stage:
            orders.append([world.nodes[peer].member.region for peer in event.message.members])

    world.watchers.append(look)
    world.run()
    assert orders and all(order == sorted(order) for order in orders)
    assert not wrong_states(world)


def test_in_a_large_swarm_a_replica_vouches_once_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "REPEATING", REPLICAS)
    world = crowded(Model(bulk_s=0.2))
    vouched = Counter[tuple[str, str]]()
    crashed: list[str] = []

    def watch(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Vouch):
            vouched[event.peer, event.message.fence.base] += 1
        if node.peer.committed == 1 and not crashed:
            crashed.extend(("r2.0", "r1.0", "r1.1", "r1.2", "r1.3"))
            for number, relay in enumerate(crashed):
                world.crash(relay)
                again = structs.replace(world.nodes[relay].member, incarnation=2)
                world.add(again, world.genesis.leader, at=world.clock.now + 0.1 * number)

    world.watchers.append(watch)
    world.run()
    assert not wrong_states(world)
    assert {peer[:2] for peer, _ in vouched} == {"r1", "r2"}
    assert set(vouched.values()) == {1}
