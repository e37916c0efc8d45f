"""Plans of pipeline islands, for a fleet in which the model fits into no machine.

A round takes the inner steps of its crews, and then the exchange: contributions up, results down, over the
slowest line of each stage. An inner step takes a round trip through the crew for its first microbatch, and
for each further one the longest of: the slowest machine, its line, the data node's share of heads, and the
round trip divided by the microbatches that the crew can hold. Crews are put together as the leader does
(`protocol.rounds.plan`, `protocol.placement.crew_search`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Crew
from anabranch.protocol.placement.crew_search import CrewTimes, quicker
from anabranch.protocol.rounds.plan import crews_of
from anabranch.sim.cluster.scenario import Fleet, Host, Regions, Scenario, fleet_of
from anabranch.sim.planning.estimate import Estimated, estimate

#: Inner steps of a round that are weighed. More cost tokens (docs/explanation/islands.md), so the fewest are
#: taken with which a fleet is ENOUGH as quick as with the most. Choices.
STEPS, ENOUGH = (5, 10, 20, 50), 0.85
#: `fleet.recompute` of crews that are weighed: forwards computed again, so that more microbatches are under
#: way.
AGAIN = (0.0, 2.0)
#: Synchronous iterations before the rounds: two, as latencies are known after the first.
START = 2
#: Slots of a round that a crash costs: its own, and those until the machine has the state again (measured on
#: `volunteers-8b`, one seed: docs/lab/open-goals.md).
CRASH_SLOTS = 2.0


def crew_scenarios(cut: Scenario, speed: Mapping[str, float]) -> Iterator[Scenario]:
    """Yield scenarios of pipeline islands with the stages of `cut`, whose relays are named: as many crews as
    each stage has machines and as divide the batch, with each number of inner steps (STEPS) and share of
    forwards computed again (AGAIN). Nothing is yielded if there would be fewer than two crews, or if two
    iterations are in flight. speed: relay -> its speed in any unit; each stage gets machines of all
    speeds."""
    relays = [part.name for part in cut.machines if part.role == "relay"]
    of_stage = len(relays) // cut.model.stages
    slots = next((k for k in range(of_stage, 1, -1) if not cut.model.microbatches % k), 0)
    if not slots or cut.run.delay:
        return
    by_speed = sorted(relays, key=lambda name: (-speed[name], name))
    stage = {name: 1 + place % cut.model.stages for place, name in enumerate(by_speed)}
    machines = tuple(replace(part, stage=stage.get(part.name, 0)) for part in cut.machines)
    for steps in STEPS:
        for again in AGAIN:
            part = replace(cut.round, slots=slots, steps=steps, start=START, first_steps=0)
            fleet = replace(cut.fleet, recompute=again, park=0.0, spare="never")
            yield replace(cut, machines=machines, round=part, fleet=fleet)


class CrewEstimates:
    """Estimate of a round of pipeline islands of one fleet, whose relays have stages."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, scenario = fleet, fleet.scenario
        self._work, self._round = scenario.work, scenario.round
        self._count = scenario.model.microbatches // scenario.round.slots
        self._again = scenario.fleet.recompute / (1.0 + scenario.fleet.recompute)
        """Share of the microbatches whose forwards are computed again."""

    def of(self) -> Estimated:
        """Estimate of a round: iteration_s is its seconds, crashes included. The parts are those of the
        slowest crew in each, over all inner steps of the round. way_s: round trips of the first microbatches;
        computing_s, lines_s, places_s: of the further ones computing, transfers and waiting for slots;
        reduce_s: the exchange. No lower bound."""
        crews = self._crews()
        steps = self._round.steps
        parts = [self._parts(crew) for crew in crews]
        step_s = [trip + (self._count - 1) * max(rest) for trip, *rest in parts]
        # A quick crew takes more steps, so that all end together.
        inner_s = steps * len(crews) / sum(1.0 / each for each in step_s)
        lost = CRASH_SLOTS * self._fleet.scenario.churn.crash * self._work.stages
        exchange_s = max(self._exchange_s(stage) for stage in range(self._work.stages + 1))
        trip_s, compute_s, line_s, wait_s = (steps * max(each) for each in zip(*parts, strict=True))
        others = self._count - 1
        whole_s = (inner_s + exchange_s) / max(0.01, 1.0 - lost)
        bounds = others * compute_s, others * line_s, others * wait_s
        return Estimated(whole_s, 0.0, *bounds, trip_s, exchange_s)

    def _crews(self) -> list[Crew]:
        """Crews (machines of stages 1 to S, then the data node) as the leader puts them together once speeds
        and latencies are known; at most as many as slots."""
        rates = []
        for stage in range(1, self._work.stages + 1):
            rates.append({host.id: 1.0 / self._microbatch_s(host) for host in self._fleet.stage(stage)})
        data_nodes = [host.id for host in self._fleet.stage(0)]
        crews = crews_of((), (), rates, data_nodes, 0).new
        seconds = {peer: 1.0 / rate for of in rates for peer, rate in of.items()}
        held = {peer: self._held(self._fleet.hosts[peer]) for peer in seconds}
        latency_s = {
            (one, other): self._fleet.link(one, other).latency_s
            for crew in crews for each in crews for one in crew for other in each if one != other
        }  # fmt: skip
        times = CrewTimes(self._count, seconds, held, lambda one, other: latency_s.get((one, other), 0.0))
        return quicker(crews, times)[: self._round.slots]

    def _held(self, host: Host) -> int:
        """Microbatches that a relay can have under way at one time; 1 at least."""
        return max(1, self._fleet.slots(host))

    def _microbatch_s(self, host: Host) -> float:
        """Seconds that a relay computes for one microbatch of an inner step, with the mean of forwards
        computed again."""
        forward, backward = (
            host.machine.inner_task_s(host.stage, kind) for kind in (tasks.InnerForward, tasks.InnerBackward)
        )
        return (1.0 + self._again) * forward + backward

    def _parts(self, crew: Crew) -> tuple[float, float, float, float]:
        """(seconds of the first microbatch's round trip through a crew; for each further microbatch, seconds
        of the slowest computing, of the slowest line, of waiting for slots)."""
        hosts = [self._fleet.hosts[peer] for peer in crew]
        source, down, up = hosts[-1], self._work.activation_bytes, self._work.gradient_bytes
        kinds = tasks.InnerForward, tasks.InnerHead, tasks.InnerBackward
        ends_s = sum(source.machine.inner_task_s(0, kind) for kind in kinds)
        trip_s = ends_s + sum(map(self._microbatch_s, hosts[:-1]))
        for one, other in pairwise((source, *hosts)):
            for sender, receiver, size in ((one, other, down), (other, one, up)):
                link = self._fleet.link(sender.id, receiver.id)
                rate_bps = min(link.rate_bps, sender.line.up_bps, receiver.line.down_bps)
                trip_s += link.latency_s + 8.0 * size / rate_bps
        lines = ((host.line, 8.0 * (down + up)) for host in hosts[:-1])
        line_s = max(bits / min(line.up_bps, line.down_bps) for line, bits in lines)
        of_source = -(-self._round.slots // len(self._fleet.stage(0)))
        compute_s = max(*map(self._microbatch_s, hosts[:-1]), of_source * ends_s)
        held = min(self._count, *(self._held(host) for host in hosts[:-1]))
        return trip_s, compute_s, line_s, trip_s / held

    def _exchange_s(self, stage: int) -> float:
        """Seconds of a round's exchange at a stage, over the slowest line of its machines. Each machine sums
        a part: it gets the others' contributions to that part, and sends them its result."""
        hosts = self._fleet.stage(stage)
        share = 1.0 - 1.0 / max(1, len(hosts))
        slowest_bps = min(min(host.line.up_bps, host.line.down_bps) for host in hosts)
        sizes = sum(self._fleet.scenario.round_bytes)
        return 8.0 * sizes * share * self._work.parameters(stage) / slowest_bps


def estimate_of(scenario: Scenario, regions: Regions) -> Estimated:
    """Estimate of an iteration of a planned scenario, or of a round if it has slots. Raises UserError as
    `fleet_of`."""
    fleet = fleet_of(scenario, regions, 0)
    return CrewEstimates(fleet).of() if scenario.round.slots else estimate(fleet)
