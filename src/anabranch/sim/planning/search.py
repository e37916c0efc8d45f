"""Search for plans of a fleet: stages, batch, slots beyond memory, and assignment of the machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from anabranch.counter_rng import CounterRng
from anabranch.errors import UserError
from anabranch.protocol.placement.cost_model import Deal
from anabranch.protocol.placement.local_search import bettered
from anabranch.sim.cluster.device_model import Machine, known_devices
from anabranch.sim.cluster.machine_spec import MachinePart, staged
from anabranch.sim.cluster.scenario import Host, Regions, Scenario, fleet_of
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Summary, summary
from anabranch.sim.planning.crews import ENOUGH, START, crew_scenarios, estimate_of
from anabranch.sim.planning.estimate import Estimated, Estimates, estimate, of_any_assignment
from anabranch.train.model.sizes import named_size

#: Values of (`fleet.park`, `fleet.recompute`) that are tried, for more slots than memory holds activations.
#: The next value of a row is tried while slots are short.
MORE_PLACES = (((0.0, 0.0), (0.0, 1.0), (0.0, 4.0)), ((1.0, 0.0), (3.0, 0.0), (3.0, 2.0)))
#: Number of plans whose assignment is improved, at most OF_STAGES of them with the same number of stages;
#: random assignments that are improved besides the first one of each (a choice).
IMPROVED, OF_STAGES, DRAWN = 8, 2, 2
#: Changes tried per step of the local search, and least relative gain of a step for another one (a choice).
TRIED, GAIN = 200, 0.001
#: Times that a local search begins again where it ended, with other random changes (a choice).
DESCENTS = 2
#: Least relative gain for which machines are left out.
WORTH = 0.01
#: Slots are short if they make a stage this many times slower than its computing.
SHORT = 1.1
#: Additional iterations of a simulation with two iterations in flight.
DELAYED = 3
#: Most simulated plans with the same number of stages.
ALIKE = 2


@dataclass(frozen=True)
class Plan:
    """Plan for training on a fleet. scenario: the plan as a scenario whose machines have stages. estimated:
    its estimate. simulated: result of its simulation (None: not simulated). left_out: unused machines.
    with_all: estimate of the best plan that uses all machines, if this plan does not."""

    scenario: Scenario
    estimated: Estimated
    simulated: Summary | None = None
    left_out: tuple[MachinePart, ...] = ()
    with_all: Estimated | None = None

    @property
    def iteration_s(self) -> float:
        """Simulated mean seconds of an iteration (or round), or estimated ones without a successful
        simulation."""
        if self.simulated is None or self.simulated.failures:
            return self.estimated.iteration_s
        return self.simulated.figures["iteration_s"].mean

    @property
    def steps(self) -> int:
        """Optimizer steps of an iteration: the inner steps of a round where the plan has pipeline islands."""
        return self.scenario.round.steps if self.scenario.round.slots else 1

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step, by which plans are compared: those of an iteration, or a round's
        share."""
        return self.iteration_s / self.steps

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of relays at each of stages 1 to S."""
        stages = [part.stage for part in self.scenario.machines if part.role == "relay"]
        return tuple(stages.count(stage) for stage in range(1, self.scenario.model.relay_stages + 1))

    @property
    def tokens_per_s(self) -> float:
        model = self.scenario.model
        return model.microbatches * model.rows * model.sequence / self.step_s

    @property
    def price_per_hour(self) -> float:
        """Price of the used machines together, in the fleet's currency; those without a price count as 0."""
        return sum(part.price_per_hour for part in self.scenario.machines)


Progress = Callable[[str, int, int], None]
"""Function that is told an activity, its steps that are done, and its steps in all."""


