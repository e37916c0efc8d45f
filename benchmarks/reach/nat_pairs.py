"""Which way each pair of machines finds to each other behind real NATs, in one live run (root, Linux, nft).

    python -m benchmarks.reach.nat_pairs [--steps 6] [--kill] [--iroh]

One relay of stage 1 and one of stage 2 stand behind each kind of access: a public address, a NAT with
port-restricted filtering, a NAT with a random port for each connection (symmetric), and a firewall that lets
only TCP out. All are network namespaces of this machine; the NATs are nftables. The leader and a dedicated
carrier have public addresses. The run trains, `verify` recomputes every step, and the table says how each
pair of stage 1 and stage 2 was linked. --kill: the carrier is killed in the middle of the run. --iroh: peers
also use iroh (`network.transport = "auto"`) with a relay of the tests, and a NAT that forwards a UDP port
(full cone) is added: 25 pairs. Each is told its public UDP address, as iroh's own relay would tell it.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.audit.verify import verify
from anabranch.config import RunConfig, with_changes
from anabranch.errors import UserError
from anabranch.node.lifecycle.create_run import create_run
from anabranch.node.lifecycle.tickets import history_of
from anabranch.node.local_swarm.local_swarm import LocalSwarm
from anabranch.node.local_swarm.supervisor import LISTEN_VARIABLE, Process, Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Event, Note, PeerJoined, Step, Vitals
from benchmarks import harness
from benchmarks.harness import table

KINDS = ("public", "port-restricted", "symmetric", "TCP out only")
IROH_KINDS = ("public", "full cone", "port-restricted", "symmetric", "TCP out only")
#: UDP port of each host's iroh endpoint, and port of the iroh relay.
UDP_PORT, RELAY_PORT = 7701, 3340
#: Addresses for documentation (RFC 5737): nothing of them leaves the namespaces.
_PUBLIC = "203.0.113"
#: Seconds without a step after which the run is given up.
PATIENCE_S = 480.0

_FILTER = """
table ip nat {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade %(ports)s; }
  chain into { type nat hook prerouting priority -100; %(forwarded)s }
}
table ip filter {
  chain through {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    ct status dnat accept
    %(refused)s
    iifname "lan" accept
  }
  chain in { type filter hook input priority 0; policy drop; ct state established,related accept; }
}
"""


#: Rules of the router against its hosts, by kind of access.
_REFUSED = {
    "TCP out only": 'iifname "lan" meta l4proto udp drop',
    "443 out only": 'iifname "lan" meta l4proto != tcp drop; iifname "lan" tcp dport != 443 drop',
}


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


@dataclass(frozen=True)
class Host:
    """Machine of the table. address: at which it would listen. outside: its public address."""

    namespace: str
    kind: str
    address: str
    outside: str


class Internet:
    """Namespaces on one bridge: public hosts, and hosts behind a router each."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(3)
        self._namespaces: list[str] = []
        self._numbers = iter(range(1, 250))
        self._core = self._namespace("core")
        _ip("-n", self._core, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._core, "link", "set", "br0", "up")

    def _namespace(self, name: str) -> str:
        full = f"nat-{self._token}-{name}"
        _ip("netns", "add", full)
        self._namespaces.append(full)
        _ip("-n", full, "link", "set", "lo", "up")
        return full

    def _plug(self, namespace: str, device: str, mbit: float = 0.0) -> str:
        """Connect a namespace to the bridge; returns its public address. mbit: capacity of its line each way
        in Mbit/s; 0: none."""
        number = next(self._numbers)
        port, address = f"p{number}", f"{_PUBLIC}.{number}"
        _ip("-n", self._core, "link", "add", port, "type", "veth", "peer", "name", device, "netns", namespace)
        _ip("-n", self._core, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
        _ip("-n", namespace, "link", "set", device, "up")
        if mbit:
            for where, end in ((namespace, device), (self._core, port)):
                shape = f"tbf rate {mbit}mbit burst 64kb latency 200ms".split()
                subprocess.run(["tc", "-n", where, "qdisc", "add", "dev", end, "root", *shape], check=True)
        return address

    def public(self, name: str, mbit: float = 0.0) -> Host:
        """Host with a public address. mbit: capacity of its line each way in Mbit/s; 0: none."""
        namespace = self._namespace(name)
        address = self._plug(namespace, "eth0", mbit)
        return Host(namespace, "public", address, address)

    def behind(self, name: str, kind: str, mbit: float = 0.0) -> Host:
        """Host behind a router of its own, with a line of `mbit` (as `public`)."""
        if kind == "public":
            return self.public(name, mbit)
        router, host = self._namespace(f"{name}-router"), self._namespace(name)
        outside = self._plug(router, "wan", mbit)
        _ip("-n", router, "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("-n", router, "address", "add", "192.168.1.1/24", "dev", "lan")
        _ip("-n", router, "link", "set", "lan", "up")
        _ip("-n", host, "address", "add", "192.168.1.2/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "eth0", "up")
        _ip("-n", host, "route", "add", "default", "via", "192.168.1.1")
        subprocess.run(["ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        forwarded = f'iifname "wan" udp dport {UDP_PORT} dnat to 192.168.1.2;'
        rules = _FILTER % {
            "ports": "fully-random" if kind == "symmetric" else "",
            "forwarded": forwarded if kind == "full cone" else "",
            "refused": _REFUSED.get(kind, ""),
        }
        subprocess.run(["ip", "netns", "exec", router, "nft", "-f", "-"], input=rules, text=True, check=True)
        return Host(host, kind, "192.168.1.2", outside)

    def router_of(self, name: str) -> str:
        """Namespace of the router that `behind` made for a host."""
        return f"nat-{self._token}-{name}-router"

    def move(self, name: str) -> None:
        """Give the router of a host another public address, as when a laptop changes networks: its
        connections are dead, and nobody is told."""
        router = self.router_of(name)
        _ip("-n", router, "address", "flush", "dev", "wan")
        _ip("-n", router, "address", "add", f"{_PUBLIC}.{250 - next(self._numbers)}/24", "dev", "wan")

    def close(self) -> None:
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def internet() -> Iterator[Internet]:
    """Raises UserError where namespaces or nft are not permitted."""
    if shutil.which("nft") is None:
        raise UserError("nft is missing: apt-get install nftables")
    made = Internet()
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Setting:
    """Set-up of a run: hosts, lines and run file.

    kinds: label of each relay of a stage -> kind of its access. iroh: True to use iroh where TCP is no way.
    once: True if a relay that has to leave the run does not join again. carriers: number of dedicated
    carriers. mbit: capacity of each line in Mbit/s; 0: none. changes: settings
    of the run file.
    """

    steps: int
    kinds: Mapping[str, str]
    iroh: bool = False
    once: bool = True
    carriers: int = 1
    mbit: float = 0.0
    changes: Mapping[str, Any] = field(default_factory=dict)


def run_file(folder: Path, setting: Setting, relay: str) -> RunConfig:
    """Small run with two stages of a relay of each kind. relay: URL of an iroh relay; "": TCP alone."""
    folder.mkdir(parents=True)
    for number in range(20):
        lines = (f"line {line} of text {number}: the quick brown fox\n" for line in range(20))
        (folder / f"{number:02}.txt").write_text("".join(lines))
    changes: dict[str, Any] = {
        "run.steps": setting.steps, "run.seed": 3, "model.dim": 16, "model.blocks": 4, "model.heads": 2,
        "model.ffn": 24, "data.source": "text", "data.path": str(folder), "data.tokenizer": "bytes",
        "batch.microbatches": 16, "batch.rows": 1, "batch.sequence": 16, "optimizer.warmup_steps": 2,
        "pipeline.stages": 2, "fleet.data_nodes": 1, "fleet.relays_per_stage": [len(setting.kinds)] * 2,
        "fleet.minimum": 4,
        "evaluation.every": 0, "checkpoint.every": 2, "compute.device": "cpu",
    }  # fmt: skip
    if relay:
        changes |= {"network.transport": "auto", "network.iroh_relay": relay}
    return with_changes(RunConfig(), changes | dict(setting.changes))


@dataclass
class Found:
    """Outcome of the run.

    ways: (name of one relay, name of another) -> way of their link. gaps_s: seconds of each step but the
    first. exact: True if `verify` finds no bit that differs. carried_mb: of each dedicated carrier that ended
    by itself. relinked_s: for each link that the killed carrier forwarded, seconds until another one carried
    it.
    """

    ways: dict[tuple[str, str], str]
    steps: int
    exact: bool
    gaps_s: list[float]
    carried_mb: list[float]
    relinked_s: list[float]


def _file_name(name: str) -> str:
    return name.replace(": ", "-").replace(" ", "-")


class NatRun:
    """Run of a relay of each kind of access in each of two stages."""

    def __init__(self, made: Internet, folder: Path, supervisor: Supervisor, setting: Setting) -> None:
        self._iroh = made.public("iroh") if setting.iroh else None
        relay = f"http://{self._iroh.address}:{RELAY_PORT}" if self._iroh is not None else ""
        config = run_file(folder / "texts", setting, relay)
        self._directory = create_run(config, folder / "run")
        self._supervisor, self.made, self._once = supervisor, made, setting.once
        self.swarm = LocalSwarm(self._directory, config, supervisor)
        self._leader = made.public("leader", setting.mbit)
        names = ["carrier", *(f"carrier-{number}" for number in range(1, setting.carriers))]
        self._carriers = {name: made.public(name.replace("-", ""), setting.mbit) for name in names}
        self.hosts = {
            f"{stage}: {label}": made.behind(f"r{stage}{number}", kind, setting.mbit)
            for stage in (1, 2)
            for number, (label, kind) in enumerate(setting.kinds.items())
        }
        self._events: list[Event] = []
        self._direct: set[frozenset[str]] = set()
        self._killed: tuple[str, float] = ("", float("inf"))
        """Id of the killed carrier, and unix time (s) of its end."""

    def process_of(self, name: str) -> Process:
        """Process of the relay `name` ("1: public")."""
        return self.swarm.processes[_file_name(name)]

    def _start(self, name: str, host: Host, arguments: list[str]) -> None:
        log = self._directory.peer(name) / "output.txt"
        environment = {LISTEN_VARIABLE: host.address} if name == "data-0" else {}
        process = self._supervisor.start(name, arguments, log, host.namespace, environment)
        self.swarm.processes[name] = process

    def _start_all(self) -> None:
        directory = self._directory
        if self._iroh is not None:
            self._start_iroh_relay(self._iroh)
        self._start("data-0", self._leader, ["resume", str(directory.path), "--quiet"])
        ticket = self.swarm._await_tickets(directory.path / "tickets.json")["relay"]
        for name, host in self._carriers.items():
            home = ["--home", str(directory.peer(name))]
            self._start(name, host, ["relay", ticket, *home, "--host", host.address, "--port", "7700"])
        self._until(lambda: len(history_of(directory).carriers) == len(self._carriers))
        for name, host in self.hosts.items():
            short = _file_name(name)
            options = ["--name", name, "--stage", name[0], "--host", host.address]
            options += ["--once"] if self._once else []
            if self._iroh is not None:
                outside = f"{host.address}:7700,{host.outside}:{UDP_PORT}/udp"
                options += ["--port", "7700", "--advertise", outside]
            self._start(short, host, ["join", ticket, "--home", str(directory.peer(short)), *options])

    def run(self, kill: bool, move: str = "") -> Found:
        """kill: True to kill the carrier with most links after step 2. move: host whose public address
        changes then."""
        directory, swarm = self._directory, self.swarm
        self._start_all()
        deadline = time.monotonic() + PATIENCE_S

        def in_time() -> None:
            if time.monotonic() > deadline:
                raise UserError(f"no step within {PATIENCE_S:.0f} s: see {directory.path}")

        for event in swarm.events(in_time):
            self._events.append(event)
            if isinstance(event, Step):
                deadline = time.monotonic() + PATIENCE_S
                self._look()
                if event.t == 2 and move:
                    self.made.move(move)
                if event.t == 2 and kill:
                    self._kill_busiest()
                self.after_step(event)
        for name in self._carriers:
            swarm.processes[name].signal(2)
        swarm.end()
        swarm.check_leader()
        steps = events_of(directory.events, Step)
        gaps = [after.time - before.time for before, after in itertools.pairwise(steps)]
        report = verify(directory.path)
        exact = report.holds and report.promise == "bits" and report.steps == len(steps)
        logs = [swarm.processes[name].log.read_text() for name in self._carriers]
        carried = [float(each) for log in logs for each in re.findall(r"([\d.]+) MB carried in all", log)]
        return Found(self._ways(), len(steps), exact, gaps, carried, self._relinked())

    def after_step(self, event: Step) -> None:
        """Called after each step; a test that does more to the run overrides it."""

    def _kill_busiest(self) -> None:
        """Kill the carrier that most members' links go through, half a second after the last step."""
        last = {event.peer: event.ways for event in self._events if isinstance(event, Vitals)}
        used = Counter(way for ways in last.values() for way in ways.values())
        ids = {name: self._id_of(name) for name in self._carriers}
        busiest = max(self._carriers, key=lambda name: used[ids[name]])
        time.sleep(0.5)
        self.swarm.processes[busiest].signal(9)
        self._killed = (ids[busiest], time.time())

    def _id_of(self, carrier: str) -> str:
        found = re.search(r"/([0-9a-f]{64}) listens", self.swarm.processes[carrier].log.read_text())
        return found[1] if found else ""

    def _relinked(self) -> list[float]:
        """Seconds from the carrier's end until each link that it forwarded went another way."""
        killed, at = self._killed
        was: dict[tuple[str, str], str] = {}
        found: dict[tuple[str, str], float] = {}
        for event in self._events:
            linked = re.search(r"^(\w{8}) is linked through carrier (\w{8})", getattr(event, "text", ""))
            if not linked:
                continue
            pair = (event.peer, linked[1])
            if event.time < at:
                was[pair] = linked[2]
            elif was.get(pair) == killed[:8] and pair not in found:
                found[pair] = event.time - at
        return sorted(found.values())

    def _start_iroh_relay(self, host: Host) -> None:
        tests = Path(__file__).parents[2] / "tests"
        path = os.pathsep.join((str(tests), os.environ.get("PYTHONPATH", "")))
        words = ["ip", "netns", "exec", host.namespace, "env", f"PYTHONPATH={path}", sys.executable]
        words += ["-m", "support.network.iroh_relay", host.address, str(RELAY_PORT)]
        self.iroh_relay = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def _until(self, reached: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while not reached():
            if time.monotonic() > until:
                raise UserError("the carrier is not listed by the log")
            time.sleep(0.1)

    def _ways(self) -> dict[tuple[str, str], str]:
        """Way of the link of each pair of the two stages, from what the relays reported."""
        names = {event.subject: event.name for event in self._events if isinstance(event, PeerJoined)}
        short = {peer[:8]: name for peer, name in names.items()}
        carried: dict[frozenset[str], str] = {}
        for event in self._events:
            text = getattr(event, "text", "")
            how = "linked directly|(?:linked|reached) through (?:carrier|iroh directly|iroh by)"
            found = re.search(rf"^(\w{{8}}) is ({how})", text)
            if isinstance(event, Note) and found:
                pair = frozenset((names.get(event.peer, ""), short.get(found[1], "")))
                last = found[2].rpartition("through ")[2]
                ways = {"carrier": "carried", "iroh directly": "punched", "iroh by": "iroh's relay"}
                carried[pair] = ways.get(last, "")
        return {
            (one, other): self._way(one, other, carried)
            for one in self.hosts
            for other in self.hosts
            if one[0] == "1" and other[0] == "2"
        }

    def _way(self, one: str, other: str, carried: dict[frozenset[str], str]) -> str:
        if way := carried.get(frozenset((one, other))):
            return way
        return "direct" if frozenset((one, other)) in self._direct else "none"

    def _look(self) -> None:
        """Note which hosts have a connection to another's own address."""
        for one in self.hosts:
            for other in self.hosts:
                if one[0] != other[0] and self._connected(one, other):
                    self._direct.add(frozenset((one, other)))

    def _connected(self, one: str, other: str) -> bool:
        """True if a host has a connection to another's own address."""
        here, there = self.hosts[one], self.hosts[other]
        if there.kind != "public":
            return False
        words = ["ip", "netns", "exec", here.namespace, "ss", "-Htn", "state", "established"]
        words += ["dst", there.address]
        return bool(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())


def body(found: Found, kill: bool, kinds: Sequence[str] = KINDS) -> str:
    """Markdown of the result."""
    rows = [
        [kind, *(found.ways.get((f"1: {kind}", f"2: {other}"), "none") for other in kinds)] for kind in kinds
    ]
    carried = f"Bytes over the carrier: {found.carried_mb[0]} MB. " if found.carried_mb else ""
    ending = "The carrier was killed after step 2; no step was lost. " if kill else ""
    return "\n\n".join(
        (
            "Way of the link between a relay of stage 1 (row) and one of stage 2 (column) in one live run. "
            "The NATs are nftables in network namespaces; a carried pair meets at a dedicated carrier.",
            table(["", *kinds], rows),
            f"{ending}{found.steps} steps were committed; `verify` finds "
            f"{'zero' if found.exact else 'SOME'} bits that differ. {carried}Longest time between two steps: "
            f"{max(found.gaps_s, default=0.0):.1f} s, which on a loaded machine says little.",
        )
    )


def measure(folder: Path, steps: int, kill: bool, move: str = "", iroh: bool = False) -> Found:
    """move: host whose address changes after step 2. iroh: True to use iroh where TCP is no way."""
    kinds = IROH_KINDS if iroh else KINDS
    return run_setting(folder, Setting(steps, dict(zip(kinds, kinds, strict=True)), iroh), kill, move)


def run_setting(folder: Path, setting: Setting, kill: bool, move: str = "") -> Found:
    with internet() as made, Supervisor(1) as supervisor:
        run = NatRun(made, folder, supervisor, setting)
        try:
            return run.run(kill, move)
        finally:
            if setting.iroh:
                run.iroh_relay.kill()


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--iroh", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(Path(folder), args.steps, args.kill, iroh=args.iroh)
        except UserError as error:
            sys.exit(str(error))
    unlinked = sum(way == "none" for way in found.ways.values())
    harness.write(
        "nat-pairs" + "-iroh" * args.iroh + "-kill" * args.kill,
        "Ways between machines behind NATs",
        body(found, args.kill, IROH_KINDS if args.iroh else KINDS),
        goals=[
            harness.at_most("pairs that are not linked", 0, unlinked),
            harness.at_least("steps committed", args.steps, found.steps),
            harness.goal("bits that differ by verify", "0", "0" if found.exact else "some", found.exact),
        ],
        data={f"{one} - {other}": way for (one, other), way in found.ways.items()},
        dry=args.dry,
    )


if __name__ == "__main__":
    main()
