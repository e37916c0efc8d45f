"""TLS whose received bytes without content are counted. KeyUpdates, alerts and records of a few bytes cost
their receiver processor time (a KeyUpdate of 27 bytes 10 to 35 microseconds, by OpenSSL 3.0), and give little
or no plaintext that the budgets above could count.

`CountingContext` makes every TLS layer, of asyncio and of uvloop, a `CountedTls`, which compares the bytes
that each step takes from the layer's input with the plaintext that it gives."""

from __future__ import annotations

import builtins
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_T = TypeVar("_T")

#: Most bytes that a caller sends before it is known, those of its TLS handshake included. An honest one sends
#: 3 kB, in the worst case the 8 KiB of a hello that `Lane` takes. A choice: twice that.
STRANGER_BYTES = 16 << 10
#: Most bytes without content beyond what records may have: 1,200 KeyUpdates. Above the largest TLS record, as
#: one that has come in part, or is read in part, has given no plaintext yet.
OVERHEAD_BYTES = 32 << 10
#: Bytes of a TLS 1.3 record without padding besides its plaintext: header, content type and AEAD tag.
RECORD_BYTES = 22
#: Plaintext of a record that pays for the record's own bytes: that of the shortest frame, a header.
_PAYING_BYTES = 8
#: Bytes without content that each of these bytes pays for: all of them pay for RECORD_BYTES.
_PAID_PER_BYTE = 3
#: Shift of the plaintext that is paid besides (a 512th): a long write ends with a record of any length.
_PAID_SHIFT = 9
#: Bound here, as `super()` was measured to cost a hundredth of a link's processor time.
_READ = ssl.SSLObject.read


class TlsFlood(ssl.SSLError):
    """Raised when the other side sent too many bytes without content; the TLS layer then drops the
    connection."""

    def __init__(self) -> None:
        super().__init__(ssl.SSL_ERROR_SSL, "it sends TLS messages without content")


class CountedTls(ssl.SSLObject):
    """State of a TLS connection (`ssl.SSLObject`), whose reading steps raise TlsFlood, from then on always,
    when the other side has sent too many bytes without content. incoming: bytes that the layer has received.
    stranger: True while the other side has not shown who it is; then all its bytes are bounded, and refused
    before any of them is decrypted. flooded: True once TlsFlood was raised."""

    incoming: ssl.MemoryBIO
    stranger = False
    flooded = False
    _taken = 0
    """Bytes taken from `incoming` while the other side was a stranger."""
    _overhead = 0
    """Bytes without content that no plaintext has paid for; never below 0."""

    def read(self, len: int = 1024, buffer: WriteableBuffer | None = None) -> Any:
        before = self.incoming.pending
        if self.stranger:
            self._admit(before)
        try:
            found: Any = _READ(self, len, buffer)
        except ssl.SSLError:
            self._charge(before - self.incoming.pending, 0)
            raise
        given = found if buffer is not None else builtins.len(found)
        taken = before - self.incoming.pending
        # Nearly all reads are of one whole record: then, with no debt, there is nothing to charge.
        if self._overhead or taken - given > RECORD_BYTES or given < _PAYING_BYTES or self.stranger:
            self._charge(taken, given)
        return found

    def do_handshake(self) -> None:
        self._without_content(super().do_handshake)

    def unwrap(self) -> Any:
        return self._without_content(super().unwrap)

    def _without_content(self, step: Callable[[], _T]) -> _T:
        before = self.incoming.pending
        if self.stranger:
            self._admit(before)
        try:
            return step()
        finally:
            self._charge(before - self.incoming.pending, 0)

    def _admit(self, waiting_bytes: int) -> None:
        if self._taken + waiting_bytes > STRANGER_BYTES:
            self._flood()

    def _charge(self, taken: int, given: int) -> None:
        """Charge a step that took `taken` bytes from the input and gave `given` bytes of plaintext."""
        if self.stranger:
            self._taken += taken
        paid = given + _PAID_PER_BYTE * min(given, _PAYING_BYTES) + (given >> _PAID_SHIFT)
        self._overhead = max(0, self._overhead + taken - paid)
        if self._overhead > OVERHEAD_BYTES or self.flooded:
            self._flood()

    def _flood(self) -> None:
        self.flooded = True
        raise TlsFlood


class CountingContext(ssl.SSLContext):
    """Context whose TLS layers, made by `wrap_bio`, are a `CountedTls`. On the accepting side the other side
    is a stranger at first."""

    sslobject_class = CountedTls

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> CountedTls:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, CountedTls)
        made.incoming, made.stranger = incoming, server_side
        return made
