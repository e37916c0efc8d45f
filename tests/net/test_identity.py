"""Keys on disk, incarnations that only rise, certificates that carry the key."""

from __future__ import annotations

import os
import ssl
import stat
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from anabranch.net.errors import IdentityError
from anabranch.net.identity import Identity, is_peer_id, next_incarnation, peer_id_of_certificate, verify

posix = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert is_peer_id(made.peer_id)
    assert Identity.generate().peer_id != made.peer_id


@posix
def test_nobody_else_can_read_the_key(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


def test_a_damaged_key_file_is_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    Identity.load_or_create(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(IdentityError, match=r"key\.pem is damaged"):
        Identity.load_or_create(path)
    assert path.stat().st_size == 40
    other = generate_private_key(SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(IdentityError, match="another type than Ed25519"):
        Identity.load_or_create(path)
    with pytest.raises(IdentityError, match="cannot create"):
        Identity.load_or_create(tmp_path / "missing" / "key.pem")


def test_a_key_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file stayed, which the next start called damaged."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "key"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            Identity.load_or_create(path)
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == made.peer_id
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_signature_holds_for_its_purpose_and_message_only() -> None:
    signer = Identity.generate()
    signature = signer.sign(b"greeting", b"hello")
    assert verify(signer.peer_id, b"greeting", b"hello", signature)
    assert not verify(signer.peer_id, b"farewell", b"hello", signature)
    assert not verify(signer.peer_id, b"greeting", b"hullo", signature)
    assert not verify(Identity.generate().peer_id, b"greeting", b"hello", signature)


@given(st.text(max_size=70), st.binary(max_size=70))
def test_verify_never_raises(peer_id: str, signature: bytes) -> None:
    assert not verify(peer_id, b"p", b"m", signature)
    assert not verify("f" * 64, b"p", b"m", signature.ljust(64)[:64])


def test_incarnations_rise(tmp_path: Path) -> None:
    path = tmp_path / "incarnation"
    assert [next_incarnation(path) for _ in range(3)] == [1, 2, 3]
    path.write_text("41\n")
    assert next_incarnation(path) == 42


@pytest.mark.parametrize("content", [b"", b"one", b"-3", b"\xff\xfe", "²".encode()])
def test_a_damaged_counter_is_not_guessed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "incarnation"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match="incarnation"):
        next_incarnation(path)
    assert path.read_bytes() == content


def id_of(path: Path) -> str:
    return Identity.load_or_create(path).peer_id


@posix
def test_processes_that_start_together_get_one_key(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert len(set(pool.map(id_of, [tmp_path / "key"] * 8))) == 1


@posix
def test_processes_that_start_together_get_different_incarnations(tmp_path: Path) -> None:
    path = tmp_path / "incarnation"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        given_out = list(pool.map(next_incarnation, [path] * 40))
    assert sorted(given_out) == list(range(1, 41))


def test_the_certificate_carries_the_key_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    peer = Identity.generate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    peer.load_into(context)
    assert list(tmp_path.iterdir()) == []
    der = ssl.PEM_cert_to_DER_cert(peer._certificate_pem().decode())
    assert peer_id_of_certificate(der) == peer.peer_id


@given(st.binary(max_size=200))
def test_other_certificates_carry_no_peer_id(der: bytes) -> None:
    assert peer_id_of_certificate(der) is None
    assert peer_id_of_certificate(None) is None
