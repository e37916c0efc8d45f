"""A relay that claims the work of its whole stage: it gets what it computed, and loses its seat (R6, R7)."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Commit, Members, decode_entry
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.islands.test_review_rounds import island_run, world_of

STEPS = 8


def lies(world: World, liar: str, stage: int = 1) -> None:
    """Have `liar` claim the whole cover as soon as it opens an iteration, and act as if it held that."""
    opened: set[int] = set()

    def lie(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iterations.current
        if node.id != liar or iteration is None or iteration.t in opened:
            return
        reduce = node.peer.iterations.replica.all_reduce
        if not opened:
            recount = reduce._recount

            def only_own(current: Iteration, unit: int, sign: int) -> None:
                if unit in current.units and current.units[unit].gradient_in is not None:
                    recount(current, unit, sign)

            reduce._recount = only_own  # type: ignore[method-assign]
        opened.add(iteration.t)
        iteration.claims.held |= node.peer.ctx.run.cover(stage, iteration.t)
        iteration.claims.send()

    world.bookkeepers.append(lie)


def owned(world: World) -> list[Counter[str]]:
    """Units of stage 1 that each peer owns, per committed step."""
    records = [decode_entry(line).record for line in world.log]
    parts = [record.stages[1] for record in records if isinstance(record, Commit) and record.stages]
    return [Counter(part.members[k] for k in part.owners if k >= 0) for part in parts]


def units_of(world: World, peer: str, stage: int) -> list[set[int]]:
    """Units of a stage that a peer owns, per committed step."""
    records = [decode_entry(line).record for line in world.log]
    parts = [record.stages[stage] for record in records if isinstance(record, Commit) and record.stages]
    return [{unit for unit, k in enumerate(part.owners) if part.members[k] == peer} for part in parts]


def sent_on(world: World, *peers: str) -> dict[int, set[int]]:
    """Iteration -> microbatches that one of `peers` sent forward, or was sent; filled by the run."""
    carry, found = world.carry, defaultdict[int, set[int]](set)

    def look(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Forward) and (sender.id in peers or peer in peers):
            found[said.fence.t].add(said.index)
        carry(sender, peer, message, payload)

    world.carry = look  # type: ignore[method-assign]
    return found


def removed(world: World) -> dict[str, str]:
    records = (decode_entry(line).record for line in world.log)
    return {
        peer: why for each in records if isinstance(each, Members) for peer, why in each.removed.items()
    }


@pytest.mark.parametrize("relays", [2, 4])
def test_a_liar_gets_nothing_of_others_and_loses_its_seat(relays: int) -> None:
    settings = Settings("steal", 1, 1, 8, STEPS, min_replicas=relays)
    machines = [Machine("d0", 0), *(Machine(f"r1.{k}", 1) for k in range(relays))]
    world = counting_world(settings, machines, 1)
    lies(world, "r1.0")
    carry, orders = world.carry, set[tuple[int, msg.AttemptId]]()

    def look(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Attempt) and said.stage:
            orders.add((said.fence.t, said.attempt))
        carry(sender, peer, message, payload)

    world.carry = look  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert world.history().t == STEPS
    assert max(Counter(t for t, _ in orders if t > 1).values()) == 1  # reduces wait for the word that decides
    assert all(units["r1.0"] <= 4 for units in owned(world))
    assert list(removed(world)) == ["r1.0"] and "work of others" in removed(world)["r1.0"]
    assert not any(units["r1.0"] for units in owned(world)[4:])


def test_with_two_stages_neither_end_nor_middle_is_taken() -> None:
    settings = Settings("steal", 1, 2, 8, STEPS, min_replicas=3)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(3))]
    world = counting_world(settings, machines, 2)
    lies(world, "r1.0")
    world.run(until_s=300.0)
    assert world.history().t == STEPS and list(removed(world)) == ["r1.0"]
    assert all(units["r1.0"] <= 4 for units in owned(world))


def three_by_two(microbatches: int, model: Model | None = None) -> World:
    """Two stages of three relays each."""
    settings = Settings("steal", 1, 2, microbatches, 6, min_replicas=3)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(3))]
    return counting_world(settings, machines, 2, model)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("cut", [False, True])
def test_each_peer_of_the_stage_before_is_asked_once_in_an_iteration(cut: bool) -> None:
    """Each question has a peer repeat all its reports, and two may make its microbatches overdue. Only one
    that was lost with a link is sent again, before the step stalls."""
    world = three_by_two(24, Model(latency_s=(0.1, 0.2)))
    lies(world, "r2.0")
    carry, asked = world.carry, Counter[tuple[int, str]]()

    def look(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        carry(sender, peer, message, payload)
        said = msg.decode(message)
        if isinstance(said, msg.Missing):
            asked[said.fence.t, peer] += 1
            if cut and (said.fence.t, peer, asked[3, "r1.1"]) == (3, "r1.1", 1):
                world.cut("d0", "r1.1")

    world.carry = look  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert world.history().t == 6 and list(removed(world)) == ["r2.0"]
    assert {peer for _, peer in asked} == {"r1.0", "r1.1", "r1.2"}
    assert [each for each, times in asked.items() if times > 1] == [(3, "r1.1")] * cut


def test_a_relay_that_changes_its_word_again_and_again_does_not_stop_the_run() -> None:
    """It sends one microbatch to two replicas, and says of the one and the other in turns that it came back
    from there. Each change had the reduce begin anew."""
    world = three_by_two(12, Model(task_s={"SumPart": 0.3, "Assemble": 0.3}))
    carry = world.carry
    double, orders, changes = dict[int, tuple[int, str, str]](), Counter[int](), list[float]()

    def look(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        carry(sender, peer, message, payload)
        if isinstance(said, msg.Attempt) and said.stage == 2 and peer == "r2.0":
            orders[said.fence.t] += 1
        if not isinstance(said, msg.Forward) or sender.id != "r1.0":
            return
        if said.train and said.fence.t > 1 and said.fence.t not in double:
            other = next(p for p in ("r2.0", "r2.1", "r2.2") if p != peer)
            double[said.fence.t] = said.index, peer, other
            carry(sender, other, message, payload)

    def lie(node: Node, event: ev.Event) -> None:
        liar = world.nodes["r1.0"].peer
        iteration = liar.iterations.current
        if iteration is None or iteration.t not in double:
            return
        index, *peers = double[iteration.t]

        def holders() -> msg.SentOn:
            others = {
                peer: tuple(tuple(each for each in part if each != index) for part in parts)
                for peer, parts in iteration.sender.holders().items()
            }
            given, sent = others.get(now_at := peers[len(changes) % 2], ((), ()))
            return {**others, now_at: (tuple(sorted((*given, index))), sent)}  # type: ignore[dict-item]

        iteration.claims._holders = holders
        if liar.ctx.clock.now >= (changes[-1] if changes else 0.0) + 0.02:
            changes.append(liar.ctx.clock.now)
            iteration.claims.names_holders = True
            iteration.claims.send()

    world.carry = look  # type: ignore[method-assign]
    world.bookkeepers.append(lie)
    world.run(until_s=120.0)
    assert world.history().t == 6 and removed(world) == {} and wrong_states(world) == {}
    assert len(double) == 5 and len(changes) > 50 and max(orders.values()) <= 2


def test_a_liar_gets_no_slots_of_a_round() -> None:
    run = island_run()
    world = world_of(replace(run, batch=replace(run.batch, microbatches=6)), relays=3, checked=False)
    lies(world, "r1.0")
    world.run(until_s=2000.0)
    assert list(removed(world)) == ["r1.0"]
    assert all(units["r1.0"] <= 1 for units in owned(world)[2:])


def test_one_relay_alone_has_nobody_removed() -> None:
    """The only replica of stage 1 sends what it sends to r2.1 to r2.0, too, and says that r2.1 gave back
    nothing and was sent nothing."""
    settings = Settings("accuse", 1, 2, 12, STEPS)
    machines = [Machine("d0", 0), Machine("r1.0", 1), *(Machine(f"r2.{k}", 2) for k in range(3))]
    world = counting_world(settings, machines, 2)
    carry, asked = world.carry, set[int]()

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        carry(sender, peer, message, payload)
        if isinstance(said, msg.Forward) and said.train and (sender.id, peer) == ("r1.0", "r2.1"):
            carry(sender, "r2.0", message, payload)

    def speak(message: msg.Message) -> msg.Message:
        if not isinstance(message, msg.Claim) or not message.holders:
            return message
        asked.add(message.fence.t)
        (mine, others), (his, _) = (message.holders.get(peer, ((), ())) for peer in ("r2.0", "r2.1"))
        holders = {**message.holders, "r2.0": (tuple(sorted({*mine, *his})), others)}
        holders.pop("r2.1", None)
        return msgspec.structs.replace(message, holders=holders)

    world.carry, world.mouths["r1.0"] = lie, speak  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert world.history().t == STEPS and len(asked) >= 4 and removed(world) == {}


def test_nobody_is_asked_for_holders_in_a_calm_run() -> None:
    settings = Settings("calm", 1, 2, 8, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(2))]
    world = counting_world(settings, machines, 1)
    carry, asked = world.carry, list[msg.Message]()

    def look(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Missing) or (isinstance(said, msg.Claim) and said.holders):
            asked.append(said)
        carry(sender, peer, message, payload)

    world.carry = look  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert asked == [] and removed(world) == {} and wrong_states(world) == {}


def vouches(world: World, accomplice: str, stage: int, liar: str) -> None:
    """Have `accomplice` say that `liar` gave it back every microbatch of the batch."""
    carry, every = world.carry, tuple(range(8))

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == accomplice and isinstance(said, msg.Claim) and said.holders:
            message = msg.encode(msgspec.structs.replace(said, holders={liar: (every, ())}))
        carry(sender, peer, message, payload)

    world.carry = on_its_way  # type: ignore[method-assign]


@pytest.mark.parametrize("claims_too", [False, True])
def test_an_accomplice_at_the_stage_before_gives_away_its_own_work_alone(claims_too: bool) -> None:
    """It says that r2.0 computed everything; r2.0 is the first by id."""
    settings = Settings("steal", 1, 2, 8, STEPS, min_replicas=3)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(3))]
    world = counting_world(settings, machines, 2)
    lies(world, "r2.0", 2)
    if claims_too:
        lies(world, "r1.0")
    vouches(world, "r1.0", 1, "r2.0")
    sent = sent_on(world, "r1.0", "r2.0")
    world.run(until_s=600.0)
    assert world.history().t == STEPS
    for t, units in enumerate(units_of(world, "r2.0", 2), 1):
        assert units <= sent[t], (t, units)
    assert any(len(sent[t]) < 8 for t in range(1, STEPS + 1))
    assert ("r1.0" in removed(world)) == claims_too and removed(world).keys() <= {"r1.0", "r2.0"}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("stage", [1, 2])
def test_some_of_the_stage_before_and_an_accomplice_have_no_honest_relay_removed(stage: int) -> None:
    """They send honest relays of the next stage their work, and say that the accomplice, which claims all of
    it, gave it back: one data node of two, or two relays of four, had all honest relays removed, and the
    accomplice was alone in its stage."""
    settings = Settings("frame", 1, 2, 12, 24, min_replicas=2)
    before = [["d0", "w0"], ["w0", "w1", "r1.0", "r1.1"]][stage - 1]
    machines = [Machine("d0", 0), *(Machine(peer, stage - 1) for peer in before if peer != "d0")]
    machines += [Machine(peer, stage) for peer in ("a", f"r{stage}.0", f"r{stage}.1")]
    machines += [Machine(f"r{3 - stage}.{k}", 3 - stage) for k in (2, 3) if stage == 1]
    world = counting_world(settings, machines, 1)
    world.strict = False
    lies(world, "a", stage)

    def frame(message: msg.AnyMessage) -> msg.AnyMessage:
        if not isinstance(message, msg.Claim) or not message.holders:
            return message
        given = {index for first, _ in message.holders.values() for index in first}
        return msgspec.structs.replace(message, holders={"a": (tuple(sorted(given)), ())})

    world.mouths.update({"w0": frame, "w1": frame})
    world.run(until_s=600.0)
    assert world.history().t == 24 and not [peer for peer in removed(world) if peer.startswith("r")]


def test_a_data_node_gets_no_heads_and_no_embeddings_of_others() -> None:
    """It claims all of stage 0, and is the first by id."""
    settings = Settings("steal", 1, 1, 8, STEPS, min_replicas=2)
    machines = [Machine("d1", 0), Machine("d0", 0), *(Machine(f"r1.{k}", 1) for k in range(2))]
    world = counting_world(settings, machines, 1)

    def lie(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iterations.current
        if node.id == "d0":
            node.peer.iterations.replica.all_reduce._recount = lambda *work: None  # type: ignore[method-assign]
        if node.id == "d0" and iteration is not None and len(iteration.claims.held) < 16:
            iteration.claims.held |= node.peer.ctx.run.cover(0, iteration.t)
            iteration.claims.losses |= dict.fromkeys(set(range(8)).difference(iteration.claims.losses), 1.0)
            iteration.claims.send()

    world.bookkeepers.append(lie)
    world.strict = False
    found = sent_on(world, "d0")
    with contextlib.suppress(TimeoutError):
        world.run(until_s=300.0)
    for t, units in enumerate(units_of(world, "d0", 0), 1):
        assert {unit // 2 for unit in units} <= found[t], (t, units)
    assert "work of others" in removed(world)["d0"]
