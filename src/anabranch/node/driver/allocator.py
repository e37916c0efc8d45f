"""Memory settings of a peer's process: the C allocator, and Python's garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

# Numbers of mallopt's parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Largest value that glibc accepts for _MMAP_THRESHOLD.
_MAX_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Keep freed memory for reuse instead of returning it to the system.

    Every microbatch allocates and frees the same tensors. By default glibc unmaps what a thread frees, and
    the kernel clears every page anew: several percent of a relay's time. Does nothing without glibc."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def settle() -> None:
    """Exempt all objects that exist now from Python's garbage collection, which then takes about a
    millisecond.

    For objects that live as long as the process, such as imported modules: an exempted object that becomes
    part of a reference cycle is never freed."""
    gc.collect()
    gc.freeze()


def free_former_peer() -> None:
    """Free the objects and device memory of a peer that has ended, for the next one of this process. Objects
    that `settle` exempted are collected again."""
    gc.unfreeze()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_cycles() -> None:
    """Free unreachable reference cycles, and the tensors in them.

    Python triggers cycle collection by numbers of objects, not by bytes: the few cycles of finished steps
    would keep all their activations in memory for long."""
    gc.collect()
