"""Grid of codecs, delay, stages and faults: workers train with torch, and every bit is the reference's.

States of integer workers depend on no codec, so these workers compute with tensors, with the smallest model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from anabranch.config import CheckpointSection, RunConfig, SnapshotsSection, WireSection
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.delay import LEAST_START
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.tensor_world import MadeUpBatches, small_run
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.torch_world import node_member
from support.grids import every_value
from support.swarms import fault_points as faults
from support.swarms import lost_stages
from support.swarms.fault_points import Fault, kill
from support.swarms.mutants import MUTANTS
from support.swarms.small_swarm import _truth, check_equal, small_model
from support.swarms.training_world import training_world

STEPS, MICROBATCHES, REPLICAS = 7, 4, 2
#: Iteration in which faults strike: with a delay one of two in flight.
AT = LEAST_START + 2
SNAPSHOTS, LATE = 2, "late"

CODECS = {
    "none": WireSection(),
    "bf16": WireSection(activations="bf16", gradients="bf16"),
    "fp16": WireSection(activations="fp16", gradients="fp16"),
    "int8": WireSection(activations="int8", gradients="int8"),
    "int8 stochastic": WireSection(activations="int8", gradients="int8", gradient_rounding="stochastic"),
    "int4, gradients int8": WireSection(activations="int4", gradients="int8"),
    "int8, coarse sums": WireSection(activations="int8", gradients="int8", reduce="coarse"),
}


def world_of(codec: str, delay: int, stages: int) -> tuple[World, RunConfig]:
    """World with two data nodes and two relays a stage, not yet running, and its run file. Lost stages come
    back from snapshots, as there are no checkpoints."""
    run = small_run(stages, MICROBATCHES, STEPS, CODECS[codec], delayed=bool(delay))
    run = replace(
        run,
        fleet=replace(run.fleet, minimum=REPLICAS),
        checkpoint=CheckpointSection(every=0),
        snapshots=SnapshotsSection(every=SNAPSHOTS),
    )
    world = training_world(run, small_model(run), MadeUpBatches(run), [REPLICAS] * stages, data_nodes=2)
    Invariants(world)
    return world, run


def freeze(world: World, node: Node) -> None:
    world.freeze(node.id, 15.0)


def join(world: World, node: Node, after_s: float = 0.05) -> None:
    world.add(node_member(LATE, node.stage), "d0", world.clock.now + after_s)


def leave(world: World, node: Node) -> None:
    node.handle(ev.Stopping("the user stopped it"))


def lose_stage(world: World, node: Node) -> None:
    """All replicas of the victim's stage die; one for it comes later, so that nobody has its state."""
    kill(*(f"r{node.stage}.{number}" for number in range(REPLICAS)))(world, node)
    join(world, node, 3.0)


def removed(world: World) -> set[str]:
    """Peers that a record of members removed."""
    records = [decode_entry(line).record for line in world.log]
    return {peer for record in records if isinstance(record, Members) for peer in record.removed}


def joined(world: World) -> set[str]:
    """Relays that came later and serve."""
    records = [decode_entry(line).record for line in world.log]
    served = {peer for record in records if isinstance(record, Members) for peer in record.active_from}
    return served & {LATE}


Strike = Callable[[World, Node], None]
#: Fault -> its strike, and whether the log has its consequence.
FAULTS: dict[str, tuple[Strike, Callable[[World, str], bool]]] = {
    "crash": (kill(), lambda world, victim: removed(world) == {victim}),
    "join": (join, lambda world, victim: bool(joined(world)) and not removed(world)),
    "leave": (leave, lambda world, victim: removed(world) == {victim}),
    "freeze": (freeze, lambda world, victim: victim in removed(world)),
    "lost stage": (lose_stage, lambda world, victim: len(removed(world)) == REPLICAS and bool(joined(world))),
}


def check_cell(codec: str, delay: int, stages: int, fault: str) -> None:
    """Run a cell: the fault is delivered and shows in the log, and every bit is right."""
    world, run = world_of(codec, delay, stages)
    strike, showed = FAULTS[fault]
    relays = tuple(sorted(name for name in world.nodes if name.startswith("r")))
    planned = Fault(world, relays, faults.sent_backward(AT), strike)
    world.run(900.0)
    ((_, victim, committed),) = planned.delivered
    assert AT - 1 - delay <= committed < AT
    assert showed(world, victim), removed(world)
    lost = fault == "lost stage" and committed % SNAPSHOTS  # else the last step has a snapshot
    assert len(lost_stages.rollbacks(world)) == bool(lost)
    check_equal(world, run)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("delay_and_codec", "fault", "stages"), every_value(product((0, 1), CODECS), FAULTS, (1, 3))
)
def test_no_bit_differs(delay_and_codec: tuple[int, str], fault: str, stages: int) -> None:
    """I1 to I7 after each event, and each committed state is that of one process (I3). The fault strikes in
    the middle of a backward pass, whose microbatches others compute again: they round as the first did. A
    codec may do wrong with a delay alone, so that all pairs of these stay in the suite."""
    delay, codec = delay_and_codec
    check_cell(codec, delay, stages, fault)


#: Mutant of a codec, or of what a delayed iteration rounds to -> a cell that catches it.
BROKEN = {
    "a codec at one end only": ("int8", 0, 1, "join"),
    "a codec of activations at one end only": ("int4, gradients int8", 0, 1, "join"),
    "draws by attempt": ("int8 stochastic", 0, 1, "crash"),
    "units of the state before": ("int8, coarse sums", 0, 1, "join"),
    "a delayed iteration on the state's weights": ("none", 1, 1, "join"),
    "a delayed iteration in units of the open one": ("int8, coarse sums", 1, 1, "join"),
}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_codec_is_caught(name: str) -> None:
    """Other bits than the reference's (I3)."""
    _truth.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            MUTANTS[name].breaks(patch)
            with pytest.raises(AssertionError):
                check_cell(*BROKEN[name])
    finally:
        _truth.cache_clear()  # its results may have come from broken code
