"""Time until the work of a lost peer is sent elsewhere, and the rate of false suspicions.

    python -m benchmarks.recovery.detection_and_repair [--seeds 40] [--hours 1.0] [--processes 3]

In virtual time (`sim/`, the protocol itself over modelled links): a relay that holds a microbatch is lost, by
a reset connection or without a word; the time is taken until that microbatch is sent to another, which has
room for it. The bound of a silent loss is that sender's own patience: three times the 99th percentile of the
gaps that it heard, plus one second. False suspicions are counted in runs without a fault, over calm and over
bad links.

On loopback with real processes: a relay of a small swarm gets SIGKILL (connections reset) or SIGSTOP (they
stay, and it is silent); the time is taken from the signal to the first repair in the event log, or to the
first verdict about the relay if it held nothing. Whatever else the machine does is in these figures.
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from anabranch.config import RunConfig, with_changes
from anabranch.node.lifecycle.create_run import create_run
from anabranch.node.local_swarm.local_swarm import LocalSwarm
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Event, PeerJoined, PeerRemoved, Repair, Step, Suspected
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from benchmarks import harness
from benchmarks.harness import table

GOAL_RESET_S = 0.5
#: Modelled seconds of a task; (least, greatest) one-way latency: calm links, and bad ones.
TASK_S = dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.25)
CALM, BAD = (0.01, 0.08), (0.05, 1.5)
VICTIM = "r1.1"
PATIENCE_S = 60.0


def swarm(seed: int, latency: tuple[float, float]) -> World:
    """Two data nodes, two replicas of two stages, with room for what another had."""
    settings = Settings(f"recovery {seed}", 1, 2, 8, 1_000_000, min_replicas=2, activation_bytes=1024)
    machines = [Machine(f"d{n}", 0) for n in range(2)]
    machines += [Machine(f"r{stage}.{n}", stage, capacity=16) for stage in (1, 2) for n in range(2)]
    return counting_world(settings, machines, seed, Model(latency, 0.02, TASK_S))


class Loss:
    """A victim is lost when it holds a microbatch of a data node; the next hop of that one is timed. (None
    where its gradient was on its way back: that microbatch's path is not broken.)"""

    def __init__(self, seed: int, silent: bool) -> None:
        self.world = world = swarm(seed, CALM)
        self.delay_s: float | None = None
        self.over = False
        self.patience_s = 0.0
        self._silent = silent
        self._at = random.Random(seed).uniform(6.0, 20.0)
        self._lost: tuple[str, int, int] | None = None
        self._lost_at = 0.0
        self._carry = world.carry
        world.carry = self._watch  # type: ignore[method-assign]
        world.watchers.append(self._strike)
        while not self.over and world.clock.now < self._at + 40.0:
            world.clock.step()
        if wrong_states(world):
            raise SystemExit(f"seed {seed}: {wrong_states(world)}")

    def _strike(self, node: Node, event: ev.Event) -> None:
        world, iteration = self.world, node.peer.iteration
        early = world.clock.now < self._at or node.peer.ctx.run.stage > 0
        if self._lost is not None or early or iteration is None:
            return
        for item in iteration.sender.items.values():
            if item.peer == VICTIM and item.leg.name == "SENT" and not item.returned:
                self._lost = (node.id, iteration.t, item.index)
                self._lost_at = world.clock.now
                self.patience_s = node.peer.ctx.links.up[VICTIM].patience_s
                world.vanish(VICTIM) if self._silent else world.crash(VICTIM)
                return

    def _watch(self, sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if self._lost is not None and not self.over and sender.id == self._lost[0]:
            said = msg.decode(message)
            if isinstance(said, msg.Forward) and (said.fence.t, said.index) == self._lost[1:]:
                if said.gradient_needed:
                    self.delay_s = self.world.clock.now - self._lost_at
                self.over = True
        self._carry(sender, peer, message, payload)


def false_suspicions(hours: float, latency: tuple[float, float]) -> tuple[int, float]:
    """Suspicions in a run without a fault, and its peer-hours."""
    world = swarm(1, latency)
    end_s = 3600.0 * hours / len(world.nodes)
    world.clock.at(end_s, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    world.run(end_s + 400.0, max_events=100_000_000)
    notes = [fields for _, _, kind, fields in world.notes if kind == "suspected"]
    return sum(fields["verdict"] == "suspected" for fields in notes), hours


# --- real processes --------------------------------------------------------------------------------


def small_run(texts: Path) -> RunConfig:
    changes = {
        "run.steps": 100_000, "model.dim": 16, "model.blocks": 4, "model.heads": 2, "model.ffn": 24,
        "data.source": "text", "data.path": str(texts), "data.tokenizer": "bytes",
        "batch.microbatches": 12, "batch.rows": 1, "batch.sequence": 16, "pipeline.stages": 2,
        "fleet.data_nodes": 1, "fleet.relays_per_stage": [2, 2], "fleet.minimum": 2,
        "evaluation.every": 0, "checkpoint.every": 1000, "compute.device": "cpu",
    }  # fmt: skip
    return with_changes(RunConfig(), changes)


def lose_process(supervisor: Supervisor, how: signal.Signals) -> tuple[float, int]:
    """Seconds from the signal to the first repair or verdict; suspicions of others."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        texts.mkdir()
        for number in range(40):
            (texts / f"{number}.txt").write_text(f"text {number}: the quick brown fox\n" * 40)
        run = small_run(texts)
        local = LocalSwarm(create_run(run, Path(folder) / "run"), run, supervisor)
        try:
            local.start()
            return _timed(local, how)
        finally:
            for process in local.processes.values():
                process.signal(signal.SIGKILL)
            for process in local.processes.values():
                process.wait(PATIENCE_S)


def _timed(local: LocalSwarm, how: signal.Signals) -> tuple[float, int]:
    until, victim, struck, steps, false = time.monotonic() + 3 * PATIENCE_S, "", 0.0, 0, 0
    seen: Iterable[Event] = local.events()
    for event in seen:
        if isinstance(event, PeerJoined) and event.name == "relay-1.1":
            victim = event.subject
        steps += isinstance(event, Step)
        if steps == 20 and not struck:
            struck = time.time()
            local.processes["relay-1.1"].signal(how)
        if isinstance(event, Suspected) and event.subject != victim and event.verdict == "suspected":
            false += 1
        about = event.dead if isinstance(event, Repair) else getattr(event, "subject", "")
        told = isinstance(event, Repair | Suspected | PeerRemoved) and about == victim
        if struck and told and event.time >= struck:
            return event.time - struck, false
        if time.monotonic() > until:
            break
    raise SystemExit("the swarm did not repair in time")


# --- the table -------------------------------------------------------------------------------------


def row(name: str, delays: Sequence[float]) -> list[str]:
    ordered = sorted(delays)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    cells = [statistics.median(ordered), p95, ordered[-1]]
    return [name, str(len(ordered)), *(f"{cell:.3f}" for cell in cells)]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="losses of each kind in virtual time")
    parser.add_argument("--hours", type=float, default=1.0, help="peer-hours without a fault")
    parser.add_argument("--processes", type=int, default=3, help="losses of each kind with real processes")
    options = parser.parse_args()
    resets = [Loss(seed, silent=False) for seed in range(options.seeds)]
    silences = [Loss(seed, silent=True) for seed in range(options.seeds)]
    rows = [row("reset, virtual time", [loss.delay_s for loss in resets if loss.delay_s is not None])]
    rows.append(row("silent, virtual time", [loss.delay_s for loss in silences if loss.delay_s is not None]))
    over = [loss.delay_s - loss.patience_s for loss in silences if loss.delay_s is not None]
    missed = sum(loss.delay_s is None for loss in [*resets, *silences])
    lines = []
    if options.processes:
        with Supervisor(threads=1) as supervisor:
            for name, how in (("reset", signal.SIGKILL), ("silent", signal.SIGSTOP)):
                timed = [lose_process(supervisor, how) for _ in range(options.processes)]
                rows.append(row(f"{name}, processes on loopback", [delay_s for delay_s, _ in timed]))
    reset_s = max(loss.delay_s for loss in resets if loss.delay_s is not None)
    late = sum(1 for each in over if each > 0.0)
    goals = [
        harness.at_most("after a reset connection, most", GOAL_RESET_S, reset_s, "{:.3f} s"),
        harness.goal(
            "after silence, beyond the suspicion time",
            "0 s",
            f"{max(over):+.3f} s, {late} of {len(over)}",
            not late,
        ),
    ]
    lines.append(
        f"- Silent: at most {max(over):+.3f} s against the sender's own bound (three times the 99th "
        f"percentile gap + 1 s; what was in flight still arrives);"
        f" {late} of {len(over)} beyond it. Gradients that were on their way back: {missed}."
    )
    for name, latency in (("calm", CALM), ("bad", BAD)):
        count, hours = false_suspicions(options.hours, latency)
        low, high = latency
        lines.append(
            f"- False suspicions over {name} links ({low}–{high} s one way): {count / hours:.2f} per "
            f"peer-hour ({count} in {hours:g})."
        )
    text = table(["loss", "n", "median s", "p95 s", "most s"], rows) + "\n\n" + "\n".join(lines)
    title = "Time until lost work is sent elsewhere"
    harness.write("recovery", title, text, goals=goals, dry=options.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
