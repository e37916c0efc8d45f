"""Conversion between tensors and payloads of messages: raw bytes with a checked header, never pickled (I7).

Sums of gradients (int64) are packed (`net.packing`), which takes a millisecond or two per million values: for
payloads that `is_slow` names, convert on another thread than the event loop's. All others share memory.

Pieces of a state are deflated (`deflated`, `inflated`), without loss: of every four bytes the highest, which
has sign and exponent of an fp32 number, takes a third of a byte. Weights and moments take 17 % less.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch

from anabranch.net import scaled_packing
from anabranch.net.errors import FrameError
from anabranch.net.framing import DTYPES, PACKED, SCALED, Blob
from anabranch.net.packing import pack, unpack
from anabranch.protocol.interface.tasks import Payload
from anabranch.train.stage.audit import known_hash, note_hash, payload_hash

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: First byte of a piece: as it is, or with its highest bytes deflated.
_PLAIN, _DEFLATED = 0, 1
#: Bytes before the content of a deflated piece: the first byte, and the piece's size, little-endian.
_HEAD = 5


def is_slow(payload: Payload | Blob) -> bool:
    """True if the conversion of this payload, from or to bytes, packs or unpacks values, which takes too long
    for the event loop."""
    if isinstance(payload, Blob):
        return payload.dtype in (PACKED, SCALED)
    return isinstance(payload, torch.Tensor) and payload.dtype == torch.int64


def to_blob(payload: Payload) -> Blob:
    """Bytes to send for a payload: a CPU tensor, or bytes. int64 tensors are packed; other contiguous tensors
    share their memory. A hash of the tensor that is known goes along. Raises TypeError for anything else,
    KeyError for a tensor of a dtype that is not in `net.framing.DTYPES`."""
    if isinstance(payload, bytes):
        return Blob("uint8", (len(payload),), payload)
    if not isinstance(payload, torch.Tensor):
        raise TypeError(f"a payload is a {type(payload).__name__}, not a tensor")
    tensor, known = payload.detach().contiguous(), known_hash(payload)
    if tensor.dtype == torch.int64:
        values = tensor.reshape(-1).numpy()
        if scaled_packing.pays(values):
            return Blob(SCALED, tuple(tensor.shape), scaled_packing.pack(values).data, known)
        return Blob(PACKED, tuple(tensor.shape), pack(values).data, known)
    flat = tensor.reshape(-1).view(torch.uint8)
    return Blob(_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data.cast("B"), known)


def from_blob(blob: Blob) -> torch.Tensor:
    """Tensor of a received payload: over the payload's buffer, or unpacked from it; its hash is noted where
    this end computed it. Raises FrameError for damaged packed values, and for a hash other than the
    sender's."""
    tensor = _tensor_of(blob)
    if blob.check is not None:
        blob.check(payload_hash(tensor))
    elif blob.hash:
        note_hash(tensor, blob.hash)
    return tensor


def _tensor_of(blob: Blob) -> torch.Tensor:
    if blob.dtype == PACKED:
        values = unpack(np.frombuffer(blob.data, dtype=np.uint8), math.prod(blob.shape))
        return torch.from_numpy(values).reshape(blob.shape)
    if blob.dtype == SCALED:
        packed = np.frombuffer(blob.data, dtype=np.uint8)
        return torch.from_numpy(scaled_packing.unpack(packed, math.prod(blob.shape))).reshape(blob.shape)
    dtype = _DTYPES[blob.dtype]
    if 0 in blob.shape:
        return torch.empty(blob.shape, dtype=dtype)
    return torch.frombuffer(blob.data, dtype=dtype).reshape(blob.shape)


def deflated(piece: Payload) -> torch.Tensor:
    """Piece of a state (uint8 vector) for the line: at most one byte longer, and shorter where possible.

    Layout: 1, the number of bytes n (four bytes), then of all whole groups of four bytes the first bytes, the
    second, the third; the n % 4 last bytes; the fourth bytes, deflated by Huffman codes alone (RFC 1951). Or
    0 and the piece. Raises TypeError for another payload than a tensor.
    """
    if not isinstance(piece, torch.Tensor):
        raise TypeError(f"a piece of a state is a {type(piece).__name__}, not a tensor")
    data = piece.contiguous().numpy()
    groups = data[: len(data) // 4 * 4].reshape(-1, 4)
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    high = packer.compress(groups[:, 3].tobytes()) + packer.flush()
    if _HEAD + len(high) > len(groups):
        return torch.cat((torch.tensor([_PLAIN], dtype=torch.uint8), piece))
    size = np.frombuffer(len(data).to_bytes(4, "little"), dtype=np.uint8)
    parts = ([_DEFLATED], size, groups[:, :3].T.reshape(-1), data[4 * len(groups) :], bytearray(high))
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.uint8) for part in parts]))


def inflated(payload: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """Piece of a state (uint8 vector) from its form on the line, `payload` (see `deflated`). Raises
    FrameError unless the piece is whole and has at most `most_bytes` bytes, before more than these are
    allocated."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not len(payload):
        raise FrameError("a piece of a state is a vector of bytes")
    data = payload.contiguous().numpy()
    if data[0] == _PLAIN:
        if len(data) - 1 > most_bytes:
            raise FrameError(f"a piece of {len(data) - 1} bytes exceeds {most_bytes}")
        return payload[1:].clone()
    size = int.from_bytes(data[1:_HEAD].tobytes(), "little")
    groups, rest = divmod(size, 4)
    low, high = _HEAD + 3 * groups, _HEAD + 3 * groups + rest
    if data[0] != _DEFLATED or size > most_bytes or len(data) < high:
        raise FrameError(f"{len(data)} bytes are not a piece of {size} bytes (at most {most_bytes})")
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        top = unpacker.decompress(data[high:].tobytes(), groups + 1)
    except zlib.error as error:
        raise FrameError(f"a deflated piece is damaged: {error}") from None
    if len(top) != groups or not unpacker.eof or unpacker.unused_data:
        raise FrameError("a deflated piece has another size than it says")
    piece = np.empty(size, dtype=np.uint8)
    table = piece[: 4 * groups].reshape(-1, 4)
    table[:, :3] = data[_HEAD:low].reshape(3, -1).T
    table[:, 3] = np.frombuffer(top, dtype=np.uint8)
    piece[4 * groups :] = data[low:high]
    return torch.from_numpy(piece)
