"""Every decentralised policy, on random graphs and bad links: what stands is feasible at every moment."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from anabranch.flow.agents.interface import Received
from anabranch.flow.graph.oracle import solve
from anabranch.flow.graph.problem import DataNode, Instance, Relay
from anabranch.sim.routing_lab.agent_world import Weather
from anabranch.sim.routing_lab.experiment import AGENTS
from benchmarks.flow.families import FAMILIES
from support.flow_graphs import Trouble, instances, troubles, weathers
from support.flow_worlds import CheckedWorld, watch
from support.grids import first_of

POLICIES = ("auction", "gwtf", "swarm", "greedy")
#: Long enough for a few periodic confirmations of every policy.
SETTLE_S = 60.0
#: Shrinking a run of thousands of events takes minutes and says little more: the seed replays it.
few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


def make_world(instance: Instance, policy: str, seed: int, weather: Weather | None = None) -> CheckedWorld:
    """A world of `policy`; the auction has no return rule but "any"."""
    solvable = replace(instance, returns="any") if policy == "auction" else instance
    planner = AGENTS[policy]
    return CheckedWorld(solvable, planner.agent, seed=seed, weather=weather, same_stage=planner.published)


def settle(world: CheckedWorld) -> None:
    """Until quiet, and on for as long as neighbours need to confirm what they share."""
    assert world.run(world.now + 20_000), "never quiet"
    world.run(world.now + SETTLE_S, stop_when_quiet=False)
    assert world.run(world.now + 20_000), "never quiet again"


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("policy", POLICIES)
@few
@example(
    # More can flow where a unit may end at another data node, as the auction's may.
    instance=Instance(
        1,
        "own",
        (DataNode("d0", 0), DataNode("d1", 2)),
        (Relay("s1r0", 1, 1), Relay("s1r1", 1, 2), Relay("s1r2", 1, 0)),
        {
            ("d0", "s1r0"): 10.0,
            ("d0", "s1r1"): 4.0,
            ("d1", "s1r0"): 17.0,
            ("d1", "s1r1"): 5.0,
            ("d1", "s1r2"): 16.0,
            ("s1r0", "d0"): 4.0,
            ("s1r0", "d1"): 12.0,
            ("s1r1", "d0"): 16.0,
            ("s1r2", "d1"): 11.0,
        },
    ),
    weather=Weather(loss=0.3),
    seed=25949,
)
@example(
    # Two relays of GWTF's second stage between which a path costs the same but for the last of 308 digits.
    instance=Instance(
        2,
        "any",
        (DataNode("d0", 4),),
        (
            *(Relay("s1r0", 1, 2), Relay("s1r1", 1, 0), Relay("s1r2", 1, 1)),
            *(Relay("s2r0", 2, 1), Relay("s2r1", 2, 3), Relay("s2r2", 2, 2)),
        ),
        {
            ("d0", "s1r0"): 0.0,
            ("d0", "s1r1"): 0.0,
            ("d0", "s1r2"): 0.0,
            ("s1r0", "s2r0"): 999999999.9999999,
            ("s1r0", "s2r1"): 0.0,
            ("s1r0", "s2r2"): 10000000.0,
            ("s1r1", "s2r0"): 2.225073858507e-311,
            ("s1r1", "s2r1"): 1.175494351e-38,
            ("s1r1", "s2r2"): 1.175494351e-38,
            ("s1r2", "s2r0"): 2.2250738585072014e-308,
            ("s1r2", "s2r1"): 849527314.7961003,
            ("s1r2", "s2r2"): 1.993564574498048e-75,
            ("s2r0", "d0"): 2.2250738585072014e-308,
            ("s2r1", "d0"): 2.00001,
            ("s2r2", "d0"): 2.2250738585e-313,
        },
    ),
    weather=Weather(loss=0.05, reorder=0.3),
    seed=0,
)
@given(instance=instances(), weather=weathers, seed=st.integers(0, 2**32))
def test_what_stands_is_feasible_at_every_moment(
    policy: str, instance: Instance, weather: Weather, seed: int
) -> None:
    world = make_world(instance, policy, seed, weather)
    watch(world)
    settle(world)
    assert not world.disagreements()
    assert world.flow().value <= solve(world.instance).flow


@pytest.mark.parametrize("policy", POLICIES)
@few
@given(instance=instances(), weather=weathers, seed=st.integers(0, 2**32), planned=troubles)
def test_no_ghost_survives_trouble(
    policy: str, instance: Instance, weather: Weather, seed: int, planned: list[Trouble]
) -> None:
    world = make_world(instance, policy, seed, weather)
    watch(world)
    for trouble in planned:
        world.at(trouble.at_s, lambda trouble=trouble: trouble.strike(world))  # type: ignore[misc]
    settle(world)
    assert not world.violations()
    assert not world.disagreements()


@pytest.mark.parametrize("seed", first_of(range(4)))
def test_gwtf_is_quiet_and_feasible_where_a_stage_has_no_relay(seed: int) -> None:
    """The last stage's relays go on offering units that nobody can bring; the data node comes to rest."""
    relays = tuple(Relay(f"s{stage}r{n}", stage, n + 1) for stage in (1, 3) for n in range(3))
    links = {("d0", relay.id) if relay.stage == 1 else (relay.id, "d0"): 1.0 for relay in relays}
    instance = Instance(3, "own", (DataNode("d0", 3),), relays, links)
    world = make_world(instance, "gwtf", seed, Weather(loss=0.05, reorder=0.3))
    watch(world)
    assert world.run(20_000)
    assert not world.violations() and world.flow().value == 0


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("family", "policy"),
    [("A", policy) for policy in POLICIES]
    + [pytest.param("E", policy, marks=pytest.mark.soak if policy == "gwtf" else ()) for policy in POLICIES],
)
def test_reaches_the_maximum_flow_between_complete_stages(policy: str, family: str) -> None:
    instance = FAMILIES[family].draw(3)
    world = make_world(instance, policy, 3)
    assert world.run(10_000)
    flow = world.flow()
    best = solve(instance)
    assert flow.value == best.flow
    assert best.cost <= flow.cost(instance) <= 2 * best.cost


