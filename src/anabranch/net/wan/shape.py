"""What a host's access and the way from one host to another are like."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.errors import UserError


class WanError(UserError, ValueError):
    """An emulated network that cannot be had: a value out of range, an unknown name, no permission."""


@dataclass(frozen=True)
class Host:
    """A host's access to the network. Rates are in bits per second and count IP headers; inf: unlimited."""

    region: str | None = None
    """One of the profile's regions; None: nowhere in particular, no delay and no rate of the profile's."""
    uplink_bps: float = math.inf
    downlink_bps: float = math.inf
    queue_s: float = 0.1
    """Seconds of traffic that each queue holds, at least 32 KiB; what comes beyond is dropped (tail drop)."""
    speed: float = 1.0
    """Share of the rates that is really there: 0.01 is an access at 1 % of its speed."""

    def __post_init__(self) -> None:
        _check(self, rates=("uplink_bps", "downlink_bps"), seconds=("queue_s",), shares=())


@dataclass(frozen=True)
class Pair:
    """The way from one host to another, in that direction only.

    Loss, duplicates and reordering are drawn for each packet of its own, bursts that the kernel hands over in
    one piece included.
    """

    delay_s: float = 0.0
    """Seconds from the last bit sent to the last bit received."""
    jitter_s: float = 0.0
    """On top of the delay, uniform between zero and this. Packets stay in order."""
    loss: float = 0.0
    rate_bps: float = math.inf
    """Bits per second, IP headers counted; inf: unlimited."""
    queue_s: float = 0.1
    """Seconds of traffic that the queue holds, at least 32 KiB; what comes beyond is dropped (tail drop)."""
    speed: float = 1.0
    """Share of the rate that is really there: 0.01 is a link at 1 % of its speed."""
    duplicate: float = 0.0
    """Probability that a packet arrives twice."""
    reorder: float = 0.0
    """Probability that a packet is held back, so that later ones overtake it ..."""
    reorder_s: float = 0.02
    """... by a time uniform between zero and this."""
    cut: bool = False
    """Nothing enters, and nothing that is on the way arrives."""

    def __post_init__(self) -> None:
        _check(
            self,
            rates=("rate_bps",),
            seconds=("delay_s", "jitter_s", "queue_s", "reorder_s"),
            shares=("loss", "duplicate", "reorder"),
        )


def _check(shape: Host | Pair, rates: Iterable[str], seconds: Iterable[str], shares: Iterable[str]) -> None:
    """Raise WanError naming the first field that is out of range."""
    for name in (*rates, *seconds, *shares, "speed"):
        value = getattr(shape, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise WanError(f"{name} must be a number, not {value!r}")
    for name in rates:
        if getattr(shape, name) <= 0:
            raise WanError(f"{name} must be above zero bits per second, not {getattr(shape, name)!r}")
    for name in seconds:
        if not 0 <= getattr(shape, name) < math.inf:
            raise WanError(f"{name} must be zero or more seconds, not {getattr(shape, name)!r}")
    for name in shares:
        if not 0 <= getattr(shape, name) <= 1:
            raise WanError(f"{name} must be a probability from 0 to 1, not {getattr(shape, name)!r}")
    if not 0 < shape.speed < math.inf:
        raise WanError(f"speed must be a share above zero, not {shape.speed!r}")
    if shape.speed != 1 and all(math.isinf(getattr(shape, name)) for name in rates):
        raise WanError("speed is a share of a rate, and there is no rate: set one")
