"""Process of the emulated network's router: makes the hosts, then moves frames between their devices.

It reads the description of the network, a JSON object, from its standard input, and prints "ready" or an
error. On SIGTERM, and when its parent dies, it removes the namespaces and ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import ipaddress
import json
import os
import select
import signal
import sys
import time
from typing import Any

from anabranch.net.wan.frame_delays import Fabric
from anabranch.net.wan.frames import FRAME_BYTES
from anabranch.net.wan.namespaces import Claim, create
from anabranch.net.wan.profile import Link
from anabranch.net.wan.shape import Host, WanError

#: Frames read from one device before the other devices are read and due frames delivered.
_BATCH = 16
#: Seconds of sleep between turns, as waking up costs most of a turn. It adds half of it to each delay.
_REST_S = 0.0002
#: Number of prctl's option that sets the accuracy of a thread's timers, from linux/prctl.h.
_PR_SET_TIMERSLACK = 29


class Router:
    """The loop that moves frames between the devices of the hosts. claim: ownership of the namespaces, which
    the constructor makes. parent: id of the process whose end ends the router.

    network: "hosts", a list of [name, address, uplink bit/s, downlink bit/s], and "links", a list of [sender,
    receiver, delay (s), bit/s] with hosts' numbers; "prefix" of the addresses and "mtu".
    """

    def __init__(self, network: dict[str, Any], claim: Claim, parent: int) -> None:
        self._running = True
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        self._parent = os.pidfd_open(parent)
        self._poll = select.epoll()
        self._poll.register(self._parent, select.EPOLLIN)
        #: True if a device had more frames than were read in its turn.
        self._behind = False
        #: Descriptor of each host's device, and each host's number by descriptor.
        self._devices: list[int] = []
        self._host_of: dict[int, int] = {}
        for name, address, *_ in network["hosts"]:
            device = create(claim.name(name), address, network["prefix"], network["mtu"])
            self._host_of[device] = len(self._devices)
            self._devices.append(device)
            self._poll.register(device, select.EPOLLIN)
        self._fabric = Fabric(
            [ipaddress.IPv4Address(address).packed for _, address, *_ in network["hosts"]],
            [Host(None, *rates) for _, _, *rates in network["hosts"]],
            {(sender, receiver): Link(*link) for sender, receiver, *link in network["links"]},
        )

    def run(self) -> None:
        while self._running:
            for receiver, frame in self._fabric.due(time.monotonic()):
                with contextlib.suppress(OSError):  # the host's device is down
                    os.write(self._devices[receiver], frame)
            if not self._behind:
                time.sleep(_REST_S)
            self._behind = False
            wait = self._fabric.next_s - time.monotonic()
            # epoll by itself rounds up to milliseconds.
            select.select([self._poll], [], [], max(0.0, min(wait, 1.0)))
            for handle, _ in self._poll.poll(0):
                if handle == self._parent:
                    self._stop()
                else:
                    self._read(handle)

    def _stop(self) -> None:
        self._running = False

    def _read(self, device: int) -> None:
        for _ in range(_BATCH):
            try:
                frame = os.read(device, FRAME_BYTES)
            except BlockingIOError:
                return
            self._fabric.submit(time.monotonic(), self._host_of[device], frame)
        self._behind = True


def _raise_priority() -> None:
    """Raise the priority of this process, as far as the system permits: the delays are only as accurate as
    its wake-ups, on a busy machine. It sleeps most of the time, and the kernel limits real-time processes."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def main(lock: int, token: str, parent: int) -> int:
    _raise_priority()
    gc.disable()  # there are no reference cycles, and a collection would visit all frames in flight
    claim = Claim(token, lock)
    try:
        router = Router(json.load(sys.stdin), claim, parent)
        print("ready", flush=True)
        router.run()
    except WanError as error:
        print(" ".join(str(error).split()), flush=True)
        return 1
    finally:
        claim.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
