"""Facts and locks of the operating system, on Linux, macOS and Windows. The Windows parts were never run."""

from __future__ import annotations

import contextlib
import os
import sys

#: Descriptors of a process on systems that state no limit: Windows gives a process far more handles.
_DESCRIPTORS = 8192


def lock(handle: int, wait: bool = False) -> None:
    """Lock an open file for this process; the kernel releases it when the process ends. Raises OSError if
    another process holds the lock; wait: True to wait for it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def descriptor_limit() -> int:
    """Most descriptors that this process may have open."""
    if sys.platform == "win32":
        return _DESCRIPTORS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft in (resource.RLIM_INFINITY, -1) else soft


def physical_memory_bytes() -> int:
    """Memory of this machine."""
    if sys.platform == "win32":
        return _windows_memory_bytes()[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory_bytes() -> int:
    """Free memory of this machine; half of all where the system does not tell (macOS)."""
    if sys.platform == "win32":
        return _windows_memory_bytes()[1]
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical_memory_bytes() // 2


def _windows_memory_bytes() -> tuple[int, int]:
    """Memory of a Windows machine: all, and free (GlobalMemoryStatusEx)."""
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "free", "a", "b", "c", "d", "e")),
        )

    status = Status(length=ctypes.sizeof(Status))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined]
        raise OSError("this machine's memory is not known")
    return int(status.total), int(status.free)
