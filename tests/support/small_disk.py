"""Small disk of its own: a file system in memory that a test can fill and free."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: File that takes the room.
FILLING = ".filling"
#: Bytes written at a time.
BLOCK_BYTES = 1 << 16


class SmallDisk:
    """Mounted file system of a few megabytes at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all room but `leave_bytes`."""
        with open(self.path / FILLING, "ab", buffering=0) as file:
            while (room := self.free_bytes - leave_bytes) > 0:
                try:
                    file.write(bytes(min(BLOCK_BYTES, room)))
                except OSError:
                    return

    def free(self) -> None:
        (self.path / FILLING).unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a small disk at `path`; skips the test where this user may not mount."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a small disk needs root: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
