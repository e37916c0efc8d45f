"""A live run over an overlay: userspace WireGuard between namespaces, whose firewalls let nothing else in."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from anabranch.net.wan.places import Place
from anabranch.node.local_swarm.supervisor import Supervisor
from support.local_swarms import PATIENCE_S, check_exact, created, history_of, small_run, swarm_of
from support.network.lan import lan, missing, run_in

MISSING = missing() or (
    "" if shutil.which("wireguard-go") and shutil.which("wg") else "needs wireguard-go, wg"
)
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

STEPS = 3
NAMES = ("data-0", "relay-1.0", "relay-2.0")
#: UDP port of WireGuard, the only one that the machines' firewalls let in.
UDP_PORT = 51820
_FIREWALL = f"""
table ip underlay {{
  chain in {{
    type filter hook input priority 0; policy accept;
    iifname "eth0" udp dport {UDP_PORT} accept
    iifname "eth0" meta l4proto {{ tcp, udp }} drop
  }}
}}
"""


@contextlib.contextmanager
def wireguard(namespaces: Mapping[str, str], folder: Path) -> Iterator[dict[str, str]]:
    """Overlay between hosts 10.80.0.N of an underlay while this is entered; yields name -> address in it."""
    folder.mkdir()
    overlay = {name: f"10.90.0.{number}" for number, name in enumerate(namespaces, start=1)}
    public, engines = {}, []
    try:
        for name in namespaces:
            key = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
            (folder / name).write_text(key)
            found = subprocess.run(["wg", "pubkey"], input=key, capture_output=True, text=True, check=True)
            public[name] = found.stdout.strip()
        for number, (name, namespace) in enumerate(namespaces.items(), start=1):
            device = f"wg{os.getpid() % 10000}x{number}"  # its socket's name is one for all namespaces
            command = ["ip", "netns", "exec", namespace, "wireguard-go", "-f", device]
            engines.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            _await_socket(device)
            keys = ["private-key", str(folder / name), "listen-port", str(UDP_PORT)]
            peers = []
            for other, there in enumerate(namespaces, start=1):
                if there != name:
                    at = [f"10.80.0.{other}:{UDP_PORT}", "allowed-ips", f"{overlay[there]}/32"]
                    peers += ["peer", public[there], "endpoint", *at]
            run_in(namespace, "wg", "set", device, *keys, *peers)
            run_in(namespace, "ip", "address", "add", f"{overlay[name]}/24", "dev", device)
            run_in(namespace, "ip", "link", "set", device, "mtu", "1420", "up")
            run_in(namespace, "nft", "-f", "-", text=_FIREWALL)
        yield overlay
    finally:
        for engine in engines:
            engine.terminate()
            engine.wait(PATIENCE_S)


def _await_socket(device: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not Path(f"/var/run/wireguard/{device}.sock").exists():
        assert time.monotonic() < until, "wireguard-go did not start"
        time.sleep(0.05)


def test_three_machines_train_over_wireguard(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    run = small_run(texts, run__steps=STEPS, fleet__relays_per_stage=[1, 1], evaluation__every=0)
    directory = created(tmp_path / "run", run)
    hosts = {name: [f"10.80.0.{number}/24"] for number, name in enumerate(NAMES, start=1)}
    with lan(hosts) as namespaces, wireguard(namespaces, tmp_path / "keys") as overlay:
        places = {name: Place(namespaces[name], overlay[name]) for name in NAMES}
        with swarm_of(directory, run, supervisor, places=places) as swarm:
            swarm.to_the_end()
    members = history_of(directory).membership.members.values()
    assert {each.name: each.address.rpartition(":")[0] for each in members} == overlay
    check_exact(directory, STEPS)
