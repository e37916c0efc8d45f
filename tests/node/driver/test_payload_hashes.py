"""A payload is hashed once at each end: the checksum of its frame is over the hash that receipts state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anabranch.net import chunk_queue, framing
from anabranch.net.chunk_queue import ChunkQueue
from anabranch.net.errors import FrameError
from anabranch.net.framing import DTYPES, MIN_CHUNK_BYTES, PACKED, SCALED, Blob, FrameReader
from anabranch.node.driver.tensor_codec import from_blob, to_blob
from anabranch.train.stage import audit
from anabranch.train.stage.audit import known_hash, payload_hash

SHAPES = [(), (3,), (2, 0, 4), (5, 7), (2, 1, 3, 4), (4000,)]
CASES = [(getattr(torch, name), shape) for name in DTYPES for shape in SHAPES]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return drawn * 10**12 if dtype == torch.int64 else drawn


def frames(blob: Blob) -> bytes:
    queue = ChunkQueue(MIN_CHUNK_BYTES)
    queue.put(b"message", blob, 0)
    out = b""
    while pieces := queue.next_pieces():
        out += b"".join(pieces)
    return out


def arrived(data: bytes) -> Tensor:
    """Tensor of the payload in `data`, the bytes of a connection."""
    ((_, blob),) = FrameReader(max_payload_bytes=1 << 20).feed(data)  # type: ignore[misc]
    assert isinstance(blob, Blob)
    return from_blob(blob)


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_what_came_has_the_hash_of_its_tensor_however_it_was_sent(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = tensor_of(dtype, shape)
    unknown = arrived(frames(to_blob(sent)))
    expected = payload_hash(sent)
    known = arrived(frames(to_blob(sent)))
    assert to_blob(sent).hash == expected == audit._hash_of(sent.clone())
    assert known_hash(known) == expected
    # The bytes of packed values have another hash, which is nobody's.
    assert known_hash(unknown) == ("" if dtype == torch.int64 else expected)
    assert torch.equal(known, sent) and torch.equal(unknown, sent) and payload_hash(unknown) == expected


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_no_damaged_byte_arrives(dtype: torch.dtype, hashed: bool) -> None:
    sent = tensor_of(dtype, (50,))
    if hashed:
        payload_hash(sent)
    sound = frames(to_blob(sent))
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        with pytest.raises((FrameError, ValueError)):  # ValueError: no payload is complete
            arrived(bytes(damaged))


@pytest.mark.parametrize("dtype", ["float32", PACKED, SCALED])
def test_a_sender_that_states_another_hash_is_refused(dtype: str) -> None:
    sent = tensor_of(torch.float32 if dtype == "float32" else torch.int64, (64,))
    blob = to_blob(sent if dtype != SCALED else sent.zero_())
    assert blob.dtype == dtype
    with pytest.raises(FrameError, match="checksum is wrong"):
        arrived(frames(replace(blob, hash=payload_hash(sent + 1))))


def test_only_packed_values_are_checked_after_they_were_unpacked() -> None:
    sound = bytearray(frames(to_blob(tensor_of(torch.float32, (3,)))))
    sound[8 + 3] = framing.OF_VALUES
    with pytest.raises(FrameError, match="a float32 tensor has no form 1"):
        arrived(bytes(sound))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_tensor_that_changed_after_its_arrival_is_hashed_anew(dtype: torch.dtype) -> None:
    sent = tensor_of(dtype, (8,))
    payload_hash(sent)
    came = arrived(frames(to_blob(sent)))
    came[3] += 1
    assert known_hash(came) == to_blob(came).hash == ""
    assert payload_hash(came) == payload_hash(came.clone()) != payload_hash(sent)
    assert torch.equal(arrived(frames(to_blob(came))), came)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_payload_with_a_receipt_is_hashed_twice_in_all(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes: list[str] = []

    def counted(owner: object, name: str) -> None:
        plain: Callable[..., str] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda given: hashes.append(name) or plain(given))

    counted(framing, "hash_text")
    counted(chunk_queue, "hash_text")
    counted(audit, "_hash_of")
    sent = tensor_of(dtype, (4000,))
    receipt = payload_hash(sent)
    assert payload_hash(arrived(frames(to_blob(sent)))) == receipt
    assert len(hashes) == 2, hashes
