"""Addresses that a name stands for, and connection to the first of several that answers (Happy Eyeballs,
RFC 8305)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from anabranch.addresses import Address
from anabranch.net.errors import DialError, NetError, Refused

#: Delay (s) before the next address is tried while earlier ones are silent: RFC 8305, 5 recommends 0.25 s. A
#: carrier is tried later: a direct connection that takes long is still the better one.
STAGGER_S, CARRIER_STAGGER_S = 0.25, 1.0

#: Names that are looked up at one time, each in a thread. A choice: all that the joiners whose addresses are
#: tried at a time can name (`protocol.fleet.dial_backs`), and as many of others.
LOOK_UPS = 256

_T = TypeVar("_T")
_free = threading.BoundedSemaphore(LOOK_UPS)


async def resolved(host: str, port: int, kind: int) -> list[tuple[Any, ...]]:
    """Addresses of a host for sockets of this kind, as `socket.getaddrinfo` returns them; a name is looked up
    without blocking the loop. kind: type of socket, such as SOCK_STREAM. Raises OSError if `host` has no
    address or is no valid name of a host (strangers choose the names that a leader dials), and while LOOK_UPS
    names are being looked up."""
    try:
        try:
            return list(socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST))
        except socket.gaierror:  # a name: the system asks others
            return await _looked_up(host, port, kind)
    except ValueError as error:  # such as "a..b", or a label of over 63 characters
        raise OSError("it is no name of a host") from error


async def _looked_up(host: str, port: int, kind: int) -> list[tuple[Any, ...]]:
    """Addresses of a name, looked up in a thread of its own: the few threads of an event loop would all wait
    for names whose servers never answer. kind: type of socket. Raises as `socket.getaddrinfo`, and OSError
    while LOOK_UPS names are being looked up."""
    free = _free
    if not free.acquire(blocking=False):
        raise OSError("too many names are being looked up")
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[tuple[Any, ...]]] = loop.create_future()

    def tell(answer: list[tuple[Any, ...]] | Exception) -> None:
        if found.done():
            return
        if isinstance(answer, Exception):
            found.set_exception(answer)
        else:
            found.set_result(answer)

    def look_up() -> None:
        answer: list[tuple[Any, ...]] | Exception
        try:
            answer = list(socket.getaddrinfo(host, port, type=kind))
        except Exception as error:
            answer = error
        finally:
            free.release()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, answer)

    threading.Thread(target=look_up, name="look-up", daemon=True).start()
    return await found


async def first_of(
    addresses: Sequence[Address],
    connect: Callable[[Address], Awaitable[_T]],
    discard: Callable[[_T], None],
) -> tuple[Address, _T]:
    """Dial the addresses in order with `connect`, each STAGGER_S after the one before (CARRIER_STAGGER_S for
    a carrier or iroh), or at once when any dial before failed. Returns the first address that succeeded, with
    its connection; the other dials are cancelled, and a connection that one of them made all the same goes to
    `discard`.

    connect(address): makes a connection, or raises. Raises NetError if all addresses failed: the only
    address's own error, or one DialError about several or none. An error of another type ends the race at
    once.
    """
    pending: dict[asyncio.Task[_T], Address] = {}
    failed: list[tuple[Address, Exception]] = []
    waiting = list(addresses)
    try:
        while waiting or pending:
            if waiting:
                address = waiting.pop(0)
                pending[asyncio.ensure_future(connect(address))] = address
            stagger_s = None
            if waiting:
                stagger_s = CARRIER_STAGGER_S if waiting[0].carrier or waiting[0].kind else STAGGER_S
            done, _ = await asyncio.wait(pending, timeout=stagger_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                address = pending.pop(task)
                error = task.exception()
                if error is None:
                    return address, task.result()
                if not isinstance(error, NetError):
                    raise error
                failed.append((address, error))
    finally:
        for task in pending:
            task.add_done_callback(lambda task: _drop(task, discard))
            task.cancel()
    raise _all_failed(failed)


def _drop(task: asyncio.Task[_T], discard: Callable[[_T], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        discard(task.result())


def _all_failed(failed: Sequence[tuple[Address, Exception]]) -> Exception:
    """Error to raise for the failed addresses: that of the only one, or one DialError about several or none.
    The DialError's `__cause__` is a ConnectionRefusedError if nobody listens at any of the peer's own
    addresses and each of its carriers refused, else None."""
    if len(failed) == 1:
        return failed[0][1]
    error = DialError("; ".join(str(reason) for _, reason in failed) or "no address is known")
    causes = [reason.__cause__ for address, reason in failed if not address.carrier]
    denied = all(isinstance(reason.__cause__, Refused) for address, reason in failed if address.carrier)
    if causes and denied and all(isinstance(cause, ConnectionRefusedError) for cause in causes):
        error.__cause__ = causes[0]
    return error
