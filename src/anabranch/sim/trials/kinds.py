"""The kinds of faults, which of them a profile draws, and at what they are aimed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

from anabranch.sim.trials.phases import ELECTION, LOSS, OF_DATA_NODES, OF_RELAYS, PHASES


class Role(Enum):
    """Whom a fault hits. The leader is whoever leads the log at that moment; the others follow it."""

    RELAY = "relay"
    DATA = "data node"
    LEADER = "leader"


@dataclass(frozen=True)
class Kind:
    """roles: whom it hits. loses: the state at that peer is gone, so another replica must have it."""

    name: str
    roles: frozenset[Role]
    loses: bool = False


_RELAY, _DATA, _LEADER = frozenset({Role.RELAY}), frozenset({Role.DATA}), frozenset({Role.LEADER})
_FOLLOWERS, _ALL = _RELAY | _DATA, _RELAY | _DATA | _LEADER

KINDS = {
    kind.name: kind
    for kind in (
        Kind("crash", _RELAY, loses=True),
        Kind("vanish", _ALL, loses=True),
        Kind("restart", _ALL, loses=True),
        Kind("data crash", _DATA, loses=True),
        Kind("leader crash", _LEADER, loses=True),
        Kind("stage loss", _RELAY),
        Kind("leave", _FOLLOWERS, loses=True),
        Kind("join", _ALL),
        Kind("freeze", _ALL),
        Kind("slow node", _ALL),
        Kind("slow link", _ALL),
        Kind("cut", _ALL),
        Kind("partition", _ALL),
        Kind("one way", _ALL),
        Kind("duplication", _ALL),
        Kind("reordering", _ALL),
        Kind("clock jump", _ALL),
        Kind("corrupt bytes", _ALL),
        Kind("garbage", _FOLLOWERS),
        Kind("flood", _FOLLOWERS),
        Kind("replay", _FOLLOWERS),
        Kind("copied key", _FOLLOWERS, loses=True),
    )
}

_PROCESSES = ("crash", "vanish", "restart", "data crash", "leader crash", "leave", "join")
_WIRES = ("slow link", "cut", "partition", "one way", "duplication", "reordering")
_BYTES = ("corrupt bytes", "garbage", "flood", "replay", "copied key")


@dataclass(frozen=True)
class Profile:
    """faults: least and greatest number of aimed faults of a seed. churn: chance that a relay crashes in an
    iteration (and is replaced)."""

    name: str
    kinds: tuple[str, ...]
    faults: tuple[int, int]
    churn: float = 0.0

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """(kind, phase) at which this profile aims."""
        return [(kind, phase) for kind in self.kinds for phase in PHASES if reachable(kind, phase)]


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("calm", (), (0, 0)),
        Profile("churn10", _PROCESSES, (1, 2), churn=0.1),
        Profile("churn20", _PROCESSES, (1, 2), churn=0.2),
        Profile("storm", tuple(KINDS), (3, 7)),
        Profile("partition", (*_WIRES, "freeze", "slow node", "clock jump"), (2, 5)),
        Profile("hostile", (*_BYTES, "crash", "join"), (2, 5)),
    )
}


def reachable(kind: str, phase: str) -> bool:
    """Whether a fault of this kind can hit a peer in that phase."""
    roles = KINDS[kind].roles
    if phase == ELECTION:
        return roles != _LEADER  # who leads has won
    if phase in OF_DATA_NODES:
        return roles != _RELAY
    return phase not in OF_RELAYS or roles != _DATA


def of_leading_relays(kind: str, phase: str) -> bool:
    """Whether only a relay that leads can be hit so: one that votes and was elected."""
    return KINDS[kind].roles == _LEADER and phase in OF_RELAYS


#: Phases in which a victim is seldom met before the aim settles for another.
_SELDOM_MET = {ELECTION: 3.0, LOSS: 1.5}
#: A relay that leads is met more seldom still.
_LEADING_RELAY = 6.0


@cache
def rarity(kind: str, phase: str) -> float:
    """How much more often a cell is to be aimed at: few profiles draw its kind, its phase is seldom met."""
    drawn = [profile for profile in PROFILES.values() if kind in profile.kinds]
    share = sum(sum(profile.faults) / len(profile.cells) for profile in drawn)
    seldom = _LEADING_RELAY if of_leading_relays(kind, phase) else _SELDOM_MET.get(phase, 1.0)
    return seldom / share


def matrix_cells() -> set[tuple[str, str]]:
    """Every reachable (kind, phase)."""
    return {(kind, phase) for kind in KINDS for phase in PHASES if reachable(kind, phase)}
