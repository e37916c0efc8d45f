"""Facts, files and locks of the operating system, on Linux, macOS and Windows. The Windows parts were never
run there; tests run most of them on Linux with what Windows lacks switched off
(`tests/support/bare_python.py`)."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

#: Signal that ends a process at once. On Windows any signal to another process does.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
#: True if a signal can ask another process to end in order, stop it for a while, or let it go on.
SIGNALS_ASK = hasattr(signal, "SIGKILL")
#: Most memory (bytes) to lend of a machine that names no limit.
UNLIMITED_BYTES = 1 << 62
#: Descriptors of a process on systems that state no limit: Windows gives a process far more handles.
_DESCRIPTORS = 8192


#: BELOW_NORMAL_PRIORITY_CLASS of Windows.
_BELOW_NORMAL = 0x4000
#: Byte of a file that Windows locks, and then lets nobody else read: behind the data, and below 2 GiB, where
#: its C library ends.
_LOCKED_BYTE = (1 << 31) - 2


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Context in which SIGINT is blocked, for forking processes, where signals can be: Python loses an
    interrupt that arrives as a fork returns. The new processes inherit the mask, and have to unblock it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def lock(handle: int, wait: bool = False) -> None:
    """Lock the open file `handle`; the kernel releases the lock once no process has that open file any more.
    Raises OSError if somebody holds the lock who opened the file separately, also in this process; wait: True
    to wait for it instead, on Windows for ten seconds."""
    try:
        import fcntl
    except ImportError:  # Windows
        msvcrt: Any = importlib.import_module("msvcrt")
        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the file `path` by `data`, and return once that is on the disk; a crash leaves the old file or
    the new one. mode: of the file, less the process's umask. Raises OSError if the disk refuses it; the old
    file stays then."""
    temporary = path.with_name(f".{path.name}.unfinished")
    temporary.unlink(missing_ok=True)  # it may be a link, or of another mode
    with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


def delete_oldest(files: Iterable[Path], most_bytes: int) -> None:
    """Delete the oldest of these files until the others take at most `most_bytes`; a file that the system
    does not let go stays."""
    oldest_first = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    used = sum(path.stat().st_size for path in oldest_first)
    for path in oldest_first:
        if used <= most_bytes:
            return
        used -= path.stat().st_size
        with contextlib.suppress(OSError):  # Windows: it is still mapped
            path.unlink()


def flush_folder(path: Path) -> None:
    """Flush a folder to the disk, which makes the renames in it durable. Nothing for a folder that may not be
    opened for reading, as on Windows, which opens none. Raises OSError for other failures."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_at(handle: int, data: bytes, offset: int) -> None:
    """Write all of `data` to the open file `handle` at an offset; one system call may store a part of it
    without an error. The position in the file is undefined afterwards."""
    left = memoryview(data)
    while left:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, left, offset)
        else:
            os.lseek(handle, offset, os.SEEK_SET)
            written = os.write(handle, left)
        left, offset = left[written:], offset + written


def open_to_others(mode: int) -> bool:
    """True if other users may read or write a file of this mode. Windows has other rights, which modes do not
    tell: False."""
    return hasattr(os, "getuid") and bool(mode & 0o077)


def descriptor_limit() -> int:
    """Most descriptors that this process may have open; sys.maxsize without a limit, a constant on
    Windows."""
    try:
        import resource
    except ImportError:  # Windows
        return _DESCRIPTORS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft in (resource.RLIM_INFINITY, -1) else soft


def physical_memory_bytes() -> int:
    """Memory of this machine in bytes, in use or free."""
    if sys.platform == "win32":
        return _windows_memory_bytes()[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory_bytes() -> int:
    """Free memory of this machine in bytes, on Linux without the file caches that could give way; half of all
    its memory where the system does not tell (macOS)."""
    if sys.platform == "win32":
        return _windows_memory_bytes()[1]
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical_memory_bytes() // 2


def lower_priority(nice: int) -> None:
    """Let other programs go before the calling thread, and before the threads and processes that it starts
    from now on; before this whole process on systems without priorities of threads (all but Linux). nice: 0
    to 19, as of `nice`; a priority that is lower already stays. Windows has one such step."""
    if nice <= 0:
        return
    if sys.platform == "win32":
        import ctypes

        kernel: Any = ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        kernel.SetPriorityClass(ctypes.c_void_p(kernel.GetCurrentProcess()), _BELOW_NORMAL)
    elif hasattr(os, "setpriority") and os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


class OtherPrograms:
    """Meter of the processor cores that other programs use.

    On Linux programs of low priority (nice) do not count, such as further peers of this machine. Elsewhere
    the load average of a minute is used, less this process's share. Making a meter raises OSError without
    either (Windows).
    """

    def __init__(self) -> None:
        if sys.platform != "linux" and not hasattr(os, "getloadavg"):
            raise OSError("this system does not tell how busy it is")
        self._before = self._used_s()
        self._at = time.monotonic()

    def cores(self) -> float:
        """Cores (0 or more) that other programs used on average since the last call, or since this meter was
        made."""
        used_s, at = self._used_s(), time.monotonic()
        cores = (used_s - self._before) / max(at - self._at, 1e-3)
        self._before, self._at = used_s, at
        return max(0.0, cores if sys.platform == "linux" else os.getloadavg()[0] + cores)

    def _used_s(self) -> float:
        """Processor seconds that other programs have used since the system was started, on Linux. Elsewhere
        the processor seconds of this process with a minus sign: `cores` adds the load average."""
        own = os.times()
        if sys.platform != "linux":
            return -(own.user + own.system)
        niced = os.getpriority(os.PRIO_PROCESS, 0) > 0
        return _normal_cpu_s() - own.system - (0.0 if niced else own.user)


def _normal_cpu_s() -> float:
    """Processor seconds of programs of normal priority and of the kernel since Linux was started."""
    # cpu user nice system idle iowait irq softirq ...
    words = Path("/proc/stat").read_text("ascii").split(maxsplit=8)
    user, system, irq, softirq = (int(words[column]) for column in (1, 3, 6, 7))
    return (user + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _windows_memory_bytes() -> tuple[int, int]:
    """Memory of a Windows machine in bytes: (all, free), by GlobalMemoryStatusEx. Raises OSError if the
    system does not tell."""
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
