"""Failure detection: who is condemned, who is not, how soon, and what is said about it (R3)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.failure_detection.verdict import Verdict
from anabranch.protocol.interface import events as ev
from anabranch.sim.kernel.simulated_peer import Node
from support.swarms.faulty_network import carry_on, swarm
from support.swarms.observations import verdicts


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("to_leader", [True, False])
def test_one_bad_link_to_the_leader_condemns_nobody(to_leader: bool) -> None:
    """For twelve seconds, three times what it took to be removed for before (R3)."""
    world = swarm(1)
    pair = ("r1.1", "d0") if to_leader else ("d0", "r1.1")
    world.clock.at(5.0, lambda: world.lose(*pair, 12.0))
    carry_on(world, 17.0)
    assert world.history().removals == 0
    by, about = ("d0", "r1.1") if to_leader else ("r1.1", "d0")
    (_, _, told), *_ = [v for v in verdicts(world, about, Verdict.BAD_LINK) if v[1] == by]
    asked = told["asked"]
    assert isinstance(asked, dict) and any("heard it" in words for words in asked.values())
    assert "heard it" in str(told["reason"]) and "patience" in str(told["reason"])


def test_a_member_that_never_reaches_the_leader_again_is_removed_in_the_end() -> None:
    world = swarm(2)
    world.clock.at(5.0, lambda: world.lose("r1.1", "d0"))
    carry_on(world, 60.0, 20.0)
    (removal,) = [f for _, who, kind, f in world.notes if kind == "peer_removed" and who == "d0"]
    assert removal["subject"] == "r1.1" and "heard it" in str(removal["reason"])


def test_who_is_silent_to_all_is_removed_with_what_others_said() -> None:
    world = swarm(3)
    world.clock.at(5.0, lambda: world.vanish("r1.1"))
    carry_on(world, 5.0)
    (at, removal), *_ = [(a, f) for a, who, kind, f in world.notes if kind == "peer_removed" and who == "d0"]
    assert "has not heard it for" in str(removal["reason"])
    assert at < 5.0 + 2 * 4.0 + 1.5


def test_a_leader_that_is_cut_off_condemns_nobody() -> None:
    world = swarm(4)
    world.clock.at(5.0, lambda: world.partition(["d0"], 15.0))
    carry_on(world, 20.0)
    assert world.history().removals == 0
    assert [f for _, who, kind, f in world.notes if kind == "waiting" and "nobody is heard" in str(f)]


def test_a_reset_is_acted_on_at_once() -> None:
    world = swarm(6)
    lost: list[float] = []

    def strike(node: Node, event: ev.Event) -> None:
        iteration = world.nodes["d0"].peer.iteration
        if lost or world.clock.now < 5.0 or iteration is None:
            return
        if any(item.peer == "r1.1" and not item.returned for item in iteration.sender.items.values()):
            lost.append(world.clock.now)
            world.crash("r1.1")

    world.watchers.append(strike)
    carry_on(world, 10.0)
    repairs = [at for at, _, kind, f in world.notes if kind == "repair" and f["lost"] == "r1.1"]
    assert repairs and min(repairs) < lost[0] + 0.1


def test_a_run_that_has_lost_a_stage_can_be_stopped() -> None:
    """Its last checkpoint cannot be made: that is tried a few times."""
    world = swarm(6)

    def strike(node: Node, event: ev.Event) -> None:
        released = isinstance(event, ev.Received) and isinstance(event.message, msg.Release)
        if released and world.nodes["r1.0"].running:
            world.crash("r1.0")
            world.crash("r1.1")

    world.watchers.append(strike)
    world.clock.at(20.0, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    world.run(100.0)
    assert world.history().stopped
    assert [f for _, _, kind, f in world.notes if kind == "note" and "no checkpoint" in str(f)]


def test_one_bad_link_beside_the_leader_is_made_anew() -> None:
    world = swarm(7)
    world.clock.at(5.0, lambda: world.lose("r1.0", "r2.0", 11.0))
    again: list[bool] = []
    world.clock.at(40.0, lambda: again.append(world.nodes["r2.0"].peer.ctx.reachable("r1.0")))
    carry_on(world, 16.0)
    assert world.history().removals == 0
    renewed = verdicts(world, "r1.0", Verdict.BAD_LINK)
    assert {who for _, who, _ in renewed} == {"r2.0"}
    assert again == [True]


FENCED = {
    "stranger": ("stranger", msg.Probe(1, "r1.1", 1), "not a member"),
    "oneself": ("d0", msg.Probe(1, "r1.0", 1), "about oneself"),
    "itself": ("d1", msg.Probe(1, "d1", 1), "about oneself"),
    "not asked": ("d0", msg.Probed(99, "r1.1", True, True, 0.0), None),
    "of another process": ("d0", msg.Probe(1, "r1.1", 7), None),
}


@pytest.mark.parametrize("name", FENCED)
def test_questions_and_answers_that_do_not_belong(name: str) -> None:
    world = swarm(8)
    sender, message, words = FENCED[name]
    told: list[str] = []

    def inject() -> None:
        before = len(world.notes)
        world.nodes["r1.0"].handle(ev.Received(sender, message))
        told.extend(str(f["reason"]) for _, _, kind, f in world.notes[before:] if kind == "refused")

    world.clock.at(6.0, inject)
    carry_on(world, 7.0, 12.0)
    assert [words in reason for reason in told] == ([True] if words else [])


def test_a_flood_of_questions_is_answered_with_few_pings() -> None:
    world = swarm(9)
    pings: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        pinged = isinstance(event, ev.Received) and isinstance(event.message, msg.Ping)
        if pinged and (node.id, event.peer) == ("r2.0", "r1.0") and 6.0 < world.clock.now < 8.0:  # type: ignore[attr-defined]
            pings.append(world.clock.now)

    def flood() -> None:
        for number in range(2000):
            world.nodes["r1.0"].handle(ev.Received("d1", msg.Probe(number, "r2.0", 1)))

    world.watchers.append(look)
    world.clock.at(6.0, flood)
    carry_on(world, 7.0, 12.0)
    assert len(pings) < 8
