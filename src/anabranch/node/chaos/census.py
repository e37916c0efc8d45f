"""Who takes part in a swarm of processes, as its events tell, and whom a strike hits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.node.chaos.plan import DATA, RELAY, STAGE, VOTER, Strike
from anabranch.observe.events import Event, PeerActive, PeerJoined, PeerRemoved, Rollback, Step


@dataclass(frozen=True)
class Soul:
    """A process of the swarm. awake: running and not frozen. serves: a replica of its stage that counts."""

    name: str
    stage: int
    serves: bool
    awake: bool = True
    leads: bool = False
    votes: bool = False


class Census:
    """Follows the run's events: which peer is who, where it serves, how far the run is."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.stages: dict[str, int] = {}
        self.serving: set[str] = set()
        self.t = 0

    def on_event(self, event: Event) -> None:
        match event:
            case PeerJoined(subject=subject, name=name, stage=stage):
                self.names[subject] = name
                self.stages[name] = stage
                self.serving.discard(name)
            case PeerActive(subject=subject) if subject in self.names:
                self.serving.add(self.names[subject])
            case PeerRemoved(subject=subject) if subject in self.names:
                self.serving.discard(self.names[subject])
                self.stages.pop(self.names[subject], None)
            case Step(t=t) | Rollback(t=t):
                self.t = t

    def member(self, name: str) -> bool:
        return name in self.stages


def aim(strike: Strike, souls: Iterable[Soul]) -> tuple[str, ...] | str:
    """The names of those who are struck, or why nobody can be."""
    present = sorted(souls, key=lambda soul: soul.name)
    awake = [soul for soul in present if soul.awake]
    if strike.target == STAGE:
        stages = sorted({soul.stage for soul in awake if soul.stage and soul.serves})
        if not stages:
            return "no stage is served"
        stage = stages[int(strike.pick * len(stages))]
        return tuple(soul.name for soul in present if soul.stage == stage)
    if strike.target == VOTER:
        candidates = [soul for soul in awake if soul.votes]
        voters = sum(soul.votes for soul in present)
        if voters < 3:
            return "the log has one voter, and without it nothing is committed until the run is resumed"
        if 2 * (len(candidates) - 1) <= voters:
            return "a majority of the voters would be gone"
    elif strike.target == DATA:
        candidates = [soul for soul in awake if soul.stage == 0 and not soul.votes]
        if not candidates:
            return "there is no data node besides the voters"
    else:
        assert strike.target == RELAY
        candidates = [soul for soul in awake if soul.stage > 0]
    spared = [soul for soul in candidates if not _last(soul, awake)]
    if not spared:
        return f"every {strike.target} is the last of its stage"
    return (spared[int(strike.pick * len(spared))].name,)


def _last(soul: Soul, awake: list[Soul]) -> bool:
    """Whether nobody else that is awake serves its stage: that is another fault."""
    others = (other for other in awake if other.name != soul.name)
    return soul.serves and not any(other.serves and other.stage == soul.stage for other in others)
