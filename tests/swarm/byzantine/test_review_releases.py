"""Replicas that keep their reports of a state back: at the end of a run, and where only they have a say."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.delay import NO_DELAY, Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_review_stalls import altered, go_on, removed, swarm

Alter = Callable[[Node, str, msg.Message], msg.Message | None]


def silent_from(liar: str, t: int) -> Alter:
    def withhold(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        withheld = isinstance(message, msg.Applied) and sender.id == liar and message.fence.t >= t
        return None if withheld else message

    return withhold


def test_the_report_of_the_last_step_that_one_of_two_keeps_back_does_not_keep_the_run_open() -> None:
    world = swarm(2, steps=6)
    altered(world, silent_from("r1.1", 6))
    world.run(until_s=900.0)
    assert world.history().t == 6 and set(removed(world)) <= {"r1.1"}
    assert world.nodes["d0"].stopped is not None


@pytest.mark.parametrize("delay", [NO_DELAY, Delay(1)])
def test_one_that_claims_and_reports_after_two_stalls_of_each_step_loses_its_seat(delay: Delay) -> None:
    """With delay = 1 its stalls did not count in later steps: all 24 steps took 13 s each, not 0.5 s."""
    settings = Settings("review", 1, 1, 6, 24, min_replicas=2, delay=delay)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r1.1", 1)], 1)
    Invariants(world)

    def late(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        lead = world.nodes["d0"].peer.lead
        stalls = lead.round.stalls if lead is not None and lead.round is not None else 0
        held = isinstance(message, msg.Applied) and sender.id == "r1.1" and message.fence.t >= 3
        return None if held and stalls < 2 else message

    altered(world, late)
    assert go_on(world, 900.0) == 24 and wrong_states(world) == {}
    assert set(removed(world)) == {"r1.1"} and world.clock.now < 60.0


def lying_from(liar: str, t: int) -> Alter:
    def lie(sender: Node, peer: str, message: msg.Message) -> msg.Message:
        lies = isinstance(message, msg.Applied) and sender.id == liar and message.fence.t >= t
        return msgspec.structs.replace(message, fingerprint="another") if lies else message

    return lie


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("deed", [silent_from, lying_from])
def test_a_run_ends_when_its_owner_stops_it_whatever_one_of_two_reports(
    deed: Callable[[str, int], Alter],
) -> None:
    world = swarm(2, steps=100)
    altered(world, deed("r1.1", 4))

    def stop() -> None:
        lead = world.nodes["d0"].peer.lead
        if lead is not None and lead.t >= 4:
            lead.stop("its owner wants that")
        else:
            world.clock.after(0.05, stop)

    world.clock.after(0.1, stop)
    world.run(until_s=900.0)
    assert set(removed(world)) <= {"r1.1"} and world.nodes["d0"].stopped is not None
    assert max(world.checkpoints, default=0) == world.history().t and wrong_states(world) == {}


def test_one_that_served_alone_does_not_stop_the_run_once_another_serves() -> None:
    """Its fellow came to serve with the next iteration, and has the state too."""
    settings = Settings("review", 1, 1, 6, 12, min_replicas=1)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1)], 1)
    Invariants(world)
    world.add(member_of(Machine("r1.1", 1)), "d0", at=0.5)
    first: list[int] = []

    def withhold(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        if isinstance(message, msg.Applied) and sender.id == "r1.0":
            serves = world.leading().peer.ctx.run.membership.active_from.get("r1.1", 0)
            if serves > message.fence.t or first:
                first.append(message.fence.t)
            if first and serves:
                return None
        return message

    altered(world, withhold)
    assert go_on(world, 1200.0) == 12
    assert set(removed(world)) <= {"r1.0"} and wrong_states(world).keys() <= {"r1.0"}


@pytest.mark.parametrize("claimed", [True, False])
def test_a_run_that_its_owner_stops_ends_though_a_stage_is_lost(claimed: bool) -> None:
    """Its only replica dies in the open step, or after the last one before it reported its state."""
    settings = Settings("review", 1, 2, 6, 100, min_replicas=1, snapshot_every=2, checkpoint_every=2)
    machines = [Machine("d0", 0), Machine("r1.0", 1), Machine("r2.0", 2), Machine("r2.1", 2)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    altered(world, (lambda *each: each[2]) if claimed else silent_from("r1.0", 7))

    def stop() -> None:
        lead = world.nodes["d0"].peer.lead
        claims = lead.round.claims.get(1, {}) if lead is not None and lead.round is not None else {}
        if lead is not None and lead.t >= 7 and (claims.get("r1.0") or not claimed):
            lead.stop("its owner wants that")
            world.crash("r1.0")
        else:
            world.clock.after(0.01, stop)

    world.clock.after(0.1, stop)
    world.run(until_s=900.0)
    assert world.nodes["d0"].stopped is not None and wrong_states(world) == {}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("replicas", "deed", "phase"),
    [
        (3, lying_from, "committed"),
        (3, lying_from, "reported"),
        (3, lying_from, "released"),
        (2, silent_from, "committed"),
        (2, silent_from, "released"),
    ],
)
def test_a_new_leader_decides_as_the_one_that_died(
    replicas: int, deed: Callable[[str, int], Alter], phase: str
) -> None:
    """It died when step 5 was committed, when two replicas had reported it, or when it was released: no other
    honest replica loses its seat, no false state is believed, and all steps are taken."""
    settings = Settings("review", 1, 2, 6, 12, min_replicas=2, voters=3)
    machines = [*(Machine(f"d{n}", 0) for n in range(3)), Machine("r2.0", 2), Machine("r2.1", 2)]
    world = counting_world(settings, [*machines, *(Machine(f"r1.{n}", 1) for n in range(replicas))], 1)
    Invariants(world)
    altered(world, deed("r1.0", 4))
    died: list[str] = []

    def watch(node: Node, event: object) -> None:
        lead = node.peer.lead
        if lead is None or lead.t != 5 or died:
            return
        reported = len(lead.released.applied.get(1, {})) > 1
        if {"committed": True, "reported": reported, "released": lead.released.last}[phase]:
            died.append(node.id)
            world.clock.after(0.0, lambda: world.crash(node.id))

    world.watchers.append(watch)
    assert go_on(world, 900.0) == 12 and died
    assert set(removed(world)) <= {"r1.0", *died} and wrong_states(world).keys() <= {"r1.0"}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("replicas", "works"), [(2, True), (3, True), (3, False)])
def test_a_lost_step_goes_back_though_one_replica_says_nothing(replicas: int, works: bool) -> None:
    """All honest replicas lost a committed gradient and say that they are behind; the liar neither reports
    the state nor says that it lacks it, and gives it to nobody. The stage was not lost for its sake, and an
    honest replica lost its seat. works: True if the liar claims units of the next step."""
    settings = Settings("review", 1, 2, 6, 12, min_replicas=1, snapshot_every=2, checkpoint_every=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(replicas))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    begun: list[int] = []
    said = (msg.Applied, msg.Behind, msg.StateOffer, msg.Piece, msg.Gradient, msg.Claim)[: 6 - works]

    def withhold(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        # Its report may leave before the others lose the gradient.
        early = isinstance(message, msg.Applied) and message.fence.t >= 5
        lies = sender.id == "r1.1" and (early or (begun and isinstance(message, said)))
        return None if lies else message

    def lose(name: str) -> None:
        replica = world.nodes[name].peer.replica
        advance = replica.advance

        def without() -> None:
            if replica.t == 4 and 5 in replica.pending and name not in lost:
                lost.add(name)
                begun.append(5)
                replica._give_up(5)
            else:
                advance()

        replica.advance = without  # type: ignore[method-assign]

    lost = set[str]()
    altered(world, withhold)
    world.clock.after(0.5, lambda: [lose(f"r1.{k}") for k in range(replicas) if k != 1])
    assert go_on(world, 1800.0) == 12
    gone = {peer for peer, why in removed(world).items() if not why.startswith("moves to")}
    assert len(lost) == replicas - 1 and gone == {"r1.1"}
    assert wrong_states(world).keys() <= {"r1.1"}
