"""Client that speaks TLS 1.3 by the system's OpenSSL and can send KeyUpdate messages: Python's module `ssl`
has no call for them."""

from __future__ import annotations

import ctypes
import ctypes.util
import socket
from collections.abc import Callable, Sequence

#: Bytes that are read at once of what OpenSSL has to send, and of plaintext.
PIECE_BYTES = 1 << 20
_POINTERS = ("TLS_client_method", "SSL_CTX_new", "SSL_new", "BIO_new", "BIO_s_mem")


def _library() -> ctypes.CDLL | None:
    """OpenSSL with the functions that are needed, or None."""
    name = ctypes.util.find_library("ssl")
    try:
        found = ctypes.CDLL(name) if name else None
        for function in _POINTERS if found is not None else ():
            getattr(found, function).restype = ctypes.c_void_p
        return found if found is not None and hasattr(found, "SSL_key_update") else None
    except (OSError, AttributeError):
        return None


LIBRARY = _library()


class KeyUpdates:
    """TLS connection of a client, once it is made. cut: True once a write found it closed."""

    def __init__(self, post: Callable[[bytes], object], fetch: Callable[[], bytes]) -> None:
        """post: sends bytes. fetch: waits for bytes and returns them, b"" at the end of the connection."""
        assert LIBRARY is not None
        self.cut = False
        self._lib, pointer, self._post_bytes, self._fetch_bytes = LIBRARY, ctypes.c_void_p, post, fetch
        context = pointer(LIBRARY.SSL_CTX_new(pointer(LIBRARY.TLS_client_method())))
        self._ssl = pointer(LIBRARY.SSL_new(context))
        self._into, self._out = (pointer(LIBRARY.BIO_new(pointer(LIBRARY.BIO_s_mem()))) for _ in range(2))
        LIBRARY.SSL_set_bio(self._ssl, self._into, self._out)
        LIBRARY.SSL_set_connect_state(self._ssl)
        while LIBRARY.SSL_do_handshake(self._ssl) != 1:
            self._post()
            self._fetch()
        self._post()

    @classmethod
    def dial(cls, host: str, port: int) -> KeyUpdates:
        """Connection to host:port."""
        made = socket.create_connection((host, port), 60.0)
        return cls(made.sendall, lambda: made.recv(1 << 16))

    @classmethod
    def inside(cls, outer: KeyUpdates) -> KeyUpdates:
        """Connection through the circuit that `outer` has opened."""
        return cls(lambda data: outer.write([data]), outer.read)

    def send(self, count: int, *, answered: bool = False) -> int:
        """Send so many KeyUpdates; returns their bytes. answered: True if they ask for KeyUpdates of the
        other side."""
        for _ in range(count):
            self._lib.SSL_key_update(self._ssl, int(answered))
            self._lib.SSL_do_handshake(self._ssl)
        return self._post()

    def write(self, records: Sequence[bytes]) -> int:
        """Send plaintext, in a TLS record each; returns the bytes of all records."""
        for each in records:
            self._lib.SSL_write(self._ssl, each, len(each))
        return self._post()

    def read(self) -> bytes:
        """Wait for plaintext. Raises ConnectionError if the other side has closed the connection."""
        buffer = ctypes.create_string_buffer(PIECE_BYTES)
        while (count := self._lib.SSL_read(self._ssl, buffer, PIECE_BYTES)) <= 0:
            self._fetch()
        return buffer.raw[:count]

    def binding(self) -> bytes:
        """The client's Finished message: the channel binding `tls-unique`."""
        buffer = ctypes.create_string_buffer(64)
        size_bytes = self._lib.SSL_get_finished(self._ssl, buffer, 64)
        return buffer.raw[:size_bytes]

    def _fetch(self) -> None:
        data = self._fetch_bytes()
        if not data:
            raise ConnectionError("the other side closed the connection")
        self._lib.BIO_write(self._into, data, len(data))

    def _post(self) -> int:
        """Send what OpenSSL has made, and return its bytes."""
        found, buffer = b"", ctypes.create_string_buffer(PIECE_BYTES)
        while (count := self._lib.BIO_read(self._out, buffer, PIECE_BYTES)) > 0:
            found += buffer.raw[:count]
        try:
            self._post_bytes(found)
        except ConnectionError:
            self.cut = True
        return len(found)
