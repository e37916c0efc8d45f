"""Doubted stages in worse company (I4): accomplices that wait, witnesses that lie or die, states that are
withheld, reports that lack at another stage. Honest machines keep their seats, and the run goes on (R3, R12,
R14)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_lone_black_hole import DEEDS
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks
from swarm.byzantine.test_withheld_states import OLD, is_silent, with_newcomer

STEPS, SINCE = 8, 4
#: World, sender, message -> the message that is sent in its place; None: nothing is.
Mouth = Callable[[World, Node, msg.Message], msg.Message | None]


def others(stage: int, count: int) -> list[Machine]:
    return [Machine(f"r{k}", stage) for k in range(count)]


def swarm(relays: list[Machine], mouth: Mouth, stages: int = 2, **settings: int) -> World:
    """Two data nodes and these relays; those whose names begin with x or y are liars, and all speak through
    `mouth`."""
    how = Settings("doubted", 1, stages, 12, STEPS, min_replicas=1, **settings)  # type: ignore[arg-type]
    world = counting_world(how, [Machine("d0", 0), Machine("d1", 0), *relays], 1)
    Invariants(world)
    world.liars.update([relay.id for relay in relays if relay.id[0] == "x"])
    altered(world, lambda sender, peer, said: mouth(world, sender, said))
    return world


def holds_up(world: World, sender: Node, said: msg.Message) -> msg.Message | None:
    """Those whose names begin with x give nothing back from iteration SINCE on, and claim all the same."""
    late = isinstance(said, msg.FencedMessage) and said.fence.t >= SINCE
    lies = late and sender.id[0] == "x" and sender.peer.ctx.run.stage == 1
    return DEEDS["gives nothing back"](said, world.settings.cover(1)) if lies else said


def is_late(sender: Node) -> bool:
    current = sender.peer.iterations.current
    return current is not None and current.t >= SINCE


def keeps_its_state(world: World, sender: Node, said: msg.Message) -> msg.Message | None:
    given = isinstance(said, msg.StateOffer | msg.Piece | msg.Gradient | msg.Vouch)
    return None if given and sender.id[0] == "x" and is_late(sender) else holds_up(world, sender, said)


def moved(world: World) -> list[str]:
    return [peer for peer, why in removed(world).items() if why.startswith("moves to")]


def test_an_accomplice_with_an_older_state_keeps_no_witness_out() -> None:
    """It was ready, and never served, as it had not applied the last step: the leader waited for ever."""

    def mouth(world: World, sender: Node, said: msg.Message) -> msg.Message | None:
        if sender.id == "y" and isinstance(said, msg.Ready) and said.t == SINCE - 1:
            older = world.leading().peer.lead.released.fingerprint_at(said.t - 1, 1)  # type: ignore[union-attr]
            return msgspec.structs.replace(said, t=said.t - 1, fingerprint=older or "")
        silent = sender.id == "y" and isinstance(said, msg.Applied)
        return None if silent else holds_up(world, sender, said)

    world = swarm([Machine("x", 1), *others(2, 3)], mouth)
    world.liars.add("y")
    world.add(member_of(Machine("y", 1)), "d0", 20.0)
    assert go_on(world, 400.0) == STEPS and wrong_states(world).keys() <= {"y"}
    assert list(removed(world)) == ["r2"] == moved(world)


def test_the_owner_stops_the_run_in_a_step_that_is_held_up() -> None:
    """Nobody was moved in a run that was to end, and the step without which it did not end stood still."""
    world = swarm([Machine("x", 1), *others(2, 3)], holds_up)
    world.clock.after(30.0, lambda: world.nodes["d0"].peer.lead.stop("its owner wants that"))  # type: ignore[union-attr]
    world.run(until_s=400.0)
    assert world.history().t == SINCE and wrong_states(world) == {} and moved(world) == ["r2"]


def test_another_witness_comes_for_one_that_dies() -> None:
    """Where one of two gives its state to nobody, nobody else was moved: the honest one lost its seat."""
    world, died = with_newcomer(OLD, is_silent, 4), list[str]()

    def watch(node: Node, event: object) -> None:
        if not died and (witnesses := moved(world)):
            died.extend(witnesses)
            world.clock.after(1.0, lambda: world.crash(died[0]))

    world.watchers.append(watch)
    assert go_on(world, 400.0) == 12 and wrong_states(world).keys() <= {OLD}
    assert {*removed(world)} - {*moved(world)} == {OLD, *died} and len(moved(world)) == 1


@pytest.mark.costly
@pytest.mark.parametrize("liars", [["x0"], ["x0", "x1"]])
def test_another_witness_comes_for_one_that_lies(liars: list[str]) -> None:
    """The slowest relay is moved first, and is an accomplice: it served, and nobody else came."""
    relays = [*(Machine(liar, 1) for liar in liars), *others(2, 3), Machine("x2", 2, 4, 1.5)]
    world = swarm(relays, holds_up)
    assert go_on(world, 900.0) == STEPS and wrong_states(world) == {} and rollbacks(world) == []
    assert moved(world) == list(removed(world)) == ["x2", "r2"]


@pytest.mark.costly
def test_several_that_withhold_their_state_lose_their_seats_by_as_many_words() -> None:
    """The step stood for ever. The word of one witness is not enough against two."""
    world = swarm([Machine("x0", 1), Machine("x1", 1), *others(2, 4)], keeps_its_state, snapshot_every=2)
    assert go_on(world, 900.0) == STEPS and wrong_states(world).keys() <= {"x0", "x1"}
    assert moved(world) == ["r3", "r2"] and set(removed(world)) == {"r3", "r2", "x0", "x1"}
    assert [record.t for record in rollbacks(world)] == [2]


@pytest.mark.costly
def test_nobody_is_doubted_whose_state_is_not_agreed_for_others_reports() -> None:
    """Stage 1 withholds its reports of a step, so that nobody can show that it got the state of stage 2
    after it. The honest replica there lost its seat, and the witness after it."""

    def mouth(world: World, sender: Node, said: msg.Message) -> msg.Message | None:
        unsaid = msg.Applied | msg.Claim | msg.Forward | msg.Backward
        lies = sender.id[0] == "x" and isinstance(said, unsaid)
        t = SINCE - isinstance(said, msg.Applied)
        return None if lies and said.fence.t >= t else said  # type: ignore[attr-defined]

    relays = [Machine("x0", 1), Machine("x1", 1), Machine("h", 2), *others(3, 3)]
    world = swarm(relays, mouth, stages=3, snapshot_every=2)
    assert go_on(world, 600.0) == STEPS and wrong_states(world).keys() <= {"x0", "x1"}
    assert {*removed(world)} - {*moved(world)} == {"x0", "x1"}


def test_who_waits_at_a_lost_stage_for_ever_keeps_nobody_out() -> None:
    """The only replica dies. The leader left the stage to the member that waited there, and never got the
    state."""

    def mouth(world: World, sender: Node, said: msg.Message) -> msg.Message | None:
        return None if sender.id == "y" and isinstance(said, msg.Ready | msg.Applied) else said

    world, died = swarm([Machine("r1.0", 1), *others(2, 3)], mouth, snapshot_every=2), list[str]()
    world.liars.add("y")
    world.add(member_of(Machine("y", 1)), "d0", 0.5)

    def watch(node: Node, event: object) -> None:
        if not died and world.log and world.history().t == SINCE:
            died.append("r1.0")
            world.crash("r1.0")

    world.watchers.append(watch)
    assert go_on(world, 400.0) == STEPS and wrong_states(world) == {}
    assert moved(world) == ["r2"] or moved(world) == ["r1"]


@pytest.mark.costly
@pytest.mark.parametrize("liars", [["x0"], ["x0", "x1"]])
def test_a_witness_serves_in_a_crowded_swarm(liars: list[str]) -> None:
    """Other stages have more replicas than neighbours, so that newcomers serve from a later iteration, which
    never came. The only replica lost its seat for that, though it had given its state."""
    relays = [*(Machine(liar, 1) for liar in liars), *others(2, 10)]
    world = swarm(relays, holds_up, neighbours=3, snapshot_every=2)
    assert go_on(world, 400.0) == STEPS and wrong_states(world) == {} and rollbacks(world) == []
    assert len(moved(world)) == 1
    # Neighbours of two liars alone are late (`late_data_nodes`): that costs a data node its seat.
    assert {*removed(world)} - {*moved(world)} <= {"d1"} and (len(liars) > 1 or len(removed(world)) == 1)
