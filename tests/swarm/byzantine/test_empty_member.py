"""A joiner that has no state and repeats what it was told: it does not come to serve (R14)."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, ProveState, Result
from anabranch.protocol.log.records import Commit, Members, Rollback, decode_entry
from anabranch.protocol.peer.shared_state import Step
from anabranch.protocol.state.possession import PossessionProof
from anabranch.protocol.state.vouchers import OLDEST, SHOWN_WITHIN, SHOWN_WITHIN_S, VOUCHED_KEPT
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states

STEPS = 12


def test_a_fingerprint_that_the_log_told_is_no_proof() -> None:
    """The joiner reports the right fingerprint of the last step, as the log has it, without the state."""
    settings = Settings("empty", 1, 1, 6, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(2))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    carry = world.carry
    lies: list[int] = []

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id != "x":
            carry(sender, peer, message, payload)
        elif isinstance(said, msg.Ready):
            return
        elif not isinstance(said, msg.FetchState):  # it wants no state
            carry(sender, peer, message, payload)

    def come(node: Node, event: object) -> None:
        if "x" not in world.nodes and world.log and world.history().t >= 2:
            world.add(member_of(Machine("x", 1)), "d0", world.clock.now)
        guest = world.nodes.get("x")
        if guest is None or not guest.running or "d0" not in guest.links:
            return
        commits = [r for line in world.log if isinstance(r := decode_entry(line).record, Commit)]
        t = commits[-1].t - 1
        if "x" in world.leading().peer.ctx.run.membership.members and t not in lies:
            lies.append(t)
            print_of_stage = commits[-1].stages[1].fingerprint_before
            carry(guest, "d0", msg.encode(msg.Ready(t, 1, print_of_stage, proof=print_of_stage)), None)

    world.carry = lie  # type: ignore[method-assign]
    world.watchers.append(come)
    world.run(until_s=300.0)
    assert lies
    served = [
        peer
        for line in world.log
        if isinstance(record := decode_entry(line).record, Members)
        for peer in record.active_from
    ]
    assert "x" not in served
    assert any("x" in r.removed for line in world.log if isinstance(r := decode_entry(line).record, Members))
    assert world.history().t == STEPS and wrong_states(world) == {}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("lie", ["initial", "first", "last"])
def test_a_joiner_that_never_shows_a_state_loses_its_seat(lie: str) -> None:
    """It reports the run's initial state, or the one after the first step, with the fingerprint that the log
    tells; or a false one after the last step, and that it has followed nothing of the log. So nobody can say
    that its proof is false."""
    steps = 8 + SHOWN_WITHIN
    settings = Settings("early", 1, 1, 2, steps, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(2))]
    model = Model(task_s={"Apply": SHOWN_WITHIN_S / SHOWN_WITHIN})
    world = counting_world(settings, machines, 1, model)
    Invariants(world)
    carry, told = world.carry, list[int]()

    def ready(t: int) -> msg.Ready:
        if lie == "initial":
            return msg.Ready(0, 1, world.genesis.fingerprints[1])
        if lie == "last":
            return msg.Ready(t, 1, "false", proof="false")
        commits = [r for line in world.log if isinstance(r := decode_entry(line).record, Commit)]
        return msg.Ready(1, 1, commits[1].stages[1].fingerprint_before, proof="false")

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == "x" and isinstance(said, msg.Ping):
            message = msg.encode(msg.Ping(said.number, 0))
        if sender.id != "x" or not isinstance(said, msg.Ready | msg.FetchState):
            carry(sender, peer, message, payload)

    def come(node: Node, event: object) -> None:
        t = world.history().t if world.log else 0
        if "x" not in world.nodes and t >= 3:
            world.add(member_of(Machine("x", 1)), "d0", world.clock.now)
        guest = world.nodes.get("x")
        if guest is None or not guest.running or "d0" not in guest.links or t in told:
            return
        if "x" in world.leading().peer.ctx.run.membership.members:
            told.append(t)
            carry(guest, "d0", msg.encode(ready(t)), None)

    world.carry = deliver  # type: ignore[method-assign]
    world.watchers.append(come)
    world.run(until_s=4000.0)
    records = [r for line in world.log if isinstance(r := decode_entry(line).record, Members)]
    assert told and not any("x" in record.active_from for record in records)
    assert [why for record in records for peer, why in record.removed.items() if peer == "x"]
    assert world.history().t == steps and wrong_states(world) == {}


def test_a_peer_that_moves_proves_the_state_of_its_new_stage() -> None:
    """The step and its log entry are the same at both stages; the proof of the former one is not used."""
    state = [(4, "entry", 1)]
    ctx = make_context("a", 1, 1, Settings("moves", 1, 2, 4, 8), "d0")
    proved: list[int] = []
    proof = PossessionProof(ctx, lambda: state[0], lambda: proved.append(state[0][2]))
    for stage, digest in ((1, "of stage 1"), (2, "of stage 2")):
        state[0] = (4, "entry", stage)
        assert proof.get() is None
        job = ctx.tasks.next()
        assert job is not None and job[0] == ProveState(4, "entry")
        then = ctx.tasks.finish(job[0])
        assert then is not None
        then(Result(digest=digest))
        assert proof.get() == digest
    assert proved == [1, 2]


def test_one_false_voucher_keeps_nobody_out() -> None:
    """A replica vouched with a false proof before the others did, and the joiner, which had the state, was
    removed for another one."""
    settings = Settings("voucher", 1, 1, 6, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(3))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    carry, false = world.carry, list[int]()

    def vouch(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if not isinstance(said, msg.Vouch):
            carry(sender, peer, message, payload)
        elif sender.id == "r1.0":
            false.append(said.fence.t)
            carry(sender, peer, msg.encode(structs.replace(said, proof="false")), payload)
        else:
            world.clock.after(0.1, lambda: carry(sender, peer, message, payload))

    def come(node: Node, event: object) -> None:
        if "x" not in world.nodes and world.log and world.history().t >= 2:
            world.add(member_of(Machine("x", 1)), "d0", world.clock.now)

    world.carry = vouch  # type: ignore[method-assign]
    world.watchers.append(come)
    world.run(until_s=300.0)
    records = [r for line in world.log if isinstance(r := decode_entry(line).record, Members)]
    assert false and not any(record.removed for record in records)
    assert any("x" in record.active_from for record in records)
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_proof_from_before_a_return_of_the_log_costs_no_seat() -> None:
    """Two replicas contradict each other after iteration 3, and the log goes back to iteration 2. A joiner's
    proof of that state, keyed by the former entry, arrives only then. Nobody had vouched under that entry."""
    settings = Settings("returns", 1, 1, 6, STEPS, min_replicas=2, snapshot_every=1)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(2))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    carry = world.carry
    held, vouched, freed = list[bytes](), set[str](), list[int]()

    def returned() -> bool:
        return any(isinstance(decode_entry(line).record, Rollback) for line in world.log)

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if (sender.id, peer) == ("x", "d0") and (isinstance(said, msg.Ready) or held) and not freed:
            held.append(message)  # and all that follows it on this link
        elif isinstance(said, msg.Vouch) and not returned():
            return
        elif isinstance(said, msg.Prepared) and returned() and not freed:
            world.clock.after(1.0, partial(deliver, sender, peer, message, payload))
        elif sender.id == "r1.0" and isinstance(said, msg.Applied) and said.fence.t == 3 and not returned():
            carry(sender, peer, msg.encode(structs.replace(said, fingerprint="another")), payload)
        else:
            carry(sender, peer, message, payload)
            if isinstance(said, msg.Vouch):
                vouched.add(sender.id)

    def arrives(node: Node, event: object) -> None:
        if len(vouched) == 2 and not freed:
            freed.append(len(held))
            for number, message in enumerate(held):
                world.clock.after(0.1 + 0.001 * number, partial(carry, world.nodes["x"], "d0", message, None))

    def come(node: Node, event: object) -> None:
        if "x" not in world.nodes and world.log and world.history().t >= 2:
            world.add(member_of(Machine("x", 1)), "d0", world.clock.now)

    world.carry = deliver  # type: ignore[method-assign]
    world.watchers += [come, arrives]
    world.run(until_s=300.0)
    records = [r for line in world.log if isinstance(r := decode_entry(line).record, Members)]
    assert freed and freed[0] > 1 and not any(record.removed for record in records)
    assert any("x" in record.active_from for record in records)
    assert world.history().t == STEPS and wrong_states(world) == {}


@pytest.mark.costly
@pytest.mark.slow
def test_a_joiner_that_reports_a_state_of_long_ago_loses_its_seat_soon() -> None:
    """It follows the log, and reports for ever the state that its Welcome named, with a fingerprint that is
    right. Its first report came when no proof of that state was remembered any more: building its stage took
    more steps than that. Steps are short, so the five minutes of one that shows no proof are far away."""
    steps = 20 + VOUCHED_KEPT + OLDEST
    settings = Settings("old", 1, 1, 2, steps, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(2))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    carry, told = world.carry, list[int]()

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if sender.id != "x" or not isinstance(msg.decode(message), msg.Ready | msg.FetchState):
            carry(sender, peer, message, payload)

    def come(node: Node, event: object) -> None:
        t = world.history().t if world.log else 0
        if "x" not in world.nodes and t >= 3:
            world.add(member_of(Machine("x", 1)), "d0", world.clock.now)
        guest = world.nodes.get("x")
        if guest is None or not guest.running or "d0" not in guest.links or t in told:
            return
        announced = guest.peer.joining.fetching.announced
        waits = "x" in world.leading().peer.ctx.run.membership.members
        if waits and announced.fingerprint and t > announced.t + VOUCHED_KEPT:
            told.append(t)
            carry(guest, "d0", msg.encode(msg.Ready(announced.t, 1, announced.fingerprint)), None)

    world.carry = deliver  # type: ignore[method-assign]
    world.watchers.append(come)
    world.run(until_s=SHOWN_WITHIN_S)
    records = [r for line in world.log if isinstance(r := decode_entry(line).record, Members)]
    assert told and not any("x" in record.active_from for record in records)
    [why] = [why for record in records for peer, why in record.removed.items() if peer == "x"]
    assert "the state it fetched" in why and "older" in why
    assert world.history().t == steps and wrong_states(world) == {}


@pytest.mark.costly
@pytest.mark.slow
def test_a_joiner_that_builds_its_stage_for_many_steps_keeps_its_seat() -> None:
    """Its Welcome named the run's initial state, which it has as soon as its stage is built: too late, so it
    fetches another one instead of reporting that."""
    steps = 2 * OLDEST
    settings = Settings("slow", 1, 1, 2, steps, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(3))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    slow, built = world.nodes["r1.2"], list[ev.StageBuilt]()
    handle = slow.handle

    def later(event: ev.Event) -> None:
        if isinstance(event, ev.StageBuilt) and not built:
            built.append(event)
        else:
            handle(event)

    def give(node: Node, event: object) -> None:
        if world.log and world.history().t == OLDEST + 20 and slow.peer.joining.step is Step.BUILDING:
            handle(built[0])

    slow.handle = later  # type: ignore[method-assign]
    world.watchers.append(give)
    world.run(until_s=SHOWN_WITHIN_S)
    records = [r for line in world.log if isinstance(r := decode_entry(line).record, Members)]
    assert built and slow.peer.joining.fetching.announced.t == 0
    assert not any(record.removed for record in records)
    assert any("r1.2" in record.active_from for record in records)
    assert world.history().t == steps and wrong_states(world) == {}
