"""Whole weight trajectories, kept as hashes: what a change that is not about numbers leaves identical.

    make golden     # after a change that is: the reference writes them anew

A golden history is what the single-process reference computes: for every iteration a hash of each stage's
state before the step (weights, moments, counters) and of all that the log says of the step, and the states at
the end. They hold for one numerics class (torch build, instruction set, threads:
docs/explanation/numerics.md); a file keeps one for each class in which it was written. Each scenario is
also a swarm under faults, which must tell the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3

from anabranch.config import ComputeSection, RunConfig, SnapshotsSection
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Rollback, decode_entry
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.torch_world import node_member
from anabranch.train.numerics.numerics_class import configure, numerics_class
from anabranch.train.reference.reference import Reference
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment, kill
from support.swarms.small_swarm import MadeUpBatches, small_model, small_run
from support.swarms.training_world import training_world

FOLDER = Path(__file__).parents[2] / "swarm" / "exactness" / "golden"
VERSION = 1
STEPS = 8
#: Hexadecimal digits that are kept of each hash.
DIGITS = 16


@dataclass(frozen=True)
class Blow:
    """A fault at the first of `victims` that has its moment. comes: and a stranger soon after it."""

    victims: tuple[str, ...]
    moment: Moment
    strike: Callable[[World, Node], None] = field(default_factory=kill)
    comes: bool = True


@dataclass(frozen=True)
class Scenario:
    """replicas[s-1] relays at stage s. blows: made anew for each world, as moments count. rollbacks: at least
    so many are needed."""

    run: RunConfig
    replicas: tuple[int, ...]
    data_nodes: int
    blows: Callable[[], Sequence[Blow]]
    rollbacks: int = 0
    seed: int = 1


def _freeze(seconds: float) -> Callable[[World, Node], None]:
    return lambda world, node: world.freeze(node.id, seconds)


def _crashes() -> list[Blow]:
    return [
        Blow(("r1.0", "r1.1"), faults.added_in_mid_backward(2)),
        Blow(("r2.0", "r2.1"), faults.ended(tasks.Assemble, 4)),
        Blow(("r1.0", "r1.1"), faults.chosen(6)),
    ]


def _everywhere() -> list[Blow]:
    neighbours = kill("r3.1")
    return [
        Blow(("d1",), faults.received(msg.Backward, 2), comes=False),
        Blow(("r2.1",), faults.received(msg.Forward, 4, 3), neighbours),
        Blow(("r1.0",), faults.received(msg.Backward, 5), _freeze(20.0)),
        Blow(("r4.0",), faults.received(msg.ReducePart, 7)),
    ]


def _lost_stages() -> list[Blow]:
    return [
        Blow(("r2.0", "r2.1"), faults.received(msg.Backward, 4), kill("r2.0", "r2.1")),
        Blow(("r1.0", "r1.1"), faults.received(msg.Forward, 7), kill("r1.0", "r1.1")),
    ]


def _run(architecture: str, stages: int, dtype: str = "fp32", snapshots: int = 2) -> RunConfig:
    run = small_run(architecture, stages, STEPS, policy="auction", minimum=2, evaluate_every=3, blocks=4)
    return replace(
        run,
        compute=ComputeSection(device="cpu", dtype=dtype),
        snapshots=SnapshotsSection(every=snapshots),
    )


def _muon(run: RunConfig) -> RunConfig:
    return replace(run, optimizer=replace(run.optimizer, kind="muon"))


SCENARIOS: dict[str, Scenario] = {
    "llama-crashes": Scenario(_run("llama", 2), (2, 2), 1, _crashes),
    "gpt-everywhere": Scenario(_run("gpt", 4), (2, 2, 2, 2), 2, _everywhere),
    "llama-lost-stages": Scenario(_run("llama", 2), (2, 2), 2, _lost_stages, rollbacks=1),
    "muon-crashes": Scenario(_muon(_run("llama", 2)), (2, 2), 1, _crashes),
    "muon-lost-stages": Scenario(_muon(_run("gpt", 2)), (2, 2), 2, _lost_stages, rollbacks=1),
    "bf16-crashes": Scenario(_run("llama", 2, "bf16"), (2, 2), 1, _crashes, seed=2),
}


# --- told by one process, and by a swarm --------------------------------------------------------


def told_by_reference(run: RunConfig) -> list[str]:
    """The history of a single process: a line per iteration, then the states at the end."""
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    lines = []
    for t in range(1, run.run.steps + 1):
        step = reference.step(reference.share(t, range(run.batch.microbatches)))
        losses = [step.losses[index] for index in range(run.batch.microbatches)]
        values = (step.norm, step.clip_factor, step.learning_rate, *step.bias_corrections)
        lines.append(_line(step.fingerprints, losses, step.digests, step.squares, values))
    return [*lines, _short(reference.fingerprints())]


def told_by_swarm(world: World) -> list[str]:
    """The history of a simulated swarm, without what was rolled back and without who computed what."""
    lines = []
    for commit in world.history().commits:
        squares = {name: value for stage in commit.stages for name, value in stage.squares.items()}
        values = (commit.norm, commit.clip_factor, commit.learning_rate)
        corrections = (commit.bias_correction1, commit.bias_correction2)
        states = [stage.fingerprint_before for stage in commit.stages]
        digests = [stage.digest for stage in commit.stages]
        lines.append(_line(states, commit.loss_sums, digests, squares, (*values, *corrections)))
    last = {}
    for node in world.nodes.values():
        if node.alive and node.peer.replica.t == world.history().t:
            last[node.peer.ctx.run.stage] = node.peer.replica.fingerprint
    return [*lines, _short([last[stage] for stage in sorted(last)])]


def _line(
    states: Sequence[str],
    losses: Sequence[float],
    digests: Sequence[str],
    squares: dict[str, float],
    values: Sequence[float],
) -> str:
    """Each stage's state before the step, and one hash of the step itself."""
    told = [*map(float.hex, losses), *digests, *map(float.hex, map(float, values))]
    told += [f"{name} {value.hex()}" for name, value in sorted(squares.items())]
    return f"{_short(states)} {blake3.blake3(' '.join(told).encode()).hexdigest()[:DIGITS]}"


