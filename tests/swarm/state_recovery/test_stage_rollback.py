"""Every replica of a stage dies, at any moment: the run rolls back to a snapshot (R12)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.audit.log_check import read_log
from anabranch.config import SnapshotsSection
from anabranch.protocol import messages as msg
from anabranch.protocol.interface.events import CheckpointWritten, Event, Received
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_worker import IntegerWorker
from support.grids import first_of
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment, kill
from support.swarms.lost_stages import (
    EVERY,
    LOSSES,
    PHASES,
    SETTINGS,
    SOON_S,
    STEPS,
    check_whole,
    come_when,
    joiner,
    lose,
    of_stage,
    rollbacks,
    swarm,
)
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("phase", "t", "stage", "comes"),
    [
        pytest.param(phase, *loss, marks=[pytest.mark.soak] * (turn != number % 2))
        for number, phase in enumerate(PHASES)
        for turn, loss in enumerate(LOSSES)
    ],
)
def test_a_stage_lost_at_any_phase_is_restored(phase: str, t: int, stage: int, comes: bool) -> None:
    """By a joiner, or by a peer of the other stage where none comes."""
    world = swarm(seed=t + 9)  # both replicas have units in t then, and send each other parts
    fault = lose(world, stage, PHASES[phase](t))
    if comes:
        come_when(world, lambda: bool(fault.delivered))
    world.run(SOON_S)
    assert fault.delivered
    committed = fault.delivered[0][2]
    check_whole(world)
    for back in rollbacks(world):
        # Snapshots of an iteration are complete a while after it.
        assert committed - back.t <= 2 * EVERY and back.t % EVERY == 0
        assert f"stage {stage}" in back.reason
    # Nothing is computed again where keepers have the very last state.
    assert len(rollbacks(world)) == 1 or (committed % EVERY == 0 and rollbacks(world) == [])
    assert of_stage(world, stage) != []
    moved = [fields for _, _, kind, fields in world.notes if kind == "note" and "going over" in str(fields)]
    assert bool(moved) is not comes


@pytest.mark.parametrize(("dies", "back", "sound"), [(5, 3, False), (8, 6, True)])
def test_a_checkpoint_whose_write_ends_after_a_rollback(dies: int, back: int, sound: bool) -> None:
    """The checkpoint of iteration 4 is being written when the stage dies. It is void if the run goes back to
    an earlier iteration, although 4 was taken again when the write ends."""
    world = swarm(seed=5, settings=replace(SETTINGS, checkpoint_every=1))
    fault = lose(world, 1, faults.received(msg.Backward, dies))
    come_when(world, lambda: bool(fault.delivered))
    leader, held, looked = world.nodes["d0"], list[Event](), list[bool]()
    handle = leader.handle

    def slow_disk(event: Event) -> None:
        held.append(event) if isinstance(event, CheckpointWritten) and event.t > 3 else handle(event)

    leader.handle = slow_disk  # type: ignore[method-assign]

    def look(node: Node, event: Event) -> None:
        lead = leader.peer.lead
        if lead is None or looked or not rollbacks(world) or lead.checkpoints._open is None or lead.t < 4:
            return
        looked.append(True)
        assert [each.t for each in held if isinstance(each, CheckpointWritten)] == [4]
        leader.peer.states._newest = {1: 0}
        handle(held.pop())
        assert (leader.peer.states._newest == {}) is sound, "the newest on the disk is another one"
        assert sound or not any(point.on_disk for point in lead.catalog.points.values())
        assert leader.peer.states._sound_t == back
        leader.handle = handle  # type: ignore[method-assign]

    world.watchers.append(look)
    world.run(SOON_S)
    check_whole(world)
    assert looked and fault.delivered and [each.t for each in rollbacks(world)] == [back]
    assert leader.peer.states._sound_t == STEPS


def test_a_checkpoint_that_an_earlier_lead_began_is_sound() -> None:
    """The founder lost the lead and took it again while its disk wrote: its new coordinator began none."""
    world = swarm(seed=5, settings=replace(SETTINGS, checkpoint_every=1))
    leader, looked = world.nodes["d0"], list[bool]()
    handle = leader.handle

    def written(event: Event) -> None:
        lead = leader.peer.lead
        if isinstance(event, CheckpointWritten) and event.t == 4:
            assert lead is not None
            lead.checkpoints._written.clear()
            handle(event)
            on_disk = any(point.on_disk for point in lead.catalog.points.values())
            looked.append(on_disk and lead.checkpoints.t == 4)
        else:
            handle(event)

    leader.handle = written  # type: ignore[method-assign]
    world.run(SOON_S)
    check_whole(world)
    assert looked == [True]


def test_the_snapshot_that_is_being_taken_does_not_count() -> None:
    """The stage dies when a keeper has begun to pull the snapshot of iteration 6: that of 3 is used."""
    world = swarm(seed=5)

    def pulled(node: Node, event: Event) -> bool:
        asked = isinstance(event, Received) and isinstance(event.message, msg.FetchPiece)
        return asked and event.message.t == 6

    fault = lose(world, 2, pulled)
    world.run(SOON_S)
    check_whole(world)
    assert fault.delivered and [back.t for back in rollbacks(world)] == [3]


@pytest.mark.parametrize("seed", first_of(range(2), 1))
def test_two_stages_in_succession(seed: int) -> None:
    """The second stage dies while the first is being restored, and then a peer that was moved."""
    world = swarm(seed, replicas=3)
    first = lose(world, 1, faults.received(msg.Backward, 5))
    second: list[float] = []

    def look(node: Node, event: Event) -> None:
        moved = [n for n in of_stage(world, 1) if n.startswith("r2")]
        if first.delivered and not second and moved and rollbacks(world):
            second.append(world.clock.now)
            for victim in ("r2.0", "r2.1", "r2.2"):
                if victim not in moved and world.nodes[victim].running:
                    world.crash(victim)
            joiner(world, "late")

    world.watchers.append(look)
    world.run(SOON_S)
    assert first.delivered and second
    check_whole(world)


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_any_two_nodes_are_lost_without_harm(seed: int) -> None:
    """f = 2: of a stage with one replica that replica and one of its two keepers, or both keepers."""
    world = swarm(seed, replicas=1, data_nodes=3, min_replicas=1)
    lost: list[str] = []

    def look(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.lead
        if lost or lead is None or lead.catalog.complete_t < EVERY or lead.t < 5:
            return
        holders = lead.catalog.holders(lead.catalog.complete_t, 1)
        keepers = [p for p in holders if p not in ("d0", "r1.0")]
        lost.extend(["r1.0", keepers[0]] if seed % 2 else [*keepers, "r1.0"][:2])
        for victim in lost:
            world.crash(victim)
        for number, victim in enumerate(lost):
            joiner(world, f"late{number}", 1.0 + number, world.nodes[victim].peer.ctx.run.stage)

    world.watchers.append(look)
    world.run(SOON_S)
    assert len(lost) == 2
    check_whole(world)


@pytest.mark.parametrize("seed", first_of(range(2), 1))
def test_keepers_that_die_while_they_are_pulled_from(seed: int) -> None:
    world = swarm(seed, data_nodes=3)
    lose(world, 1, faults.received(msg.Forward, 7))
    victims = tuple(p for p in world.nodes if p != "d0" and not p.startswith("r1") and p != "r2.0")
    death = Fault(world, victims, _serves(1), kill())
    come_when(world, lambda: bool(rollbacks(world)))
    world.run(SOON_S)
    assert death.delivered
    check_whole(world)


def _serves(stage: int) -> Moment:
    """A piece of a stage's state is asked of a peer of another stage."""
    return lambda node, event: (
        isinstance(event, Received)
        and isinstance(event.message, msg.FetchPiece)
        and event.message.stage == stage
        and node.peer.ctx.run.stage != stage
    )


