"""Scenarios (model, fleet, network, churn) as TOML files, and the fleet that a seed draws from one.

The format is described in docs/reference/scenario.md; the keys and their ranges are in `scenario_schema`.
"""

from __future__ import annotations

import json
import random
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from anabranch.config.constraints import OneOf, Range, is_64_bits
from anabranch.config.load import parse_toml
from anabranch.errors import UserError
from anabranch.sim.cluster.churn_trace import NO_TRACE, Trace, read_trace
from anabranch.sim.cluster.device_model import (
    CONTRIBUTION_BYTES,
    RESULT_BYTES,
    Device,
    Machine,
    WirePart,
    Workload,
    known_devices,
)
from anabranch.sim.cluster.machine_spec import MachinePart, problem, staged
from anabranch.sim.cluster.scenario_schema import (
    ChurnPart,
    DriftPart,
    FleetPart,
    ModelPart,
    NetworkPart,
    PrecisionPart,
    RoundPart,
    RunPart,
    type_and_constraint,
)
from anabranch.sim.network.drift import Drift
from anabranch.sim.network.shared_link import Line, SharedLink
from anabranch.train.model.sizes import named_size, size_names

#: Version of a scenario file.
SCENARIO_VERSION = 1
#: Keys whose value is a path: (section, key).
FILES = (("fleet", "devices"), ("network", "profile"), ("churn", "trace"))
#: Sections of a run file that a scenario does not have.
OF_RUN_FILES = ("data", "batch", "optimizer", "pipeline", "compute", "checkpoint", "routing")
#: Keys of drawn machines -> keys of [[machines]]. Those in OF_ALL still hold for data nodes if none is named.
OF_RELAYS = {"fleet.relays": "count", "fleet.speed": "speed", "fleet.capacity": "capacity"}
OF_ALL = {
    "fleet.data_nodes": "count",
    "fleet.device": "device",
    "network.up_bps": "up_bps",
    "network.down_bps": "down_bps",
}
#: Share of host memory that offloaded activations may take (a choice).
HOST_SHARE = 0.5


