"""Signer of simulated peers: a hash in place of a signature."""

from __future__ import annotations

import hashlib


class SimulatedSigner:
    """Stand-in for a peer's signatures: a hash of the peer's name and the text. Whoever knows the name can
    make one."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def sign(self, text: bytes) -> bytes:
        return hashlib.sha256(self._peer.encode() + b"|" + text).digest()

    def verify(self, peer: str, text: bytes, signature: bytes) -> bool:
        return signature == SimulatedSigner(peer).sign(text)
