"""Replicas that alone have the state of their stage after a step, report it, and give it to nobody (R12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

LIAR = "r1.1"
OLD, NEW = "r1.0", "r1.1"
Deed = Callable[[msg.Message], msg.Message | None]


def is_silent(said: msg.Message) -> msg.Message | None:
    return None if isinstance(said, msg.StateOffer | msg.Piece | msg.Gradient) else said


def offers_nothing(said: msg.Message) -> msg.Message | None:
    if isinstance(said, msg.StateOffer):
        return msgspec.structs.replace(said, fingerprint="", pieces=0, hashes=())
    return None if isinstance(said, msg.Piece | msg.Gradient) else said


def gives_no_piece(said: msg.Message) -> msg.Message | None:
    return None if isinstance(said, msg.Piece | msg.Gradient) else said


def claims_nothing(said: msg.Message) -> msg.Message | None:
    return None if isinstance(said, msg.Claim) else is_silent(said)


def lost_by_others(deed: Deed, times: int = 1) -> tuple[World, Counter[str]]:
    """A stage of three replicas, of which two lose the gradient of step 5, so many times; the third has it,
    and does its deed from then on. Returns the world before its run, and how often each lost it so far."""
    settings = Settings("withheld", 1, 2, 6, 12, min_replicas=1, snapshot_every=2, checkpoint_every=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(3))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    lost = Counter[str]()
    altered(world, lambda sender, peer, said: deed(said) if sender.id == LIAR and lost else said)

    def lose(name: str) -> None:
        replica = world.nodes[name].peer.replica
        advance = replica.advance

        def without() -> None:
            if replica.t == 4 and 5 in replica.pending and lost[name] < times:
                lost[name] += 1
                replica._give_up(5)
            else:
                advance()

        replica.advance = without  # type: ignore[method-assign]

    for name in ("r1.0", "r1.2"):
        world.clock.after(0.5, lambda name=name: lose(name))  # type: ignore[misc]
    return world, lost


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("deed", [is_silent, offers_nothing, gives_no_piece, claims_nothing])
def test_the_log_goes_back_where_most_of_a_stage_cannot_get_its_state(deed: Deed) -> None:
    """The honest ones lost their seats after six stalls, and the run stood still."""
    world, lost = lost_by_others(deed)
    assert go_on(world, 900.0) == 12 and len(lost) == 2
    assert set(removed(world)) <= {LIAR} and wrong_states(world).keys() <= {LIAR}
    assert [record.t for record in rollbacks(world)] == [4]


def test_who_gives_it_to_nobody_once_more_loses_its_seat() -> None:
    world, lost = lost_by_others(is_silent, times=2)
    assert go_on(world, 900.0) == 12 and lost == {"r1.0": 2, "r1.2": 2}
    assert set(removed(world)) == {LIAR} and wrong_states(world).keys() <= {LIAR}
    assert [record.t for record in rollbacks(world)] == [4, 4]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("late_s", [8.0, 25.0])
def test_an_honest_one_with_a_slow_line_keeps_its_seat(late_s: float) -> None:
    """Each message of the state takes so long; the others wait for it, and nobody is removed."""
    world, lost = lost_by_others(lambda said: said)
    carry = world.carry

    def slow(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        given = isinstance(msg.decode(message), msg.StateOffer | msg.Piece | msg.Gradient)
        late = sender.id == LIAR and lost and given
        world.clock.after(late_s if late else 0.0, lambda: carry(sender, peer, message, payload))

    world.carry = slow  # type: ignore[method-assign]
    assert go_on(world, 900.0) == 12 and len(lost) == 2
    assert removed(world) == {} and wrong_states(world) == {}


# --- stages of two replicas ----------------------------------------------------------------------------


def with_newcomer(liar: str, deed: Deed, others: int = 3) -> World:
    """A stage of one replica, to which a second one comes; of these two the liar does its deed as soon as the
    second one has its seat. others: replicas of the other stage."""
    settings = Settings("withheld", 1, 2, 6, 12, min_replicas=1, snapshot_every=2, checkpoint_every=2)
    machines = [Machine("d0", 0), Machine(OLD, 1), *(Machine(f"r2.{k}", 2) for k in range(others))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add(liar)
    world.add(member_of(Machine(NEW, 1)), "d0", at=0.5)

    def withhold(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        serves = NEW in world.leading().peer.ctx.run.membership.active_from
        return deed(said) if sender.id == liar and serves else said

    altered(world, withhold)
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("deed", "others"), [(is_silent, 3), (offers_nothing, 2), (gives_no_piece, 3)])
def test_a_newcomer_that_serves_and_gets_no_state_keeps_its_seat(deed: Deed, others: int) -> None:
    """It lost it after six tries of the reduce. A peer that the leader moves there does not get it either."""
    world = with_newcomer(OLD, deed, others)
    assert go_on(world, 400.0) == 12 and wrong_states(world).keys() <= {OLD}
    gone = {peer for peer, why in removed(world).items() if not why.startswith("moves to")}
    assert gone == {OLD} and len(removed(world)) == 2 and len(rollbacks(world)) == 1
    assert not world.nodes["d0"].peer.ctx.rate_limits.banned(OLD, world.clock.now)


def test_a_newcomer_gets_from_another_one_what_is_withheld_from_it_alone() -> None:
    """The peer that the leader moves there gets the state, and gives it to the newcomer: all stay."""
    world = with_newcomer(OLD, lambda said: said)
    carry = world.carry

    def withhold(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        serves = NEW in world.leading().peer.ctx.run.membership.active_from
        withheld = serves and (sender.id, peer) == (OLD, NEW)
        if not withheld or is_silent(msg.decode(message)) is not None:
            carry(sender, peer, message, payload)

    world.carry = withhold  # type: ignore[method-assign]
    assert go_on(world, 400.0) == 12 and wrong_states(world) == {} and rollbacks(world) == []
    assert [why.startswith("moves to") for why in removed(world).values()] == [True]


def reports_nothing(said: msg.Message) -> msg.Message | None:
    return None if isinstance(said, msg.Applied | msg.Claim | msg.Prepared) else said


def says_that_it_lacks_it(said: msg.Message) -> msg.Message | None:
    return msg.Behind(said.fence.t, 1) if isinstance(said, msg.Applied) else reports_nothing(said)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("deed", [reports_nothing, says_that_it_lacks_it])
def test_an_honest_one_is_not_removed_on_the_word_of_a_newcomer(deed: Deed) -> None:
    world = with_newcomer(NEW, deed)
    assert go_on(world, 900.0) == 12 and wrong_states(world).keys() <= {NEW}
    gone = {peer for peer, why in removed(world).items() if not why.startswith("moves to")}
    assert gone <= {NEW} and rollbacks(world) == []
