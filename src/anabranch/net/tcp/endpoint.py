"""This side of all connections of a transport: key, admission rules, limits, budgets (memory, unfinished
payloads, connections), counts of refusals; and the interface of the iroh engine. Not here: any connection."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.addresses import Address
from anabranch.net.connection_limits import Limits
from anabranch.net.handshake import Gate, IncarnationFence
from anabranch.net.identity import Identity
from anabranch.net.resource_manager import ResourceManager
from anabranch.net.tcp import tls


class Engine(Protocol):
    """Interface of an iroh endpoint, the transport's alternative to its own TCP connections: connects to
    peers by their keys. `net.iroh.engine.IrohEngine` implements it and documents the members."""

    on_incoming: Callable[[socket.socket, str, str], None]
    on_path: Callable[[str, str], None]
    paths: dict[str, str]
    sockets: list[str]

    async def connect(self, peer: str, address: Address) -> socket.socket: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class Endpoint:
    """This side of all connections of a transport: its key and incarnation, admission rules (gate) and
    limits. Raises ListenError where TLS lacks channel bindings.

    engine: iroh endpoint of this peer; None: addresses through iroh are not used. unix_time_s(): Unix time,
    for the expiry of credentials. refusals: numbers of refused connections and broken frames, by kind
    (`errors.TICKET`, `errors.FRAME`, ...).
    """

    identity: Identity
    incarnation: int
    gate: Gate
    limits: Limits
    engine: Engine | None = None
    unix_time_s: Callable[[], float] = time.time
    refusals: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.resources = ResourceManager(self.limits.budgets())
        self.fence = IncarnationFence()
        self.server_context = tls.server_context(self.identity)
        self.client_context = tls.client_context()


def carried_name(carrier: str) -> str:
    """Name of the far end of a circuit through the carrier with this id, in counts and reports, in place of
    its address, which is not known."""
    return f"carrier {carrier[:12]}"
