"""Kinds of faults, profiles that draw them, and how often each kind is aimed at each phase of a peer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

from anabranch.sim.fuzz.peer_phases import (
    ELECTION,
    INNER_STEPS,
    LATE_SLOTS,
    OF_DATA_NODES,
    OF_RELAYS,
    OUTER_STEP,
    PHASES,
    ROUND_PHASES,
    SLOT_READY,
    STEPS_AHEAD,
)


class Role(Enum):
    """Role of a fault's victim. The leader is the current leader of the log; the others are followers."""

    RELAY = "relay"
    DATA = "data node"
    LEADER = "leader"


@dataclass(frozen=True)
class FaultKind:
    """Kind of fault that `simtest` injects. roles: roles of peers that it may hit. loses: True if the
    victim's state is lost, so that it hits only where another replica has the state."""

    name: str
    roles: frozenset[Role]
    loses: bool = False


_RELAY, _DATA, _LEADER = frozenset({Role.RELAY}), frozenset({Role.DATA}), frozenset({Role.LEADER})
_FOLLOWERS, _ALL = _RELAY | _DATA, _RELAY | _DATA | _LEADER

KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("crash", _RELAY, loses=True),
        FaultKind("vanish", _ALL, loses=True),
        FaultKind("restart", _ALL, loses=True),
        FaultKind("data crash", _DATA, loses=True),
        FaultKind("leader crash", _LEADER, loses=True),
        FaultKind("stage loss", _RELAY),
        FaultKind("leave", _FOLLOWERS, loses=True),
        FaultKind("join", _ALL),
        FaultKind("freeze", _ALL),
        FaultKind("slow node", _ALL),
        FaultKind("slow link", _ALL),
        FaultKind("cut", _ALL),
        FaultKind("partition", _ALL),
        FaultKind("one way", _ALL),
        FaultKind("duplication", _ALL),
        FaultKind("reordering", _ALL),
        FaultKind("clock jump", _ALL),
        FaultKind("corrupt bytes", _ALL),
        FaultKind("garbage", _FOLLOWERS),
        FaultKind("flood", _FOLLOWERS),
        FaultKind("replay", _FOLLOWERS),
        FaultKind("copied key", _FOLLOWERS, loses=True),
    )
}

#: Kinds of faults of a carrier, which hit it while it carries payloads of an iteration. Seeds with access
#: lines draw them apart, so that all others draw what they drew.
CARRIER_KINDS = {
    "carrier crash": FaultKind("carrier crash", _ALL, loses=True),
    "slow carrier": FaultKind("slow carrier", _ALL),
}

_PROCESSES = ("crash", "vanish", "restart", "data crash", "leader crash", "leave", "join")
_WIRES = ("slow link", "cut", "partition", "one way", "duplication", "reordering")
_BYTES = ("corrupt bytes", "garbage", "flood", "replay", "copied key")


@dataclass(frozen=True)
class FaultProfile:
    """Kinds of faults that a seed may draw, by their names. faults: least and greatest number per seed.
    churn: probability that a relay crashes in an iteration (and is replaced). guests: True if its seeds draw
    hostile guests. undefended: True if one of the guests does a deed against which there is no full defence
    (`guest_deeds.OPEN`). islands: True if its seeds take rounds. crews: True if these are rounds of pipeline
    islands, in seeds of two stages or more. in_rounds: True if its faults are aimed at phases of a round,
    too. delayed: True if all of its seeds have two iterations in flight, instead of some. carriers: True if
    all of its seeds have relays that nobody can dial, access lines and faults of carriers, instead of some.
    tickets: True if whoever joins or starts again knows the addresses of the data nodes alone. private: True
    if the rounds of its seeds are on data of the machines' own. scarce: factors of the weights of phases and
    of kinds that are hit more seldom than others, by the last seeds that were run."""

    name: str
    kinds: tuple[str, ...]
    faults: tuple[int, int]
    churn: float = 0.0
    guests: bool = False
    undefended: bool = False
    islands: bool = False
    crews: bool = False
    in_rounds: bool = False
    delayed: bool = False
    carriers: bool = False
    tickets: bool = False
    private: bool = False
    scarce: tuple[tuple[str, float], ...] = ()

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """Pairs (kind of fault, phase of the victim) that seeds of this profile draw: all reachable ones of
        its kinds."""
        phases = (*PHASES, *ROUND_PHASES) if self.in_rounds else PHASES
        return [(kind, phase) for kind in self.kinds for phase in phases if reachable(kind, phase)]


