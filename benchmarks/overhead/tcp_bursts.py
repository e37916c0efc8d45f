"""Time in which TCP delivers bursts over long links, with BBR, with cubic, and with remedies without root.

    python -m benchmarks.overhead.tcp_bursts [--bursts 12]

Needs Linux, root, /dev/net/tun, nft and the kernel's module of BBR. One host sends to another in an emulated
network. A burst has the size of a microbatch's activation or of a part of a reduce, and begins after a pause
as between two iterations. The remedies: pacing by the socket (SO_MAX_PACING_RATE) at 0.95 of the link's rate;
two and four connections that share a burst; and 30 bytes each 0.2 s of the pause, so that the kernel does not
forget the connection's rate: links of anabranch send so many (`net.link`: an empty frame, encrypted). For
comparison, the kernel's own switch (`net.ipv4.tcp_slow_start_after_idle=0`), which needs root. The second
half of the bursts counts. Round trips from a burst's first byte to its last, with BBR on the first link, are
one measurement of `network.burst_trips` of a scenario.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

from anabranch.net.framing import MAX_PAUSES
from anabranch.net.wan.emulated_network import EmulatedNetwork, available
from anabranch.net.wan.namespaces import DEVICE, run_ip
from anabranch.net.wan.profile import Link, Profile, find_profile
from anabranch.net.wan.shape import Host
from benchmarks import harness
from benchmarks.harness import table

SENDER, RECEIVER = "sender", "receiver"
#: Share of the link's rate at which sockets are paced.
PACE = 0.95
#: Largest time of a burst with the built-in remedy, as a multiple of BBR's, that the goal permits.
GOAL = 1.5
#: Way of anabranch's links where BBR is missing.
BUILT_IN = "cubic, frames in the pause"
IDLE_SWITCH = "net.ipv4.tcp_slow_start_after_idle=0"

#: Prints the times (s) at which each burst's first and last byte came, as a JSON list per burst.
RECEIVES = """
import json, socket, sys, threading, time
size, ways, bursts, ping = map(int, sys.argv[1:])
with socket.create_server(("", 9000)) as server:
    print("ready", flush=True)
    connections = [server.accept()[0] for _ in range(ways)]
times = [[] for _ in range(ways)]
def read(connection, out):
    left, first = size // ways, None
    while len(out) < bursts:
        got = connection.recv(min(max(left, 1), 1 << 20))
        if not got:
            raise SystemExit("the sender ended early")
        got = got.lstrip(b"p")
        if not got:
            continue
        now = time.monotonic()
        first = first or now
        left -= len(got)
        if not left:
            out.append((first, now))
            left, first = size // ways, None
