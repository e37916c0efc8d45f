"""Carriers: members that nobody can dial work with each other through a third peer, and lose no step when it
dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Carry, JoinRequest, encode
from anabranch.sim.kernel.simulated_peer import Link, Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import first_of
from support.swarms.fault_points import Fault, ended, kill

STEPS = 8


def via(world: World, one: str, other: str) -> str | None:
    """Carrier of the link of two peers ("": direct; None: no link)."""
    link = world.nodes[one].links.get(other)
    return link.via if link is not None and link.open else None


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_adjacent_relays_that_nobody_can_dial_work_through_a_carrier(seed: int) -> None:
    """Every state is right (I3)."""
    settings = Settings("run", 1, 2, 4, STEPS)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.0", s, reachable=False) for s in (1, 2))]
    world = counting_world(settings, machines, seed)
    seen = set()
    world.watchers.append(lambda node, event: seen.add(via(world, "r1.0", "r2.0")))
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == STEPS and not wrong_states(world)
    assert "d0" in seen and "" not in seen


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_another_carrier_takes_over_from_one_that_dies(seed: int) -> None:
    """No step is lost, and the pair is linked again within two seconds (I3, I4)."""
    settings = Settings("run", 1, 2, 4, STEPS, min_replicas=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0)], seed)
    for machine in [Machine(f"r{s}.{n}", s, reachable=False) for s in (1, 2) for n in (0, 1)]:
        world.add(member_of(machine), "d0", at=1.0)
    fault = Fault(world, ("d1",), ended(tasks.Head, 4), kill())
    pairs = [(f"r1.{n}", f"r2.{m}") for n in (0, 1) for m in (0, 1)]
    carried_by_dead: list[tuple[str, str]] = []
    again: dict[tuple[str, str], float] = {}

    def watch(node: object, event: object) -> None:
        if not fault.delivered:
            carried_by_dead[:] = [pair for pair in pairs if via(world, *pair) == "d1"]
        for pair in carried_by_dead if fault.delivered else ():
            if via(world, *pair) == "d0":
                again.setdefault(pair, world.clock.now - fault.delivered[0][0])

    world.watchers.append(watch)
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == STEPS and not wrong_states(world)
    assert fault.delivered and carried_by_dead, "no pair used the carrier that died"
    assert again.keys() == set(carried_by_dead) and max(again.values()) < 2.0


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_a_carrier_that_swallows_what_it_carries_is_left_for_another(seed: int) -> None:
    """Its own links are sound, so nobody suspects it; no step is lost (I3, I4). Either end of a pair finds it
    out for itself."""
    world, fault, ways = two_carriers(lambda world, node: world.swallows.add(node.id), seed)
    world.run(600.0)
    assert fault.delivered and any(seen[0] == "d1" for seen in ways.values()), "d1 carried nothing"
    assert world.nodes["d0"].peer.committed == 60 and not wrong_states(world)
    assert all(seen.count("d1") <= 2 for seen in ways.values()), ways


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_a_carrier_that_swallows_payloads_alone_is_left_for_another(seed: int) -> None:
    """It passes heartbeats on, so it is no silence and no slow round trip. Nobody is removed for what it
    drops, and no step is lost (I3, I4)."""
    world, fault, ways = two_carriers(lambda world, node: None, seed)
    honest, lost = world._deliver, set()

    def swallow(sender: Node, link: Link, peer: str, message: Any, size: int, payload: Any) -> None:
        if fault.delivered and link.via == "d1" and payload is not None:
            lost.add(type(message).__name__)
        else:
            honest(sender, link, peer, message, size, payload)

    world._deliver = swallow  # type: ignore[method-assign]
    world.run(600.0)
    assert {"Forward", "Backward", "ReducePart"} <= lost
    assert world.nodes["d0"].peer.committed == 60 and not wrong_states(world)
    assert all(seen.count("d1") <= 2 for seen in ways.values())
    assert any("d0" in seen for seen in ways.values()), ways
    assert not [fields for _, _, kind, fields in world.notes if kind == "peer_removed"]


@pytest.mark.costly
def test_a_carrier_that_swallows_a_newcomers_payloads_does_not_keep_it_out() -> None:
    """The pieces of its stage's state never came, and nobody else missed anything."""
    settings, via_liar = Settings("run", 1, 2, 4, 160, min_replicas=2), Counter[str]()
    world, served = counting_world(settings, [Machine("d0", 0)], 1), list[float]()
    world.add(member_of(Machine("liar", 2)), "d0", at=0.2)
    for name in ("r1.0", "r1.1", "r2.0"):
        world.add(member_of(Machine(name, int(name[1]), reachable=False)), "d0", at=1.0)
    world.add(member_of(Machine("new", 1, reachable=False)), "d0", at=6.0)
    honest = world._deliver

    def swallow(sender: Node, link: Link, peer: str, message: Any, size: int, payload: Any) -> None:
        if link.via == "liar" and payload is not None and "new" in (sender.id, peer):
            via_liar[type(message).__name__] += 1
        else:
            honest(sender, link, peer, message, size, payload)

    def watch(node: object, event: object) -> None:
        commits = world.history().commits
        if not served and commits and "new" in commits[-1].stages[1].members:
            served.append(world.clock.now)

    world._deliver = swallow  # type: ignore[method-assign]
    world.watchers.append(watch)
    world.run(600.0)
    assert via_liar["Piece"] and world.nodes["d0"].peer.committed == 160 and not wrong_states(world)
    assert served and served[0] < 60.0


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("grows", [1.0, 1.3])
def test_a_carrier_whose_payloads_become_slow_is_left_for_another(grows: float) -> None:
    """At once, or a little with each step, so that none is late by the link's own measurements. Steps of a
    second took seventeen for as long as it liked. Links between replicas of one stage leave it, too."""
    settings = Settings("run", 1, 2, 6, 40, min_replicas=2, activation_bytes=4 << 20)
    world = counting_world(settings, [Machine("d0", 0)], 1, Model(bulk_s=0.05))
    world.mouths["liar"] = lambda message: None if isinstance(message, JoinRequest) else message
    world.add(member_of(Machine("liar", 1)), "d0")

    def offer() -> None:
        world.carry(world.nodes["liar"], "d0", encode(Carry("liar:1")), None)
        world.clock.after(2.0, offer)

    world.clock.after(0.4, offer)
    relays = [f"r{s}.{n}" for s in (1, 2) for n in (0, 1)]
    for name in relays:
        world.add(member_of(Machine(name, int(name[1]), reachable=False)), "d0", at=2.5)
    honest, at, used = world._deliver, dict[int, float](), set[str | None]()

    def late(sender: Node, link: Link, peer: str, message: Any, size: int, payload: Any) -> None:
        t = world.history().t
        delay_s = min(4.0, (0.05 if grows > 1.0 else 4.0) * grows**t)
        ready = partial(honest, sender, link, peer, message, size, payload)
        if link.via == "liar" and payload is not None and t > 4:
            world.clock.after(delay_s, lambda: ready() if link.open else None)
        else:
            ready()

    def watch(node: object, event: object) -> None:
        at.setdefault(world.history().t, world.clock.now)
        if world.history().t == 4:
            used.update(via(world, one, other) for one in relays for other in relays if one < other)

    world._deliver = late  # type: ignore[method-assign]
    world.watchers.append(watch)
    world.run(900.0)
    took_s = [at[t + 1] - at[t] for t in range(40)]
    assert used == {"liar"} and max(took_s) > 4.0 and not wrong_states(world)
    assert max(took_s[24:]) < 1.5 and sum(step_s > 2.0 for step_s in took_s) < 15, took_s


@pytest.mark.costly
@pytest.mark.parametrize(("slow", "delay_s"), first_of([("d1", 5.0), ("d0 d1", 0.7), ("d1", 0.5)], 2))
def test_a_carrier_that_delays_what_it_carries_is_left_for_another(slow: str, delay_s: float) -> None:
    """Its bytes keep coming, so it is no silence; round trips tell. If all are slow, each is tried once. No
    step is lost (I3, I4)."""
    world, fault, ways = two_carriers(lambda world, node: None)
    honest = world._deliver

    def late(sender: Node, link: Link, peer: str, *message: Any) -> None:
        if not fault.delivered or link.via not in slow.split():
            honest(sender, link, peer, *message)
        elif link.via:
            ready = partial(honest, sender, link, peer, *message)
            world.clock.at(world.clock.now + delay_s, lambda: ready() if link.open else None)

    world._deliver = late  # type: ignore[method-assign]
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == 60 and not wrong_states(world)
    assert {seen[0] for seen in ways.values()} == {"d1"}
    used = [[carrier for carrier in seen if carrier] for seen in ways.values()]
    if slow == "d1":
        assert all(seen == ["d1", "d0"] for seen in used), ways
    else:
        assert all(seen in (["d1", "d0"], ["d1", "d0", "d1"]) for seen in used), ways


