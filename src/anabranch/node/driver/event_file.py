"""Reading of the run's event log in compressed pieces, which are sent to machines that watch the run."""

from __future__ import annotations

import zlib
from pathlib import Path

#: Bytes of the file in one piece before compression to about a tenth.
PIECE_BYTES = 1 << 18


def piece_of(path: Path, position: int) -> tuple[bytes, int]:
    """Piece of the file from byte `position` on, at most PIECE_BYTES before it is compressed by zlib (b"" at
    the end), and the file's size in bytes; (b"", 0) if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(position)
            data = file.read(PIECE_BYTES)
    except OSError:
        return b"", 0
    return (zlib.compress(data, 1) if data else b""), size