def _short(states: Sequence[str]) -> str:
    return " ".join(state[:DIGITS] for state in states)


# --- the swarm under faults ---------------------------------------------------------------------


def play(scenario: Scenario) -> tuple[World, list[Fault]]:
    """The scenario's swarm to its end, under its faults."""
    run = scenario.run
    data = MadeUpBatches(run)
    world = training_world(
        run, small_model(run), data, scenario.replicas, scenario.data_nodes, scenario.seed, capacity=3
    )
    planned = []
    for number, blow in enumerate(scenario.blows()):
        strike = _and_another(blow, f"late{number}") if blow.comes else blow.strike
        planned.append(Fault(world, blow.victims, blow.moment, strike))
    world.run(until_s=600)
    return world, planned


def _and_another(blow: Blow, name: str) -> Callable[[World, Node], None]:
    """The blow, and half a second later a stranger who takes any stage."""

    def strike(world: World, node: Node) -> None:
        blow.strike(world, node)
        world.add(node_member(name, -1), "d0", world.clock.now + 0.5)

    return strike


def rollbacks(world: World) -> int:
    return sum(isinstance(decode_entry(line).record, Rollback) for line in world.log)


# --- the files ----------------------------------------------------------------------------------


def class_of(run: RunConfig) -> tuple[str, dict[str, str]]:
    """This machine's numerics class for a run, and what it is made of."""
    return numerics_class(run.compute, run.batch.rows, run.batch.sequence)


def kept(name: str) -> dict[str, Any]:
    """The file of a scenario: numerics class -> `described` and `history`."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert content["version"] == VERSION
    classes: dict[str, Any] = content["classes"]
    return classes


def write(name: str) -> None:
    """Enter what the reference computes on this machine."""
    run = SCENARIOS[name].run
    key, described = class_of(run)
    classes = kept(name) | {key: {"described": described, "history": told_by_reference(run)}}
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"version": VERSION, "classes": classes}, indent=1)
    (FOLDER / f"{name}.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    configure(threads=1)
    for each in SCENARIOS:
        write(each)
