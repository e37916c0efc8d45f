"""The only replica of a stage that serves holds a step up (I4): it does nothing, or claims what it never gave
back. Others serve in that step, if need be peers of other stages; an honest one keeps its seat (R3, R14)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.recovery.last_states import LONG_S
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import every_pair
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

LIAR, STEPS = "x", 12


def begun_with_liar(returns_nothing: bool) -> tuple[World, Counter[str]]:
    """A run whose first iteration begins while the liar alone serves stage 1. returns_nothing: it refuses all
    microbatches (True), or sends back no gradient (False). Returns the world after its run, and what the liar
    did."""
    settings = Settings("lone", 1, 2, 12, STEPS, min_replicas=1)
    relays = [Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(2)]
    machines = [Machine("d0", 0), Machine("d1", 0), *relays, Machine(LIAR, 1)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add(LIAR)
    carry, did = world.carry, Counter[str]()

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if peer == LIAR and isinstance(said, msg.Forward) and returns_nothing:
            did["refused"] += 1
            liar = world.nodes[LIAR]
            lack = msg.Lack(liar.peer.ctx.fence(said.fence.t, said.fence.base), said.index, True, said.way)
            world.clock.after(0.02, lambda: carry(liar, sender.id, msg.encode(lack), None))
            return
        if sender.id == LIAR and isinstance(said, msg.Backward) and not returns_nothing:
            did["empty"] += 1
            payload = None
        carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=200.0)
    return world, did


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("returns_nothing", [True, False])
def test_others_serve_in_the_step_that_it_holds_up(returns_nothing: bool) -> None:
    """They were to serve from the second iteration, and the first one never ended."""
    world, did = begun_with_liar(returns_nothing)
    assert did and world.history().t == STEPS and wrong_states(world) == {}
    assert world.history().removals == 0


def test_who_comes_after_the_first_stall_serves_from_the_next_one() -> None:
    """A relay that does one microbatch in several seconds stalls the step between two of them. Another one
    that came after the first such stall had to wait for the iteration's end, ten times as long."""
    settings = Settings("lone", 1, 2, 12, 3, min_replicas=1)
    relays = [Machine("r1.0", 1, 4, 300.0), Machine("r2.0", 2)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *relays], 1)
    Invariants(world)
    world.add(member_of(Machine("r1.1", 1)), "d0", 10.0)
    world.run(until_s=100.0)
    assert world.history().t == 3 and wrong_states(world) == {} and world.history().removals == 0
    assert world.clock.now < 40.0


# --- claims of what is not given back, and nobody else at the stage ------------------------------

DEEDS: dict[str, Callable[[msg.Message, frozenset[int]], msg.Message | None]] = {
    "gives nothing back": lambda said, cover: None if isinstance(said, msg.Backward) else said,
    "does nothing, and claims all": lambda said, cover: (
        msgspec.structs.replace(said, units=tuple(sorted(cover)))
        if isinstance(said, msg.Claim)
        else None
        if isinstance(said, msg.Forward | msg.Backward | msg.Have)
        else said
    ),
    "gives nothing back, and claims nothing": lambda said, cover: (
        None if isinstance(said, msg.Backward | msg.Claim) else said
    ),
}


def alone(deed: str, since: int, stage: int = 1, others: int = 2, snapshots: int = 0) -> World:
    """A liar alone at its stage of two, which begins its deed in iteration `since`, with `others` replicas of
    the other stage."""
    settings = Settings("lone", 1, 2, 12, STEPS, min_replicas=1, snapshot_every=snapshots)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine(LIAR, stage)]
    world = counting_world(settings, [*machines, *(Machine(f"r{k}", 3 - stage) for k in range(others))], 1)
    Invariants(world)
    world.liars.add(LIAR)

    def lie(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        late = isinstance(message, msg.FencedMessage) and message.fence.t >= since
        return DEEDS[deed](message, settings.cover(stage)) if sender.id == LIAR and late else message

    altered(world, lie)
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("deed", "since", "stage"), every_pair(list(DEEDS), [1, 4], [1, 2]))
def test_a_peer_of_another_stage_is_moved_there(deed: str, since: int, stage: int) -> None:
    """It held the step up for ever. Nobody can tell who is at fault, so it keeps its seat."""
    world = alone(deed, since, stage)
    assert go_on(world, 300.0) == STEPS and wrong_states(world) == {}
    [(moved, why)] = removed(world).items()
    assert moved != LIAR and "may hold the step up" in why and LONG_S < world.clock.now < 180.0


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("deed", list(DEEDS))
def test_a_newcomer_serves_in_the_step_that_it_holds_up(deed: str) -> None:
    """It waited for the end of the step if it came after its beginning; in the run's first step nobody knew
    a usual time either, and a slow line may take minutes."""
    world = alone(deed, since=1)
    world.add(member_of(Machine("r1.1", 1)), "d0", 2.0)
    assert go_on(world, 200.0) == STEPS and wrong_states(world) == {} and removed(world) == {}


