"""Network namespaces with a TUN device: creation, entering, removal, and cleaning up after dead owners.

A namespace is called `anb-TOKEN-HOST`. The router and the process that started it hold a lock on a file that
is named after the token. The kernel releases the lock when both have ended, in whatever way, so abandoned
namespaces are recognized without relying on process ids."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from anabranch.net.wan.shape import WanError

with contextlib.suppress(ImportError):  # Windows, where no network is emulated
    import fcntl

DEVICE = "wan0"
TUN = Path("/dev/net/tun")
NAMED = Path("/run/netns")
LOCKS = Path("/run/anabranch-wan")
_NAME = re.compile(r"anb-([0-9a-f]{8})-.+")

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02  # checksums, and segmentation of TCP over IPv4
#: Most frames that wait for the router in a device; the kernel drops further ones.
_DEVICE_QUEUE = 4000

_libc = ctypes.CDLL(None, use_errno=True)


class Claim:
    """Ownership of an emulated network's namespaces, whose names contain `token`. The owner holds a lock on a
    file (descriptor `handle`), so that `sweep` removes only the namespaces of owners that have ended."""

    def __init__(self, token: str, handle: int) -> None:
        self.token = token
        self.handle = handle
        """Descriptor of the lock; a process that inherits the descriptor is an owner, too."""

    @classmethod
    def take(cls) -> Claim:
        """Lock a new random token, for the names of a network's namespaces. Raises WanError if the folder
        LOCKS cannot be used."""
        try:
            LOCKS.mkdir(mode=0o700, exist_ok=True)
            while True:
                token = secrets.token_hex(4)
                handle = _lock(LOCKS / token, os.O_CREAT | os.O_EXCL)
                if handle is not None:
                    return cls(token, handle)
        except OSError as error:
            raise WanError(f"{LOCKS} cannot be used: {error.strerror}") from None

    def name(self, host: str) -> str:
        return f"anb-{self.token}-{host}"

    def release(self) -> None:
        """Remove the namespaces and give up the lock. May be called by several processes, and again.

        Processes in the namespaces continue, without a network.
        """
        _remove(self.token)
        (LOCKS / self.token).unlink(missing_ok=True)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def _lock(path: Path, flags: int) -> int | None:
    """Open and lock a file; returns the descriptor that holds the lock. None if another process holds it, or
    if the file is missing (or there, with O_EXCL). flags: further ones for os.open."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except (FileNotFoundError, FileExistsError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, a sweep may have removed the file.
        if os.stat(path).st_ino == os.fstat(handle).st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def sweep() -> list[str]:
    """Remove the namespaces whose owners have all ended; returns their names."""
    removed = []
    tokens = {match[1] for name in _names() if (match := _NAME.fullmatch(name))}
    if LOCKS.is_dir():
        tokens |= {path.name for path in LOCKS.iterdir()}
    for token in sorted(tokens):
        # A token without a file has no owner, since the file is removed last.
        handle = _lock(LOCKS / token, 0)
        if handle is None and (LOCKS / token).exists():
            continue
        removed += _remove(token)
        if handle is not None:
            (LOCKS / token).unlink(missing_ok=True)
            os.close(handle)
    return removed


def _names() -> list[str]:
    return sorted(os.listdir(NAMED)) if NAMED.is_dir() else []


def _remove(token: str) -> list[str]:
    removed = [name for name in _names() if name.startswith(f"anb-{token}-")]
    for name in removed:
        with contextlib.suppress(WanError):  # another owner has removed it
            run_ip("netns", "delete", name)
    return removed


def create(name: str, address: str, prefix: int, mtu: int) -> int:
    """Make a namespace whose loopback and TUN device are up, with IPv4 address/prefix and MTU (bytes).
    Returns the device's non-blocking descriptor; the device exists until that is closed. Raises WanError if
    `ip` or the device fails."""
    run_ip("netns", "add", name)
    with _inside(name):
        handle = _open_tun()
    lines = (
        "link set lo up",
        f"link set {DEVICE} addrgenmode none",  # IPv6 would only add noise
        f"link set {DEVICE} txqueuelen {_DEVICE_QUEUE} mtu {mtu}",
        f"address add {address}/{prefix} dev {DEVICE}",
        f"link set {DEVICE} up",
    )
    try:
        run_ip("-n", name, "-batch", "-", lines="\n".join(lines))
    except WanError:
        os.close(handle)
        raise
    return handle


def _open_tun() -> int:
    try:
        handle = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise WanError(f"{TUN} cannot be opened: {error.strerror}") from None
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        # Without offloads frames are single packets, which is slower.
        with contextlib.suppress(OSError):
            fcntl.ioctl(handle, _TUNSETOFFLOAD, _OFFLOADS)
    except OSError as error:
        os.close(handle)
        raise WanError(f"a TUN device cannot be made: {error.strerror}") from None
    return handle


def enter(name: str) -> None:
    """Move the calling thread, and everything it starts from now on, into a namespace. Raises WanError if
    there is none, or it may not be entered. For a process that has just been forked;
    `EmulatedNetwork.command` does it for an executed one."""
    try:
        handle = os.open(NAMED / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WanError(f"network namespace {name!r}: {error.strerror}") from None
    try:
        _set_namespace(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(name)
        try:
            yield
        finally:
            _set_namespace(before)
    finally:
        os.close(before)


def _set_namespace(handle: int) -> None:
    if _libc.setns(handle, _CLONE_NEWNET) != 0:
        raise WanError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def run_ip(*arguments: str, lines: str = "") -> str:
    """Run `ip` with `lines` as its input, and return its output. Raises WanError with its error message."""
    try:
        done = subprocess.run(
            ["ip", *arguments], input=lines, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WanError(f"`ip` cannot be run: {error}") from None
    if done.returncode:
        raise WanError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
