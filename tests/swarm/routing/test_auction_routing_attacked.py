"""Routing under attack: what a neighbour may say without stopping, blinding or swelling an honest peer."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from anabranch.flow.agents.interface import Side, UnitId
from anabranch.flow.auction.messages import Answer, Offer, Search
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.pipeline.credits import SlotLedger
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms.routing_trials import mismatches


def swarm(stages: int = 2) -> World:
    """Two data nodes, two relays of capacity 4 at each stage. Steps are slow: planning has time."""
    settings = Settings("attacked", 1, stages, 6, 10_000, policy="auction", activation_bytes=1024)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{s}.{n}", s, slowness=8.0) for s in range(1, stages + 1) for n in range(2)]
    return counting_world(settings, machines, 1)


Forge = Callable[[Offer | Answer], Offer | Answer | None]


class Forger:
    """Relay r1.0 goes bad after a while: what is forged of the letters that it has sent follows them."""

    def __init__(self, world: World, *forges: Forge) -> None:
        self.world = world
        self.left = list(forges)
        world.watchers.append(self._overhear)

    def _overhear(self, node: Node, event: ev.Event) -> None:
        if self.world.clock.now < 12.0 or not isinstance(event, ev.Received) or event.peer != "r1.0":
            return
        if isinstance(event.message, msg.Route):
            for forge in list(self.left):
                letter = forge(event.message.letter)
                if letter is not None:
                    self.left.remove(forge)
                    route = msg.Route(event.message.ahead, letter)
                    self.world.nodes["r1.0"].peer.ctx.outbox.send(node.id, route)


def answer(**changes: object) -> Forge:
    """To a data node."""

    def forge(letter: Offer | Answer) -> Offer | Answer | None:
        return structs.replace(letter, seq=letter.seq + 1, **changes) if isinstance(letter, Answer) else None

    return forge


def offer(**changes: object) -> Forge:
    """To a relay of stage 2."""

    def forge(letter: Offer | Answer) -> Offer | Answer | None:
        return structs.replace(letter, seq=letter.seq + 1, **changes) if isinstance(letter, Offer) else None

    return forge


def carry_on(world: World, end_s: float = 50.0, patience_s: float = 100.0) -> None:
    """Steps are committed until the end; then, or after a while, what is wanted stands, and both ends of a
    link agree."""
    seen: dict[str, object] = {}

    def end() -> None:
        seen["standing"], seen["mismatches"] = standing(world), mismatches(world)
        if (seen["standing"] == 6 and not seen["mismatches"]) or world.clock.now > end_s + patience_s:
            world.nodes["d0"].handle(ev.Stopping("over"))
        else:
            world.clock.after(5.0, end)

    world.clock.at(end_s, end)
    world.run(end_s + patience_s + 60.0, max_events=1_200_000)
    assert not wrong_states(world)
    assert world.history().t > 10
    assert seen == {"standing": 6, "mismatches": set()}


def standing(world: World) -> int:
    agents = [world.nodes[name].peer.router.agent for name in ("d0", "d1")]
    return sum(len(agent.standing()) for agent in agents if agent is not None)


def rate_limits(world: World) -> list[str]:
    return [str(fields["reason"]) for _, _, kind, fields in world.notes if kind == "refused"]


def longest_letter(world: World) -> list[int]:
    """Bytes of the longest letter so far; filled while the world runs."""
    longest = [0]

    def look(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Route) and event.peer != "r1.0":
            longest[0] = max(longest[0], len(msg.encode(event.message)))

    world.watchers.append(look)
    return longest


def test_what_cannot_be_is_refused() -> None:
    world = swarm()
    forger = Forger(
        world,
        answer(returned=1 << 60),
        answer(price=-1.0),
        answer(price=1e300),
        answer(price=float("-inf")),
        answer(searches=(Search("d1", 1 << 40, float("inf")),)),
        offer(searches=(Search("d1", 1 << 40, float("inf")),)),
        answer(stir=1 << 62),
        offer(bid=float("inf")),
        offer(recalled=1 << 60),
        offer(wants=(UnitId("x" * 4096, 1),)),
        offer(stir=1 << 61),
    )
    carry_on(world)
    assert not forger.left
    found = rate_limits(world)
    assert len(found) == 11
    wanted = [
        "units handed back of",
        "a price of -1.0",
        "a price of 1e+300",
        "a price of -inf",
        "a price of inf",
        "changes, after",
        "units recalled of",
        "a name of 4096 letters",
    ]
    assert all(any(text in reason for reason in found) for text in wanted)


def test_a_count_that_falls_is_refused() -> None:
    world = swarm()

    def fall(letter: Offer | Answer) -> Offer | Answer | None:
        if not isinstance(letter, Offer) or not letter.pushed:
            return None
        return structs.replace(letter, seq=letter.seq + 1, pushed=letter.pushed - 1, recalled=0)

    Forger(world, fall)
    carry_on(world)
    assert len(rate_limits(world)) == 1
    assert "that falls to" in rate_limits(world)[0]


def test_data_nodes_that_nobody_knows_are_not_spoken_of() -> None:
    """Every name costs a search."""
    world = swarm()
    longest = longest_letter(world)
    names = [f"nobody {n}" for n in range(2000)]
    searches = tuple(Search(name, 1, 1.0) for name in names)
    forger = Forger(world, offer(searches=searches), answer(searches=searches))
    carry_on(world)
    assert not forger.left
    assert longest[0] < 20_000


def come_back(world: World, name: str, incarnation: int) -> None:
    """The process `name` dies, and another is started at once."""
    world.crash(name)
    member = structs.replace(world.nodes[name].member, incarnation=incarnation)
    world.clock.after(0.05, lambda: world.add(member, "d0", world.clock.now, 8.0) and None)


def test_a_new_process_is_not_taken_for_the_one_that_the_log_has_yet_to_remove() -> None:
    """It would take a message now for the beginning of those that come once it serves."""
    world = swarm()
    met: set[tuple[int, int]] = set()
    waited: set[int] = set()

    def strike() -> None:
        world.slow[frozenset(("d0", "r1.0"))] = 50.0  # r1.0 hears late of it
        come_back(world, "r2.1", 2)

    def look(node: Node, event: ev.Event) -> None:
        ctx = node.peer.ctx
        member, linked = ctx.run.membership.members.get("r2.1"), ctx.links.incarnations.get("r2.1", 0)
        if node.id == "r1.0" and member is not None and linked:
            if linked > member.incarnation:
                waited.add(linked)
            if ("r2.1", Side.NEXT) in node.peer.router.neighbours:
                met.add((member.incarnation, linked))

    world.watchers.append(look)
    world.clock.at(15.0, strike)
    carry_on(world, 80.0)
    assert waited == {2}
    assert met == {(1, 1), (2, 2)}


def test_a_data_node_whose_incarnation_is_a_unix_time_takes_part() -> None:
    """It is what a user may write into a damaged incarnation file."""
    world = swarm()
    world.clock.at(15.0, lambda: come_back(world, "d1", 1_763_740_000))
    carry_on(world, 60.0)
    assert not rate_limits(world)


def test_the_plan_stands_where_activations_take_long_and_all_else_is_quick() -> None:
    """Seconds of a link are not known before an activation was sent; nothing of what was believed before
    (a price of turning away, the steps of prices) may outlive that."""
    settings = Settings(
        "slow links", 1, 2, 6, 10_000, policy="auction", activation_bytes=10_000_000, heartbeat_s=5.0
    )
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{s}.{n}", s, slowness=0.02) for s in (1, 2) for n in range(2)]
    model = Model((0.0001, 0.0002), 20.0, dict.fromkeys(("Forward", "InputGradient", "Head"), 0.02))
    world = counting_world(settings, machines, 1, model)
    seen: list[int] = []
    world.clock.at(900.0, lambda: seen.append(standing(world)))
    world.clock.at(900.0, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    world.run(2000.0)
    assert seen == [6]


def test_who_sends_a_microbatch_home_does_not_pay_for_what_departs_there() -> None:
    world = swarm()
    prices: set[float] = set()

    def look(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and event.peer == "d1" and isinstance(event.message, msg.Pong):
            prices.add(event.message.price)

    world.watchers.append(look)
    carry_on(world)
    assert prices == {0.0}


def test_who_has_gone_is_forgotten() -> None:
    world = swarm()
    world.clock.at(12.0, lambda: world.crash("r1.1"))
    late = structs.replace(world.nodes["r1.1"].member, id="late", name="late", address="late:1")
    world.clock.at(20.0, lambda: world.add(late, "d0", world.clock.now, 8.0) and None)
    carry_on(world, 70.0)
    assert "late" in world.nodes["d0"].peer.ctx.costs.neighbours
    for name in ("d0", "d1", "r2.0"):
        assert "r1.1" not in world.nodes[name].peer.ctx.costs.neighbours


def test_handing_back_more_than_one_has_costs_no_more_than_one_has() -> None:
    ledger = SlotLedger(4)
    ledger.deal(["a", "b"])
    told = ledger.give_back("a", 1 << 40)
    assert len(told) <= 2
    assert sum(grant.held for grant in ledger.grants.values()) + ledger.pool == 4
    assert ledger.grants["a"].unused == 2  # standing slots come back to whom they stand for


def test_asks_are_served_in_order_and_each_once() -> None:
    ledger = SlotLedger(1)
    ledger.deal(["a", "b"])
    ledger.ask("b", 3, repair=False)
    assert ledger.receive("b")
    for index in (9, 2, 9, 7, 2):
        ledger.ask("a", index, repair=False)
    ledger.ask("b", 8, repair=True)
    assert ledger.asks == [(True, 2, "a"), (True, 7, "a"), (True, 9, "a")]
    assert ledger.grants["b"].total == 2  # the only slot, and the repair slot
