"""Network addresses: properties of hosts, and the text form of the addresses of a peer.

A peer has several addresses in order of preference, `ADDRESS,ADDRESS,...`. Each is HOST:PORT, or
HOST:PORT/CARRIER: the peer is reached through a circuit of the carrier with this id, which listens there. Or
it is reached by its key through iroh (`net.iroh`): HOST:PORT/iroh names an iroh relay at https://HOST:PORT,
HOST:PORT/iroh+http one without TLS, and HOST:PORT/udp the peer's own UDP address.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

#: Most addresses of one peer. A choice: local, overlay and public ones of both IP versions, and two carriers.
MOST_ADDRESSES = 8
#: Most addresses of one dial: those of the peer, and some at carriers (`protocol.context.carriers`).
MOST_DIALLED = 16
_ID = re.compile("[0-9a-f]{64}")
#: Kinds of addresses at which a peer is reached by its key, through iroh.
IROH_KINDS = ("iroh", "iroh+http", "udp")


@dataclass(frozen=True)
class Address:
    """Address of a peer, at host:port. carrier: id of the carrier (a peer that forwards links) that listens
    there; "": the peer itself does. kind: one of IROH_KINDS, e.g. "iroh" for an iroh relay's address; "":
    TCP."""

    host: str
    port: int
    carrier: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return self.where + (f"/{self.carrier or self.kind}" if self.carrier or self.kind else "")

    @property
    def relay_url(self) -> str:
        """URL of the iroh relay; "" if this address is of another kind."""
        schemes = {"iroh": "https", "iroh+http": "http"}
        return f"{schemes[self.kind]}://{self.where}" if self.kind in schemes else ""

    @property
    def where(self) -> str:
        """HOST:PORT, an IPv6 host in brackets."""
        return host_port(self.host, self.port)


def host_port(host: str, port: int) -> str:
    """HOST:PORT as text, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """IP address in its plain form: ::ffff:192.0.2.1, as a socket for both IP versions shows an IPv4 address,
    becomes 192.0.2.1. Any other text is returned as it is."""
    address = _address(host)
    return host if address is None or address.version == 6 else str(address)


def parse_address(text: str) -> Address:
    """Parse HOST:PORT, HOST:PORT/CARRIER_ID or HOST:PORT/KIND. Raises ValueError."""
    where, slash, carrier = text.strip().partition("/")
    host, _, port = where.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f'"{text}"; write it as host:port, the port in 1..65535')
    if slash and carrier in IROH_KINDS:
        return Address(host, int(port), kind=carrier)
    if slash and not _ID.fullmatch(carrier):
        raise ValueError(f'"{text}"; write it as host:port/ID: a carrier\'s id is 64 hexadecimal digits')
    return Address(host, int(port), carrier)


def parse_addresses(text: str, most: int = MOST_ADDRESSES) -> tuple[Address, ...]:
    """Parse the addresses of a peer, joined by commas, in their order; () for "". Raises ValueError for an
    ill-formed address, or more than `most`."""
    texts = text.split(",") if text else []
    if len(texts) > most:
        raise ValueError(f"{len(texts)} addresses; give at most {most}")
    return tuple(parse_address(one) for one in texts)


def direct_addresses(text: str) -> str:
    """Plain TCP addresses among a peer's addresses `text`, joined by commas like these: those at which it
    listens itself, without the ones at carriers or through iroh. "" if there is none."""
    if "/" not in text and "," not in text:
        return text
    return ",".join(one for one in text.split(",") if one and "/" not in one)


def own_addresses(text: str) -> str:
    """Those of a peer's addresses `text`, TCP or iroh, that lead through no carrier, joined by commas; "" if
    there is none."""
    through = set(carrier_ways(text))
    return ",".join(one for one in text.split(",") if one and one not in through)


def carrier_ways(text: str) -> list[str]:
    """Those of a peer's addresses `text` (joined by commas) that lead through carriers, each as text."""
    found = [one for one in text.split(",") if "/" in one]
    return [one for one in found if one.rpartition("/")[2] not in IROH_KINDS]


def block_of(host: str) -> str:
    """Address block of a host, with which limits count it: its /24, or its /48 for IPv6, as one customer of a
    provider often has, as text (192.0.2.0/24); `host` itself if it is no IP address."""
    address = _address(host)
    if address is None:
        return host
    bits = 24 if address.version == 4 else 48
    return str(ipaddress.ip_network((address, bits), strict=False))


def foreign_block_of(host: str) -> str:
    """`block_of(host)`; "" for a loopback address, as this machine's processes are no strangers, and for text
    that is no address."""
    address = _address(host)
    return "" if address is None or address.is_loopback else block_of(host)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """IP address that the text `host` is, without the scope of an IPv6 address (%eth0); the IPv4 address for
    one that is mapped into IPv6. None if `host` is no IP address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def on_loopback(host: str) -> bool:
    """True if `host` is a loopback address or "localhost", to which only this machine can connect. Other
    names are not looked up: False."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback
