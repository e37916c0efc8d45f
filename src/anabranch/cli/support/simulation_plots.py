"""Pictures of simulated policies, for `anabranch simulate --plot DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli.support.simulation_report import churn_of
from anabranch.errors import os_errors_named

if TYPE_CHECKING:
    from anabranch.sim.cluster.scenario import Fleet
    from anabranch.sim.metrics.iteration_metrics import Outcome, Summary


def plot(folder: Path, fleet: Fleet, summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> None:
    """Draw bars and throughput of all policies into `folder`, which is made if missing; for each of the
    protocol's own that did not fail also a timeline and a world map of the iteration with most crashes, for
    which it is simulated again. fleet: that was simulated. summaries: means of each policy over all seeds.
    outcomes: those of seed 0. Raises UserError if a file cannot be written."""
    from anabranch.flow.policies.registry import POLICIES
    from anabranch.observe.plots.policy_plots import draw_bars, draw_throughput

    scenario = fleet.scenario
    bars = {
        each.policy: (figure["iteration_s"].mean, figure["iteration_s"].half, figure["bound_s"].mean)
        for each in summaries
        for figure in (each.figures,)
    }
    finished = {each.policy for each in outcomes if not each.failure}
    lines = {
        each.policy: [
            (row.seconds, row.alive_s / row.seconds, row.bound_s, row.crashes)
            for row in each.rows[scenario.run.warm_up :]
        ]
        for each in outcomes
    }
    title = f"{scenario.name}, {churn_of(scenario)}"
    tokens = scenario.model.microbatches * scenario.work.tokens
    with os_errors_named(f"--plot {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        draw_bars(bars, title, folder / "policies.svg")
        draw_throughput(lines, tokens, title, folder / "throughput.svg")
        for policy in bars:
            if policy in POLICIES and policy in finished:
                _draw_worst_iteration(folder, fleet, policy)


def _draw_worst_iteration(folder: Path, fleet: Fleet, policy: str) -> None:
    """Simulate the fleet under a policy with seed 0 again, and draw its iteration with most crashes as
    timeline (SVG and JSON) and world map into `folder`; nothing if no iteration is counted. Raises OSError if
    a file cannot be written."""
    from anabranch.observe.plots.iteration_timeline import draw_timeline, in_seconds, trace
    from anabranch.observe.plots.world_map import draw_map
    from anabranch.sim.experiment.initial_placement import placed
    from anabranch.sim.experiment.run import Simulation
    from anabranch.sim.experiment.timeline import TimelineRecorder
    from anabranch.sim.metrics.phase_breakdown import PHASES

    scenario = fleet.scenario
    simulation = Simulation(placed(scenario, fleet.regions, 0), policy, 0)
    spans = TimelineRecorder(simulation)
    rows = simulation.run().rows[scenario.run.warm_up :]
    if not rows:
        return
    row = max(rows, key=lambda row: row.crashes)
    nodes = sorted(fleet.hosts, key=lambda name: (fleet.hosts[name].stage, name))
    crashes = f"{row.crashes} crash{'' if row.crashes == 1 else 'es'}"
    title = f"{policy}, iteration {row.t}: {in_seconds(row.seconds, row.seconds)}, {crashes}"
    phases = {name[:-2]: row.phases[name] for name in PHASES}
    happened, repairs, begin_s = spans.of(row.t), spans.repairs(row.t), spans.time_of(row.t)[0]
    draw_timeline(happened, nodes, title, folder / f"timeline-{policy}.svg", phases, repairs, begin_s)
    (folder / f"timeline-{policy}.json").write_text(trace(happened, nodes, repairs), "utf-8")
    hosts = {name: (host.region, host.stage) for name, host in fleet.hosts.items()}
    paths = [path for path in spans.paths(row.t) if path]
    caption = f"{scenario.name}: {title}, {len(paths)} microbatches in flight"
    draw_map(hosts, paths, spans.crashed(row.t), caption, folder / f"map-{policy}.svg")
