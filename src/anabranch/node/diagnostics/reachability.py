"""Checks that need another machine: links, clock offset, NAT, and whether others can dial this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator

from anabranch.addresses import host_port
from anabranch.errors import words_of
from anabranch.node.diagnostics.check_result import GREEN, RED, YELLOW, CheckResult, graded
from anabranch.node.diagnostics.link_test import Greeting, LinkTestClient, LinkTestError, listening

#: Round trip (s) from which a link is yellow.
SLOW_S = 0.3
#: Bandwidth (bit/s) below which a link is yellow, and below which it is red.
BANDWIDTH_BPS = (20e6, 2e6)
#: Clock offset (s) from which a clock is yellow, and from which it is red: tickets expire by the minute.
CLOCK_OFFSET_S = (5.0, 300.0)
_FORWARD = "forward a port of the router to this machine and name it: --advertise your.host:port"


def remote_checks(
    peers: list[str], listens: str, port: int, tell: Callable[[str], None] = lambda text: None
) -> Iterator[CheckResult]:
    """Make all checks that need another machine, which runs `anabranch doctor --answer`. peers: such
    machines, all as HOST:PORT/CODE (another text fails an assertion); one that fails is RED. Clock, NAT and
    dialling back are checked if one answered, dialling back by the first of them. listens, port: address of
    its own at which this machine listens meanwhile, for the dialling back (port 0: any free one); not a
    public address that a router forwards. tell: gets a sentence before each measurement."""
    seen: list[tuple[LinkTestClient, Greeting]] = []
    for text in peers:
        tell(f"measuring the link to {text.partition('/')[0]}")
        try:
            far = LinkTestClient.parse(text)
            seen.append((far, far.hello()))
            yield from _link(far, seen[-1][1])
        except (LinkTestError, ValueError) as error:
            repair = (
                "check that `anabranch doctor --answer` runs there, and which address and code it printed"
            )
            yield CheckResult(f"peer {text.partition('/')[0]}", RED, str(error), repair)
    if not seen:
        return
    yield _clocks([other.clock_s for _, other in seen])
    yield _nat(seen)
    tell("waiting to be dialled back")
    yield _dialled_back(seen[0][0], listens, port)


def _link(far: LinkTestClient, seen: Greeting) -> Iterator[CheckResult]:
    name = f"peer {host_port(far.host, far.port)}"
    slow = seen.trip_s >= SLOW_S
    far_away = "it is far away, or the link is bad" if slow else ""
    yield CheckResult(name, YELLOW if slow else GREEN, f"answers after {1000 * seen.trip_s:.0f} ms", far_away)
    for way, bps in (("up", far.up_bps()), ("down", far.down_bps())):
        verdict = graded(bps, *BANDWIDTH_BPS)
        repair = "" if verdict == GREEN else "end other transfers, use a cable, or lend to a smaller run"
        yield CheckResult(f"{name} {way}", verdict, f"{bps / 1e6:.3g} Mbit/s", repair)


def _clocks(offsets_s: list[float]) -> CheckResult:
    """Check this machine's clock against the other clock that differs least, since others may be wrong.
    offsets_s: of the other machines' clocks (s; positive: ahead of this one), at least one."""
    off_s = min(offsets_s, key=abs)
    verdict = graded(-abs(off_s), -CLOCK_OFFSET_S[0], -CLOCK_OFFSET_S[1])
    words = f"{abs(off_s):.1f} s {'behind' if off_s > 0 else 'ahead of'} that of the other machine"
    repair = "" if verdict == GREEN else "set it by network time: timedatectl set-ntp true"
    return CheckResult("clock against peers", verdict, words, repair)


def _nat(seen: list[tuple[LinkTestClient, Greeting]]) -> CheckResult:
    """Check for the type of address translation (NAT; RFC 4787, 4.1) between this machine and the others.
    seen: the other machines, with what each saw of this one, at least one."""
    first, other = seen[0]
    try:
        own = own_address(first.host, first.port)
    except OSError as error:
        found = f"not known: this machine's own address towards {first.host}: {words_of(error)}"
        return CheckResult("NAT", YELLOW, found, "check this machine's routes and names")
    if own == other.host:
        return CheckResult("NAT", GREEN, f"none: {first.host} sees this machine's own address")
    where = f"{first.host} sees {other.host}, this machine is {own}"
    elsewhere = [far for far, _ in seen[1:] if far.host != first.host]
    if not elsewhere:
        found = f"behind a router ({where}); a second --peer shows its type"
        return CheckResult("NAT", YELLOW, found, _FORWARD)
    with contextlib.suppress(LinkTestError), socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        probe.close()
        if first.hello(port).port == elsewhere[0].hello(port).port:
            found = f"endpoint-independent mapping: one address for all peers ({where})"
            return CheckResult("NAT", YELLOW, found, _FORWARD)
        kind = "address- or port-dependent mapping: another port for each peer"
        return CheckResult("NAT", YELLOW, f"{kind}; {where}", _FORWARD)
    return CheckResult("NAT", YELLOW, f"behind a router of unknown type ({where})", _FORWARD)


def own_address(host: str, port: int) -> str:
    """Address of this machine on packets to host:port; no packet goes there. A name is looked up; its first
    address counts. Raises OSError if it has none, or there is no route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _dialled_back(far: LinkTestClient, listens: str, port: int) -> CheckResult:
    what = f"by {far.host}, at port {port}" if port else f"by {far.host}"
    name = "dialled back"
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(listens).is_loopback and not ipaddress.ip_address(far.host).is_loopback:
            repair = "to be dialled by others: --host 0.0.0.0"
            return CheckResult(name, YELLOW, "not tested: --host listens on loopback only", repair)
    try:
        with listening(listens, port) as server:
            reached = far.dials_back(server.getsockname()[1])
    except (OSError, LinkTestError) as error:
        return CheckResult(name, YELLOW, f"not tested: {error}", "choose a free --port")
    if reached:
        return CheckResult(name, GREEN, f"{what}: reached")
    repair = (
        "open the port in the firewall and forward it on the router; without, this machine dials the others"
    )
    return CheckResult(name, YELLOW if not port else RED, f"{what}: not reached", repair)
