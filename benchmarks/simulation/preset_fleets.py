"""Throughput and bytes of the presets on three fleets, by the simulator or by a bound that favours them.

llama-350m, one draw of each fleet, no churn. A step of every row has as many tokens, and every relay takes
part. What the simulator cannot do of a preset is left out or made cheaper, never dearer, so that a preset is
at most as quick as its row says (SAYS names each such choice); `anabranch` has no such choice, and rounds of
50, 10 or 1 steps: each fleet has the shortest that are not much slower than the quickest (`ours`). Figures
are kept in build/sync-methods.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from anabranch.config import RunConfig
from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import Scenario, fleet_of, load_scenario
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Outcome, Row
from anabranch.sim.planning.crews import CrewEstimates
from anabranch.train.recipes.presets import PRESETS, with_preset
from anabranch.train.recipes.recipes import recipe_run
from benchmarks import harness

KEPT = harness.CACHE / "sync-methods"
SYNCHRONOUS, OURS = "synchronous", "anabranch"
#: Rows without a curve of their own: that of the synchronous row counts for them, which favours them.
SWARM, DEDLOC = "swarm", "dedloc"
LIKE_SYNCHRONOUS = SWARM, DEDLOC
RAVNEST = "ravnest"
#: Row -> inner steps of its rounds: this project's preset with its own, and with shorter rounds.
OURS_STEPS = {OURS: PRESETS[OURS].settings["round.steps"], f"{OURS}-10": 10, f"{OURS}-1": 1}
ISLANDS = *OURS_STEPS, "diloco", "streaming-diloco", "opendiloco", RAVNEST, "sparse", "gaia"
ROWS = SYNCHRONOUS, *LIKE_SYNCHRONOUS, *ISLANDS

_LINES_100 = {"network.up_bps": [100e6], "network.down_bps": [100e6]}
_EQUAL = {"fleet.device": ["rtx3090"], "fleet.speed": [1.0]} | _LINES_100
#: Fleet -> scenario, changes of it.
FLEETS: dict[str, tuple[str, dict[str, Any]]] = {
    "volunteers": ("volunteers", {}),
    "100 Mbit/s": ("volunteers", _EQUAL),
    "wan10": ("wan10", {}),
}
#: Fleet -> most steps of a round that are simulated: on slow machines 500 take hours, and 50 hide it all.
MOST_STEPS = {"wan10": 50}
#: Microbatches of a step for each relay.
EACH = 16
#: Least throughput of the rounds that count as ours on a fleet, as a share of the quickest. A choice: rounds
#: of 50 steps need about twice as many steps to the synchronous loss as rounds of 10.
QUICK = 0.4
#: Bytes of a value that SparseLoCo's paper sends: of each 4,096 values 64, each with its place (12 bits) and
#: 2 bits.
SPARSE_BYTES = 64 * (12 + 2) / 8 / 4096
#: Bytes of 4-bit integers with a scale for each 64 values.
FOUR_BITS = 0.5 + 2 / 64
#: Row -> what its simulation leaves out of it or makes cheaper.
SAYS = {
    SYNCHRONOUS: "pipeline of six stages, routed by prices and queues; the quickest of four steps",
    SWARM: "the same, routed alike, with 8-bit cuts and two steps in flight; its 8 bits and its delayed "
    "update cost no tokens",
    DEDLOC: "whole models, shares by the linear program; the quicker of two steps",
    OURS: "as it is",
    f"{OURS}-10": "as it is, with `round.steps = 10`",
    f"{OURS}-1": "as it is, with `round.steps = 1`",
    "diloco": "rounds of 500 steps (its losses, and wan10, have 50), 4 bytes a value each way",
    "streaming-diloco": "a third of the values each round, 4 bits both ways, 5 steps ahead",
    "opendiloco": "rounds of 500 steps (its losses, and wan10, have 50), 2 bytes a value both ways",
    RAVNEST: "estimate of `plan` for crews of two relays, with 4 bytes a value each way; its pipeline waits "
    "in each step, the paper's does not; simulated rounds of 3 steps have 0.71 of the estimate on wan10",
    "sparse": "places of 12 bits and values of 2, and as many bytes of each other island back",
    "gaia": "each step a round of all values (4 and 8 bits): of the small models 75 % are significant in the "
    "first round and 97 % in the 300th",
}


class Figures(msgspec.Struct):
    """Figures of a row on a fleet. tokens_per_s: virtual. bytes_per_token: of payloads and messages, all
    machines together. alone_tokens_per_s: of the fleet's best machine alone (0: not simulated). says: program
    that found them."""

    tokens_per_s: float
    bytes_per_token: float
    alone_tokens_per_s: float = 0.0
    says: str = ""


def fleet_changes(fleet: str, row: str) -> tuple[str, dict[str, Any]]:
    """Scenario of a row on a fleet, and its changes."""
    name, changes = FLEETS[fleet]
    relays = load_scenario(name, changes).fleet.relays
    shared = {"churn.crash": 0.0, "run.heartbeat_s": 60.0, "fleet.neighbours": relays}
    changes = changes | shared | {"model.microbatches": EACH * relays}
    if row == SYNCHRONOUS:
        return name, changes | {"run.iterations": 5, "run.warm_up": 1}
    if row == SWARM:
        cuts = {"wire.activations": "int8", "wire.gradients": "int8", "wire.block": 4096}
        return name, changes | cuts | {"run.delay": 1, "run.iterations": 6, "run.warm_up": 4}
    if row == DEDLOC:
        whole = {"model.stages": 0, "fleet.spare": "never", "fleet.spread": "program"}
        return name, changes | whole | {"run.iterations": 3, "run.warm_up": 1}
    found = _rounds(row, relays)
    steps = min(found["round.steps"], MOST_STEPS.get(fleet, found["round.steps"]))
    return name, changes | found | {"round.steps": steps}


def with_row(run: RunConfig, row: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """Run file with the preset of a row and then `changes`, by dotted key."""
    if row in OURS_STEPS:
        return with_preset(run, OURS, {"round.steps": OURS_STEPS[row], **(changes or {})})
    return with_preset(run, row, changes)


def ours(figures: Mapping[str, Figures | None]) -> str:
    """This project's row for a fleet: the one with the shortest rounds that have QUICK of the throughput of
    the quickest of them. figures: row -> its figures on that fleet."""
    known = {row: found.tokens_per_s for row in OURS_STEPS if (found := figures.get(row))}
    enough = [row for row, speed in known.items() if speed >= QUICK * max(known.values())]
    return min(enough, key=lambda row: OURS_STEPS[row], default=OURS)


def _rounds(row: str, relays: int) -> dict[str, Any]:
    """Changes of a scenario for the rounds of a row."""
    part = with_row(recipe_run("llama-tiny"), row).round
    found = {
        "model.stages": 0,
        "fleet.spare": "never",
        "round.slots": relays,
        "round.steps": part.steps,
        "round.overlap": part.overlap,
        # The first rounds are planned before all speeds and lines are known.
        "run.iterations": 4,
        "run.warm_up": 2,
    }
    if row == RAVNEST:
        found |= {"model.stages": 2, "round.slots": relays // 2}
    sizes = {
        "diloco": (4.0, 4.0),
        "opendiloco": (2.0, 2.0),
        "streaming-diloco": (FOUR_BITS / part.fragments,) * 2,
        RAVNEST: (4.0, 4.0),
        "sparse": (SPARSE_BYTES, relays * SPARSE_BYTES),
    }
    if row in sizes:
        sums, results = sizes[row]
        return found | {"precision.sum_bytes": sums, "precision.reduced_bytes": results}
    return found | {"round.contributions": part.contributions, "round.results": part.results}


def kept(fleet: str, row: str) -> Figures | None:
    """Figures of a row on a fleet that were kept; None if there are none."""
    path = _path(fleet, row)
    return msgspec.json.decode(path.read_bytes(), type=Figures) if path.exists() else None


def _path(fleet: str, row: str) -> Path:
    return KEPT / f"times-{fleet.split()[0]}-{row}.json"


def measure(fleet: str, row: str) -> None:
    """Find the figures of a row on a fleet, and keep them."""
    name, changes = fleet_changes(fleet, row)
    scenario = load_scenario(name, changes)
    found = of_crews(scenario) if row == RAVNEST else _simulated(scenario, row)
    if found:
        found.says = harness.program()
        harness.write_whole(_path(fleet, row), msgspec.json.encode(found))
        print(f"{fleet}, {row}: {found}", file=sys.stderr, flush=True)


def _simulated(scenario: Scenario, row: str) -> Figures | None:
    """Figures of a simulation; None if it failed, which is printed."""
    outcome = simulate(scenario, find_profile(scenario.network.profile), "auction", 0)
    if outcome.failure:
        print(f"{scenario.name}, {row}: {outcome.failure}", file=sys.stderr, flush=True)
        return None
    return figures_of(scenario, outcome, quickest=row in (SYNCHRONOUS, DEDLOC))


def figures_of(scenario: Scenario, outcome: Outcome, quickest: bool) -> Figures:
    """Figures of the iterations of an outcome that count. quickest: only the quickest of them counts."""
    rows: Iterable[Row] = outcome.rows[scenario.run.warm_up :]
    if quickest:
        rows = [min(rows, key=lambda row: row.seconds)]
    rows = list(rows)
    tokens = scenario.work.tokens * sum(each.microbatches or scenario.model.microbatches for each in rows)
    sent = sum(each.payload_bytes + each.message_bytes for each in rows)
    return Figures(tokens / sum(each.seconds for each in rows), sent / tokens, outcome.alone_tokens_per_s)


def of_crews(scenario: Scenario) -> Figures:
    """Figures of pipeline islands, by the estimate of `plan` and the bytes of its activations and sums."""
    fleet = fleet_of(scenario, find_profile(scenario.network.profile), 0)
    work, part = scenario.work, scenario.round
    count = scenario.model.microbatches * part.steps
    # Activations come and go over each cut between a data node and the relays of its crew.
    cuts = count * (work.stages + 1) * (work.activation_bytes + work.gradient_bytes)
    parameters = sum(map(work.parameters, range(work.stages + 1)))
    exchanged = (part.slots - 1) * parameters * sum(scenario.round_bytes)
    tokens = count * work.tokens
    return Figures(tokens / CrewEstimates(fleet).of().iteration_s, (cuts + exchanged) / tokens)
