"""Identity of a peer: an Ed25519 key, and an incarnation that increases with each process that uses the key.

The peer id is the public key in hexadecimal. There is no certificate authority: each peer makes a self-signed
TLS certificate for its key, and a dialling peer compares the key in it with the id that it dialled.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from anabranch.errors import used_up
from anabranch.net.errors import IdentityError
from anabranch.operating_system import lock, open_to_others, write_atomically

SIGNATURE_BYTES = 64
_PEER_ID = re.compile(r"[0-9a-f]{64}")

#: Purpose of signatures on statements about a run's work.
_STATEMENT = b"anabranch statement"


class Identity:
    """Private key of a peer, and the peer id: its public key in hexadecimal."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id = key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Identity with these 32 bytes as the private key."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file (PEM, readable by its owner only), or create one with a new key, on the disk when
        this returns. Raises IdentityError for a file that cannot be made or read, is not an Ed25519 key, or
        that other users may read; OSError if disk, descriptors or memory are used up for a new one."""
        if os.path.lexists(path):
            return cls._load(path)
        try:
            # Two processes may start together: one then reads the other's file.
            with path.with_name(path.name + ".lock").open("a") as locked:
                lock(locked.fileno(), wait=True)  # the kernel releases it when the process ends
                if os.path.lexists(path):
                    return cls._load(path)
                identity = cls.generate()
                write_atomically(path, identity._private_pem(), 0o600)
        except OSError as error:
            if used_up(error):
                raise
            raise IdentityError(f"cannot create the key file {path}: {error.strerror}") from error
        return identity

    @classmethod
    def _load(cls, path: Path) -> Identity:
        try:
            mode = path.stat().st_mode
            pem = path.read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read the key file {path}: {error.strerror}") from error
        if open_to_others(mode):
            raise IdentityError(f"the key file {path} can be read by other users: run chmod 600 {path}")
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise IdentityError(
                f"the key file {path} is damaged ({error}): restore it from a copy, or delete it together "
                "with the incarnation file beside it to become a new peer"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(
                f"the key file {path} holds a key of another type than Ed25519: name another file"
            )
        return cls(key)

    def seed(self) -> bytes:
        """The 32 bytes of the private key. Only a ticket's key, and the key of a peer's
        own iroh process (`net.iroh`), leave a process this way."""
        return self._key.private_bytes_raw()

    def sign(self, purpose: bytes, message: bytes) -> bytes:
        """Signature (64 bytes) of `message`, which is valid for this purpose only."""
        return self._key.sign(purpose + b"\0" + message)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Give a TLS server context this identity's key, with a new self-signed certificate. During the call
        the private key lies unencrypted in a temporary file that only this user can read. Raises OSError if
        that cannot be written."""
        # The ssl module reads keys from files only; this file exists during the call.
        with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
            path = Path(folder) / "certificate.pem"
            path.touch(mode=0o600)
            path.write_bytes(self._certificate_pem() + self._private_pem())
            context.load_cert_chain(path)

    def _private_pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def _certificate_pem(self) -> bytes:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "anabranch peer")])
        # Valid at any time: trust comes from the key alone, and clocks of volunteers may be wrong.
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime(2000, 1, 1))
            .not_valid_after(datetime(9999, 12, 31))
        )
        return builder.sign(self._key, None).public_bytes(Encoding.PEM)


class IdentitySigner:
    """Signer that signs statements of a peer with its identity, and verifies those of others
    (`protocol.interface.signatures.Signer`)."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, text: bytes) -> bytes:
        return self._identity.sign(_STATEMENT, text)

    def verify(self, peer: str, text: bytes, signature: bytes) -> bool:
        return verify(peer, _STATEMENT, text, signature)


def is_peer_id(text: str) -> bool:
    """True if `text` has the form of a peer id: 64 lower-case hexadecimal digits."""
    return _PEER_ID.fullmatch(text) is not None


def verify(peer_id: str, purpose: bytes, message: bytes, signature: bytes) -> bool:
    """True if the peer `peer_id` signed `message` for this purpose. Never raises."""
    if not is_peer_id(peer_id) or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(peer_id))
        key.verify(signature, purpose + b"\0" + message)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of_certificate(der: bytes | None) -> str | None:
    """Peer id of the key in a certificate (DER); None if it has no Ed25519 key, cannot be read, or is
    missing."""
    if not der:
        return None
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except Exception:  # parsing untrusted bytes raises many types of errors, all with the same meaning
        return None
    return key.public_bytes_raw().hex() if isinstance(key, Ed25519PublicKey) else None


def next_incarnation(path: Path) -> int:
    """Count a start of this peer's process: increment the number in the file `path`, and return it once it is
    on disk; the first is 1. Raises IdentityError if the file cannot be written, or is damaged: other peers
    refuse a number lower than they have seen."""
    try:
        with path.with_name(path.name + ".lock").open("a") as locked:
            lock(locked.fileno(), wait=True)  # the kernel releases it when the process ends
            try:
                text = path.read_text("ascii")
            except FileNotFoundError:
                text = "0"
            if not text.strip().isdigit():
                raise IdentityError(
                    f"the incarnation file {path} is damaged: write a number into it that is higher than "
                    "any this peer has used, or delete it together with the key to become a new peer"
                )
            incarnation = int(text) + 1
            write_atomically(path, f"{incarnation}\n".encode())
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"cannot update the incarnation file {path}: {error}") from error
    return incarnation