threads = [threading.Thread(target=read, args=pair) for pair in zip(connections, times)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(json.dumps([[min(f for f, _ in each), max(l for _, l in each)] for each in zip(*times)]))
"""
#: Prints the times (s) at which each burst began. In the pauses between bursts it sends pings, if asked to.
SENDS = """
import json, socket, sys, threading, time
address, size, ways, bursts, ping, gap, congestion, pace = sys.argv[1:]
size, ways, bursts, ping, gap, pace = int(size), int(ways), int(bursts), int(ping), float(gap), int(pace)
connections = [socket.create_connection((address, 9000)) for _ in range(ways)]
for connection in connections:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if pace:
        connection.setsockopt(socket.SOL_SOCKET, 47, pace // ways)  # SO_MAX_PACING_RATE
times = []
for number in range(bursts):
    times.append(time.monotonic())
    part = bytes(size // ways)
    threads = [threading.Thread(target=each.sendall, args=(part,)) for each in connections]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    for count in range(int(gap / 0.2) + 1):
        time.sleep(max(0.0, min(0.2, times[-1] + gap - time.monotonic())))
        if count < ping and number + 1 < bursts and time.monotonic() < times[-1] + gap:
            [each.sendall(b"p" * 30) for each in connections]
time.sleep(2.0)
print(json.dumps(times))
"""


@dataclass(frozen=True)
class Path:
    """Link and the bursts on it. gap_s: from one burst's beginning to the next one's. loss: share of packets
    that each side loses as it sends them."""

    name: str
    link: Link
    size_bytes: int
    gap_s: float
    loss: float = 0.0


@dataclass(frozen=True)
class Way:
    """Options of the sender's sockets. connections: that share a burst."""

    name: str
    congestion: str = "cubic"
    connections: int = 1
    paced: bool = False
    pings: int = 0
    kernel_switch: bool = False


PATHS = (
    Path("Seoul to Oregon, 1 s", find_profile("wan10").link("Seoul", "Oregon"), 6 << 17, 0.95),
    Path("the same, 3 s", find_profile("wan10").link("Seoul", "Oregon"), 8 << 20, 3.0),
    Path("home, 1 s", Link(0.05, 40e6), 1 << 18, 1.0),
    Path("home, 3 s", Link(0.05, 40e6), 1 << 18, 3.0),
    Path("home, 1 s, 0.1 % lost", Link(0.05, 40e6), 1 << 18, 1.0, 0.001),
    Path("home, 1 s, 1 % lost", Link(0.05, 40e6), 1 << 18, 1.0, 0.01),
)
#: Two tiny bursts, between which the bytes of a pause are counted.
PAUSE = Path("a pause", Link(0.05, 40e6), 1 << 10, 10.0)
SHORT = [path for path in PATHS if path.gap_s <= 1.0]
LONG = [path for path in PATHS if path.gap_s > 1.0]
WAYS = (
    Way("BBR", "bbr"),
    Way("cubic"),
    Way("cubic, paced", paced=True),
    Way("cubic, 2 connections", connections=2),
    Way("cubic, 4 connections", connections=4),
    Way(BUILT_IN, pings=MAX_PAUSES),
    Way("cubic, kernel's switch (root)", kernel_switch=True),
)


@dataclass(frozen=True)
class Burst:
    """Seconds of one burst: from its first byte's arrival to its last's, and from its beginning to that."""

    spread_s: float
    delivery_s: float


@dataclass(frozen=True)
class Bytes:
    """Bytes of IP packets that the sender's device sent and received."""

    sent: int
    received: int


def measure(path: Path, way: Way, bursts: int) -> tuple[list[Burst], Bytes]:
    profile = Profile("one link", ("a", "b"), path.link, {frozenset("ab"): path.link})
    with EmulatedNetwork({SENDER: Host("a"), RECEIVER: Host("b")}, profile) as wan:
        for host in (SENDER, RECEIVER):
            _prepare(wan, host, path, way)
            sizes = (path.size_bytes, way.connections, bursts, way.pings)
        command = wan.command(RECEIVER, [sys.executable, "-c", RECEIVES, *map(str, sizes)])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            pace = int(PACE * path.link.rate_bps / 8) if way.paced else 0
            wanted = [wan.address(RECEIVER), *sizes, path.gap_s, way.congestion, pace]
            command = wan.command(SENDER, [sys.executable, "-c", SENDS, *map(str, wanted)])
            patience_s = 60.0 + 4.0 * path.gap_s * bursts
            sent = subprocess.run(command, check=True, timeout=patience_s, stdout=subprocess.PIPE, text=True)
            begun: list[float] = json.loads(sent.stdout)
            arrived: list[tuple[float, float]] = json.load(receiver.stdout)
        counted = _bytes(wan)
    times = zip(begun, arrived, strict=True)
    return [Burst(last - first, last - start) for start, (first, last) in times], counted


def _bytes(wan: EmulatedNetwork) -> Bytes:
    command = wan.command(SENDER, ["ip", "-j", "-s", "link", "show", "dev", DEVICE])
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    stats = json.loads(done.stdout)[0]["stats64"]
    return Bytes(stats["tx"]["bytes"], stats["rx"]["bytes"])


def _prepare(wan: EmulatedNetwork, host: str, path: Path, way: Way) -> None:
    if way.kernel_switch:
        subprocess.run(wan.command(host, ["sysctl", "-qw", IDLE_SWITCH]), check=True)
    if path.loss:
        run_ip("-n", wan.namespace(host), "link", "set", DEVICE, "gso_max_segs", "1")  # frames are packets
        rule = f"oif {DEVICE} numgen random mod 1000000 < {round(path.loss * 1e6)} drop"
        chain = f"type filter hook output priority 0\n{rule}\n"
        rules = f"table ip lossy {{\nchain sent {{\n{chain}}}\n}}\n"
        subprocess.run(wan.command(host, ["nft", "-f", "-"]), input=rules, text=True, check=True)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--bursts", type=int, default=12, help="of each way on each path")
    options = parser.parse_args()
    if (reason := available()) is not None:
        raise SystemExit(reason)
    found: dict[str, dict[str, list[Burst]]] = {}
    for path in PATHS:
        key = f"{path.name}, {path.size_bytes / 1e6:.2f} MB"
        for way in WAYS:
            bursts, _ = measure(path, way, options.bursts)
            found.setdefault(way.name, {})[key] = bursts
            print(f"{key}, {way.name}: {_median_s(bursts):.3f} s", file=sys.stderr, flush=True)
    report(found, _per_s(), options.dry)
    return 0


def _median_s(bursts: list[Burst]) -> float:
    return statistics.median(burst.delivery_s for burst in bursts[len(bursts) // 2 :])


def _per_s() -> tuple[float, float]:
    """Bytes a second of a pause that the built-in way sends and receives, and plain cubic does not."""
    [more, plain] = [measure(PAUSE, way, 2)[1] for way in WAYS if way.name in (BUILT_IN, "cubic")][::-1]
    return (more.sent - plain.sent) / PAUSE.gap_s, (more.received - plain.received) / PAUSE.gap_s


def report(found: dict[str, dict[str, list[Burst]]], per_s: tuple[float, float], dry: bool) -> None:
    columns = dict(zip(found["BBR"], PATHS, strict=True))
    medians = {way: {key: _median_s(bursts) for key, bursts in row.items()} for way, row in found.items()}
    rows = [(way, *(f"{row[key]:.3f}" for key in columns)) for way, row in medians.items()]
    first = next(iter(columns))
    bursts = found["BBR"][first]
    spread_s = statistics.median(burst.spread_s for burst in bursts[len(bursts) // 2 :])
    text = (
        "Median seconds from the beginning of a burst to the arrival of its last byte, second half of the "
        "bursts, which begin 1 or 3 s apart. With BBR the first link's bursts arrive within "
        f"{spread_s / (2.0 * columns[first].link.delay_s):.2f} round trips. Links of anabranch send the "
        "frames where the kernel has no BBR, or does not permit it. Beside plain cubic they cost "
        f"{per_s[0]:.0f} bytes a second and {per_s[1]:.0f} for their acknowledgements, headers included, in "
        f"the first {MAX_PAUSES / 5:.0f} s of a pause, and nothing after that.\n\n"
        f"{table(('way', *columns), rows)}"
    )
    goals = []
    for pause, paths in (("short", SHORT), ("long", LONG)):
        ratio = max(medians[BUILT_IN][key] / medians["BBR"][key] for key in columns if columns[key] in paths)
        name = f"burst after a {pause} pause by {BUILT_IN}, times BBR's, worst link"
        goals.append(harness.at_most(name, GOAL, ratio, "{:.2f}"))
    harness.write("tcp-bursts", "Bursts over long links without BBR", text, goals=goals, data=found, dry=dry)


if __name__ == "__main__":
    raise SystemExit(main())
