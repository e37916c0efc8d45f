"""Huge pages for a large simulation (Linux 6.1 and later, `madvise(2)`: MADV_COLLAPSE; elsewhere no effect).

With a thousand peers every event touches memory all over the process. Without huge pages misses of the TLB
add 18 % (`benchmarks/simulation/thousand_relays.py`: 39.1 instead of 33.1 s of CPU per iteration).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

LARGE_BYTES = 2 << 20
MADV_COLLAPSE = 25


def use_huge_pages() -> int:
    """Put the anonymous memory that this process has now into huge pages; returns the number of bytes that
    are in them. 0 where that is not possible."""
    collapsed = 0
    with contextlib.suppress(AttributeError, OSError):  # another C library; no /proc here
        madvise = ctypes.CDLL(None).madvise
        lines = Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else []
        for line in lines:
            span, permissions, _, _, _, *name = line.split()
            if permissions != "rw-p" or name not in ([], ["[heap]"]):
                continue
            first, last = (int(text, 16) for text in span.split("-"))
            begin, end = -(-first // LARGE_BYTES) * LARGE_BYTES, last // LARGE_BYTES * LARGE_BYTES
            size = ctypes.c_size_t(end - begin)
            if begin < end and madvise(ctypes.c_void_p(begin), size, MADV_COLLAPSE) == 0:
                collapsed += end - begin
    return collapsed
