"""TCP sockets: listening, connecting, and their options. Not here: TLS (`tls`)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
from typing import Any

from anabranch.addresses import MOST_ADDRESSES, Address, host_port, on_loopback, plain_host
from anabranch.net.address_race import first_of, resolved
from anabranch.net.errors import DialError, ListenError, PortInUseError
from anabranch.net.lane import Lane

#: Connections that the kernel queues while the event loop is busy; a plain choice above any swarm's burst.
_BACKLOG = 256
#: TCP congestion control that connections ask for. BBR keeps its rate on lossy long-distance paths, where
#: loss-based algorithms halve theirs.
CONGESTION = "bbr"
#: Bytes that the kernel takes beyond those that are on their way; nothing can overtake them. Without a limit
#: it took up to 4 MB of a snapshot before an urgent activation: seconds on a thin line.
UNSENT_BYTES = 128 << 10
#: Remedy where BBR is missing, for a sentence.
BBR_REMEDY = "as root: modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control='cubic bbr'"


def bbr_missing() -> bool:
    """True if this kernel, which is Linux, does not let this process use BBR congestion control. Other
    systems have no such option."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            return True
    return False


async def bind(host: str, port: int) -> socket.socket:
    """Listening socket, non-blocking, at an address (port 0: a free one); at :: also over IPv4. host: of a
    name the first address is taken. Raises ListenError if the address cannot be used, PortInUseError if
    another socket has the port."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"cannot listen on {host!r}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # OpenBSD cannot
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # `::` is also 0.0.0.0
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} on {host} is in use") from error
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


async def connect(host: str, port: int) -> socket.socket:
    """Non-blocking socket that is connected to the first address of a host that answers. A name may have
    several: MOST_ADDRESSES of them at most are tried, each a little after the one before (`first_of`). Those
    of the two IP versions take turns (RFC 8305, 4), so that a machine whose IPv6 leads nowhere is not held
    up. Raises OSError if the only address fails, or the name has none, and DialError, which is no OSError,
    about several."""
    found = await resolved(host, port, socket.SOCK_STREAM)
    version = found[0][0]
    turns = itertools.zip_longest(
        [each for each in found if each[0] == version], [each for each in found if each[0] != version]
    )
    ends = {Address(*each[4][:2]): each for turn in turns for each in turn if each is not None}
    # A stranger's name may stand for any number of addresses, also of others.
    ends = dict(itertools.islice(ends.items(), MOST_ADDRESSES))
    if len(ends) == 1:
        return await _connected(found[0])

    async def attempt(address: Address) -> socket.socket:
        try:
            return await _connected(ends[address])
        except OSError as error:
            raise DialError(f"{address}: {error.strerror or error}") from error

    try:
        _, connection = await first_of(list(ends), attempt, socket.socket.close)
    except DialError as error:
        raise DialError(f"cannot reach {host_port(host, port)} ({error})") from error.__cause__
    return connection


async def _connected(end: tuple[Any, ...]) -> socket.socket:
    """Connected socket to an address as `getaddrinfo` returns it. Raises OSError if nobody answers there."""
    family, kind, protocol, _, address = end
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, address)
    except OSError as error:
        connection.close()
        if error.errno is None:
            raise
        # asyncio says "Connect call failed" and the address, which the caller says, too, and not why.
        raise OSError(error.errno, os.strerror(error.errno)) from error
    except RuntimeError as error:
        # uvloop: a connection of this process has the same descriptor, as somebody closed its own. That one
        # will close this one, which nobody else may do: its number may be another connection's by then.
        connection.detach()
        raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def host_of(lane: Lane) -> str:
    """Address of the other end; "" if the connection is gone."""
    found = lane.transport.get_extra_info("peername")
    return plain_host(str(found[0])) if found else ""


def tune(lane: Lane) -> None:
    """Set options of a lane's connected socket: no delay of small packets, few unsent bytes in the kernel
    (UNSENT_BYTES), and to other machines BBR congestion control, as far as the system has these. Sets
    `forgets_rate` of the lane. Raises ConnectionError if the other end is gone already."""
    connection = lane.transport.get_extra_info("socket")
    if connection is None:  # uvloop has closed it
        raise ConnectionResetError("the connection was lost")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if on_loopback(host_of(lane)):
        return  # within one machine BBR's pacing only costs time
    lane.forgets_rate = True
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode())
            lane.forgets_rate = CONGESTION != "bbr"