@dataclass(frozen=True)
class Scenario:
    """Contents of a scenario file: all that a simulation needs besides a policy and a seed. machines: named
    machines. They replace the relays that a seed draws from `fleet`, and its data nodes if any of them is
    one."""

    name: str = "scenario"
    model: ModelPart = field(default_factory=ModelPart)
    fleet: FleetPart = field(default_factory=FleetPart)
    machines: tuple[MachinePart, ...] = ()
    network: NetworkPart = field(default_factory=NetworkPart)
    churn: ChurnPart = field(default_factory=ChurnPart)
    drift: DriftPart = field(default_factory=DriftPart)
    wire: WirePart = field(default_factory=WirePart)
    run: RunPart = field(default_factory=RunPart)
    round: RoundPart = field(default_factory=RoundPart)
    precision: PrecisionPart = field(default_factory=PrecisionPart)

    @property
    def work(self) -> Workload:
        """Workload of the scenario: its model divided into stages, its microbatches, and their sizes on the
        line."""
        part, shape, precision = self.model, named_size(self.model.size), self.precision
        if part.subspace:
            shape = replace(shape, subspace=part.subspace, tied=False)
        return Workload(
            *(shape, part.relay_stages, part.rows, part.sequence, part.dtype),
            *(self.wire, part.microbatches, part.stages == 0),
            *(precision.activation_bytes, precision.sum_bytes, precision.reduced_bytes),
            bool(self.run.delay),
            -(-self.round.slots // self.data_nodes) if part.stages else 0,
        )

    @property
    def round_bytes(self) -> tuple[float, float]:
        """Bytes on the line of a parameter in a round: of a contribution, and of the result."""
        part, precision = self.round, self.precision
        of_sum = precision.sum_bytes or CONTRIBUTION_BYTES[part.contributions]
        return of_sum, precision.reduced_bytes or RESULT_BYTES[part.results]

    @property
    def data_nodes(self) -> int:
        """Number of data nodes: of those among the named machines; without any, of those that a seed
        draws."""
        return sum(one.count for one in self.machines if one.role == "data") or self.fleet.data_nodes


def shipped_scenarios() -> tuple[str, ...]:
    folder = resources.files("anabranch.sim.cluster").joinpath("scenarios")
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_scenario(name: str, changes: Mapping[str, Any] | None = None) -> Scenario:
    """Scenario by the name of a shipped one or the path of a file. changes: dotted key ("section.key") ->
    value that replaces that of the file. Raises UserError with file, key and allowed values."""
    data, where = read_scenario(name)
    for dotted, value in (changes or {}).items():
        part, _, key = dotted.partition(".")
        section = data.setdefault(part, {})
        if not key or not isinstance(section, dict):
            raise UserError(f"--set {dotted}: write it as section.key=value, e.g. churn.crash=0.1")
        section[key] = value
    return parse_scenario(data, where)


def read_scenario(name: str) -> tuple[dict[str, Any], str]:
    """(Unchecked contents, name for messages) of a shipped scenario or a file. Paths in a file are completed
    relative to the file's folder if they exist there. Raises UserError if it cannot be read or is not
    TOML."""
    if name in shipped_scenarios():
        where = f"{name}.toml"
        folder = resources.files("anabranch.sim.cluster").joinpath("scenarios")
        text = folder.joinpath(where).read_text("utf-8")
    else:
        where = name
        try:
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(shipped_scenarios())
            why = (error.strerror if isinstance(error, OSError) else "") or error
            then = f"; shipped scenarios: {known}"
            if (Path(name) / "version").is_file():
                then = f"; `anabranch simulate --from {name}` makes a scenario of a run"
            raise UserError(f"{name}: cannot be read: {why}{then}") from None
    try:
        data = parse_toml(text)
    except (ValueError, RecursionError) as error:  # an integer of too many digits is no TOMLDecodeError
        raise UserError(f"{where}: not TOML: {error}") from None
    for section, key in FILES:
        part = data.get(section)
        value = part.get(key) if isinstance(part, dict) else None
        beside = Path(name).parent / value if isinstance(value, str) else None
        if where == name and beside is not None and beside.is_file():
            data[section][key] = str(beside)
    return data, where


def parse_scenario(data: Mapping[str, Any], where: str) -> Scenario:
    """Checked scenario from the contents of a file. where: the file's name, with which errors begin and of
    which the scenario gets its name. The file of devices is read, those of the network profile and of the
    churn trace are not. Raises UserError with file, key and allowed values."""
    parts = typing.get_type_hints(Scenario)
    header = data.get("anabranch")
    version = header.get("version") if isinstance(header, Mapping) else None
    if type(version) is not int or version != SCENARIO_VERSION:
        begins = "" if version is not None else "; the file begins with [anabranch], and version = 1 below it"
        raise UserError(f"{where}: anabranch.version must be {SCENARIO_VERSION}{begins}")
    odd = next((key for key in data["anabranch"] if key != "version"), None)
    if odd is not None:
        raise UserError(f"{where}: anabranch.{odd} is no key; [anabranch] has version")
    foreign = next((section for section in OF_RUN_FILES if section in data), None)
    if foreign is not None:
        way = "docs/reference/scenario.md); `anabranch simulate --from RUN_DIR` has those of a run"
        raise UserError(f"{where}: [{foreign}] is of run files, this is to be a fleet of machines ({way}")
    scenario = Scenario(name=Path(where).stem)
    for section, content in data.items():
        if section == "anabranch":
            continue
        if section == "machines":
            scenario = replace(scenario, machines=_machines(content, where))
            continue
        if section not in parts or section == "name" or not isinstance(content, Mapping):
            known = ", ".join(name for name in parts if name != "name")
            raise UserError(f"{where}: [{section}] is no section of a scenario; there are {known}")
        part = _part(parts[section], section, content, where)
        scenario = replace(scenario, **{section: part})
    if scenario.machines:
        _check_only_named(scenario, data, where)
    _check_consistency(scenario, where)
    return scenario


def _check_only_named(scenario: Scenario, data: Mapping[str, Any], where: str) -> None:
    """Raise UserError if the file's contents `data` set keys of drawn machines that have no effect, as the
    scenario names its machines. where: begin of the message."""
    unused = OF_RELAYS | (OF_ALL if any(each.role == "data" for each in scenario.machines) else {})
    for dotted, key in unused.items():
        section, _, name = dotted.partition(".")
        if name in data.get(section, {}):
            sentence = f"is of machines that are drawn, and [[machines]] names them: change {key} there"
            raise UserError(f"{where}: {dotted} {sentence}")


def _machines(content: Any, where: str) -> tuple[MachinePart, ...]:
    if not isinstance(content, list) or not all(isinstance(each, Mapping) for each in content):
        raise UserError(f"{where}: machines must be tables: write [[machines]] and their keys below")
    return tuple(
        _part(MachinePart, "machines", each, where, f"machines[{at}]") for at, each in enumerate(content)
    )


def _part(kind: type, section: str, content: Mapping[str, Any], where: str, place: str = "") -> Any:
    hints, default = typing.get_type_hints(kind, include_extras=True), kind()
    place = place or section
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in hints:
            raise UserError(f"{where}: {place}.{key} is no key; [{section}] has {', '.join(hints)}")
        label = f"{where}: {place}.{key}"
        many = isinstance(getattr(default, key), tuple)
        if many and not (isinstance(value, list) and (value or key == "capacity")):
            example = json.dumps(getattr(default, key) or (8,))
            raise UserError(f"{label} must be a list such as {example}, not {value!r}")
        given = [_value(one, hints[key], label) for one in (value if many else [value])]
        values[key] = tuple(given) if many else given[0]
    return replace(default, **values)


def _value(value: Any, hint: Any, label: str) -> Any:
    """Checked value of a key, or of an item of a list. hint: annotated type of its field; whole numbers
    become floats where that is one. Raises UserError, whose message begins with `label`, if the value is not
    allowed."""
    kind, allowed = type_and_constraint(hint)
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and is_64_bits(value):
        value = float(value)
    if type(value) is not kind:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        bounds = f" of {allowed}" if isinstance(allowed, Range) else ""
        raise UserError(f"{label} must be {names[kind]}{bounds}, not {value!r}")
    if isinstance(allowed, OneOf) and value not in allowed.choices:
        raise UserError(f"{label}: {value!r} is none of {', '.join(allowed.choices)}")
    if isinstance(allowed, Range) and not allowed.holds(value):
        raise UserError(f"{label} = {value!r} is out of range: {allowed}")
    return value


def _check_consistency(scenario: Scenario, where: str) -> None:
    """Raise UserError if keys of a scenario contradict each other, the name of a model or device is unknown,
    or a drawn device is too small for a stage. where: begin of the message."""
    model, fleet, run = scenario.model, scenario.fleet, scenario.run
    if model.size not in size_names():
        known = ", ".join(size_names())
        raise UserError(f"{where}: model.size: there is no {model.size!r}; there are {known}")
    blocks = named_size(model.size).blocks
    if model.relay_stages > blocks:
        raise UserError(f"{where}: model.stages = {model.relay_stages}: {model.size} has {blocks} blocks")
    if model.subspace >= named_size(model.size).dim:
        width = named_size(model.size).dim
        raise UserError(f"{where}: model.subspace = {model.subspace}: {model.size} has a width of {width}")
    if fleet.relays < model.relay_stages and not scenario.machines:
        least = f"at least one for each of {model.relay_stages} stages"
        raise UserError(f"{where}: fleet.relays = {fleet.relays}: {least}")
    sentence = problem(scenario.machines, model.relay_stages) if scenario.machines else ""
    if sentence:
        raise UserError(f"{where}: {sentence}")
    try:
        devices = known_devices(fleet.devices)
    except UserError as error:
        raise UserError(f"{where}: fleet.devices: {error}") from None
    named = [(f"machines[{at}].device", each.device) for at, each in enumerate(scenario.machines)]
    for key, name in named or [("fleet.device", each) for each in fleet.device]:
        if name not in devices:
            raise UserError(f"{where}: {key}: there is no {name!r}; there are {', '.join(devices)}")
        machine = Machine(devices[name], scenario.work)
        if machine.device.together > 1 and scenario.round.slots:
            raise UserError(f"{where}: {key}: {name!r}: an island computes on one device: name one")
        if not named and not fleet.capacity and machine.capacity(1) < 1:
            raise UserError(f"{where}: fleet.device: {_too_small(scenario, name)}")
    if run.delay and not model.stages:
        raise UserError(f"{where}: run.delay = 1: is for pipelines; model.stages must be 1 or more")
    if wrong := _round_problem(scenario):
        raise UserError(f"{where}: {wrong}")
    if scenario.churn.trace and scenario.churn.crash:
        both = "churn.crash and churn.trace both say who crashes: one of them"
        raise UserError(f"{where}: {both} (churn.crash = 0.0 leaves it to the trace)")
    if run.warm_up >= run.iterations:
        less = f"must be less than run.iterations = {run.iterations}"
        raise UserError(f"{where}: run.warm_up = {run.warm_up}: {less}")


def _round_problem(scenario: Scenario) -> str:
    """Reason why rounds of islands cannot work as the scenario says; "" if they can, or if it has no
    rounds."""
    model, part = scenario.model, scenario.round
    if not part.slots:
        return ""
    if model.microbatches % part.slots:
        return f"round.slots = {part.slots} needs model.microbatches to be a multiple of it"
    if part.overlap and (model.stages or part.first_steps or part.overlap >= part.steps):
        return "round.overlap is less than round.steps, with round.first_steps = 0 and model.stages = 0"
    if not model.stages:
        return ""
    if part.private:
        return "round.private is for islands of one machine: set model.stages = 0"
    if model.stages == 1:
        return "round.slots works with model.stages = 0 (an island is one machine) or with 2 and more"
    if part.late == "wait":
        return 'round.late = "wait" is for islands of one machine (model.stages = 0): set it to "drop"'
    if scenario.run.delay or scenario.fleet.park:
        return "round.slots works with run.delay = 0 and fleet.park = 0"
    return _ends_problem(scenario)


def _ends_problem(scenario: Scenario) -> str:
    """Reason why a data node cannot hold embedding and head for all the pipeline islands that it serves at
    once; "" if it can."""
    work, devices = scenario.work, known_devices(scenario.fleet.devices)
    named = [one.device for one in scenario.machines if one.role == "data" and not one.capacity]
    drawn = () if any(one.role == "data" for one in scenario.machines) else scenario.fleet.device
    for name in named or drawn:
        if Machine(devices[name], work).capacity(0) < 1:
            size, needed = scenario.model.size, work.step_bytes(0) / 1e9
            what = f"embedding and head of {size} in {work.ends} islands need {needed:.0f} GB of a data node"
            return f"{what}, a {name} has {devices[name].memory_bytes / 1e9:.0f} GB: use more data nodes"
    return ""


# --- the fleet of a seed -----------------------------------------------------------------------------------


class RegionLink(Protocol):
    """Link between two regions: one-way delay (s) and bandwidth (bits per second)."""

    @property
    def delay_s(self) -> float: ...
    @property
    def rate_bps(self) -> float: ...


class Regions(Protocol):
    """Network profile: regions, and the link between any two of them and within each, `link(one, one)`
    (`net.wan.profile.Profile` is one)."""

    @property
    def regions(self) -> tuple[str, ...]: ...
    def link(self, one: str, other: str) -> RegionLink: ...


@dataclass(frozen=True)
class Host:
    """Process of a fleet, mostly alone on a machine. stage: 0 for a data node. capacity: greatest number of
    microbatches in flight, those of `parked` included and further ones of `fleet.recompute` not. machine:
    model of the times of its tasks. line: its access line. parked: how many of the microbatches, at most,
    have their activations offloaded to host memory. fixed: True if the scenario gives the stage. on: host
    whose machine this is a further process of ("": a machine of its own). hidden: True if nobody can dial it,
    so that others reach it through carriers."""

    id: str
    stage: int
    region: str
    capacity: int
    machine: Machine
    line: Line
    parked: int = 0
    fixed: bool = False
    on: str = ""
    hidden: bool = False

    @property
    def resident(self) -> int:
        """Greatest number of microbatches whose activations stay in device memory."""
        return self.capacity - self.parked


@dataclass(frozen=True)
class Fleet:
    """Machines of a scenario as a seed draws them, with their network, churn trace and drift of speeds.
    hosts: host's id -> host."""

    scenario: Scenario
    hosts: Mapping[str, Host]
    regions: Regions
    trace: Trace = NO_TRACE
    drift: Drift = field(default_factory=Drift)
    _links: dict[tuple[str, str, float], SharedLink] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Links between regions at a factor of drift, once they were asked for."""

    def link(self, sender: str, receiver: str) -> SharedLink:
        """Link from one host to another, by their regions: delay, loss, and bandwidth at the present drift.
        Hosts of the same two regions share one object."""
        one, other = self.hosts[sender].region, self.hosts[receiver].region
        key = one, other, self.drift.rate(one, other)
        if (found := self._links.get(key)) is None:
            link, network = self.regions.link(one, other), self.scenario.network
            rate_bps = link.rate_bps * key[2]
            found = SharedLink(link.delay_s, rate_bps, network.loss, network.burst_trips)
            self._links[key] = found
        return found

    def line(self, host: str) -> Line:
        """Access line of a host."""
        return self.hosts[host].line

    def machine(self, host: str) -> str:
        """Name of the machine on which the process `host` runs: that of the host itself, or of the one that
        it is a further process of."""
        return self.hosts[host].on or host

    def beside(self) -> dict[str, list[str]]:
        """{host: names of the other hosts on its machine}, for each host that shares its machine."""
        processes: dict[str, list[str]] = {}
        for host in self.hosts:
            processes.setdefault(self.machine(host), []).append(host)
        shared = [names for names in processes.values() if len(names) > 1]
        return {name: [other for other in names if other != name] for names in shared for name in names}

    def stage(self, stage: int) -> list[Host]:
        """Hosts of a stage."""
        return [host for host in self.hosts.values() if host.stage == stage]

    def slots(self, host: Host) -> int:
        """Number of microbatches that a relay holds at once: its capacity, and those of which it keeps only
        the input and computes the forward again (`fleet.recompute`)."""
        return host.capacity + int(host.capacity * self.scenario.fleet.recompute)


def fleet_of(
    scenario: Scenario, regions: Regions, seed: int, assigned: Mapping[str, int] | None = None
) -> Fleet:
    """Fleet of a scenario for a seed. The seed draws regions (as evenly as possible), devices, speeds,
    capacities and access lines that the scenario does not give, and which relays nobody can dial. Relays
    without a given stage are assigned in turn. assigned: relay -> stage that it has instead, also of a given
    one. Raises UserError for an unknown region, and for a churn trace that is unreadable or names other
    machines than these relays."""
    rng, part, stages = random.Random(f"fleet {seed}"), scenario.fleet, scenario.model.relay_stages
    assigned = assigned or {}
    named = staged(scenario.machines, stages)
    drawn: list[tuple[int, MachinePart | None]] = [(1 + n % stages, None) for n in range(part.relays)]
    data = [] if any(not stage for stage, _ in named) else [(0, None)] * part.data_nodes
    every = [*data, *(named or drawn)]
    places: list[str] = []
    while len(places) < len(every):
        places += rng.sample(regions.regions, len(regions.regions))
    devices, hosts, count = known_devices(part.devices), {}, Counter[int]()
    for (stage, one), region in zip(every, places, strict=False):
        name = f"r{stage}.{count[stage]}" if stage else f"d{count[stage]}"
        count[stage] += 1
        if one is None:
            hosts[name] = _drawn(scenario, devices, rng, name, assigned.get(name, stage), region)
            continue
        if one.region and one.region not in regions.regions:
            at = next(at for at, part in enumerate(scenario.machines) if part.region == one.region)
            known, odd = ", ".join(regions.regions), f"machines[{at}].region: {one.region!r}"
            raise UserError(f"{odd} is no region of the network; there are {known}")
        machine = Machine(devices[one.device], scenario.work, part.achieved, one.speed, one.measured())
        line, name = Line(one.up_bps, one.down_bps), one.name or name
        stage = assigned.get(name, stage)
        capacity = one.capacity or max(1, min(machine.capacity(stage), 1024))
        host = _host(scenario, name, stage, one.region or region, capacity, machine, line)
        hosts[name] = replace(host, fixed=bool(one.stage), on=one.on)
    for name, host in hosts.items():
        if host.on:
            there = hosts[host.on]
            hosts[name] = replace(host, region=there.region, line=there.line)
    hidden = _hidden(hosts, scenario.network.hidden, seed)
    hosts |= {name: replace(host, hidden=True) for name, host in hosts.items() if (host.on or name) in hidden}
    drift = Drift(scenario.drift.speed, scenario.drift.links, scenario.drift.period_s, seed)
    return Fleet(scenario, hosts, regions, _trace_of(scenario, hosts), drift)


def _hidden(hosts: Mapping[str, Host], share: float, seed: int) -> set[str]:
    """Ids of hosts whose machines nobody can dial: the share `share` of the machines on which relays alone
    run. With the same seed, a greater share hides the same ones and more."""
    others = {host.on or host.id for host in hosts.values() if not host.stage}
    relays = [host.id for host in hosts.values() if not host.on and host.id not in others]
    random.Random(f"hidden {seed}").shuffle(relays)
    return set(relays[: round(share * len(relays))])


def _trace_of(scenario: Scenario, hosts: Mapping[str, Host]) -> Trace:
    """Churn trace of a scenario, empty if it names none. Raises UserError if the trace is unreadable, or
    names a machine that is no relay among `hosts`."""
    path = scenario.churn.trace
    if not path:
        return NO_TRACE
    trace, relays = read_trace(Path(path)), [host.id for host in hosts.values() if host.stage]
    for at, change in enumerate(trace.changes):
        if change.machine not in relays:
            known = f"there are {', '.join(relays[:4])}, ..."
            where = f"churn.trace: {path}: changes[{at}].machine"
            raise UserError(f"{where}: {change.machine!r} is no relay; {known}")
    return trace


def _drawn(
    scenario: Scenario, devices: Mapping[str, Device], rng: random.Random, name: str, stage: int, region: str
) -> Host:
    part = scenario.fleet
    device = devices[rng.choice(part.device)]
    speed = rng.choice(part.speed) if stage else 1.0
    machine = Machine(device, scenario.work, part.achieved, speed)
    capacity = machine.capacity(stage)
    if stage and part.capacity:
        capacity = rng.choice(part.capacity)
    line = Line(rng.choice(scenario.network.up_bps), rng.choice(scenario.network.down_bps))
    return _host(scenario, name, stage, region, max(1, min(capacity, 1024)), machine, line)


def _host(
    scenario: Scenario, name: str, stage: int, region: str, resident: int, machine: Machine, line: Line
) -> Host:
    """Host whose capacity is `resident` microbatches and those whose activations it can offload
    (`fleet.park`; none at a data node or without host memory apart)."""
    part, parked = scenario.fleet, 0
    if stage and machine.device.host_link_bytes_per_s:
        fit = int(part.host_memory_bytes * HOST_SHARE) // scenario.work.kept_bytes(stage)
        parked = max(0, min(int(resident * part.park), fit, 1024 - resident))
    return Host(name, stage, region, resident + parked, machine, line, parked)


def misfit(scenario: Scenario) -> str:
    """Sentence on the first named relay whose stage does not fit into its memory; "" if there is none. A
    relay whose capacity the scenario gives is taken to fit."""
    model, devices = scenario.model, known_devices(scenario.fleet.devices)
    for stage, one in staged(scenario.machines, model.relay_stages):
        if stage and not one.capacity and Machine(devices[one.device], scenario.work).capacity(stage) < 1:
            alike = [part.device == one.device and not part.capacity for part in scenario.machines]
            return f"machines[{alike.index(True)}].device: {_too_small(scenario, one.device)}"
    return ""


def _too_small(scenario: Scenario, device: str) -> str:
    """Sentence that a relay's stage does not fit into the device of this name, for an error."""
    model, work = scenario.model, scenario.work
    what = f"a stage of {model.size} does not fit into a {device}, with model.stages = {model.stages}"
    if not work.ends:
        return what
    each = work.step_bytes(1) // work.parameters(1)
    committed = "the committed weights, outer momentum, second moment, sums and result"
    own = "the island's own weights, moments and gradient"
    return f"{what} and round.slots: {each} bytes a parameter for {committed}, and for {own}"