@pytest.mark.parametrize("policy", POLICIES)
def test_rests_on_static_costs(policy: str) -> None:
    """Once quiet, the standing paths stay as they are and nothing but confirmations is sent."""
    instance = FAMILIES["A"].draw(1)
    world = make_world(instance, policy, 1)
    settle(world)
    paths = sorted(world.flow().paths)
    world.restart_counts()
    world.run(world.now + 300, stop_when_quiet=False)
    assert sorted(world.flow().paths) == paths
    assert world.counts.total == world.counts.confirmations


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    instance = FAMILIES["B"].draw(2)
    runs = []
    for _ in range(2):
        world = make_world(instance, policy, 5, Weather(loss=0.1, duplicate=0.1, reorder=0.3))
        world.run(5_000)
        runs.append((world.now, world.counts, world.flow()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_messages_survive_the_wire(policy: str) -> None:
    """Every message that is sent decodes to itself: only what is on the wire can be relied on."""
    world = make_world(FAMILIES["A"].draw(0), policy, 0)
    handle, seen = world.handle, set()

    def over_the_wire(name: str, event: object) -> None:
        if isinstance(event, Received):
            kind = type(event.message)
            seen.add(kind)
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(event.message), type=kind)
            assert again == event.message
            event = Received(event.peer, event.side, again)
        handle(name, event)  # type: ignore[arg-type]

    world.handle = over_the_wire  # type: ignore[method-assign]
    assert world.run(10_000)
    assert len(seen) >= (2 if policy == "auction" else 3)
    assert world.flow().value == world.instance.demand


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "instance",
    [
        Instance(1, "any", (DataNode("d", 3),), (), {}),
        Instance(1, "any", (DataNode("d", 3),), (Relay("r", 1, 2),), {("d", "r"): 1.0}),
        Instance(1, "own", (DataNode("d", 0),), (Relay("r", 1, 2),), {("d", "r"): 1.0, ("r", "d"): 1.0}),
        Instance(1, "own", (DataNode("d", 3),), (Relay("r", 1, 0),), {("d", "r"): 1.0, ("r", "d"): 1.0}),
    ],
    ids=["no relay", "no way home", "no demand", "no capacity"],
)
def test_nothing_flows_where_nothing_can(policy: str, instance: Instance) -> None:
    world = make_world(instance, policy, 0)
    watch(world)
    settle(world)
    assert not world.flow().paths
    assert not world.disagreements()


@pytest.mark.parametrize("policy", POLICIES)
def test_one_relay_serves_its_capacity(policy: str) -> None:
    links = {("d", "r"): 0.0, ("r", "d"): 1e12}
    instance = Instance(1, "own", (DataNode("d", 5),), (Relay("r", 1, 2),), links)
    world = make_world(instance, policy, 0)
    watch(world)
    settle(world)
    assert world.flow().paths == (("d", "r", "d"),) * 2
