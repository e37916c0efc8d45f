"""Round trips, throughput and CPU seconds of a link between two processes on this machine.

    python -m benchmarks.overhead.transport

Sender and receiver are processes of their own with one event loop each; the receiver answers every
message. CPU seconds are those of both together: encryption, checksums and copies included.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from anabranch.net.connection_limits import Limits
from anabranch.net.framing import Blob
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import issue_certificate
from anabranch.node.driver.event_loop import run_async
from benchmarks import harness
from benchmarks.harness import table

RUN = "transport"
OWNER, SERVER, CLIENT = (
    Identity.from_seed(name.encode().ljust(32)) for name in ("owner", "server", "client")
)
LIMITS = Limits(max_payload_bytes=1 << 30)


def transport_of(who: Identity, on_link: object = None) -> TcpTransport:
    gate = Gate(RUN, OWNER.peer_id, lambda hello: None)
    return TcpTransport(who, 1, gate, on_link or (lambda link: None), limits=LIMITS)  # type: ignore[arg-type]


async def serve() -> None:
    """Answer every message with its last kilobyte and this process's CPU seconds."""
    over = asyncio.Event()

    def on_link(link: Link) -> None:
        link.start(
            lambda message, blob: link.send(repr(time.process_time()).encode() if blob else message),
            lambda reason: over.set(),
        )

    transport = transport_of(SERVER, on_link)
    _, port = await transport.listen("127.0.0.1", 0)
    print(port, flush=True)
    await over.wait()
    await transport.close()


class Client:
    """Sends, and waits for the answers."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        link.start(lambda message, blob: self._answers.put_nowait(message), lambda reason: None)

    async def round_trips(self, count: int) -> float:
        """Seconds of one round trip of 1 KB."""
        begin = time.perf_counter()
        for _ in range(count):
            self._link.send(bytes(1024))
            await self._answers.get()
        return (time.perf_counter() - begin) / count

    async def payloads(self, size_bytes: int, count: int, at_once: int) -> tuple[float, float]:
        """(bytes per second, CPU seconds of both sides per 1e9 bytes)."""
        blob = Blob("uint8", (size_bytes,), np.random.default_rng(1).bytes(size_bytes))
        await self._one(blob)  # the buffers of both sides exist now
        theirs, mine, begin = await self._one(blob), time.process_time(), time.perf_counter()
        for _ in range(count // at_once):
            for _ in range(at_once):
                self._link.send(b"payload", blob)
            for _ in range(at_once):
                last = float(await self._answers.get())
        seconds = time.perf_counter() - begin
        cpu = last - theirs + time.process_time() - mine
        return size_bytes * count / seconds, cpu / (size_bytes * count / 1e9)

    async def _one(self, blob: Blob) -> float:
        self._link.send(b"payload", blob)
        return float(await self._answers.get())


async def measure(port: int, repeats: int) -> str:
    certificate = issue_certificate(
        OWNER, run=RUN, peer_id=CLIENT.peer_id, role="relay", expires_at_s=int(time.time()) + 3600
    )
    transport = transport_of(CLIENT)
    client = Client(await transport.dial(SERVER.peer_id, "127.0.0.1", port, certificate))
    await client.round_trips(200)
    trips = sorted([await client.round_trips(500) for _ in range(repeats)])
    rows: list[tuple[str, ...]] = [
        ("1 KB round trip, µs", f"{trips[0] * 1e6:.0f}", f"{trips[len(trips) // 2] * 1e6:.0f}", "")
    ]
    for what, size, count, at_once in (
        ("4 MB, one at a time, MB/s", 4_000_000, 64, 1),
        ("64 MB, one at a time, MB/s", 64_000_000, 8, 1),
        ("4 MB, 16 queued, MB/s", 4_000_000, 64, 16),
    ):
        runs = [await client.payloads(size, count, at_once) for _ in range(repeats)]
        speeds, costs = sorted((r[0] for r in runs), reverse=True), sorted(r[1] for r in runs)
        middle = repeats // 2
        rows.append(
            (
                what,
                f"{speeds[0] / 1e6:.0f}",
                f"{speeds[middle] / 1e6:.0f}",
                f"{costs[0]:.2f} / {costs[middle]:.2f}",
            )
        )
    await transport.close()
    return table(
        ("link over TLS 1.3, loopback", "best", "median", "CPU s/GB (both sides): least / median"), rows
    )


@contextmanager
def serving() -> Iterator[int]:
    """Port of a server in another process, which ends with this context."""
    command = [sys.executable, "-m", "benchmarks.overhead.transport", "--serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT)
    assert server.stdout is not None
    try:
        yield int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_async(serve())
        return 0
    with serving() as port:
        text = run_async(measure(port, args.repeats))
    harness.write("transport", "Encrypted links on loopback", text, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