def test_a_keeper_that_serves_other_bytes_is_found_out_and_passed_over() -> None:
    world = swarm(seed=3, data_nodes=3)
    lose(world, 1, faults.received(msg.Forward, 8))
    liars: set[str] = set()

    def lie(node: Node, event: Event) -> None:
        """The first keeper of stage 1 that is asked for a piece changes them all."""
        if node.id != "d0" and _serves(1)(node, event) and not liars and rollbacks(world):
            liars.add(node.id)
        if node.id in liars:
            for key, state in node.peer.states.pinned.items():
                if key[0] == 1 and state.pieces[1] != -1:
                    node.peer.states.pinned[key] = replace(state, pieces=(state.pieces[0], *[-1] * 4))

    world.watchers.append(lie)
    come_when(world, lambda: bool(rollbacks(world)))
    world.run(SOON_S)
    check_whole(world)
    refused = [fields for _, _, kind, fields in world.notes if kind == "refused"]
    found_out = {fields["subject"] for fields in refused if "not what it offered" in str(fields["reason"])}
    assert liars and found_out == liars


def test_older_snapshots_stay_until_a_newer_one_is_complete_and_no_longer() -> None:
    world = swarm(seed=1)

    def look(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.lead
        assert lead is not None
        for stage in range(3):
            assert lead.t == 0 or lead.catalog.newest(lead.t + 1) is not None, stage
        held = {key[1] for key in node.peer.states.pinned if key[0] == node.peer.ctx.run.stage}
        assert len(held) <= 3

    world.watchers.append(look)
    world.run(SOON_S)
    check_whole(world)
    for node in world.nodes.values():
        last = STEPS // EVERY * EVERY
        assert {t for _, t in node.peer.states.pinned} <= {last, last - EVERY}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("stage", "policy"), [(1, "auction"), (2, "greedy")])
