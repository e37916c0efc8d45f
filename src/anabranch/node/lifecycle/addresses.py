"""Addresses of a live peer: the port that it binds, and where other peers can dial it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from anabranch.addresses import on_loopback
from anabranch.checkpoint.directory import write_atomically
from anabranch.config import NetworkSection

#: File in the leading peer's folder: the port that its tickets name, chosen if `network.port` is 0.
PORT_FILE = "port"

#: Sockets that reserve this process's ports until it ends.
_reserved: list[socket.socket] = []


def bind_port(host: str, port: int) -> int:
    """`port`, or a free port of the host if it is 0.

    On Linux the free port stays reserved for this process: a bound socket keeps other processes off it, and
    lets a second socket of this process listen.
    """
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
    """Write down the port on which the leading peer listens, for its next process."""
    if remembered_port(folder) != port:
        write_atomically(folder / PORT_FILE, f"{port}\n".encode())


def reachable_address(host: str, port: int, leader_host: str) -> str:
    """Address (host:port) at which other peers can dial a peer that listens there; "" for a loopback address
    if the leader is on another machine."""
    return "" if on_loopback(host) and not on_loopback(leader_host) else f"{host}:{port}"


def advertised(network: NetworkSection, port: int) -> str:
    """Addresses at which peers dial a data node that listens on `port`, in order of preference."""
    return network.advertise or f"{network.host}:{port}"
