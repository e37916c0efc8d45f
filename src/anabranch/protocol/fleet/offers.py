"""Plausibility of a joiner's statements about itself, checked before they go into the log (I7)."""

from __future__ import annotations

from msgspec import UNSET

from anabranch.addresses import parse_addresses
from anabranch.protocol.log.records import Member
from anabranch.protocol.messages.common import COUNT_MAX
from anabranch.protocol.telemetry.estimators import plausible

#: Greatest plausible capacity (microbatches) of a machine.
MOST_CAPACITY = 1 << 20
#: Longest texts (bytes) of a member. Addresses are host names with ports, and ids of carriers; a voter's id
#: consists of the peer's id and the disk's name (`messages.Id`).
TEXT_BYTES = {"name": 128, "region": 128, "numerics_class": 128, "disk": 48, "address": 1024}


def absurd(member: Member) -> str | None:
    """Reason why a joiner's statements about itself (capacity, measured seconds, incarnation, addresses,
    texts) are implausible; None: they are plausible."""
    if not 1 <= member.capacity <= MOST_CAPACITY:
        return f"a capacity of {member.capacity} microbatches is not plausible"
    if member.shared is not UNSET and not 1 <= member.shared <= member.capacity:
        return f"a capacity of {member.shared} microbatches for each of two islands is not plausible"
    for name, seconds in (("forward", member.forward_s), ("backward", member.backward_s)):
        if seconds != 0.0 and not plausible(seconds):  # in the log, JSON, there is no number for some
            return f"a {name} of {seconds:g} seconds is not plausible"
    if not 0 <= member.incarnation <= COUNT_MAX:  # others repeat it in messages
        return f"an incarnation of {member.incarnation} is not plausible"
    try:
        parse_addresses(member.address)
    except ValueError:
        return "its address is not plausible: it is to be host:port, or several of them with commas between"
    for what, most in TEXT_BYTES.items():
        text = getattr(member, what)
        if len(text.encode()) > most or not text.isprintable():
            return f"its {what.replace('_', ' ')} is too long or not printable: choose a shorter one"
    return None