def search(
    scenario: Scenario,
    regions: Regions,
    stages: Sequence[int] = (),
    progress: Progress = lambda activity, done, total: None,
) -> Iterator[list[Plan]]:
    """Yield the plans found so far, sorted by estimate: once after each number of stages and microbatch size
    (the scenario's size first), then after each improvement of the best ones' assignments. stages: numbers of
    stages to consider (empty: all). progress: told what is done. If the model fits into no relay, pipeline
    islands are weighed, too. The iterator raises UserError if the model does not fit the fleet, or a number
    of stages is too great."""
    fleet = named_fleet(replace(scenario, round=replace(scenario.round, slots=0)), regions)
    size = scenario.model.size
    most = min(named_size(size).blocks, sum(part.role == "relay" for part in fleet.machines))
    if stages and max(stages) > most:
        raise UserError(f"--stages {max(stages)}: at most {most}, with these relays and {size}")
    cuts = list(_cuts(fleet, stages or range(1, most + 1)))
    own = [cut for cut in cuts if cut.model.rows == fleet.model.rows]
    others = [cut for cut in cuts if cut.model.rows != fleet.model.rows]
    found: list[Plan] = []
    islands: list[Plan] = []
    for number, cut in enumerate([*own, *others], start=1):
        found += _with_more_slots(replace(cut, machines=_placed(cut)), regions)
        if number <= len(own) and not _fits_alone(fleet):
            islands += _with_crews(cut, regions)
        progress("comparing numbers of stages and microbatch sizes", number, len(cuts))
        if found:
            yield sorted([*found, *islands], key=_estimated_s)
    if not found:
        raise UserError(
            f"{scenario.name}: {size} does not fit: in every cut into stages the state of a stage is more "
            "than the memory of some machine; name machines with more memory, or a smaller model"
        )
    found.sort(key=lambda plan: (_estimated_s(plan), plan.scenario.model.stages, plan.scenario.model.rows))
    yield sorted([*found, *islands], key=_estimated_s)
    for better in _improved(found, regions, progress):
        found = [*found, better]
        whole = min((plan for plan in found if not plan.left_out), key=_estimated_s).estimated
        found = [replace(plan, with_all=whole if plan.left_out else None) for plan in found]
        yield sorted([*found, *islands], key=_estimated_s)


def _estimated_s(plan: Plan) -> float:
    return plan.estimated.iteration_s / plan.steps


def _fits_alone(fleet: Scenario) -> bool:
    """True if some relay holds the whole model: islands of single machines are possible then, and pipeline
    islands are not weighed."""
    whole = replace(fleet, model=replace(fleet.model, stages=0))
    relays = {part.name for part in fleet.machines if part.role == "relay"}
    return any(machine.capacity(1) >= 1 for name, machine in _machines(whole).items() if name in relays)


def _with_crews(cut: Scenario, regions: Regions) -> list[Plan]:
    """The one plan of pipeline islands with the stages of `cut` that has the fewest inner steps and is still
    ENOUGH times as quick, by step, as the quickest; [] if none fits."""
    speed = {name: 1.0 / machine.microbatch_s(1) for name, machine in _machines(cut).items()}
    fitting = [each for each in crew_scenarios(cut, speed) if _fits(each)]
    plans = [Plan(each, estimate_of(each, regions)) for each in fitting]
    if not plans:
        return []
    best_s = min(map(_estimated_s, plans))
    enough = [plan for plan in plans if best_s >= ENOUGH * _estimated_s(plan)]
    return [min(enough, key=lambda plan: (plan.steps, _estimated_s(plan)))]


def _improved(found: Sequence[Plan], regions: Regions, progress: Progress) -> Iterator[Plan]:
    """Yield plans with better assignments, made from the most promising of `found` (sorted by estimate): each
    one with all its machines, then one without harmful machines if that is clearly quicker. progress: told
    what is done."""
    first = shortlist(found, len(found), 1)
    fewer = {id(plan): plan for plan in found}
    for number, plan in enumerate(first, start=1):
        fewer[id(plan)] = without(plan, regions)
        progress("leaving out machines that cost more than they bring", number, len(first))
    promising = sorted(found, key=lambda plan: _estimated_s(fewer[id(plan)]))
    chosen = shortlist(promising, IMPROVED, OF_STAGES)
    for number, plan in enumerate(chosen, start=1):
        better = improve(plan, regions)
        small = [without(better, regions), fewer[id(plan)]]
        best = min((improve(each, regions, 0) for each in small), key=_estimated_s)
        progress("exchanging machines in the best plans", number, len(chosen))
        yield better
        if best.left_out and _estimated_s(best) < (1.0 - WORTH) * _estimated_s(better):
            yield best


