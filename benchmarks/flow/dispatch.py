"""Iteration times of a simulated swarm under each routing policy, and without one ingredient of dispatch.

    python -m benchmarks.flow.dispatch --seeds 3

The protocol of real peers with integer workers (`sim/workers`), the ten regions' latencies
and machines of different speeds. Each fleet runs under every policy, and under `auction` without one
ingredient at a time. Everything follows from the seeds. Writes the result `dispatch`.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from anabranch.counter_rng import CounterRng
from anabranch.flow.dispatch.next_hop_policies import Dispatch, Policy
from anabranch.flow.policies.registry import PLANNERS, POLICIES
from anabranch.net.wan.profile import find_profile
from anabranch.protocol.interface.events import Event
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from benchmarks import harness
from benchmarks.harness import table

STAGES, CAPACITY, DATA_NODES, MICROBATCHES = 3, 6, 2, 12
#: Iterations: the plan settles in the first ones, which are not counted.
WARM_UP, STEPS = 15, 27
#: Seconds of a forward, an input gradient, a weight gradient and a head on a machine of speed 1; one way of
#: a link within one place.
COMPUTE_S, LATENCY_S = 0.2, 0.01

#: Compared variants: name -> (factory of a node's policy, policy of the agents that plan).
VARIANTS: dict[str, tuple[Callable[[CounterRng], Policy], str]] = {
    "greedy": (POLICIES["greedy"], ""),
    "static": (POLICIES["static"], ""),
    "swarm": (POLICIES["swarm"], ""),
    "gwtf": (POLICIES["gwtf"], "gwtf"),
    "auction": (lambda rng: Dispatch(), "auction"),
    "... without reported load": (lambda rng: Dispatch(load=False), "auction"),
    "... without prices": (lambda rng: Dispatch(price=False), "auction"),
    "... without holding back": (lambda rng: Dispatch(hold=False), "auction"),
    "... without a plan (nor prices)": (lambda rng: Dispatch(), ""),
}


@dataclass(frozen=True)
class Fleet:
    """regions: with the latencies of ten regions. slowness: of machines, drawn from. replicas: of each stage.
    transfer: of an activation, in latencies of its link."""

    name: str
    regions: bool
    slowness: tuple[float, ...]
    replicas: int = 3
    transfer: float = 0.5


FLEETS = (
    Fleet("one place, speeds 1 to 1/4", False, (1.0, 2.0, 4.0)),
    Fleet("ten regions", True, (1.0,)),
    Fleet("ten regions, speeds 1 to 1/4", True, (1.0, 2.0, 4.0)),
    Fleet("ten regions, 6 replicas, large activations", True, (1.0,), 6, 5.0),
)


def world_of(fleet: Fleet, variant: str, seed: int) -> World:
    """The fleet of this seed, the same for every variant."""
    POLICIES[variant], planner = VARIANTS[variant]
    if planner:
        PLANNERS[variant] = PLANNERS[planner]
    draw = random.Random(seed)
    machines = [Machine(f"d{number}", 0, CAPACITY * fleet.replicas) for number in range(DATA_NODES)]
    for stage, number in product(range(1, STAGES + 1), range(fleet.replicas)):
        machines.append(Machine(f"r{stage}.{number}", stage, CAPACITY, draw.choice(fleet.slowness)))
    settings = Settings(
        "dispatch", 1, STAGES, MICROBATCHES, STEPS, policy=variant, activation_bytes=1 << 20, heartbeat_s=2.0
    )
    kinds = ("Forward", "Head", "InputGradient", "WeightGradient")
    model = Model(
        (0.9 * LATENCY_S, 1.1 * LATENCY_S), fleet.transfer * LATENCY_S, dict.fromkeys(kinds, COMPUTE_S)
    )
    world = counting_world(settings, machines, seed, model)
    if fleet.regions:
        profile = find_profile("wan10")
        home = {machine.id: draw.choice(profile.regions) for machine in machines}
        for one, other in combinations(home, 2):
            delay_s = profile.link(home[one], home[other]).delay_s
            world.slow[frozenset((one, other))] = delay_s / LATENCY_S
    return world


def seconds_per_iteration(fleet: Fleet, variant: str, seed: int) -> float:
    """Virtual seconds, mean over the iterations after the warm-up. AssertionError if a step went wrong."""
    world = world_of(fleet, variant, seed)
    at: dict[int, float] = {}
    leader = world.nodes["d0"]

    def watch(node: Node, event: Event) -> None:
        if node is leader:
            at.setdefault(leader.peer.committed, world.clock.now)

    world.watchers.append(watch)
    world.run()
    assert leader.peer.committed == STEPS and not wrong_states(world), f"{fleet.name}, {variant}, {seed}"
    return (at[STEPS] - at[WARM_UP]) / (STEPS - WARM_UP)


def lower_bound(fleet: Fleet, seed: int) -> float:
    """Seconds that the slowest stage computes, its work split as well as whole microbatches allow."""
    world = world_of(fleet, "greedy", seed)
    bound = 0.0
    for stage in range(1, STAGES + 1):
        slowness = [node.slowness for node in world.nodes.values() if node.member.stage == stage]
        load: Counter[int] = Counter()
        for _ in range(MICROBATCHES):
            load[min(range(fleet.replicas), key=lambda r: (load[r] + 1) * slowness[r])] += 1
        bound = max(bound, max(3 * COMPUTE_S * load[r] * slowness[r] for r in range(fleet.replicas)))
    return bound


def _seconds(trial: tuple[Fleet, str, int]) -> float:
    return seconds_per_iteration(*trial)


def report(
    fleets: Sequence[Fleet], seeds: Sequence[int], found: dict[tuple[Fleet, str, int], float]
) -> str:
    rows = []
    base = {fleet: statistics.mean(found[fleet, "greedy", seed] for seed in seeds) for fleet in fleets}
    for variant in VARIANTS:
        cells = []
        for fleet in fleets:
            mean = statistics.mean(found[fleet, variant, seed] for seed in seeds)
            cells.append(f"{mean:.2f} ({mean / base[fleet]:.3f})")
        rows.append([variant, *cells])
    bounds = [statistics.mean(lower_bound(fleet, seed) for seed in seeds) for fleet in fleets]
    rows.append(["the slowest stage's computing alone", *(f"{bound:.2f}" for bound in bounds)])
    return "\n".join(
        [
            f"{DATA_NODES} data nodes, {STAGES} stages of 3 relays (or 6) of capacity {CAPACITY}, "
            f"{MICROBATCHES} microbatches, {COMPUTE_S} s for a forward, an input gradient, a weight gradient "
            f"and a head; {len(seeds)} seeds. Virtual seconds per iteration, mean of iterations "
            f"{WARM_UP + 1} to {STEPS}; in brackets over `greedy`.",
            "",
            table(["", *(fleet.name for fleet in fleets)], rows),
        ]
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fleets", type=int, default=len(FLEETS), help="only the first so many")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    seeds = range(args.seeds)
    fleets = FLEETS[: args.fleets]
    trials = list(product(fleets, VARIANTS, seeds))
    seconds = harness.in_processes(_seconds, trials, args.processes, "trials")
    found = dict(zip(trials, seconds, strict=True))
    harness.write("dispatch", "Dispatch on top of the flow", report(fleets, seeds, found), dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
