"""Iteration time of a small real swarm in the emulated ten regions, beside that of the simulator.

    python -m benchmarks.simulation.simulated_against_real [--thin] [--repetitions 3] [--steps 26]

Needs Linux, root and /dev/net/tun (network namespaces), and a machine that does nothing else: with the
defaults about twelve minutes. One scenario calibrates: seconds of each task per block of the model come from
its timings (its first run's), and one number, the round trips that a connection takes for a burst
(`network.burst_trips`: TCP's pacing, encryption and Python), is chosen so that the simulated iteration takes
as long as the real one. Three others are judged by these figures and the network's profile alone: a longer
pipeline, more replicas elsewhere, and one whose relay is killed. A repetition whose iterations spread by more
than a tenth of their mean (standard deviation, before and after the crash apart) is thrown out and counted.
Real runs are kept in build/sim-vs-real and taken from there: a benchmark that was stopped goes on, and a
changed simulator is judged by the same runs.

With --thin all lines have 1/300 of the rates (1 to 4 Mbit/s), so that an iteration waits for bytes and other
work on the machine matters little. The swarm is calibrated without codec, delay and snapshots; it is judged
with int8 cuts, with two iterations in flight, and without codec and in either way with snapshots. Each run is
compared with a simulation that has the seconds of its own tasks, and the number is the share of the rates
that payloads get. On quick lines two iterations in flight would need more than all of two cores, and every
simulated machine has its own. Begin with `--thin --steps 17 --warm-up 5`: seventeen minutes for each
repetition of all.

Batches are large enough that every replica is worth a part of them: with six microbatches all go one way, and
which, of two about as long, is a matter of chance.

The first iterations are not counted: connections are slow at first, and about ten seconds later one iteration
takes up to 0.4 s more, which is what BBR's PROBE_RTT would do (0.2 s and a round trip; not shown to be it).
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from anabranch.cli.support.recorded_scenario import record
from anabranch.config import RunConfig, with_changes
from anabranch.net.wan.emulated_network import available
from anabranch.net.wan.places import emulated, regions_of
from anabranch.net.wan.profile import Link, Profile, find_profile
from anabranch.node.lifecycle.create_run import create_run
from anabranch.node.local_swarm.local_swarm import LocalSwarm, processes_of
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Step
from anabranch.sim.cluster.churn_trace import LEAVE, Change, Trace, render_trace
from anabranch.sim.cluster.device_model import WirePart
from anabranch.sim.cluster.machine_spec import MachinePart
from anabranch.sim.cluster.scenario import Scenario
from anabranch.sim.cluster.scenario_schema import ChurnPart, FleetPart, ModelPart, NetworkPart, RunPart
from anabranch.sim.experiment.run import simulate
from benchmarks import harness
from benchmarks.harness import Goal, table

GOAL, SPREAD = 0.10, 0.10
#: How well the calibration has to fit, and repetitions that have to be kept for a scenario to be judged.
CALIBRATED, KEPT = 0.02, 2
SIZE, ROWS, SEQUENCE = "llama-tiny", 2, 128
#: The relay that is killed, steps after the warm-up and the share of an iteration before it is.
VICTIM, AFTER, SHARE = "relay-2.1", 2, 0.5
#: Round trips for a burst that are tried, and how often the interval is halved.
TRIPS, HALVED = (0.05, 1.0), 9
#: Shares of the lines' rates that are tried on thin lines, and the pacing there: the one that was calibrated
#: on quick lines (docs/results/sim-vs-real.md).
CARRIED, THIN_TRIPS = (0.4, 1.0), 0.66
PATIENCE_S = 900.0
#: Real runs that were made.
FOLDER = harness.CACHE / "sim-vs-real"
SEEDS = 3


@dataclass(frozen=True)
class Setting:
    """Swarm. relays: replicas of each stage. crash: VICTIM is killed. rates: factor on the lines' rates.
    snapshots: iterations between them (0: the run file's rule). copies: of each (0: no snapshots)."""

    name: str
    relays: tuple[int, ...]
    microbatches: int
    crash: bool = False
    codec: str = "none"
    delay: int = 0
    rates: float = 1.0
    snapshots: int = 0
    copies: int = 2

    @property
    def period(self) -> int:
        """Iterations after which those of a thin swarm repeat themselves: two in flight take turns."""
        return (self.snapshots if self.copies else 0) or 1 + self.delay

    def profile(self, carried: float = 1.0) -> Profile:
        """Network: the ten regions, with `rates` times the rates, of which payloads get a share."""
        whole, share = find_profile("wan10"), self.rates * carried
        links = {pair: Link(link.delay_s, share * link.rate_bps) for pair, link in whole.links.items()}
        inside = Link(whole.same_region.delay_s, share * whole.same_region.rate_bps)
        return Profile(whole.source, whole.regions, inside, links)


CALIBRATION = Setting("two stages of two", (2, 2), 24)
JUDGED = (
    Setting("three stages, 2 1 2", (2, 1, 2), 24),
    Setting("two stages of three", (3, 3), 36),
    Setting("two stages of two, a relay killed", (2, 2), 24, crash=True),
)
#: Factor on the rates of the thin lines.
THINNER = 1 / 300
_THIN = Setting("thin lines", (2, 2), 16, rates=THINNER, copies=0)
_KEPT = replace(_THIN, name="thin lines, snapshots", copies=2, snapshots=6)
THIN = (
    _THIN,
    replace(_THIN, name="thin lines, int8 cuts", codec="int8"),
    replace(_THIN, name="thin lines, delay 1", delay=1),
    _KEPT,
    replace(_KEPT, name="thin lines, delay 1, snapshots", delay=1),
)


def run_of(setting: Setting, steps: int, texts: Path) -> RunConfig:
    return with_changes(RunConfig(), {
        "run.steps": steps, "run.name": "real", "model.size": SIZE,
        "data.source": "text", "data.path": str(texts), "data.tokenizer": "bytes",
        "batch.microbatches": setting.microbatches, "batch.rows": ROWS, "batch.sequence": SEQUENCE,
        "pipeline.stages": len(setting.relays), "fleet.data_nodes": 1,
        "fleet.relays_per_stage": list(setting.relays), "fleet.minimum": min(setting.relays),
        "evaluation.every": 0, "checkpoint.every": 1000, "compute.device": "cpu",
        "wire.activations": setting.codec, "wire.gradients": setting.codec, "iteration.delay": setting.delay,
        "snapshots.every": setting.snapshots, "snapshots.copies": setting.copies,
    })  # fmt: skip


# --- for real -----------------------------------------------------------------------------------------


@contextmanager
def real(
    setting: Setting, steps: int, warm_up: int, supervisor: Supervisor
) -> Iterator[tuple[list[float], Path]]:
    """Seconds of each iteration, and the run's directory while this is entered."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        texts.mkdir()
        for number in range(40):
            (texts / f"{number}.txt").write_text(f"text {number}: the quick brown fox\n" * 400)
        run = run_of(setting, steps, texts)
        with emulated(list(processes_of(run)), setting.profile()) as places:
            directory = create_run(run, Path(folder) / "run")
            swarm = LocalSwarm(directory, run, supervisor, places=places)
            try:
                swarm.start()
                took = _watched(swarm, setting, warm_up)
            finally:
                swarm.kill()
        yield took, directory.path


def _watched(swarm: LocalSwarm, setting: Setting, warm_up: int) -> list[float]:
    took: list[float] = []
    kill_at = [0.0]
    until = time.monotonic() + PATIENCE_S

    def poll() -> None:
        if kill_at[0] and time.time() >= kill_at[0]:
            kill_at[0] = 0.0
            swarm.processes[VICTIM].signal(signal.SIGKILL)
        if time.monotonic() > until:
            raise SystemExit(f"{setting.name}: not done in {PATIENCE_S:.0f} s")

    for event in swarm.events(poll):
        if isinstance(event, Step):
            took.append(event.seconds)
            if setting.crash and event.t == warm_up + AFTER:
                kill_at[0] = event.time + SHARE * statistics.mean(took[warm_up:])
    return took


# --- in virtual time ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibrated:
    """data: the data node. block: a relay with one block. burst_trips: of the network. carried: share of the
    lines' rates that payloads get."""

    data: MachinePart
    block: MachinePart
    burst_trips: float = 0.0
    carried: float = 1.0


def measured(run_dir: Path) -> Calibrated:
    """Seconds per block: medians over the relays."""
    _, found = record(run_dir, None)
    work = found.scenario.work
    keys = ("forward_s", "input_gradient_s", "weight_gradient_s", "reduce_s", "apply_s")
    relays = [part for part in found.scenario.machines if part.role == "relay"]
    each = {key: [getattr(part, key) / work.blocks(part.stage) for part in relays] for key in keys}
    data = next(part for part in found.scenario.machines if part.role == "data")
    return Calibrated(data, replace(relays[0], **{key: statistics.median(each[key]) for key in keys}))


def scenario_of(setting: Setting, known: Calibrated, steps: int, warm_up: int) -> Scenario:
    """The same swarm: places by the same rule, seconds by the number of blocks."""
    config = run_of(setting, steps, Path("texts"))
    names = processes_of(config)
    places = regions_of(list(names), find_profile("wan10"))
    model = ModelPart(SIZE, len(setting.relays), ROWS, SEQUENCE, setting.microbatches)
    scenario = Scenario(
        setting.name, model, FleetPart(), (), NetworkPart(burst_trips=known.burst_trips),
        ChurnPart(spare_last=False), wire=WirePart(setting.codec, setting.codec),
        run=RunPart(
            steps, warm_up, delay=setting.delay,
            snapshot_every=setting.snapshots, snapshot_copies=setting.copies,
        ),
    )  # fmt: skip
    machines = []
    for name, stage in names.items():
        blocks = scenario.work.blocks(stage) if stage else 1
        like = known.block if stage else known.data
        keys = ("forward_s", "input_gradient_s", "weight_gradient_s", "reduce_s", "apply_s")
        seconds = {key: blocks * getattr(like, key) for key in keys}
        machines.append(replace(like, name=name, stage=stage, region=places[name], **seconds))
    return replace(scenario, machines=tuple(machines))


def predicted(setting: Setting, known: Calibrated, steps: int, warm_up: int, seeds: int = SEEDS) -> float:
    """Mean seconds of a counted iteration over the seeds."""
    scenario, profile = scenario_of(setting, known, steps, warm_up), setting.profile(known.carried)
    found = []
    for seed in range(seeds):
        if not setting.crash:
            found.append(_mean(scenario, profile, seed, warm_up))
            continue
        calm = simulate(scenario, profile, "auction", seed).rows
        before = [row.seconds for row in calm[: warm_up + AFTER]]
        at_s = sum(before) + SHARE * statistics.mean(before[warm_up:])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "churn.json"
            path.write_text(render_trace(Trace("one crash", (Change(at_s, VICTIM, LEAVE),))), "utf-8")
            struck = replace(scenario, churn=replace(scenario.churn, trace=str(path)))
            found.append(_mean(struck, profile, seed, warm_up))
    return statistics.mean(found)


def _mean(scenario: Scenario, profile: Profile, seed: int, warm_up: int) -> float:
    outcome = simulate(scenario, profile, "auction", seed)
    if outcome.failure:
        raise SystemExit(f"{scenario.name}, seed {seed}: {outcome.failure}")
    return statistics.mean(row.seconds for row in outcome.rows[warm_up:])


def calibrate(
    setting: Setting, known: Calibrated, iteration_s: float, steps: int, warm_up: int
) -> Calibrated:
    """The figures with which the setting's simulated iteration takes so long: the pacing, or on thin lines,
    where it matters little, the share that is carried. The interval is halved on a logarithmic scale."""
    thin = setting.rates < 1.0
    low, high = CARRIED if thin else TRIPS

    def with_figure(value: float) -> Calibrated:
        if thin:
            return replace(known, burst_trips=THIN_TRIPS, carried=value)
        return replace(known, burst_trips=value)

    for _ in range(HALVED):
        middle = (low * high) ** 0.5
        slower = predicted(setting, with_figure(middle), steps, warm_up, 1) > iteration_s
        low, high = (middle, high) if slower == thin else (low, middle)
    return with_figure((low * high) ** 0.5)


# --- side by side -------------------------------------------------------------------------------------


def spread(took: Sequence[float], setting: Setting) -> float:
    """Standard deviation over mean of the counted iterations. Those before a crash and those after it, with a
    relay less, deviate from a mean of their own each; that of the crash is apart. So do those at each place
    in a period of thin lines."""
    period = setting.period if setting.rates < 1.0 else 1
    phases = [took[at::period] for at in range(period)]
    if setting.crash:
        phases = [took[:AFTER], took[AFTER + 1 :]]
    squares = sum((each - statistics.mean(phase)) ** 2 for phase in phases for each in phase)
    count = sum(map(len, phases))
    return float((squares / (count - len(phases))) ** 0.5 / (sum(map(sum, phases)) / count))


@dataclass(frozen=True)
class Repetition:
    """Real run of a setting. took: seconds of each iteration. known: figures of its machines."""

    took: list[float]
    known: Calibrated


def repetitions(setting: Setting, options: argparse.Namespace, supervisor: Supervisor) -> list[Repetition]:
    """Real runs of a setting: those that are kept in FOLDER, and new ones until there are enough."""
    path = FOLDER / f"{setting.name.replace(' ', '-').replace(',', '')}-{options.steps}.json"
    found = msgspec.json.decode(path.read_bytes(), type=list[Repetition]) if path.is_file() else []
    while len(found) < options.repetitions:
        with real(setting, options.steps, options.warm_up, supervisor) as (took, run_dir):
            found.append(Repetition(took, measured(run_dir)))
        harness.write_whole(path, msgspec.json.encode(found))
        counted = took[options.warm_up :]
        mean_s, percent = statistics.mean(counted), 100 * spread(counted, setting)
        print(f"{setting.name}: {mean_s:.3f} s, spread {percent:.1f} %", flush=True)
    return found[: options.repetitions]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="of each scenario")
    parser.add_argument("--steps", type=int, default=26, help="iterations of each repetition")
    parser.add_argument("--warm-up", type=int, default=14, help="of them, not counted")
    parser.add_argument("--judged", type=int, default=4, help="scenarios besides the calibration")
    parser.add_argument("--thin", action="store_true", help="judge codecs and delay")
    options = parser.parse_args()
    calibration, *judged = THIN if options.thin else (CALIBRATION, *JUDGED)
    reason = available()
    if reason is not None:
        raise SystemExit(reason)
    steps, warm_up = options.steps, options.warm_up
    rows: list[list[str]] = []
    goals: list[Goal] = []
    known: Calibrated | None = None
    with Supervisor(threads=1) as supervisor:
        for setting in (calibration, *judged[: options.judged]):
            runs = repetitions(setting, options, supervisor)
            spreads = [spread(run.took[warm_up:], setting) for run in runs]
            kept = [run for run, each in zip(runs, spreads, strict=True) if each <= SPREAD]
            means = [statistics.mean(run.took[warm_up:]) for run in kept]
            if known is None:
                if not kept:
                    raise SystemExit(f"every calibration was thrown out: is the machine quiet? ({FOLDER})")
                known = calibrate(setting, kept[0].known, statistics.mean(means), steps, warm_up)
            own = [replace(run.known, burst_trips=known.burst_trips, carried=known.carried) for run in kept]
            figures = own if options.thin and own else [known]
            simulated_s = statistics.mean(predicted(setting, each, steps, warm_up) for each in figures)
            rows.append(_row(setting, simulated_s, means, len(runs) - len(kept), spreads))
            error = simulated_s / statistics.mean(means) - 1.0 if means else math.inf
            if setting is calibration and abs(error) > CALIBRATED:
                raise SystemExit(f"no pacing {TRIPS} or share {CARRIED} fits: off by {100 * error:.1f} %")
            if setting is not calibration:
                enough = len(means) >= min(KEPT, options.repetitions)
                goals.append(goal_of(setting, error, len(means), enough))
    assert known is not None
    body = report(rows, known, options)
    title = "Simulator against real swarms" + (" with thin lines" if options.thin else "")
    name = "sim-vs-real-thin" if options.thin else "sim-vs-real"
    harness.write(name, title, body, goals=goals, dry=options.dry)
    return 0


