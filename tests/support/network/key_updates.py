"""Client that answers a TLS 1.3 handshake and then sends KeyUpdate messages alone, by the system's OpenSSL:
Python's module `ssl` has no call for it."""

from __future__ import annotations

import ctypes
import ctypes.util
import socket

#: Bytes that are read at once of what OpenSSL has to send.
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
    """Connection to host:port with TLS, once it is made."""

    def __init__(self, host: str, port: int) -> None:
        assert LIBRARY is not None
        self._lib, pointer = LIBRARY, ctypes.c_void_p
        self.socket = socket.create_connection((host, port), 10.0)
        context = pointer(LIBRARY.SSL_CTX_new(pointer(LIBRARY.TLS_client_method())))
        self._ssl = pointer(LIBRARY.SSL_new(context))
        into, self._out = (pointer(LIBRARY.BIO_new(pointer(LIBRARY.BIO_s_mem()))) for _ in range(2))
        LIBRARY.SSL_set_bio(self._ssl, into, self._out)
        LIBRARY.SSL_set_connect_state(self._ssl)
        while LIBRARY.SSL_do_handshake(self._ssl) != 1:
            self.socket.sendall(self._made())
            data = self.socket.recv(1 << 16)
            LIBRARY.BIO_write(into, data, len(data))
        self.socket.sendall(self._made())

    def send(self, count: int) -> int:
        """Send so many KeyUpdates; returns their bytes."""
        for _ in range(count):
            self._lib.SSL_key_update(self._ssl, 0)
            self._lib.SSL_do_handshake(self._ssl)
        data = self._made()
        self.socket.sendall(data)
        return len(data)

    def _made(self) -> bytes:
        """Bytes that OpenSSL has made to be sent."""
        found, buffer = b"", ctypes.create_string_buffer(PIECE_BYTES)
        while (count := self._lib.BIO_read(self._out, buffer, PIECE_BYTES)) > 0:
            found += buffer.raw[:count]
        return found
