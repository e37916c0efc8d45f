"""Local network for tests: namespaces on one bridge (root, Linux)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from anabranch.net.wan.namespaces import run_ip
from anabranch.net.wan.shape import WanError


def missing() -> str:
    """Reason why no local network can be made here; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root, Linux and `ip`"
    name = f"lan-{secrets.token_hex(3)}"
    try:
        run_ip("netns", "add", name)
    except WanError as error:
        return str(error)
    run_ip("netns", "delete", name)
    return ""


@contextlib.contextmanager
def lan(hosts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Make a network of hosts while this is entered; yields name -> namespace. hosts: name -> addresses with
    prefix length, "10.9.0.1/24" or "fd00::1/64"; a host without an IPv6 address has no IPv6 at all."""
    token = secrets.token_hex(3)
    core = f"lan-{token}-core"
    names = {name: f"lan-{token}-{name}" for name in hosts}
    try:
        run_ip("netns", "add", core)
        run_ip("-n", core, "link", "add", "br0", "type", "bridge")
        run_ip("-n", core, "link", "set", "br0", "up")
        for number, (name, addresses) in enumerate(hosts.items()):
            run_ip("netns", "add", names[name])
            _plug(core, f"p{number}", names[name], addresses)
        yield names
    finally:
        for namespace in (core, *names.values()):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _plug(core: str, port: str, namespace: str, addresses: Sequence[str]) -> None:
    if not any(":" in address for address in addresses):
        run_in(namespace, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    run_ip("-n", namespace, "link", "set", "lo", "up")
    run_ip("-n", core, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    run_ip("-n", core, "link", "set", port, "master", "br0", "up")
    for address in addresses:
        # Without duplicate address detection, which would take a second.
        run_ip("-n", namespace, "address", "add", address, "dev", "eth0", *(["nodad"] * (":" in address)))
    run_ip("-n", namespace, "link", "set", "eth0", "up")


def run_in(namespace: str, *command: str, text: str = "") -> str:
    """Run a command in a namespace, with `text` as its input; returns its output. Raises WanError."""
    return run_ip("netns", "exec", namespace, *command, lines=text)
