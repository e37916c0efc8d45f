"""Signer: signatures of a peer's statements, as the driver makes them. Not here: keys (net.identity)."""

from __future__ import annotations

from typing import Protocol


class Signer(Protocol):
    """Signatures with the key behind a peer's id. Both functions are pure: equal inputs, equal results."""

    def sign(self, text: bytes) -> bytes:
        """This peer's signature of `text`."""

    def verify(self, peer: str, text: bytes, signature: bytes) -> bool:
        """True if `peer` signed `text`. Never raises."""


class NoSigner:
    """Signer of runs without audit: no signature, and none is accepted."""

    def sign(self, text: bytes) -> bytes:
        return b""

    def verify(self, peer: str, text: bytes, signature: bytes) -> bool:
        return False
