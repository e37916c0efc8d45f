"""Driver of a peer's iroh process: starts it, dials through it, and takes the connections of others."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from anabranch.addresses import MOST_ADDRESSES, Address, host_port
from anabranch.background import background
from anabranch.net.address_race import resolved
from anabranch.net.errors import DialError, ListenError
from anabranch.net.identity import Identity
from anabranch.net.iroh.wire import HEADER_BYTES, SECRET_BYTES, line, parse

#: Longest time (s) from the start of the process until it is ready: it loads an 18 MB library.
START_S = 30.0
#: Seconds before a process that ended is started again.
RESTART_S = 1.0
#: Peers whose paths are remembered, those that changed last: keys are free. A choice: more than neighbours.
PATHS_KEPT = 4096
#: Seconds to wait after a failed accept, such as without a descriptor left.
_ACCEPT_RETRY_S = 0.05
#: Time (s) in which a local connection must show its header.
_HEADER_S = 5.0

OnIncoming = Callable[[socket.socket, str, str], None]


def installed() -> bool:
    """True if the package iroh can be imported."""
    return find_spec("iroh") is not None


async def udp_ends(address: Address) -> list[str]:
    """IP:PORT of the addresses that a peer's UDP address stands for, at most MOST_ADDRESSES: iroh knows no
    names, and a stranger's may stand for any number. Raises OSError if its name stands for none."""
    found = await resolved(address.host, address.port, socket.SOCK_DGRAM)
    return [host_port(str(end[0]), address.port) for *_, end in found[:MOST_ADDRESSES]]


class IrohEngine:
    """iroh endpoint of one peer, in a process of its own that is started again if it ends. relays: URLs of
    iroh relays, through which peers find each other ([]: only known UDP addresses are used). bind: IP:PORT of
    its UDP sockets, at most one of each IP version; iroh takes a free port for a version that is not named.
    on_incoming(connection, peer, path): gets the connections of other peers, before anything but the peer's
    key is proved. path: "relay", UDP address of the other end, or "" if not known yet. paths: path to each of
    the last PATHS_KEPT peers, by its id; empty again when the process ends. sockets: IP:PORT of its UDP
    sockets, once it has started."""

    def __init__(
        self,
        identity: Identity,
        relays: Sequence[str] = (),
        bind: Sequence[str] = (),
        external: Sequence[str] = (),
    ) -> None:
        """relays, bind: as in the class. external: public IP:PORT addresses of the UDP sockets that the user
        knows; iroh also learns its public address from an iroh relay."""
        self.on_incoming: OnIncoming = lambda connection, peer, path: connection.close()
        #: Called when the path to a peer changes: "relay", or its UDP address.
        self.on_path: Callable[[str, str], None] = lambda peer, path: None
        self.paths: dict[str, str] = {}
        self.sockets: list[str] = []
        #: Report of the process about the release of iroh, for the log.
        self.release = ""
        self._identity, self._relays, self._bind, self._external = (
            identity,
            list(relays),
            list(bind),
            list(external),
        )
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._numbers = itertools.count(1)
        self._dials: dict[int, asyncio.Future[socket.socket]] = {}
        self._listener: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready: asyncio.Future[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the process, and accept its local connections; returns when it is ready. Raises ListenError
        if iroh is missing or unusable, or not ready within START_S; the process is then tried again all the
        same, until `close`."""
        if not installed():
            raise ListenError("iroh is not installed: pip install 'anabranch[iroh]'")
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener))
        self._ready = asyncio.get_running_loop().create_future()
        self._spawn(self._keep())
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), START_S)
        except asyncio.TimeoutError:
            raise ListenError(f"iroh's process was not ready within {START_S:.0f} s") from None

    def _spawn(self, work: Any) -> None:
        task = background(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(self, peer: str, address: Address) -> socket.socket:
        """Connection to a peer through iroh, as a local socket whose bytes iroh passes on both ways; nothing
        but the peer's key is proved. Raises DialError, and OSError for a name without an address. A dial ends
        within `engine_process.DIAL_S`; callers bound it too."""
        process = self._process
        if process is None or process.stdin is None:
            raise DialError("iroh's process is being started again")
        addresses = await udp_ends(address) if address.kind == "udp" else []
        dial = next(self._numbers)
        met: asyncio.Future[socket.socket]
        met = self._dials[dial] = asyncio.get_running_loop().create_future()
        command = {"dial": dial, "peer": peer, "relay": address.relay_url, "addresses": addresses}
        try:
            process.stdin.write(line(command))
            return await met
        except (OSError, RuntimeError) as error:
            raise DialError(f"iroh's process has ended: {error}") from error
        finally:
            self._dials.pop(dial, None)
            if met.done() and not met.cancelled() and met.exception() is None and self._closed:
                met.result().close()

    async def close(self) -> None:
        """End the process; connections through it break."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    # The process.

    async def _keep(self) -> None:
        """Start the process, and start it again RESTART_S after each end, until this task is cancelled. Each
        end fails all dials (`_fail`)."""
        while True:
            try:
                await self._run()
            except OSError as error:
                self._fail(f"iroh's process cannot be started: {error}")
            self._fail("iroh's process has ended")
            await asyncio.sleep(RESTART_S)

    def _fail(self, reason: str) -> None:
        """Forget all paths, and end all dials with a DialError for `reason`; also the start, with a
        ListenError, if the process was never ready."""
        self.paths.clear()
        for met in self._dials.values():
            if not met.done():
                met.set_exception(DialError(reason))
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(ListenError(f"{reason}; see the lines that it printed"))

    async def _run(self) -> None:
        assert self._listener is not None
        config = {
            "key": self._identity.seed().hex(),
            "relays": self._relays,
            "bind": self._bind,
            "external": self._external,
            "port": self._listener.getsockname()[1],
            "secret": self._secret,
        }
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "anabranch.net.iroh.engine_process")
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line(config))
        try:
            while data := await process.stdout.readline():
                self._heard(parse(data))
        finally:
            await asyncio.shield(background(self._end_process()))

    def _heard(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.sockets, self.release = message["ready"], message["iroh"]
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif "path" in message:
            self.paths.pop(message["peer"], None)
            self.paths[message["peer"]] = message["path"]
            if len(self.paths) > PATHS_KEPT:
                del self.paths[next(iter(self.paths))]
            self.on_path(message["peer"], message["path"])
        elif (met := self._dials.get(message["dial"])) is not None and not met.done():
            met.set_exception(DialError(message["failed"]))

    # Its local connections.

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            connection.setblocking(False)
            self._spawn(self._welcome(connection))

    async def _welcome(self, connection: socket.socket) -> None:
        """Read the header of a local connection, and hand the connection on; one without the secret is
        closed."""
        try:
            shown = parse(await asyncio.wait_for(_read_header(connection), _HEADER_S))
            if not hmac.compare_digest(str(shown["secret"]), self._secret):
                raise ValueError("another secret")
        except (OSError, ValueError, KeyError, asyncio.TimeoutError):
            connection.close()
            return
        if not shown["dial"]:
            self.on_incoming(connection, shown["peer"], self.paths.get(shown["peer"], ""))
            return
        met = self._dials.get(shown["dial"])
        if met is None or met.done():
            connection.close()
        else:
            met.set_result(connection)


async def _read_header(connection: socket.socket) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    while len(found) < HEADER_BYTES:
        data = await loop.sock_recv(connection, HEADER_BYTES - len(found))
        if not data:
            raise ConnectionError("it ended")
        found += data
    return found