PROFILES = {
    profile.name: profile
    for profile in (
        FaultProfile("calm", (), (0, 0)),
        FaultProfile("churn10", _PROCESSES, (1, 2), churn=0.1),
        FaultProfile("churn20", _PROCESSES, (1, 2), churn=0.2),
        FaultProfile("storm", tuple(KINDS), (2, 6)),
        FaultProfile("partition", (*_WIRES, "freeze", "slow node", "clock jump"), (2, 4)),
        FaultProfile("hostile", (*_BYTES, "crash", "join"), (2, 5), guests=True),
        FaultProfile(
            "phases", tuple(KINDS), (6, 8), islands=True, crews=True, in_rounds=True,
            scarce=((LATE_SLOTS, 1.3), (INNER_STEPS, 1.05), ("leader crash", 1.7)),
        ),
    )
}  # fmt: skip
#: Profile whose turn comes in every third seed; the other ones of PROFILES take turns in the rest.
ROUNDS = PROFILES["phases"]
OTHERS = tuple(profile for profile in PROFILES.values() if profile is not ROUNDS)
#: Profile of deeds whose defence is not built yet: its seeds may fail, and no turn comes to it.
UNDEFENDED = FaultProfile("undefended", (), (0, 0), guests=True, undefended=True)
#: Profile of runs with rounds of islands, whose faults are aimed at no phase of a round: tests kept seeds of
#: it before `phases` came.
ISLANDS = FaultProfile("islands", tuple(KINDS), (1, 4), churn=0.1, islands=True)
#: Profile that had the turns of `phases` until 2026-12-01, with fewer faults; tests keep seeds of it.
FORMER = FaultProfile("rounds", tuple(KINDS), (5, 7), islands=True, crews=True, in_rounds=True)
#: As `islands`, for rounds of pipeline islands, in seeds of two stages or more.
CREWS = FaultProfile("crews", tuple(KINDS), (1, 4), churn=0.1, islands=True, crews=True)
#: Rounds of machines that hold the whole model and have data of their own.
PRIVATE = FaultProfile("private", tuple(KINDS), (1, 5), churn=0.1, islands=True, in_rounds=True, private=True)
#: Profile of runs with two iterations in flight; no turn comes to it, since others have some such seeds.
DELAYED = FaultProfile("delayed", tuple(KINDS), (1, 4), churn=0.1, delayed=True)
#: Profile of runs over carriers with shared lines, in which only carriers fail; no turn comes to it, since
#: others have some such seeds.
CARRIERS = FaultProfile("carriers", (), (0, 0), carriers=True)
#: Profile of runs that processes find by the addresses of their ticket; in others they are led to the leader.
TICKETS = FaultProfile("tickets", tuple(KINDS), (2, 6), churn=0.2, tickets=True)
#: Profiles that are run by name only.
BY_NAME = {
    profile.name: profile
    for profile in (UNDEFENDED, FORMER, ISLANDS, CREWS, PRIVATE, DELAYED, CARRIERS, TICKETS)
}


def profile_named(name: str) -> FaultProfile:
    """Fault profile with this name. Raises KeyError if there is none."""
    return BY_NAME.get(name) or PROFILES[name]


def kind_named(name: str) -> FaultKind:
    """Kind of fault with this name. Raises KeyError if there is none."""
    return KINDS.get(name) or CARRIER_KINDS[name]


def reachable(kind: str, phase: str) -> bool:
    """True if a fault of this kind (a key of KINDS) can hit a peer in this phase, by the roles of its
    victims."""
    roles = KINDS[kind].roles
    if phase == ELECTION:
        return roles != _LEADER  # a leader has won its election
    if phase in OF_DATA_NODES:
        return roles != _RELAY
    return phase not in OF_RELAYS or roles != _DATA