def test_what_was_computed_again_equals_the_reference(stage: int, policy: str) -> None:
    run = replace(small_run(steps=5, policy=policy, minimum=2), snapshots=SnapshotsSection(every=2))
    world = training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 2, seed=stage)
    fault = lose(world, stage, faults.received(msg.Backward, 4))
    world.run(SOON_S)
    assert fault.delivered and [back.t for back in rollbacks(world)] == [2]
    check_equal(world, run)


def test_verify_reads_of_a_rollback_what_the_peers_do(tmp_path: Path) -> None:
    """A member that was to serve from an iteration on when the run went back serves at once; `verify` must
    not take it for a stranger."""
    world = swarm(seed=2)

    def strike(node: Node, event: Event) -> None:
        committed = world.nodes["d0"].peer.committed
        if "early" not in world.nodes and committed == 5:
            joiner(world, "early", after_s=0.0, stage=1)
        to_serve = world.nodes["d0"].peer.ctx.run.membership.active_from.get("early", 0)
        if to_serve > committed + 1 and "late" not in world.nodes:
            for victim in of_stage(world, 2):
                world.crash(victim)
            joiner(world, "late", after_s=0.1)

    world.watchers.append(strike)
    world.run(SOON_S)
    history = check_whole(world)
    assert len(rollbacks(world)) == 1
    to_serve = [f["from_iteration"] for _, who, kind, f in world.notes
                if (who, kind) == ("d0", "peer_active") and f["subject"] == "early"]  # fmt: skip
    since = min(commit.t for commit in history.commits if "early" in commit.stages[1].members)
    assert len(to_serve) == 1 and since < to_serve[0]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in world.log))
    # A swarm of counters has no weights whose hash its genesis could name.
    assert [problem for problem in read_log(path).problems if "initial weights" not in problem] == []


@pytest.mark.parametrize("seed", first_of(range(2), 1))
def test_those_who_were_to_serve_from_the_next_step_on_bring_the_stage_up(seed: int) -> None:
    """The stage's replicas die when a step is chosen; two newcomers serve from the next one, and have yet to
    take this one. Neither goes on asking the other."""
    world = swarm(seed, replicas=2, data_nodes=2, settings=SETTINGS)
    struck: list[int] = []

    def look(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.lead
        if lead is None or struck:
            return
        if lead.t >= 1 and "late0" not in world.nodes:
            for number in range(2):
                joiner(world, f"late{number}", 0.01, stage=2)
        serving = lead.ctx.run.membership.active_from
        if all(serving.get(f"late{number}", 0) == lead.t + 1 for number in range(2)):
            struck.append(lead.t)
            for victim in ("r2.0", "r2.1"):
                world.crash(victim)

    world.watchers.append(look)
    world.run(SOON_S)
    assert struck
    check_whole(world)
    assert len(rollbacks(world)) == 1
    assert set(of_stage(world, 2)) >= {"late0", "late1"}


@pytest.mark.costly
def test_the_only_replica_that_has_taken_the_step_is_not_moved() -> None:
    """Stage 1 is down to one replica. Of the three of stage 2 two serve from the next step on, and have
    yet to take the last one from the third: one of them moves."""
    world = swarm(seed=1, replicas=2, data_nodes=2, settings=SETTINGS)
    struck: list[int] = []
    moved: list[str] = []

    def look(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.lead
        if lead is None:
            return
        for peer in ("r2.0", "late0", "late1"):
            if lead.ctx.run.membership.stage_of(peer) == 1 and peer not in moved:
                moved.append(peer)
        if struck:
            return
        if lead.t >= 1 and "late0" not in world.nodes:
            world.crash("r2.1")
            for number in range(2):
                joiner(world, f"late{number}", 0.01, stage=2)
        serving = lead.ctx.run.membership.active_from
        if all(serving.get(f"late{number}", 0) == lead.t + 2 for number in range(2)):
            struck.append(lead.t)
            world.crash("r1.1")

    world.watchers.append(look)
    world.run(SOON_S)
    assert struck
    check_whole(world)
    assert rollbacks(world) == []
    assert moved and "r2.0" not in moved


@pytest.mark.parametrize("seed", first_of(range(2), 1))
def test_a_replica_that_took_over_a_whole_state_has_applied_the_step(seed: int) -> None:
    """r1.1 missed the gradient of step 5 and nobody gives it: the whole state comes, the step is released."""
    world = swarm(seed, settings=SETTINGS)
    missed: list[float] = []

    def hide(node: Node, event: Event) -> None:
        if isinstance(node.computer, IntegerWorker) and node.id == "r1.0" and node.peer.replica.t >= 5:
            node.computer._gradients.pop(5, None)
        prepared = node.peer.replica.all_reduce.prepared
        if node.id == "r1.1" and prepared is not None and prepared.fence.t == 5:
            if not missed:
                world.lose("d0", "r1.1", 3.0)
            missed.append(world.clock.now)
            node.peer.replica.all_reduce.prepared = None

    world.watchers.append(hide)
    world.run(SOON_S)
    assert missed
    check_whole(world)
