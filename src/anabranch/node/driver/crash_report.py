"""Crash report of a peer: written through a descriptor and into disk space that are reserved at the start.

An internal failure often has no descriptor and no disk left, which is why it happened. The report must not
need either, and a report that cannot be written must not keep the process alive."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from anabranch.observe.wording import plain_lines
from anabranch.operating_system import write_at

#: Name of the report, of the one before it, and of the reserved file that becomes the report.
REPORT, FORMER_REPORT, RESERVE = "crash.txt", "crash.former.txt", ".crash-reserve"
#: Bytes of disk reserved for the report; a traceback has two to ten kilobytes.
RESERVE_BYTES = 64 << 10
#: Flags of systems: to follow no link, and on Windows to write bytes as they are.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class CrashReport:
    """Crash report of a peer in `folder`. Disk space and an open descriptor are reserved from the start, as a
    failing machine may have none left."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / REPORT
        self._reserve = folder / RESERVE
        self._file: int | None = None
        with contextlib.suppress(OSError):  # a machine that has nothing left now has no reserve
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._reserve, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
            write_at(self._file, bytes(RESERVE_BYTES), 0)  # a sparse file would reserve nothing

    def write(self, text: str) -> str:
        """Write the report of a failure, cut to RESERVE_BYTES, and keep the one before it as FORMER_REPORT;
        returns where it is, or that it could not be written, for a sentence: "traceback in crash.txt". It
        raises nothing. What cannot be written, such as a second report, is printed on stderr."""
        text = plain_lines(text)  # an exception may quote bytes of another peer
        data = f"{time.ctime()}\n{text}\n".encode(errors="replace")[:RESERVE_BYTES]
        try:
            if self._file is None:
                raise OSError("nothing is reserved")
            write_at(self._file, data, 0)
            os.ftruncate(self._file, len(data))
            os.close(self._file)  # Windows renames no open file
            self._file = None
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path, self.path.with_name(FORMER_REPORT))
            os.replace(self._reserve, self.path)
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr, flush=True)
            return "its report could not be written"
        return f"traceback in {self.path.name}"

    def close(self) -> None:
        """Give back what was reserved for a crash report: the descriptor, and the file that holds disk space,
        unless that file has become the report."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)
