"""Addresses of a live peer: the port that it binds, and where other peers can dial it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from anabranch.addresses import Address, host_port, on_loopback, parse_addresses
from anabranch.config import NetworkSection
from anabranch.errors import UserError
from anabranch.net.errors import ListenError
from anabranch.net.identity import Identity
from anabranch.net.iroh.engine import IrohEngine, installed, udp_ends
from anabranch.operating_system import write_atomically

#: File in the founder's folder: the port that its tickets name, chosen if `network.port` is 0.
PORT_FILE = "port"

#: Sockets that reserve this process's ports until it ends.
_reserved: list[socket.socket] = []


def bind_port(host: str, port: int) -> int:
    """Port to listen on: `port` itself, which is not tried, or a free port of the host if `port` is 0. On
    Linux a bound socket, kept open until this process ends but never listening, reserves the free port: other
    processes cannot take the port, while this process can still listen there with another socket. Raises
    OSError if a free port is wanted and the host is no address of this machine."""
    if port:
        return port
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((host, 0))
    found = int(probe.getsockname()[1])
    if sys.platform == "linux":
        _reserved.append(probe)
    else:
        probe.close()
    return found


def remembered_port(folder: Path) -> int:
    """Port that `remember_port` wrote in this folder; 0 if there is none that can be read."""
    try:
        port = int((folder / PORT_FILE).read_text("ascii"))
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 1 << 16 else 0


def remember_port(folder: Path, port: int) -> None:
    """Write down, in the founder's folder, the port on which it listens, for its next process."""
    if remembered_port(folder) != port:
        write_atomically(folder / PORT_FILE, f"{port}\n".encode())


def reachable_address(host: str, port: int, leader_host: str) -> str:
    """Address (host:port) at which other peers can dial a peer that listens at `host` and `port`; "" if that
    is a loopback address and the leader (`leader_host`) is on another machine."""
    return "" if on_loopback(host) and not on_loopback(leader_host) else host_port(host, port)


def advertised(network: NetworkSection, port: int) -> str:
    """Addresses, joined by commas, at which peers dial a data node that listens on `port`, in order of
    preference: network.advertise or its own address, then the iroh relay, if the run uses one. network:
    section of the run file."""
    own = network.advertise or host_port(network.host, port)
    return own if network.transport == "tcp" else f"{own},{relay_address(network.iroh_relay)}"


def relay_address(url: str) -> Address:
    """Address that names the iroh relay at this URL (http or https; the port may be left out), for a peer
    behind it (`anabranch.addresses`)."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Address(parts.hostname or "", port, kind="iroh" if parts.scheme == "https" else "iroh+http")


def relay_of(addresses: str) -> Address | None:
    """First of a peer's addresses that names an iroh relay; None if none of them does. addresses: as text,
    joined by commas. Raises ValueError for addresses that cannot be parsed."""
    return next((one for one in parse_addresses(addresses) if one.relay_url), None)


async def started_engine(
    identity: Identity, relay: Address, advertise: str, must: bool, say: Callable[[str], None]
) -> IrohEngine | None:
    """Start an iroh endpoint that uses the iroh relay `relay`; the caller closes it. None if iroh is not
    installed, which `say` then tells the user. must: True to raise UserError instead. advertise: addresses of
    this machine, joined by commas; the first of each IP version that ends in /udp has the port of its UDP
    socket. Raises UserError if the endpoint cannot start, ValueError for addresses that cannot be parsed."""
    if not installed() and not must:
        say(
            "iroh is not installed, so connections are TCP alone; to punch holes: "
            "pip install 'anabranch[iroh]'"
        )
        return None
    external: list[str] = []
    for one in parse_addresses(advertise):
        try:
            external += await udp_ends(one) if one.kind == "udp" else []
        except OSError as error:
            raise UserError(f"{one}: {error.strerror or error}; name an address of this machine") from None
    bind: dict[str, str] = {}
    for end in external:
        host, _, port = end.rpartition(":")
        bind.setdefault("[::]" if ":" in host else "0.0.0.0", port)
    engine = IrohEngine(identity, [relay.relay_url], [":".join(each) for each in bind.items()], external)
    try:
        await engine.start()
    except ListenError as error:
        await engine.close()
        raise UserError(f'{error}; or use network.transport = "tcp", or `join --transport tcp`') from None
    return engine
