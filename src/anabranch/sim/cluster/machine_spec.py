"""Machines that a scenario names, one by one or in groups (`[[machines]]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from anabranch.config.constraints import OneOf, Range
from anabranch.protocol.interface import tasks
from anabranch.sim.cluster.scenario_schema import LineRate

Seconds = Annotated[float, Range(0.0, 1e5)]
#: Tasks that share the measured seconds of a reduce equally.
OF_A_REDUCE = (tasks.Freeze, tasks.SumPart, tasks.Assemble)


@dataclass(frozen=True)
class MachinePart:
    """Group of `count` equal machines, a table `[[machines]]` of a scenario.

    name: prefix of the machines' names, which end with a number if there are several ("": named by stage).
    region: region of the network profile ("": drawn by the seed). stage: stage of a relay (0: assigned by the
    simulator). on: name of a machine that these are further processes of ("": machines of their own), which
    share its region, line and device, as a data node that serves a stage as well. speed: factor on all rates;
    the measured seconds are those at speed 1. capacity: microbatches in flight (0: computed from its memory).
    price_per_hour: price of one machine, in any currency. The measured seconds are those of one microbatch
    (forward_s of a data node: embedding and head) and of one step (reduce_s, apply_s); 0: computed from the
    device's figures.
    """

    count: Annotated[int, Range(1, 4096)] = 1
    name: str = ""
    device: str = "t4"
    region: str = ""
    role: Annotated[str, OneOf("relay", "data")] = "relay"
    stage: Annotated[int, Range(0, 64)] = 0
    on: str = ""
    speed: Annotated[float, Range(0.01, 100.0)] = 1.0
    capacity: Annotated[int, Range(0, 1024)] = 0
    up_bps: LineRate = 2e9
    down_bps: LineRate = 2e9
    price_per_hour: Annotated[float, Range(0.0, 1e6)] = 0.0
    forward_s: Seconds = 0.0
    input_gradient_s: Seconds = 0.0
    weight_gradient_s: Seconds = 0.0
    reduce_s: Seconds = 0.0
    apply_s: Seconds = 0.0

    def measured(self) -> Mapping[type[tasks.Task], float]:
        """{task: seconds} by the measured figures; tasks whose seconds are 0 are left out. `forward_s` of a
        data node is that of Head, its other tasks are not measured apart. Recount takes the sum of the three
        figures of a microbatch, each task of OF_A_REDUCE a third of `reduce_s`."""
        first = tasks.Head if self.role == "data" else tasks.Forward
        seconds: dict[type[tasks.Task], float] = {
            first: self.forward_s,
            tasks.InputGradient: self.input_gradient_s,
            tasks.WeightGradient: self.weight_gradient_s,
            tasks.Recount: self.forward_s + self.input_gradient_s + self.weight_gradient_s,
            tasks.Apply: self.apply_s,
            **dict.fromkeys(OF_A_REDUCE, self.reduce_s / len(OF_A_REDUCE)),
        }
        return {task: value for task, value in seconds.items() if value}


def single(machines: Sequence[MachinePart]) -> list[MachinePart]:
    """The same machines as groups of one, in order. Those of a named group of several get numbered names;
    unnamed ones stay unnamed."""
    found = []
    for part in machines:
        for number in range(part.count):
            name = f"{part.name}-{number}" if part.name and part.count > 1 else part.name
            found.append(replace(part, count=1, name=name))
    return found


def problem(machines: Sequence[MachinePart], stages: int) -> str:
    """Sentence on the first inconsistency among all machines of a scenario, for an error; "" if there is
    none. stages: relay stages of the model, of which each needs a relay."""
    each = single(machines)
    names = [part.name for part in each if part.name]
    for at, part in enumerate(machines):
        if part.stage > stages:
            return f"machines[{at}].stage = {part.stage}: at most model.stages = {stages}"
        if part.stage and part.role == "data":
            return f"machines[{at}].stage: a data node holds none"
    own = {part.name for part in each if not part.on}
    for at, part in enumerate(machines):
        if part.on and part.on not in own:
            return f"machines[{at}].on: {part.on!r} is the name of no machine of its own"
    for name in names:
        if names.count(name) > 1:
            return f"machines: two of them are called {name!r}"
    relays = sum(part.role == "relay" for part in each)
    if relays < stages:
        return f"machines: {relays} relays, at least one for each of model.stages = {stages}"
    served = {stage for stage, _ in staged(machines, stages)}
    for stage in range(1, stages + 1):
        if stage not in served:
            return f"machines: none of the relays has stage {stage} of model.stages = {stages}"
    return ""


def staged(machines: Sequence[MachinePart], stages: int) -> list[tuple[int, MachinePart]]:
    """(stage, machine) pairs, one for each machine of each group, data nodes (stage 0) first. stages: relay
    stages. Relays without a stage go one by one to the relay stage with the fewest relays, the lowest of
    equals; those with a stage are counted first."""
    each = single(machines)
    relays = [part for part in each if part.role == "relay"]
    count = dict.fromkeys(range(1, stages + 1), 0)
    for part in relays:
        if part.stage:
            count[part.stage] += 1
    found = [(0, part) for part in each if part.role == "data"]
    for part in relays:
        stage = part.stage or min(count, key=lambda stage: (count[stage], stage))
        if not part.stage:
            count[stage] += 1
        found.append((stage, part))
    return found
