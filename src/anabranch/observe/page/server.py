"""HTTP server of the page: static files, recording as server-sent events, metrics, actions of the owner.

Not here: the thread that fills the recording (`page_thread.py`).
"""

from __future__ import annotations

import contextlib
import hmac
import io
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

import msgspec

from anabranch.addresses import on_loopback
from anabranch.errors import UserError
from anabranch.observe.metrics.prometheus import metrics_text
from anabranch.observe.page.static_files import served
from anabranch.observe.view.recording import Cursor, Recording

#: Most simultaneous connections, each with a thread; a plain choice.
CONNECTIONS_MAX = 64
#: Most bytes of a request's head and of its body.
HEAD_MAX, BODY_MAX = 16384, 4096
#: Seconds in which a request must arrive.
REQUEST_S = 10.0
#: Seconds in which a connection that is cut gives up its place: milliseconds, on a busy machine more.
FREED_S = 5.0
#: Seconds in which a reader must take a message.
SEND_S = 60.0
#: Least seconds between two messages of a stream, normally and while a long log is read.
STREAM_S, READING_S = 0.2, 1.0
#: Seconds between heartbeats of an idle stream.
HEARTBEAT_S = 5.0

#: Part of a content-security policy that lets no script turn text into markup or into a script.
NO_MARKUP = "require-trusted-types-for 'script'; trusted-types 'none'"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " + NO_MARKUP
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXT = "text/plain; charset=utf-8"


class Owner(Protocol):
    """Actions on the run for the holder of the owner's secret. actions: their names, as the page offers
    them."""

    @property
    def actions(self) -> tuple[str, ...]: ...

    def ask(self, action: str, name: str, steps: int = 0) -> str:
        """Request `action`, one of `actions`, on the peer of this name ("" for the run); returns the reason
        of a refusal, or "". For "expel" the name is the peer's id. steps: argument of the action "steps"."""


class _Action(msgspec.Struct):
    """Body of `POST /act`, an action of the run's owner. peer: id of the peer, not the key of its record (it
    may be another peer's in the next recording); "" for an action on the whole run."""

    action: str
    peer: str = ""
    steps: int = 0


