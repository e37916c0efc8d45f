"""The emulated network as the program that uses it sees it: hosts, addresses, commands, and live changes."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from types import TracebackType
from typing import Any, Literal

from anabranch.net.wan.fabric import Counters
from anabranch.net.wan.namespaces import DEVICE, TUN, Claim, run_ip, sweep
from anabranch.net.wan.profile import Profile
from anabranch.net.wan.shape import Host, Pair, WanError

#: Every host's address is in here; nothing outside the namespaces ever sees it.
NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}")
#: Seconds for an order, and beyond that for each host that is to be made; a busy machine has its moments.
_ORDER_S = 30.0
_HOST_S = 2.0


@dataclass(frozen=True)
class Account:
    """What the router has done. late_*: how much later than due frames were handed over; kernel_drops: host
    -> packets that its device dropped because the router did not keep up."""

    pairs: dict[tuple[str, str], Counters]
    frames: int
    late_mean_s: float
    late_max_s: float
    cpu_s: float
    kernel_drops: dict[str, int]


class WanRouter:
    """Namespaces, one for each host, and the process that routes between them; a context manager.

    Making one removes what dead owners of such networks left behind. Methods may be called from any thread.
    Raises WanError: a bad value, an unknown name, no permission, the router has ended.
    """

    def __init__(
        self, hosts: Mapping[str, Host], profile: Profile | None = None, *, mtu: int = 1500, seed: int = 0
    ) -> None:
        """Delays and rates are the profile's, by the hosts' regions; without one there are none.

        mtu: bytes of the largest packet, 576 to 65535. seed: of the dice for loss and the like; what real
        processes send is never the same twice, though.
        """
        self._names = list(hosts)
        self._numbers = {name: number for number, name in enumerate(hosts)}
        for name in hosts:
            if not _HOST.fullmatch(name):
                raise WanError(f"{name!r} cannot name a host: letters, digits, '.', '_' and '-', at most 40")
        if not 576 <= mtu <= 65535:
            raise WanError(f"mtu must be from 576 to 65535 bytes, not {mtu}")
        if len(hosts) > NETWORK.num_addresses - 2:
            raise WanError(f"{NETWORK} has no room for {len(hosts)} hosts")
        self._hosts = dict(hosts)
        self._addresses = {name: str(NETWORK[number]) for number, name in enumerate(hosts, start=1)}
        self._pairs = {
            (a, b): profile.pair(hosts[a].region, hosts[b].region) if profile else Pair()
            for a, b in permutations(hosts, 2)
        }
        self._lock = threading.Lock()
        self._text = b""
        sweep()
        self._claim = Claim.take()
        self._orders, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(self._claim.handle), self._claim.token, str(os.getpid())]
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "anabranch.net.wan.process", *arguments],
            pass_fds=(theirs.fileno(), self._claim.handle),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl+C is for whoever closes this network
        )
        theirs.close()
        try:
            self._ask(
                _ORDER_S + _HOST_S * len(hosts),
                do="network",
                hosts={name: asdict(host) for name, host in hosts.items()},
                addresses=list(self._addresses.values()),
                pairs=[[*self._of(pair), asdict(shape)] for pair, shape in self._pairs.items()],
                prefix=NETWORK.prefixlen,
                mtu=mtu,
                seed=seed,
            )
        except BaseException:
            self.close()
            raise

    def address(self, host: str) -> str:
        """The address that the other hosts reach this one at."""
        self._known(host)
        return self._addresses[host]

    def namespace(self, host: str) -> str:
        """The name of its network namespace, for `namespaces.enter` and for `ip netns exec`."""
        self._known(host)
        return self._claim.name(host)

    def command(self, host: str, command: Sequence[str] = ()) -> list[str]:
        """The command that runs a command on a host; with none, the words to put in front of one. The process
        that executes it keeps its number."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def host(self, name: str) -> Host:
        """How a host's access is now."""
        self._known(name)
        return self._hosts[name]

    def pair(self, sender: str, receiver: str) -> Pair:
        """How the way from one host to another is now."""
        self._known(sender, receiver)
        if sender == receiver:
            raise WanError(f"{sender!r} reaches itself without this network")
        return self._pairs[sender, receiver]

    def set_host(self, name: str, **changes: float) -> None:
        """Change fields of a host's access, while running."""
        with self._lock:
            shape = _changed(self.host(name), changes)
            self._tell(do="host", host=self._numbers[name], shape=asdict(shape))
            self._hosts[name] = shape

    def set_pair(self, sender: str, receiver: str, *, both: bool = False, **changes: float) -> None:
        """Change fields of the way from one host to another, while running; with `both` of the way back, too.

        What is on the way arrives as it would have, unless the way is cut.
        """
        ways = [(sender, receiver), (receiver, sender)] if both else [(sender, receiver)]
        with self._lock:
            self._change(ways, changes)

    def partition(
        self,
        left: Collection[str],
        right: Collection[str],
        direction: Literal["both", "forward", "back"] = "both",
    ) -> None:
        """Cut all ways from left to right (forward), from right to left (back), or both. Adds to the cuts
        that are there."""
        ways = [(a, b) for a in left for b in right if a != b]
        if direction not in ("both", "forward", "back"):
            raise WanError(f"direction must be 'both', 'forward' or 'back', not {direction!r}")
        back = [(b, a) for a, b in ways]
        with self._lock:
            self._change({"both": ways + back, "forward": ways, "back": back}[direction], {"cut": True})

    def heal(self, left: Collection[str] | None = None, right: Collection[str] | None = None) -> None:
        """Mend every cut between left and right, in both directions. None: all hosts."""
        with self._lock:
            ones = self._names if left is None else left
            others = self._names if right is None else right
            self._known(*ones, *others)
            near = {(a, b) for a in ones for b in others} | {(b, a) for a in ones for b in others}
            self._change([way for way in near if way in self._pairs and self._pairs[way].cut], {"cut": False})

    def account(self) -> Account:
        """What the router has done so far."""
        with self._lock:
            counts = self._tell(do="count")
        pairs = {(self._names[a], self._names[b]): Counters(**count) for a, b, count in counts.pop("pairs")}
        return Account(pairs=pairs, kernel_drops={name: self._drops(name) for name in self._names}, **counts)

    def close(self) -> None:
        """End the router and remove the namespaces. Processes still in them are cut off, not ended."""
        with contextlib.suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)  # also where a forked child has it open
        self._orders.close()
        try:
            self._popen.wait(_ORDER_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stderr is not None:
            self._popen.stderr.close()
        self._claim.release()  # what it left, if it was killed

    def __enter__(self) -> WanRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _change(self, ways: Iterable[tuple[str, str]], changes: Mapping[str, float]) -> None:
        shapes = {way: _changed(self.pair(*way), changes) for way in ways}
        alike: dict[Pair, list[tuple[str, str]]] = {}
        for way, shape in shapes.items():
            alike.setdefault(shape, []).append(way)
        for shape, group in alike.items():
            self._tell(do="pairs", pairs=[self._of(way) for way in group], shape=asdict(shape))
            self._pairs.update(dict.fromkeys(group, shape))

    def _of(self, pair: tuple[str, str]) -> tuple[int, int]:
        return self._numbers[pair[0]], self._numbers[pair[1]]

    def _known(self, *hosts: str) -> None:
        for host in hosts:
            if host not in self._numbers:
                raise WanError(f"no host {host!r} in this network: it has {', '.join(self._names)}")

    def _drops(self, host: str) -> int:
        links = json.loads(run_ip("-n", self.namespace(host), "-s", "-j", "link", "show", DEVICE))
        return int(links[0]["stats64"]["tx"]["dropped"])

    def _tell(self, **order: Any) -> Any:
        return self._ask(_ORDER_S, **order)

    def _ask(self, patience_s: float, **order: Any) -> Any:
        """Give the router an order and return its answer."""
        try:
            self._orders.settimeout(patience_s)
            self._orders.sendall(json.dumps(order).encode() + b"\n")
            while b"\n" not in self._text:
                data = self._orders.recv(1 << 20)
                if not data:
                    raise ConnectionError
                self._text += data
        except TimeoutError:
            self._orders.close()  # its answer would be taken for the next order's
            raise WanError(f"the router does not answer within {patience_s:.0f} s") from None
        except OSError:
            raise WanError(f"the router has ended{self._last_words()}") from None
        line, _, self._text = self._text.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise WanError(answer["error"])
        return answer["answer"]

    def _last_words(self) -> str:
        if self._popen.stderr is None or self._popen.stderr.closed or self._popen.poll() is None:
            return ""
        words = self._popen.stderr.read().decode(errors="replace").strip()
        return f": {words.splitlines()[-1]}" if words else f" with status {self._popen.returncode}"


def _changed(shape: Any, changes: Mapping[str, float]) -> Any:
    """The shape with these fields changed. Raises WanError for an unknown field or a bad value."""
    fields = asdict(shape)
    odd = [name for name in changes if name not in fields or name == "region"]
    if odd:
        raise WanError(f"{odd[0]!r} cannot be changed; what can: {', '.join(set(fields) - {'region'})}")
    return replace(shape, **changes)


@functools.cache
def available() -> str | None:
    """Why no network can be emulated here; None: it can. Found out by making one."""
    if sys.platform != "linux":
        return "the emulated network needs Linux"
    if os.geteuid() != 0:
        return "the emulated network needs root"
    if not TUN.exists():
        return f"the emulated network needs {TUN}, the kernel's module `tun`"
    if shutil.which("ip") is None:
        return "the emulated network needs the `ip` command (package iproute2)"
    try:
        with WanRouter({"probe": Host()}) as wan:
            subprocess.run(wan.command("probe", ["true"]), check=True, capture_output=True, timeout=30)
    except (WanError, OSError, subprocess.SubprocessError) as error:
        return f"the emulated network is not permitted here: {error}"
    return None
