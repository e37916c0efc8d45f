"""A replica that accepts no links of newcomers to its stage, so that they could not sum gradients with it."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.fleet.admission import APART_S
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states

COMES_AT, OLD = 5.0, "r1.1"
#: Steps that are taken after the one in which the newcomer serves first.
MORE_STEPS = 3


def pair_and_newcomer(newcomer: str) -> World:
    """Two replicas of stage 1 and three of stage 2; a third one comes to stage 1 later."""
    settings = Settings("shut", 1, 2, 6, 1000, min_replicas=1)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r1.0", 1), Machine(OLD, 1)]
    world = counting_world(settings, [*machines, *(Machine(f"r2.{k}", 2) for k in range(3))], 1)
    Invariants(world)
    world.add(member_of(Machine(newcomer, 1)), "d0", COMES_AT)
    return world


def served_at(world: World, newcomer: str) -> float:
    """Let the run go on until some steps after it; returns the time (s) at which the newcomer owned a
    microbatch first."""
    found = list[tuple[float, int]]()

    def watch(node: Node, event: ev.Event) -> None:
        commits = world.history().commits
        if not found and commits and newcomer in commits[-1].stages[1].members:
            found.append((world.clock.now, world.history().t))

    world.watchers.append(watch)
    while world.clock.now < 100.0 and not (found and world.history().t >= found[0][1] + MORE_STEPS):
        world.clock.step()
    assert wrong_states(world) == {} and world.history().removals == 0
    assert found
    return found[0][0]


def test_a_third_replica_serves_although_one_of_the_two_refuses_its_links() -> None:
    """It waited for ever; so the two remained two, of which the liar could hold the run up."""
    world = pair_and_newcomer("new")
    plain = world.carrier_to
    world._blocked[frozenset((OLD, "new"))] = 1e9

    def nobody_carries(node: Node, peer: str, carriers: list[str]) -> str:
        return "" if {node.id, peer} == {OLD, "new"} else plain(node, peer, carriers)

    world.carrier_to = nobody_carries  # type: ignore[assignment, method-assign]
    assert COMES_AT + APART_S < served_at(world, "new") < COMES_AT + APART_S + 20.0


@pytest.mark.costly
@pytest.mark.parametrize("lies", [False, True])
def test_a_newcomer_that_says_so_falsely_costs_nobody_a_seat(lies: bool) -> None:
    world = pair_and_newcomer("liar")

    def lie(said: msg.AnyMessage) -> msg.AnyMessage:
        if lies and isinstance(said, msg.Ready | msg.Claim):
            said = msgspec.structs.replace(said, apart=(OLD,))
        return said

    world.mouths["liar"] = lie
    at_s = served_at(world, "liar")
    assert at_s < COMES_AT + (APART_S + 20.0 if lies else 10.0)