class PageServer(socketserver.ThreadingTCPServer):
    """HTTP server of one recording, with a thread per connection. port: 0 for any free one.

    With a `secret`, everything but the static files requires it. Without one the server answers only requests
    to a name of this machine, so that no foreign page can read it. With an `owner`, whoever shows
    `owner_secret` may act on the run. Raises UserError if a secret is needed and missing, or the address
    cannot be used.

    `changed` guards the recording: hold it to change or read `recording` and `reading`.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, recording: Recording, host: str, port: int, secret: str, owner: Owner | None) -> None:
        if not secret and not on_loopback(host):
            raise UserError(f"--host {host}: others could read the page there; give --secret, too")
        self.recording = recording
        self.reading: float | None = None
        """Fraction of the log that has been read while the recording is incomplete, else None."""
        self.version = 0
        """Number of changes so far."""
        self.secret, self.owner = secret, owner
        self.owner_secret = secrets.token_hex(16) if owner is not None else ""
        self.files = served()
        self.changed = threading.Condition()
        self.ended = threading.Event()
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._arriving: dict[socket.socket, None] = {}
        """Connections whose request is not complete, the oldest first."""
        self._arriving_lock = threading.Lock()
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__((str(address[0]), port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen on {host} port {port}: {error}; choose another --port"
            ) from None
        name = f"[{host}]" if ":" in host else host
        self._address = f"http://{name}:{self.server_address[1]}/"

    @property
    def address(self) -> str:
        """URL of the page, with the secret if there is one."""
        return self._address + (f"#secret={self.secret}" if self.secret else "")

    @property
    def owner_address(self) -> str:
        """URL of the page with the owner's secret; "" without an owner."""
        return f"{self._address}#secret={self.owner_secret}" if self.owner_secret else ""

    def notify(self) -> None:
        """Wake the threads that stream the recording, after a change. The caller holds `changed`."""
        self.version += 1
        self.changed.notify_all()

    def close(self) -> None:
        self.ended.set()
        with self.changed:
            self.notify()
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False) or (
            self._cut_oldest() and self._slots.acquire(timeout=FREED_S)
        ):
            super().process_request(request, client_address)
        else:
            with contextlib.suppress(OSError):
                request.sendall(_head(503, {}) + b"too many connections\n")
            self.shutdown_request(request)

    def _cut_oldest(self) -> bool:
        """Close the connection that has been sending its request for longest, so that slow requests of
        strangers keep nobody out. False if all requests are complete."""
        with self._arriving_lock, contextlib.suppress(OSError):
            for connection in self._arriving:
                del self._arriving[connection]
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    @contextlib.contextmanager
    def arrival(self, connection: socket.socket) -> Iterator[None]:
        """Context in which the request of a connection arrives: during it, `_cut_oldest` may close the
        connection."""
        with self._arriving_lock:
            self._arriving[connection] = None
        try:
            yield
        finally:
            with self._arriving_lock:
                self._arriving.pop(connection, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection, which carries one request and is closed then."""

    server: PageServer
    timeout = SEND_S

    def handle(self) -> None:
        # A client that goes away or does not read ends its connection.
        with contextlib.suppress(OSError):
            with self._deadline(), self.server.arrival(self.connection):
                body = self._read_request()
            if body is not None:
                self._respond(body)

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Context in which reading from the client ends after REQUEST_S seconds, as if the client had closed
        its side."""

        def stop() -> None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)

        timer = threading.Timer(REQUEST_S, stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _read_request(self) -> bytes | None:
        """Read a request and return its body; its head is parsed into attributes. None if the request is
        malformed or too long, after an error response."""
        head, line = b"", b"?"
        while line not in (b"\r\n", b"\n", b"") and len(head) <= HEAD_MAX:
            line = self.rfile.readline(HEAD_MAX + 1 - len(head))
            head += line
        self.raw_requestline, _, fields = head.partition(b"\n")
        words = self.raw_requestline.split()
        if not line or len(head) > HEAD_MAX or len(words) != 3 or not words[1].startswith(b"/"):
            self.send_error(400)
            return None
        rest, self.rfile = self.rfile, io.BytesIO(fields)
        parsed = self.parse_request()  # bounded here: http.client accepts six megabytes
        self.rfile = rest
        if not parsed:
            return None
        length = self.headers.get("Content-Length", "0")
        # Leading zeros are digits, too: the number of digits bounds the number.
        short = len(length) <= len(str(BODY_MAX)) and length.isascii() and length.isdecimal()
        if not self.headers.defects and short and int(length) <= BODY_MAX:
            body = self.rfile.read(int(length))
            if len(body) == int(length):
                return body
        self.send_error(400)
        return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request with status 400. `parse_request` calls it; its `code` and texts are not
        used."""
        self._answer(400, b"not a request\n")

    def _respond(self, body: bytes) -> None:
        server, path = self.server, self.path.partition("?")[0]
        if not server.secret and not self._is_local():
            self._answer(403, b"this page is for its own machine: call it 127.0.0.1 or localhost\n")
        elif path not in server.files and self._is_of_another_site():
            self._answer(403, b"another site may not ask for this\n")
        elif path == "/act" and self.command == "POST":
            self._act(body)
        elif self.command != "GET":
            self._answer(405, b"only GET\n")
        elif path in server.files:
            kind, data = server.files[path]
            self._answer(200, data, kind)
        elif path not in ("/stream", "/metrics"):
            self._answer(404, b"there is no such page\n")
        elif server.secret and not self._shows(server.secret) and not self._is_owner():
            self._answer(403, b"the secret is missing or wrong\n")
        elif path == "/stream":
            self._stream()
        elif server.reading is not None:
            self._answer(503, b"the event log is still being read\n")
        else:
            with server.changed:
                text = metrics_text(server.recording.view)
            self._answer(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _is_local(self) -> bool:
        """True if the request's Host header names this machine. A foreign name that resolves to loopback (DNS
        rebinding) would let any web page read this one."""
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return on_loopback(name.strip("[]"))

    def _is_of_another_site(self) -> bool:
        """True if a browser says that another site's page makes this request, or if it opens a WebSocket, of
        which browsers do not say so. Such a page cannot read the answer, but each one would cost this process
        the encoding of the whole recording."""
        site, upgrade = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Upgrade", "")
        return site not in ("none", "same-origin") or upgrade.lower() == "websocket"

    def _shows(self, secret: str) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), secret.encode())

    def _is_owner(self) -> bool:
        return bool(self.server.owner_secret) and self._shows(self.server.owner_secret)

    def _act(self, body: bytes) -> None:
        owner = self.server.owner
        if owner is None or not self._is_owner():
            return self._answer(403, b"only the owner of the run may act on it\n")
        try:
            wanted = msgspec.json.decode(body, type=_Action)
        except (ValueError, RecursionError):
            return self.send_error(400)
        with self.server.changed:
            nodes = self.server.recording.view.state.sections.get("nodes", {}).values()
            node = next((node for node in nodes if node["id"] == wanted.peer), {}) if wanted.peer else {}
        # Several peers may call themselves alike; processes of this machine go by their names.
        subject = node.get("id" if wanted.action == "expel" else "name", "")
        refusal = owner.ask(wanted.action, subject, wanted.steps)
        self._answer(409 if refusal else 200, f"{refusal or 'done'}\n".encode())

    def _answer(self, status: int, body: bytes, kind: str = _TEXT) -> None:
        self.wfile.write(_head(status, {"Content-Type": kind, "Content-Length": str(len(body))}) + body)

    def _stream(self) -> None:
        """Send the whole recording, then changes as they come, until the client or the server ends; this
        takes the connection's thread meanwhile."""
        self.wfile.write(_head(200, {"Content-Type": "text/event-stream"}))
        server, owner = self.server, self.server.owner if self._is_owner() else None
        recording, cursor = None, Cursor()
        while not server.ended.is_set():
            with server.changed:
                version, whole = server.version, None
                reading = server.reading
                if recording is not server.recording:
                    recording, cursor = server.recording, Cursor()
                    whole = recording.document() | {"reading": reading}
                more, after = recording.since(cursor)
            if whole is not None:
                self._send("all", whole | ({"actions": owner.actions} if owner is not None else {}))
            elif after != cursor or reading is not None:
                self._send("more", more | {"reading": reading})
                server.ended.wait(STREAM_S if reading is None else READING_S)
            else:
                with server.changed:
                    changed = server.version != version or server.changed.wait(HEARTBEAT_S)
                if not changed:
                    self._send("beat", {})
            cursor = after

    def _send(self, event: str, data: Mapping[str, Any]) -> None:
        self.wfile.write(b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(data)))


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    """Head of a response with HEADERS and these headers, after which the connection closes."""
    fields = {**HEADERS, **headers, "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode("latin-1")