@pytest.mark.costly
@pytest.mark.parametrize("always", [True, False])
def test_one_that_withholds_its_state_too_loses_its_seat(always: bool) -> None:
    """Nobody whom the leader sent there could serve. `always`: nobody ever got the state, so that the log
    goes back to the initial one; else it is withheld during the deed, and the last snapshot is left."""
    world = alone("gives nothing back", since=6, others=3, snapshots=2)
    plain = world.carry

    def withhold(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        kinds = msg.StateOffer | msg.Piece | msg.Gradient | msg.Vouch
        current = sender.peer.iterations.current
        withholds = always or (current is not None and current.t >= 6)
        if sender.id == LIAR and isinstance(msg.decode(message), kinds) and withholds:
            return
        plain(sender, peer, message, payload)

    world.carry = withhold  # type: ignore[method-assign]
    assert go_on(world, 400.0) == STEPS and wrong_states(world).keys() <= {LIAR}
    assert "nobody gets the state" in removed(world)[LIAR]
    assert [record.t for record in rollbacks(world)] == [0 if always else 4]
    assert not world.nodes["d0"].peer.ctx.rate_limits.banned(LIAR, world.clock.now)


@pytest.mark.costly
def test_one_that_vouches_falsely_keeps_nobody_out() -> None:
    """The proofs of newcomers differ from its own, so they were removed one after the other."""
    world = alone("gives nothing back", since=4)
    world.mouths[LIAR] = lambda said: (
        msgspec.structs.replace(said, proof="0" * len(said.proof)) if isinstance(said, msg.Vouch) else said
    )
    assert go_on(world, 300.0) == STEPS and wrong_states(world) == {}
    assert all("may hold the step up" in why for why in removed(world).values())


# --- honest replicas that are alone ----------------------------------------------------------------


def honest(slowness: float = 1.0, stages: int = 2, steps: int = 6) -> World:
    """An honest replica alone at stage 1, with three replicas of each later stage."""
    settings = Settings("lone", 1, stages, 6, steps, min_replicas=1, snapshot_every=2)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r1.0", 1, 4, slowness)]
    machines += [Machine(f"r{s}.{k}", s) for s in range(2, stages + 1) for k in range(3)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("slowness", [30.0, 300.0])
def test_a_slow_one_stays_alone(slowness: float) -> None:
    """Each of its passes takes as long as a whole step of the others, and the step stalls between them."""
    world = honest(slowness, steps=3)
    assert go_on(world, 1000.0) == 3 and wrong_states(world) == {} and removed(world) == {}
    assert world.clock.now > slowness / 2.0


def test_one_that_freezes_keeps_its_seat() -> None:
    world = honest()
    frozen = list[float]()

    def watch(node: Node, event: object) -> None:
        if not frozen and world.log and world.history().t == 3:
            frozen.append(world.clock.now)
            world.freeze("r1.0", 10.0)

    world.watchers.append(watch)
    assert go_on(world, 600.0) == 6 and frozen and wrong_states(world) == {} and removed(world) == {}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kinds", [msg.Backward, msg.Backward | msg.Claim])
def test_one_whose_device_hangs_for_minutes_keeps_its_seat(kinds: type[msg.Message]) -> None:
    """It answers heartbeats. Another peer does its work meanwhile."""
    world = honest()
    carry = world.carry

    def hang(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        late = sender.id == "r1.0" and isinstance(said, kinds) and said.fence.t == 4  # type: ignore[attr-defined]
        world.clock.after(200.0 if late else 0.0, lambda: carry(sender, peer, message, payload))

    world.carry = hang  # type: ignore[method-assign]
    assert go_on(world, 600.0) == 6 and wrong_states(world) == {} and rollbacks(world) == []
    assert ["whose only replica may hold" in why for why in removed(world).values()] == [True]
    assert "r1.0" not in removed(world) and world.clock.now < 150.0


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("line", ["both", "gradients"])
def test_one_with_a_slow_line_keeps_its_seat(line: str) -> None:
    """Its gradients take 40 s each, dozens of times as long as a step did."""
    world = honest()
    carry = world.carry

    def slow(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        kinds = msg.Backward if line == "gradients" else msg.Backward | msg.Forward
        late = sender.id == "r1.0" and isinstance(said, kinds) and said.fence.t == 4
        world.clock.after(40.0 if late else 0.0, lambda: carry(sender, peer, message, payload))

    world.carry = slow  # type: ignore[method-assign]
    assert go_on(world, 1500.0) == 6 and wrong_states(world) == {} and "r1.0" not in removed(world)
    assert rollbacks(world) == []


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("before", [1, 2])
def test_accomplices_at_both_sides_frame_nobody(before: int) -> None:
    """The stage before withholds the claims of what the honest one gave back, `before` replicas of it, and so
    does one of the stage after. The honest one stays, and those who come to the liars' stage do the work."""
    settings = Settings("frame", 1, 3, 6, 8, min_replicas=1, snapshot_every=2)
    liars = [f"x{k}" for k in range(before)]
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r2.0", 2), Machine("y", 3), Machine("r3.0", 3)]
    world = counting_world(settings, [*machines, *(Machine(peer, 1) for peer in liars)], 1)
    Invariants(world)
    world.liars.update((*liars, "y"))
    world.add(member_of(Machine("r1.0", 1)), "d0", 60.0)

    def withhold(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        lies = sender.id in world.liars and isinstance(message, msg.Claim | msg.Backward)
        return None if lies and message.fence.t >= 4 else message  # type: ignore[attr-defined]

    altered(world, withhold)
    reached = go_on(world, 500.0)
    assert not {"r2.0", "r3.0", "r1.0"} & removed(world).keys() and wrong_states(world) == {}
    assert rollbacks(world) == [] and reached == (8 if before == 1 else reached)
