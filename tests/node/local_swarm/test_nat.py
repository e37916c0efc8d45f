"""Relays behind real NATs (nftables in network namespaces) train; the carrier of their links is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import UserError
from anabranch.net.iroh.engine import installed
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerJoined, Step, Vitals
from benchmarks.reach.nat_pairs import KINDS, NatRun, Setting, internet, measure

#: Seconds for which the laptop sleeps.
SLEEP_S = 600.0

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("nft") is None,
        reason="needs root, network namespaces and nft",
    ),
]


def test_every_pair_is_linked_by_the_way_that_the_docs_promise(tmp_path: Path) -> None:
    """Directly if one of both has a public address, through a carrier else; zero bits differ (I3)."""
    try:
        found = measure(tmp_path, steps=6, kill=True)
    except UserError as error:
        if "failed: mount" in str(error) or "Operation not permitted" in str(error):
            pytest.skip(str(error))
        raise
    assert len(found.ways) == 16 and found.ways == promised(0)
    assert found.exact and found.steps == 6


def promised(number: int) -> dict[tuple[str, str], str]:
    """Way of each pair by table `number` (0: TCP alone, 1: with iroh) of `lend-behind-a-router.md`."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "lend-behind-a-router.md").read_text("utf-8")
    tables = [part.partition("\n\n")[0] for part in page.split("\n| | public address |")[1:]]
    lines = tables[number].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    names = {"public address": "public", "only TCP out": "TCP out only"}
    kinds = [names.get(row[0], row[0].removeprefix("NAT, ")) for row in rows]
    return {
        (f"1: {kind}", f"2: {other}"): way
        for kind, (_, *ways) in zip(kinds, rows, strict=True)
        for other, way in zip(kinds, ways, strict=True)
    }


@pytest.mark.skipif(not installed(), reason="needs iroh")
def test_every_pair_is_linked_with_iroh_by_the_way_that_the_docs_promise(tmp_path: Path) -> None:
    """25 cells, none of them carried; zero bits differ (I3)."""
    found = measure(tmp_path, steps=6, kill=False, iroh=True)
    assert len(found.ways) == 25 and found.ways == promised(1)
    assert found.exact and found.steps == 6


def test_a_machine_whose_address_changes_goes_on(tmp_path: Path) -> None:
    """Its connections are dead without a word, as when a laptop moves to another network; no step is lost."""
    found = measure(tmp_path, steps=12, kill=False, move="r22")
    assert found.exact and found.steps == 12


class Opening(NatRun):
    """Run in which a relay with a public address lets only leader and carrier in, until one behind a NAT is
    linked with it through a carrier; stopped once both have a direct link and three more steps are made."""

    open_name, nat_name = "2: public", "1: symmetric"
    opened = False
    more = 3

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        known = ", ".join(host.address for host in (self._leader, *self._carriers.values()))
        let_in = f"ct state established,related accept; ip saddr {{ {known} }} accept;"
        hook = "type filter hook input priority 0; policy drop;"
        self._nft(f"table ip guard {{ chain in {{ {hook} {let_in} }}\n}}")

    def _nft(self, rules: str) -> None:
        words = ["ip", "netns", "exec", self.hosts[self.open_name].namespace, "nft", rules]
        subprocess.run(words, check=True)

    def is_direct(self) -> bool:
        """True if both ends have told of a way that is no carrier, and are connected."""
        ids = {e.name: e.subject for e in self._events if isinstance(e, PeerJoined)}
        last = {event.peer: event.ways for event in self._events if isinstance(event, Vitals)}
        one, other = ids[self.nat_name], ids[self.open_name]
        told = {one, other} <= last.keys() and other not in last[one] and one not in last[other]
        return told and self._connected(self.nat_name, self.open_name)

    def after_step(self, event: Step) -> None:
        if not self.opened and self._ways()[self.nat_name, self.open_name] == "carried":
            assert not self._connected(self.nat_name, self.open_name)
            self._nft("flush ruleset")
            self.opened = True
        elif self.opened and self.is_direct():
            self.more -= 1
            if self.more == 0:
                self.swarm.leader.signal(signal.SIGINT)


def test_a_carried_link_becomes_direct_once_a_firewall_is_opened(tmp_path: Path) -> None:
    """No step is lost, and nothing is counted twice (I1, I3)."""
    with internet() as made, Supervisor(1) as supervisor:
        setting = Setting(100_000, {kind: kind for kind in KINDS}, once=False)
        run = Opening(made, tmp_path, supervisor, setting)
        found = run.run(kill=False)
    assert run.opened and run.more <= 0 and found.exact


class Nap(NatRun):
    """Run in which one relay sleeps SLEEP_S and wakes behind another address; it is stopped once the relay
    owns units of three more steps."""

    name = "2: symmetric"
    asleep = woken = float("inf")
    peers: frozenset[str] = frozenset()
    worked = 0
    stopped = False

    def after_step(self, event: Step) -> None:
        now = time.monotonic()
        if event.t == 4:
            joined = [each for each in self._events if isinstance(each, PeerJoined)]
            self.peers = frozenset(each.subject for each in joined if each.name == self.name)
            self.process_of(self.name).signal(signal.SIGSTOP)
            self.asleep = now
            self.made.move("r22")
        if now > self.asleep + SLEEP_S and self.woken == float("inf"):
            self.process_of(self.name).signal(signal.SIGCONT)
            self.woken = now
        if now > self.woken:
            self.worked += any(self.peers & set(units.values()) for units in event.owners.values())
        if self.worked >= 3 and not self.stopped:
            self.stopped = True
            self.swarm.leader.signal(signal.SIGINT)


@pytest.mark.timeout(1800)
def test_a_laptop_sleeps_ten_minutes_and_goes_on_in_another_network(tmp_path: Path) -> None:
    """It joins again by itself, with its key; nothing is counted twice (I1)."""
    kinds = {kind: kind for kind in KINDS}
    with internet() as made, Supervisor(1) as supervisor:
        run = Nap(made, tmp_path, supervisor, Setting(100_000, kinds, once=False))
        found = run.run(kill=False)
    assert run.worked >= 3 and len(run.peers) == 1
    assert found.exact and found.steps > 100
