"""Messages of a single member that ended the leader or the run, found by review."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import STRANDED, AnyRecord, Commit, Members, decode_entry
from anabranch.protocol.messages import AnyMessage, Claim, Overflow, Slots
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import overflowing


def records(world: World) -> list[AnyRecord]:
    return [decode_entry(line).record for line in world.log]


def removed(world: World) -> dict[str, str]:
    """Peers that lost their seats -> reason; without those that were moved to another stage."""
    return {
        peer: reason
        for record in records(world)
        if isinstance(record, Members)
        for peer, reason in record.removed.items()
        if not reason.startswith("moves to")
    }


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, float("nan")])
def test_a_data_node_whose_losses_have_no_sum_is_out(loss: float) -> None:
    """Two losses of 1.7e308 each are finite, and their sum is not: the step was logged, and ended the leader
    and all volunteers that told of it."""
    settings = Settings("loss", 1, 1, 6, 10, min_replicas=1)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r1.0", 1), Machine("r1.1", 1)]
    world = counting_world(settings, machines, 1)
    send = world.send

    def lie(sender: Node, peer: str, message: AnyMessage, payload: Any = None) -> None:
        if sender.member.id == "d1" and isinstance(message, Claim) and message.fence.t >= 3:
            message = msgspec.structs.replace(message, losses=dict.fromkeys(message.losses, loss))
        send(sender, peer, message, payload)

    world.send = lie  # type: ignore[method-assign, assignment]
    world.run(60.0)
    commits = [record for record in records(world) if isinstance(record, Commit)]
    assert len(commits) == 10 and wrong_states(world).keys() <= {"d1"}
    assert list(removed(world)) == ["d1"]
    assert all(abs(each) < 1e6 for record in commits for each in record.loss_sums)


def lone_relay(replicas: int, lies: bool = True, tensor: str = "made up") -> World:
    """World whose relay r2.0, alone at its stage, finds an overflow in each iteration from the third on.
    replicas: of stage 1. lies: True if it makes them up, from three messages, in `tensor`; else there are
    some."""
    settings = Settings("sole", 1, 2, 6, 12, min_replicas=1, snapshot_every=2, snapshot_copies=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{n}", 1) for n in range(replicas)), Machine("r2.0", 2)]
    world = counting_world(settings, machines, 1)
    if not lies:
        overflowing(world, 2, lambda task, _: isinstance(task, tasks.Forward) and task.t >= 3)
        return world
    send = world.send

    def lie(sender: Node, peer: str, message: AnyMessage, payload: Any = None) -> None:
        if sender.member.id == "r2.0" and isinstance(message, Slots) and message.fence.t >= 3:
            send(sender, "d0", Overflow(message.fence, 2, 0, tensor, "d0"), None)
        send(sender, peer, message, payload)

    world.send = lie  # type: ignore[method-assign, assignment]
    return world


def test_overflows_that_only_the_one_replica_of_a_stage_finds_stop_no_run() -> None:
    """Three messages of it ended the run."""
    world = lone_relay(3)
    world.run(200.0)
    history = world.history()
    assert list(removed(world)) == ["r2.0"]
    assert history.t == 12 and wrong_states(world).keys() <= {"r2.0"}


def test_an_overflow_with_the_name_of_a_round_without_machines_skips_no_step() -> None:
    """Skips for want of machines count as no overflows, so all steps that were left were skipped, and
    `verify` found nothing."""
    world = lone_relay(3, tensor=STRANDED)
    world.run(200.0)
    history = world.history()
    assert all(commit.verdict == "step" for commit in history.commits) and history.t == 12


def test_overflows_of_the_one_replica_of_a_stage_are_believed_once_its_successor_finds_them() -> None:
    world = lone_relay(3, lies=False)
    world.run(200.0)
    assert list(removed(world))[:1] == ["r2.0"]
    reason, _ = world.nodes["d0"].stopped or ("", False)
    assert "3 skipped steps in a row" in reason


def test_overflows_are_believed_where_nobody_else_could_look() -> None:
    world = lone_relay(1, lies=False)
    world.run(200.0)
    reason, _ = world.nodes["d0"].stopped or ("", False)
    assert removed(world) == {} and "3 skipped steps in a row" in reason


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("microbatches", [1, 6])
def test_a_relay_that_leads_and_alone_finds_the_overflows_ends_the_run(microbatches: int) -> None:
    """The founder is away. The leader was to be expelled by itself, which never happens, and skipped all the
    steps that were left. Where all microbatches overflow, no claim told it the hash of the batch, and it
    skipped none."""
    machines = [Machine("d0", 0), Machine("r2.0", 2), Machine("d1", 0)]
    machines += [Machine(f"r1.{n}", 1) for n in range(3)]
    settings = Settings("sole", 1, 2, 6, 40, voters=3, snapshot_every=2, snapshot_copies=2)
    world, led = counting_world(settings, machines, 1), list[int]()

    def bad(task: tasks.Task, _: tuple[tasks.Payload, ...]) -> bool:
        return isinstance(task, tasks.Forward) and task.index < microbatches and bool(led)

    overflowing(world, 2, bad)

    def look(node: Node, event: ev.Event) -> None:
        if node.id == "d0" and node.peer.committed == 4 and node.alive:
            assert "r2.0/0" in node.peer.ctx.log.voters
            world.crash("d0")
        elif node.id == "r2.0" and node.peer.lead is not None and not led:
            led.append(node.peer.committed)

    world.bookkeepers.append(look)
    with pytest.raises(TimeoutError):  # for the founder
        world.run(60.0)
    lead = world.nodes["r2.0"].peer.lead
    assert led and lead is not None and "3 skipped steps in a row" in (lead.tip.stop_reason or "")
    skips = [record.t for record in records(world) if isinstance(record, Commit) and record.verdict == "skip"]
    assert len(skips) == 3
