"""Access line of a host in an emulated network, and the error of such networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.errors import UserError


class WanError(UserError, ValueError):
    """Raised for a network that cannot be emulated: a bad profile, an unknown region, missing permission."""


@dataclass(frozen=True)
class Host:
    """Host of an emulated network and its access line. region: of the profile; None: links from and to it
    have neither delay nor limit. Rates are in bit/s, including IP headers; inf: unlimited."""

    region: str | None = None
    uplink_bps: float = math.inf
    downlink_bps: float = math.inf