def _with_more_slots(cut: Scenario, regions: Regions) -> Iterator[Plan]:
    """Yield plans with one number of stages and microbatch size (`cut`) that differ in slots (microbatches
    that a relay holds at once), with their estimates: first all activations in device memory; if slots are
    short then, more of them by recomputing, and apart from these by offloading (its last step recomputes,
    too), each in MORE_PLACES' steps until slots suffice. The machines of `cut` have names and stages. Nothing
    is yielded if a stage does not fit."""
    for row in MORE_PLACES:
        for park, recompute in row:
            scenario = replace(cut, fleet=replace(cut.fleet, park=park, recompute=recompute))
            if not _fits(scenario):
                return
            fleet = fleet_of(scenario, regions, 0)
            if park and not any(host.parked for host in fleet.hosts.values()):
                return
            plan = Plan(scenario, estimate(fleet))
            yield plan
            if plan.estimated.places_s < SHORT * max(plan.estimated.computing_s, plan.estimated.lines_s):
                if not park + recompute:
                    return
                break


def named_fleet(scenario: Scenario, regions: Regions) -> Scenario:
    """The same scenario with every machine named, in a region, and without a stage; missing figures are drawn
    with seed 0. Raises UserError as `fleet_of`."""
    hosts = list(fleet_of(scenario, regions, 0).hosts.values())
    parts = [part for _, part in staged(scenario.machines, scenario.model.relay_stages)]
    drawn = [_as_part(scenario, host) for host in hosts[: len(hosts) - len(parts)]]
    machines = [
        replace(part, name=host.id, region=host.region, stage=0)
        for host, part in zip(hosts, [*drawn, *parts], strict=True)
    ]
    return replace(scenario, machines=tuple(machines))


def _as_part(scenario: Scenario, host: Host) -> MachinePart:
    return MachinePart(
        device=host.machine.device.name,
        role="relay" if host.stage else "data",
        speed=host.machine.speed,
        capacity=host.resident if scenario.fleet.capacity and host.stage else 0,
        up_bps=host.line.up_bps,
        down_bps=host.line.down_bps,
    )


