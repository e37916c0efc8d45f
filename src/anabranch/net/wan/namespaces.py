"""Network namespaces with a TUN device: made, entered and removed; those of dead owners swept away.

Namespaces are called `anb-TOKEN-HOST`. A token is claimed by a lock on the file of its name, which the router
and the process that started it hold: the kernel drops it with the last of them, whatever end they came to,
and so nobody's namespaces are told from somebody's without trusting process numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from anabranch.net.wan.shape import WanError

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
#: Frames that may wait for the router in a device; beyond, the kernel drops.
_DEVICE_QUEUE = 4000

_libc = ctypes.CDLL(None, use_errno=True)


class Claim:
    """The right to a token, and to the namespaces that bear it."""

    def __init__(self, token: str, handle: int) -> None:
        self.token = token
        self.handle = handle
        """Descriptor of the lock; a process that inherits it shares the claim."""

    @classmethod
    def take(cls) -> Claim:
        """Claim a fresh token. Raises WanError."""
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
        """Remove the token's namespaces and give it back. May be called by several processes, and again.

        Processes in them go on, cut off from everything.
        """
        _remove(self.token)
        (LOCKS / self.token).unlink(missing_ok=True)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def _lock(path: Path, flags: int) -> int | None:
    """A descriptor that holds the lock, or None: somebody else holds it, or the file is gone."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except (FileNotFoundError, FileExistsError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking a sweep may have taken it for a dead owner's.
        if os.stat(path).st_ino == os.fstat(handle).st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def sweep() -> list[str]:
    """Remove the namespaces whose owners are all dead; their names. Touches no others."""
    removed = []
    tokens = {match[1] for name in _names() if (match := _NAME.fullmatch(name))}
    if LOCKS.is_dir():
        tokens |= {path.name for path in LOCKS.iterdir()}
    for token in sorted(tokens):
        # A token without its file is nobody's: the file goes last.
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
        with contextlib.suppress(WanError):  # another owner was quicker
            run_ip("netns", "delete", name)
    return removed


def create(name: str, address: str, prefix: int, mtu: int) -> int:
    """Make a namespace with its loopback and its TUN device up. Returns the device's descriptor, which does
    not block; the device lasts until it is closed. Raises WanError."""
    run_ip("netns", "add", name)
    with _inside(name):
        handle = _open_tun()
    lines = (
        "link set lo up",
        f"link set {DEVICE} addrgenmode none",  # IPv6 would only make noise here
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
        # Without offloads frames are single packets: slower, nothing else.
        with contextlib.suppress(OSError):
            fcntl.ioctl(handle, _TUNSETOFFLOAD, _OFFLOADS)
    except OSError as error:
        os.close(handle)
        raise WanError(f"a TUN device cannot be made: {error.strerror}") from None
    return handle


def enter(name: str) -> None:
    """Put the calling thread, and what it starts from now on, into a namespace. Raises WanError.

    For a process that has just been forked; where one is executed, `WanRouter.command` does it.
    """
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
    """Run `ip` and return what it prints. Raises WanError with its last words."""
    try:
        done = subprocess.run(
            ["ip", *arguments], input=lines, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WanError(f"`ip` cannot be run: {error}") from None
    if done.returncode:
        raise WanError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
