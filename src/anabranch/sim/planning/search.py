"""The plans that a fleet allows, their placements, and which of them are worth simulating."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from anabranch.errors import UserError
from anabranch.sim.devices import Machine, known_devices
from anabranch.sim.machines import MachinePart, staged
from anabranch.sim.planning.estimate import Estimated, estimate
from anabranch.sim.scenario import Host, Regions, Scenario, fleet_of
from anabranch.sim.simulate import simulate
from anabranch.sim.tape import Summary, summary
from anabranch.train.sizes import named_size

#: Ways to have more places than memory holds activations: (`fleet.park`, `fleet.recompute`), as shares of it.
#: Each row goes on while places are short.
MORE_PLACES = (((0.0, 0.0), (0.0, 1.0), (0.0, 4.0)), ((1.0, 0.0), (3.0, 0.0), (3.0, 2.0)))
#: Plans whose placement is improved; exchanges that are tried on each at most, and in a row without avail.
IMPROVED, EXCHANGES, IN_VAIN = 5, 60, 20
#: Plans of the same number of stages among those that are simulated.
ALIKE = 2


@dataclass(frozen=True)
class Plan:
    """One way to use the fleet: its machines with their stages, and what is thought of it."""

    scenario: Scenario
    estimated: Estimated
    simulated: Summary | None = None

    @property
    def iteration_s(self) -> float:
        """As simulated, else as estimated."""
        if self.simulated is None or self.simulated.failures:
            return self.estimated.iteration_s
        return self.simulated.figures["iteration_s"].mean

    @property
    def replicas(self) -> tuple[int, ...]:
        """At stages 1..S."""
        stages = [part.stage for part in self.scenario.machines if part.role == "relay"]
        return tuple(stages.count(stage) for stage in range(1, self.scenario.model.stages + 1))

    @property
    def tokens_per_s(self) -> float:
        model = self.scenario.model
        return model.microbatches * model.rows * model.sequence / self.iteration_s

    @property
    def price_per_hour(self) -> float:
        """Of all machines; 0 where no price is known."""
        return sum(part.price_per_hour for part in self.scenario.machines)


def plans(
    scenario: Scenario,
    regions: Regions,
    stages: Sequence[int] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> list[Plan]:
    """All plans by estimate, the best first and with the best placements found. stages: only these numbers.
    tell: called with what is done so far. Raises UserError where the model does not fit the fleet in any
    way."""
    fleet = named_fleet(scenario, regions)
    size = scenario.model.size
    most = min(named_size(size).blocks, sum(part.role == "relay" for part in fleet.machines))
    if stages and max(stages) > most:
        raise UserError(f"--stages {max(stages)}: at most {most}, with these relays and {size}")
    found: list[Plan] = []
    for cut in _cuts(fleet, stages or range(1, most + 1)):
        stage = found[-1].scenario.model.stages if found else cut.model.stages
        if found and cut.model.stages != stage:
            tell(f"{len(found)} plans compared, with up to {stage} of {most} stages")
        found += _with_places(cut, regions)
    if not found:
        raise UserError(
            f"{scenario.name}: {size} does not fit: in every cut into stages the state of a stage is more "
            "than the memory of some machine; name machines with more memory, or a smaller model"
        )
    found.sort(key=lambda plan: plan.estimated.iteration_s)
    tell(f"{len(found)} plans compared; exchanging machines in the best {min(IMPROVED, len(found))}")
    better = [improve(plan, regions) for plan in found[:IMPROVED]]
    return sorted([*better, *found[IMPROVED:]], key=lambda plan: plan.estimated.iteration_s)


def _with_places(cut: Scenario, regions: Regions) -> Iterator[Plan]:
    """The plan whose activations all stay in the machines' memory; and, while places are what is short, such
    with more of them."""
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
            if plan.estimated.places_s < max(plan.estimated.computing_s, plan.estimated.lines_s):
                if not park + recompute:
                    return
                break


def named_fleet(scenario: Scenario, regions: Regions) -> Scenario:
    """The same with every machine named and in its region; what a scenario leaves to chance is drawn (seed
    0)."""
    hosts = list(fleet_of(scenario, regions, 0).hosts.values())
    parts = [part for _, part in staged(scenario.machines, scenario.model.stages)]
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
    """Stages and rows of a microbatch; the batch stays."""
    model = scenario.model
    rows_in_all = model.rows * model.microbatches
    for number in stages:
        for rows in (1 << power for power in range(13)):
            if not rows_in_all % rows:
                shape = replace(model, stages=number, rows=rows, microbatches=rows_in_all // rows)
                changed = replace(scenario, model=shape)
                yield replace(changed, machines=_placed(changed))


def _machines(scenario: Scenario) -> Mapping[str, Machine]:
    devices = known_devices(scenario.fleet.devices)
    return {
        part.name: Machine(
            devices[part.device], scenario.work, scenario.fleet.achieved, part.speed, part.measured()
        )
        for part in scenario.machines
    }


def _placed(scenario: Scenario) -> tuple[MachinePart, ...]:
    """The quickest machine first, each to the stage that has most to compute for what it has."""
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


def improve(plan: Plan, regions: Regions, exchanges: int = EXCHANGES) -> Plan:
    """Exchange machines of two stages, or move one, by seeded chance, and keep what lowers the estimate."""
    dice, best, in_vain = random.Random("placement"), plan, 0
    for _ in range(exchanges):
        if in_vain == IN_VAIN:
            break
        in_vain += 1
        scenario = replace(best.scenario, machines=_exchanged(best, dice))
        if scenario.machines == best.scenario.machines or not _fits(scenario):
            continue
        other = Plan(scenario, estimate(fleet_of(scenario, regions, 0)))
        if other.estimated.iteration_s < best.estimated.iteration_s:
            best, in_vain = other, 0
    return best


def _exchanged(plan: Plan, dice: random.Random) -> tuple[MachinePart, ...]:
    machines = list(plan.scenario.machines)
    relays = [at for at, part in enumerate(machines) if part.role == "relay"]
    one, other = dice.choice(relays), dice.choice(relays)
    first, second = machines[one].stage, machines[other].stage
    machines[one] = replace(machines[one], stage=second)
    if dice.random() < 0.7 or plan.replicas[first - 1] == 1:
        machines[other] = replace(machines[other], stage=first)
    return tuple(machines)


def simulated(plan: Plan, regions: Regions, iterations: int, seed: int = 0) -> Plan:
    """The same with what the protocol makes of it in virtual time; the first iteration is not counted."""
    run = replace(plan.scenario.run, iterations=iterations, warm_up=1)
    scenario = replace(plan.scenario, run=run)
    outcome = simulate(scenario, regions, "auction", seed)
    return replace(plan, simulated=summary([outcome], fleet_of(scenario, regions, seed)))


def shortlist(found: Sequence[Plan], most: int) -> list[Plan]:
    """The best by estimate, but not more than a few with the same number of stages."""
    chosen: list[Plan] = []
    for plan in found:
        alike = sum(each.scenario.model.stages == plan.scenario.model.stages for each in chosen)
        if alike < ALIKE and len(chosen) < most:
            chosen.append(plan)
    return chosen
