"""A process with a transport that delivers nowhere, and tells its resources: the victim of live attacks.

Argument: JSON with `limits` (of `connection_limits.Limits`) and `descriptors` (0: as they are). It prints its
port, and for each line of input one line of JSON: resident bytes, resources in use, refusals, and how many
files it could open besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys

from anabranch.net.connection_limits import Limits
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from support.network.net_world import NOW_S, gate, identity

#: Files that a peer must be able to open at any time.
FILES = 64


def openable() -> int:
    with contextlib.ExitStack() as files:
        for number in range(FILES):
            try:
                files.enter_context(open(os.devnull, "rb"))
            except OSError:
                return number
    return FILES


async def main(limits: Limits) -> None:
    received = 0

    def on_link(link: Link) -> None:
        def took(message: bytes, payload: object) -> None:
            nonlocal received
            received += 1

        link.start(took, lambda reason: None)

    transport = TcpTransport(identity("bert"), 1, gate(), on_link, limits=limits, unix_time_s=lambda: NOW_S)
    _, port = await transport.listen("127.0.0.1", 0)
    print(port, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        with open("/proc/self/statm", encoding="ascii") as file:
            rss_bytes = int(file.read().split()[1]) * resource.getpagesize()
        system = transport.end.resources.system
        told = {
            "rss_bytes": rss_bytes,
            "memory_bytes": system.memory_bytes,
            "streams": system.streams,
            "connections": system.connections,
            "refused": dict(transport.end.resources.refusals),
            "received": received,
            "openable": openable(),
        }
        print(json.dumps(told), flush=True)
    await transport.close()


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    if wanted["descriptors"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted["descriptors"],) * 2)
    asyncio.run(main(Limits(**wanted["limits"])))