def test_a_carrier_that_breaks_whatever_it_carries_is_left_for_another() -> None:
    """Flipped or repeated bytes break a circuit, as its two ends run TLS in it. No step is lost (I3, I4)."""
    world, fault, ways = two_carriers(lambda world, node: None)

    def watch(node: object, event: object) -> None:
        if fault.delivered and world.carries("d1"):
            world.end_circuits("d1")

    world.watchers.append(watch)
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == 60 and not wrong_states(world)
    assert {seen[0] for seen in ways.values()} == {"d1"}
    assert all(seen.count("d1") <= 2 for seen in ways.values()), ways


def two_carriers(
    strike: Callable[[World, Node], None], seed: int = 0
) -> tuple[World, Fault, dict[tuple[str, str], list[str | None]]]:
    """World of two data nodes, d0 and d1, that carry for four relays which nobody can dial; the fault hits d1
    in step 4. Returns world, fault, and the carriers that each pair used from then on, the first one
    included (None: no link)."""
    settings = Settings("run", 1, 2, 4, 60, min_replicas=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0)], seed)
    for machine in [Machine(f"r{s}.{n}", s, reachable=False) for s in (1, 2) for n in (0, 1)]:
        world.add(member_of(machine), "d0", at=1.0)
    fault = Fault(world, ("d1",), ended(tasks.Head, 4), strike)
    pairs = [(f"r1.{n}", f"r2.{m}") for n in (0, 1) for m in (0, 1)]
    ways: dict[tuple[str, str], list[str | None]] = {pair: [] for pair in pairs}

    def watch(node: object, event: object) -> None:
        for pair, seen in ways.items():
            if not fault.delivered:
                seen[:] = [via(world, *pair)]
            elif via(world, *pair) != seen[-1]:
                seen.append(via(world, *pair))

    world.watchers.append(watch)
    return world, fault, ways


def test_the_dead_carriers_own_address_is_not_the_only_way_tried() -> None:
    """A member whose address answers nobody, as behind a router, is reached through a carrier too."""
    settings = Settings("run", 1, 2, 4, STEPS)
    machines = [Machine("d0", 0), Machine("r1.0", 1), Machine("r2.0", 2)]
    world = counting_world(settings, machines)
    world._blocked[frozenset(("r1.0", "r2.0"))] = float("inf")
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == STEPS and not wrong_states(world)


@pytest.mark.parametrize("order", [("r1.0", "r2.0"), ("r2.0", "r1.0")])
def test_a_pair_meets_if_only_one_of_its_ends_knows_a_carrier(order: tuple[str, str]) -> None:
    """The data node carries for nobody. The relay of stage 3 can be reached by both, and only that of stage 2
    has dialled it: so only that of stage 1 can open a circuit, also if the other one is to dial it."""
    world = counting_world(Settings("run", 1, 4, 4, STEPS), [Machine("d0", 0)])
    honest, used = world.carrier_to, set()
    world.carrier_to = lambda node, peer, carriers: honest(  # type: ignore[method-assign]
        node, peer, [carrier for carrier in carriers if carrier != "d0"]
    )
    for number, name in enumerate(("r3.0", "r4.0", *order)):
        machine = Machine(name, int(name[1]), reachable=name not in order)
        world.add(member_of(machine), "d0", at=1.0 + 2.0 * number)
    world.watchers.append(lambda node, event: used.add(via(world, "r1.0", "r2.0")))
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == STEPS and not wrong_states(world)
    assert used == {None, "r3.0"}


def test_carriers_that_nobody_finds_do_not_cut_two_members_apart() -> None:
    """Strangers with a relay ticket offer to carry, at addresses where nobody listens, and keep a link with
    the leader. Each pair meets through a member all the same."""
    settings = Settings("run", 1, 2, 4, STEPS)
    world = counting_world(settings, [Machine("d0", 0)], 1)
    offers = [f"s{number}" for number in range(5)]
    for name in offers:
        world.mouths[name] = lambda message: None if isinstance(message, JoinRequest) else message
        world.add(member_of(Machine(name, 1)), "d0")

    def offer() -> None:
        for name in offers:
            world.carry(world.nodes[name], "d0", encode(Carry(f"{name}.nowhere:1")), None)
        world.clock.after(2.0, offer)

    world.clock.after(0.5, offer)
    for machine in [Machine(f"r{s}.0", s, reachable=False) for s in (1, 2)]:
        world.add(member_of(machine), "d0", at=2.0)
    listed: set[str] = set()
    world.watchers.append(lambda node, event: listed.update(node.peer.ctx.run.carriers))
    world.run(600.0)
    assert listed == set(offers)
    assert world.nodes["d0"].peer.committed == STEPS and not wrong_states(world)