def of_leading_relays(kind: str, phase: str) -> bool:
    """True if only a relay that leads can be hit by a fault of this kind in this phase."""
    return kind_named(kind).roles == _LEADER and phase in OF_RELAYS


#: Shares of the planned faults that find a victim in the planned phase, measured over some hundred seeds:
#: those for a leading relay; for a voter in an election; for leaders or data nodes only; those of kinds that
#: need another replica, in a phase of data nodes; all others.
_LEADING_RELAY, _ELECTION, _ONE_ROLE, _LAST_REPLICA, _HITS = 0.35, 0.65, 0.85, 0.85, 0.94
#: The same for phases of a round, measured over 160 seeds; and factors for kinds that need another replica,
#: of any peer, of peers of one role only, and of data nodes.
_ROUND_HITS = {INNER_STEPS: 0.95, STEPS_AHEAD: 0.8, SLOT_READY: 0.9, LATE_SLOTS: 0.8, OUTER_STEP: 0.75}
_ROUND_REPLICA, _ROUND_ONE_ROLE, _ROUND_DATA = 0.8, 0.6, 0.4
#: Passes of the fitting after which the weights have converged.
_FITTING_PASSES = 25
#: Weight of a phase of PHASES in `phases`, relative to a phase of a round: the other profiles, which have two
#: thirds of the seeds, hit it, too.
_OF_STEPS = 0.22


def hits(kind: str, phase: str) -> float:
    """Expected share (0 to 1) of the planned faults of this kind and phase that find a victim in that
    phase."""
    roles, loses = KINDS[kind].roles, KINDS[kind].loses
    if of_leading_relays(kind, phase):
        return _LEADING_RELAY
    if phase in ROUND_PHASES:
        of_one = _ROUND_DATA if roles == _DATA else _ROUND_ONE_ROLE
        factor = (of_one if len(roles) == 1 else _ROUND_REPLICA) if loses else 1.0
        return _ROUND_HITS.get(phase, _HITS) * factor
    share = _ELECTION if phase == ELECTION else _HITS
    if roles in (_LEADER, _DATA):
        return share * _ONE_ROLE
    return share * (_LAST_REPLICA if loses and phase in OF_DATA_NODES else 1.0)


def weights(profile: FaultProfile) -> list[float]:
    """Weight of each of `profile.cells`, in their order. Pairs drawn by weight are hit about equally often,
    over all profiles that draw them."""
    if profile.in_rounds:
        scarce = dict(profile.scarce)
        return [
            (1.0 if phase in ROUND_PHASES else _OF_STEPS)
            * scarce.get(kind, 1.0)
            * scarce.get(phase, 1.0)
            / hits(kind, phase)
            for kind, phase in profile.cells
        ]
    return [_step_weights()[cell] for cell in profile.cells]


@cache
def _step_weights() -> dict[tuple[str, str], float]:
    """Weight of each reachable (kind, phase) pair with a phase of PHASES, for the profiles other than
    `phases`. A pair weighs more if few profiles draw its kind, or if few of its faults find a victim. The
    weights come from iterative proportional fitting."""
    found = {(kind, phase): 1.0 / hits(kind, phase) for kind, phase in sorted(_cells(PHASES))}
    for _ in range(_FITTING_PASSES):
        rates = dict.fromkeys(found, 0.0)
        for profile in OTHERS:
            together = sum(found[cell] for cell in profile.cells)
            for cell in profile.cells:
                rates[cell] += sum(profile.faults) * found[cell] / together * hits(*cell)
        found = {cell: weight / rates[cell] for cell, weight in found.items()}
    return found


def matrix_cells() -> set[tuple[str, str]]:
    """All (kind, phase) pairs that `reachable` allows: kinds of KINDS, phases of steps and of rounds."""
    return _cells((*PHASES, *ROUND_PHASES))


def _cells(phases: tuple[str, ...]) -> set[tuple[str, str]]:
    return {(kind, phase) for kind in KINDS for phase in phases if reachable(kind, phase)}
