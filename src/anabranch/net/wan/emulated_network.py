"""Emulated network of hosts, as its user sees it: addresses, namespaces and commands of the hosts."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import permutations

from anabranch.net.wan.namespaces import TUN, Claim, sweep
from anabranch.net.wan.profile import Profile
from anabranch.net.wan.shape import Host, WanError

#: Network of the hosts' addresses, which exist inside the namespaces only.
NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
#: Largest packet in bytes.
MTU = 1500
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}")
#: Seconds that the router may take to end, on a busy machine.
_END_S = 30.0


class EmulatedNetwork:
    """Network namespaces, one for each host, and the process that routes between them; a context manager.

    hosts: name -> access line; each gets an address. Delays and rates between hosts are those of the profile,
    by the hosts' regions; none without a profile. The network exists from construction to `close`. Making one
    also removes the namespaces of networks whose processes have ended. Raises WanError for a bad name, too
    many hosts, an unknown region, and missing permission.
    """

    def __init__(self, hosts: Mapping[str, Host], profile: Profile | None = None) -> None:
        for name in hosts:
            if not _HOST.fullmatch(name):
                raise WanError(f"{name!r} cannot name a host: letters, digits, '.', '_' and '-', at most 40")
        if len(hosts) > NETWORK.num_addresses - 2:
            raise WanError(f"{NETWORK} has no room for {len(hosts)} hosts")
        self._addresses = {name: str(NETWORK[number]) for number, name in enumerate(hosts, start=1)}
        network = {
            "hosts": [
                [name, self._addresses[name], host.uplink_bps, host.downlink_bps]
                for name, host in hosts.items()
            ],
            "links": _links([host.region for host in hosts.values()], profile),
            "prefix": NETWORK.prefixlen,
            "mtu": MTU,
        }
        sweep()
        self._claim = Claim.take()
        arguments = [str(self._claim.handle), self._claim.token, str(os.getpid())]
        self._router = subprocess.Popen(
            [sys.executable, "-m", "anabranch.net.wan.router_process", *arguments],
            pass_fds=(self._claim.handle,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl+C must reach only the process that closes this network
        )
        try:
            self._start(json.dumps(network))
        except BaseException:
            self.close()
            raise

    def _start(self, network: str) -> None:
        """Send the description of the network (JSON) to the router's process, whose input is closed then;
        return once all hosts are up, however long that takes. Raises WanError if the router cannot make them.
        Called once."""
        assert self._router.stdin is not None and self._router.stdout is not None
        try:
            with self._router.stdin as file:
                file.write(network)
        except BrokenPipeError:
            pass  # it has ended, and printed why
        answer = self._router.stdout.readline()
        if answer != "ready\n":
            words = (answer + self._router.stdout.read()).strip().splitlines()
            raise WanError(words[-1] if words else "the router of the emulated network has ended")

    def address(self, host: str) -> str:
        """IPv4 address of a host, as text. Raises KeyError for a host that the network does not have."""
        return self._addresses[host]

    def namespace(self, host: str) -> str:
        """Name of a host's network namespace, for `namespaces.enter` and `ip netns exec`; also for a host
        that the network does not have, which is not checked."""
        return self._claim.name(host)

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Command line that runs `command` in the network namespace of a host; the process that executes it
        becomes that command."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def close(self) -> None:
        """End the router, wait for its end, and remove the namespaces. Processes in them continue, without a
        network."""
        self._router.terminate()
        try:
            self._router.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._router.kill()
            self._router.wait()
        if self._router.stdout is not None:
            self._router.stdout.close()
        self._claim.release()  # for a router that was killed

    def __enter__(self) -> EmulatedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _links(regions: Sequence[str | None], profile: Profile | None) -> list[tuple[int, int, float, float]]:
    """Links of all ordered pairs of hosts that have a region, as (sender's number, receiver's number, delay
    in s, bit/s); [] without a profile. regions: of the hosts, by number."""
    links = []
    for (sender, one), (receiver, other) in permutations(enumerate(regions), 2):
        if profile is not None and one is not None and other is not None:
            link = profile.link(one, other)
            links.append((sender, receiver, link.delay_s, link.rate_bps))
    return links


@functools.cache
def available() -> str | None:
    """Reason why this process can emulate no network, None if it can; found by making one, once in a process.
    """
    if sys.platform != "linux":
        return "the emulated network needs Linux"
    if os.geteuid() != 0:
        return "the emulated network needs root"
    if not TUN.exists():
        return f"the emulated network needs {TUN}, the kernel's module `tun`"
    if shutil.which("ip") is None:
        return "the emulated network needs the `ip` command (package iproute2)"
    try:
        with EmulatedNetwork({"probe": Host()}) as wan:
            subprocess.run(wan.command("probe", ["true"]), check=True, capture_output=True, timeout=30)
    except (WanError, OSError, subprocess.SubprocessError) as error:
        return f"the emulated network is not permitted here: {error}"
    return None
