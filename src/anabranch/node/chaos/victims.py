"""Choice of the processes that a planned fault hits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.node.chaos.fault_schedule import DATA, STAGE, VOTER, PlannedFault

_NO_MAJORITY = "a majority of the voters would be gone"


@dataclass(frozen=True)
class Candidate:
    """A running process of the swarm, a possible victim of a planned fault. stage: -1 if it has none yet.
    serves: True if it is an active replica of its stage. awake: False while it is frozen. votes: True if it
    is a voter, which keeps the commit log."""

    name: str
    stage: int
    serves: bool
    awake: bool = True
    votes: bool = False


def choose_victims(
    fault: PlannedFault, candidates: Iterable[Candidate], voters: int
) -> tuple[str, ...] | str:
    """Names of the processes to hit, or the reason why no process can be hit. One awake process is chosen, or
    all of one relay stage, by `fault.pick` and the order of names: the same arguments give the same victims.
    candidates: all running processes. voters: number of voters of the log. The fault leaves a majority of the
    voters awake; one aimed at a voter needs at least three voters. Unless it is aimed at a whole stage, the
    fault also leaves an awake active replica of every stage that has one. Nothing is hit here."""
    present = sorted(candidates, key=lambda each: each.name)
    awake = [each for each in present if each.awake]
    if fault.target == STAGE:
        return _choose_stage(fault, present, voters)
    if fault.target == VOTER:
        if voters < 3:
            return "the log has one voter, and without it nothing is committed until the run is resumed"
        targets = [each for each in awake if each.votes]
    else:
        targets = [each for each in awake if (each.stage == 0) == (fault.target == DATA)]
    allowed = [each for each in targets if _majority_left(awake, {each.name}, voters)]
    if not allowed:
        return _NO_MAJORITY if targets else f"there is no {fault.target}"
    replaceable = [each for each in allowed if not _is_last(each, awake)]
    if not replaceable:
        return f"every {fault.target} is the last of its stage"
    return (replaceable[int(fault.pick * len(replaceable))].name,)


def _choose_stage(fault: PlannedFault, present: list[Candidate], voters: int) -> tuple[str, ...] | str:
    """Names of all processes of one relay stage that an awake replica serves, frozen and joining processes
    included; or the reason why no stage can be hit."""
    awake = [each for each in present if each.awake]
    served = sorted({each.stage for each in awake if each.stage > 0 and each.serves})
    groups = [tuple(each.name for each in present if each.stage == stage) for stage in served]
    allowed = [names for names in groups if _majority_left(awake, set(names), voters)]
    if not allowed:
        return _NO_MAJORITY if groups else "no stage is served"
    return allowed[int(fault.pick * len(allowed))]


def _majority_left(awake: list[Candidate], victims: set[str], voters: int) -> bool:
    """True if more than half of the voters are awake after `victims` are hit."""
    return 2 * sum(each.votes and each.name not in victims for each in awake) > voters


def _is_last(candidate: Candidate, awake: list[Candidate]) -> bool:
    """True if the candidate is the only awake (not frozen) active replica of its stage."""
    others = (other for other in awake if other.name != candidate.name)
    return candidate.serves and not any(other.serves and other.stage == candidate.stage for other in others)