def _cuts(scenario: Scenario, stages: Sequence[int]) -> Iterator[Scenario]:
    """Yield the scenario with each of these numbers of stages and each microbatch size (a power of two of
    rows) that divides its batch; the batch stays the same, and machines keep the stages that they have."""
    model = scenario.model
    rows_in_all = model.rows * model.microbatches
    for number in stages:
        for rows in (1 << power for power in range(13)):
            if not rows_in_all % rows:
                shape = replace(model, stages=number, rows=rows, microbatches=rows_in_all // rows)
                yield replace(scenario, model=shape)


def _machines(scenario: Scenario) -> Mapping[str, Machine]:
    devices = known_devices(scenario.fleet.devices)
    return {
        part.name: Machine(
            devices[part.device], scenario.work, scenario.fleet.achieved, part.speed, part.measured()
        )
        for part in scenario.machines
    }


def _placed(scenario: Scenario) -> tuple[MachinePart, ...]:
    """The scenario's machines, each relay with a stage by a greedy assignment: the fastest first, to the
    stage with the most work for its power."""
    work, machines = scenario.work, _machines(scenario)
    power = dict.fromkeys(range(1, work.stages + 1), 0.0)
    stage_of = {}
    relays = [part.name for part in scenario.machines if part.role == "relay"]
    for name in sorted(relays, key=lambda name: machines[name].microbatch_s(1)):
        stage = min(power, key=lambda stage: (power[stage] / work.blocks(stage), stage))
        power[stage] += work.blocks(stage) / machines[name].microbatch_s(stage)
        stage_of[name] = stage
    return tuple(replace(part, stage=stage_of.get(part.name, 0)) for part in scenario.machines)


def _fits(scenario: Scenario) -> bool:
    machines = _machines(scenario)
    return all(machines[part.name].capacity(part.stage) >= 1 for part in scenario.machines)


def improve(plan: Plan, regions: Regions, drawn: int = DRAWN) -> Plan:
    """Copy of a plan with the best assignment that local search finds from its own assignment and `drawn`
    random ones; not worse than its own by estimate, and not simulated."""
    estimates, assignment = of_any_assignment(plan.scenario, regions), _assignment_of(plan)
    assignments = [assignment, *(_drawn(assignment, estimates.stages, seed) for seed in range(drawn))]
    keeps = _least_replicas(plan.scenario)
    ends = [_descended(estimates, each, keeps) for each in assignments]
    return _judged(plan, min([assignment, *ends], key=estimates.seconds), regions)


def without(plan: Plan, regions: Regions) -> Plan:
    """Copy of a plan without the machines that make the iteration longer; not simulated. The machine that is
    missed least is removed again and again, while its stage has more than `_least_replicas`; the result is
    the first assignment whose iteration is nearly as short (WORTH) as the shortest one."""
    estimates, keeps = of_any_assignment(plan.scenario, regions), _least_replicas(plan.scenario)
    shrinking = [_assignment_of(plan)]
    while True:
        assignment, count = shrinking[-1], Counter(shrinking[-1].values())
        spared = [peer for peer in assignment if count[assignment[peer]] > keeps]
        fewer = [{other: assignment[other] for other in assignment if other != peer} for peer in spared]
        if not fewer:
            break
        shrinking.append(min(fewer, key=estimates.seconds))
    least_s = min(map(estimates.seconds, shrinking))
    enough = next(each for each in shrinking if (1.0 - WORTH) * estimates.seconds(each) <= least_s)
    return _judged(plan, enough, regions)


def _least_replicas(scenario: Scenario) -> int:
    """Least number of replicas that plans give a stage: two if relays may crash, else one."""
    return 2 if scenario.churn.crash or scenario.churn.trace else 1


def _descended(estimates: Estimates, assignment: Deal, keeps: int) -> Deal:
    """Assignment that local search reaches from `assignment`, not slower by estimate. keeps: least number of
    replicas of a stage."""
    rng = CounterRng(0)
    for _ in range(DESCENTS):
        now_s = estimates.seconds(assignment)
        for better in bettered(estimates, assignment, list(assignment), rng, tried=TRIED, keeps=keeps):
            assignment, before_s, now_s = better, now_s, estimates.seconds(better)
            if now_s > (1.0 - GAIN) * before_s:
                break
    return assignment


def _assignment_of(plan: Plan) -> Deal:
    return {part.name: part.stage for part in plan.scenario.machines if part.role == "relay"}


def _drawn(assignment: Deal, stages: int, seed: int) -> Deal:
    """Random assignment of the same relays, by a seed, with as equal numbers as possible at all stages."""
    names = list(assignment)
    CounterRng(seed).shuffle(names)
    return {name: 1 + at % stages for at, name in enumerate(names)}


def _judged(plan: Plan, assignment: Deal, regions: Regions) -> Plan:
    machines = [part for part in plan.scenario.machines if part.role == "data" or part.name in assignment]
    gone = [part for part in plan.scenario.machines if part not in machines]
    placed = tuple(replace(part, stage=assignment.get(part.name, 0)) for part in machines)
    scenario = replace(plan.scenario, machines=placed)
    left_out = (*plan.left_out, *(replace(part, stage=0) for part in gone))
    return Plan(scenario, estimate(fleet_of(scenario, regions, 0)), None, left_out, plan.with_all)


def simulated(
    plan: Plan,
    regions: Regions,
    iterations: int,
    committed: Callable[[int], None] = lambda t: None,
) -> Plan:
    """Copy of the plan with the result of its simulation under policy `auction`, which may have failed.
    iterations: of the simulation, of which up to two are warm-up, as speeds and links are unknown then. With
    two iterations in flight there are DELAYED more, of which all but one are warm-up, and the last of all is
    not counted, as no other is in flight beside it. Pipeline islands take two rounds instead, of which the
    second counts. committed: called with the number of each iteration after it."""
    delay = plan.scenario.run.delay
    whole, warm_up = iterations + DELAYED * delay, min(2, iterations - 1) + (DELAYED - 1) * delay
    if plan.scenario.round.slots:
        whole, warm_up = START + 2, START + 1
    run = replace(plan.scenario.run, iterations=whole, warm_up=warm_up)
    scenario = replace(plan.scenario, run=run)
    outcome = simulate(scenario, regions, "auction", 0, committed)
    if delay and not outcome.failure:
        outcome.rows = outcome.rows[:-1]
    return replace(plan, simulated=summary([outcome], fleet_of(scenario, regions, 0)))


def shortlist(found: Sequence[Plan], most: int, of_stages: int = ALIKE) -> list[Plan]:
    """First `most` plans of `found`, in order, but no more than `of_stages` of them with the same number of
    stages."""
    chosen: list[Plan] = []
    for plan in found:
        alike = sum(each.scenario.model.relay_stages == plan.scenario.model.relay_stages for each in chosen)
        if alike < of_stages and len(chosen) < most:
            chosen.append(plan)
    return chosen