def _row(
    setting: Setting, simulated_s: float, means: Sequence[float], thrown: int, spreads: Sequence[float]
) -> list[str]:
    kept = [setting.name, str(len(means)), str(thrown), f"{100 * statistics.median(spreads):.1f}"]
    if not means:
        return [*kept, "–", f"{simulated_s:.3f}", "–"]
    real_s = statistics.mean(means)
    range_s = f"{min(means):.3f}–{max(means):.3f}"
    return [*kept, f"{real_s:.3f} ({range_s})", f"{simulated_s:.3f}", f"{simulated_s / real_s:.3f}"]


def goal_of(setting: Setting, error: float, kept: int, enough: bool) -> Goal:
    """Goal for the deviation of a prediction; open unless enough repetitions are kept. error: relative to the
    mean of these (infinite: none is)."""
    value = f"{100 * error:+.1f} %, repetitions kept: {kept}" if kept else "no repetition was kept"
    what = f"predicted over measured iteration time, deviation, {setting.name}"
    return harness.goal(what, f"within {100 * GOAL:.0f} %", value, abs(error) <= GOAL if enough else None)


def report(rows: list[list[str]], known: Calibrated, options: argparse.Namespace) -> str:
    head = ["scenario", "kept", "thrown out", "spread %", "measured s", "predicted s", "predicted/measured"]
    return "\n".join(
        [
            f"Seconds per iteration of a real swarm under the emulated ten regions (`{SIZE}`, {ROWS}×"
            f"{SEQUENCE} tokens a microbatch, one data node) and in the simulator; {options.steps} "
            f"iterations, the first {options.warm_up} not counted. The first scenario "
            f"calibrates: seconds per block, {known.burst_trips:.2f} round trips that a "
            "connection takes for a burst (`network.burst_trips`), and the share of the lines' rates that "
            f"payloads get, {known.carried:.2f}; the others are judged."
            + (" A run is compared with a simulation that has the seconds of its own tasks." * options.thin),
            "",
            table(head, rows),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
