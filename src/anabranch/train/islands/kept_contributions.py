"""Contributions of a machine's slots in files of its own, for `anabranch verify` of a run on private data.

A contribution cannot be computed again without the data that it was computed on. So the log has its digest,
and whoever computed it keeps the values. A file is a JSON header after its length (4 bytes), then the values
in chunks of `CHUNK`, each deflated after its length (4 bytes): rounded ones in the byte form of
`block_float`, others as they are. A file is trusted in nothing: its digest is computed again.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import blake3
import msgspec
import torch
from torch import Tensor

from anabranch.operating_system import delete_oldest
from anabranch.train.model.layout import Layout, raw_bytes
from anabranch.train.numerics.block_float import from_bytes, to_bytes
from anabranch.train.numerics.exact import UNIT_EXPONENT

#: Values that are rounded, packed or hashed at a time. A choice: bounds the memory; a multiple of a block.
CHUNK = 1 << 20
#: Largest header (bytes).
HEADER_MAX = 1 << 12
#: Effort of the compressor, of 9. A choice: the least, which is as quick as a disk.
EFFORT = 1
#: Share of the disk's free room that the files may take together. A plain choice: a guest leaves most of it.
FREE_SHARE = 0.5
#: Characters of the digest in a file's name.
NAME_DIGITS = 16
#: Name of a file that is being written. A process that is killed leaves it, and the next one writes it anew.
UNFINISHED = ".unfinished"

_NAME = re.compile(r"round-(\d{6,})-slot-(\d{3,})-[0-9a-f]{16}\.contribution")


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Header of a contribution's file. run, t, slot: run, round and slot of the contribution. peer: who
    computed it. corpus: fingerprint of the private corpus on which it was computed. digest:
    `contribution_digest` of the values. elements, dtype: number and type of the values."""

    run: str
    t: int
    slot: int
    peer: str
    corpus: str
    digest: str
    elements: int
    dtype: str


class BadFile(ValueError):
    """File that does not hold the contribution that it names; the message says why."""


def contribution_digest(layout: Layout, change: Tensor) -> str:
    """BLAKE3 (hex) of names and shapes, then of a contribution's values as they are added: int64, in units of
    2⁻⁴⁸."""
    hasher = blake3.blake3(layout.header())
    for part in torch.split(change.reshape(-1), CHUNK):
        hasher.update(raw_bytes(torch.mul(part, 2.0**UNIT_EXPONENT).round_().to(torch.int64)))
    return str(hasher.hexdigest())


class ContributionFolder:
    """Folder with the newest contributions of one machine; only one process may write to it. most_bytes: of
    all its files together; 0: nothing is kept."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def keep(self, about: Kept, change: Tensor) -> str:
        """Write a contribution (flat) with its header into the folder, which is made if missing. The oldest
        files are deleted to make room. One that is too large for the folder, or for the share of the free
        disk that it may take, is not kept: returns the reason, else "" (also for a folder that keeps
        nothing). Raises OSError."""
        if not self.most_bytes:
            return ""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = self.folder / UNFINISHED
        header = msgspec.json.encode(about)
        try:
            with open(unfinished, "wb") as file:
                file.write(len(header).to_bytes(4, "little") + header)
                for chunk in torch.split(change.reshape(-1), CHUNK):
                    packed = zlib.compress(_packed(chunk), EFFORT)
                    file.write(len(packed).to_bytes(4, "little") + packed)
                size = file.tell()
            free = int(FREE_SHARE * (shutil.disk_usage(self.folder).free + size))
            files = files_of(self.folder)
            room = min(self.most_bytes, sum(path.stat().st_size for path in files) + free)
            if size > room:
                return f"it takes {size / 1e6:,.1f} MB, and its folder may take {room / 1e6:,.1f} MB"
            delete_oldest(files, room - size)  # after a rollback those of lower rounds may be newer
            os.replace(unfinished, self.folder / name_of(about))
            return ""
        finally:
            unfinished.unlink(missing_ok=True)


def name_of(about: Kept) -> str:
    """Name of a contribution's file, from its round, slot and digest."""
    return f"round-{about.t:06}-slot-{about.slot:03}-{about.digest[:NAME_DIGITS]}.contribution"


def files_of(folder: Path) -> list[Path]:
    """Files of contributions right in a folder, those of the oldest rounds first; symbolic links are left
    out."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink():
            found.append((int(match[1]), int(match[2]), path))
    return [path for _, _, path in sorted(found)]


def read_header(path: Path) -> Kept:
    """Header of a contribution's file; its values are not read. Raises BadFile if there is no header, and
    OSError."""
    with open(path, "rb") as file:
        return _header(file)


def read_contribution(path: Path, layout: Layout, dtype: torch.dtype) -> tuple[Kept, Tensor]:
    """(Header, contribution, flat in `layout`) of a file. Raises BadFile if it is damaged, of another size or
    type, or has not the digest in its header; OSError."""
    with open(path, "rb") as file:
        about = _header(file)
        if (about.elements, about.dtype) != (layout.elements, str(dtype)):
            raise BadFile(
                f"it has {about.elements} values of {about.dtype}, not {layout.elements} of {dtype}"
            )
        change = torch.empty(layout.elements, dtype=dtype)
        for part in torch.split(change, CHUNK):
            packed = file.read(min(int.from_bytes(file.read(4), "little"), 2 * part.nbytes + HEADER_MAX))
            part.copy_(_unpacked(packed, len(part), dtype))
        if file.read(1):
            raise BadFile("there is more behind its values")
    if contribution_digest(layout, change) != about.digest:
        raise BadFile("its values do not have the digest that it names")
    return about, change


def _header(file: BinaryIO) -> Kept:
    size = int.from_bytes(file.read(4), "little")
    try:
        return msgspec.json.decode(file.read(size) if 0 < size <= HEADER_MAX else b"", type=Kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadFile("it has no header of a contribution") from None


def _packed(chunk: Tensor) -> bytes:
    """Values in the byte form of `block_float`, if that has each of them exactly, else as they are; after a
    byte that tells which."""
    values = chunk.detach().cpu()
    form = to_bytes(values)
    if torch.equal(from_bytes(form, len(values), values.dtype), values):
        return b"b" + bytes(raw_bytes(form))
    return b"f" + bytes(raw_bytes(values.contiguous()))


def _unpacked(data: bytes, count: int, dtype: torch.dtype) -> Tensor:
    """`count` values from a deflated chunk. Raises BadFile if it holds another number, or is damaged."""
    most = 1 + max(count * dtype.itemsize, 2 * count + CHUNK)
    try:
        inflater = zlib.decompressobj()
        plain = inflater.decompress(data, most + 1)
        if not inflater.eof:
            raise BadFile("a part of its values is cut off or too long")
        values = torch.frombuffer(bytearray(plain[1:]), dtype=torch.uint8)
        if plain[:1] == b"b":
            return from_bytes(values, count, dtype)
        if plain[:1] == b"f" and len(values) == count * dtype.itemsize:
            return values.view(dtype)
    except (zlib.error, ValueError) as error:
        raise BadFile(f"a part of its values cannot be read: {error}") from None
    raise BadFile("a part of its values has another form")


def contribution_files(folders: Iterator[Path] | list[Path]) -> Iterator[Path]:
    """Yield the files of contributions in these folders and below them; a missing folder has none."""
    for folder in folders:
        for below, names, _ in os.walk(folder):
            names.sort()
            yield from files_of(Path(below))
