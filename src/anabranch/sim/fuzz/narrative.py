"""Story of one seed in words: its faults, notes of its peers and its result (`simtest --trace`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from anabranch.sim.fuzz.liveness_conditions import unmet
from anabranch.sim.fuzz.trial import SeedTrial

Fields = Mapping[str, object]


def _step(peer: str, fields: Fields) -> str:
    record = fields["record"]
    return f"step {getattr(record, 't', '?')} is committed ({getattr(record, 'verdict', '')})"


def _repair(peer: str, fields: Fields) -> str:
    return (
        f"{peer} repairs microbatch {fields['index']} of {fields['t']} at stage {fields['stage']} "
        f"({fields['phase']}, it was with {fields['lost'] or 'nobody'}): {fields['reason']}"
    )


_WORDS: dict[str, Callable[[str, Fields], str]] = {
    "repair": _repair,
    "suspected": lambda peer, f: f"{peer} suspects {f['subject']}: {f['reason']}",
    "refused": lambda peer, f: f"{peer} refuses what {f['subject']} says: {f['reason']} ({f['count']})",
    "waiting": lambda peer, f: f"{peer} waits: {f['reason']}",
    "note": lambda peer, f: f"{peer}: {f['text']}",
    "double": lambda peer, f: f"{peer} subtracts unit {f['unit']} of {f['t']}, which another owns",
    "overflow": lambda peer, f: f"{peer} meets an overflow in microbatch {f['index']} of {f['t']}",
    "rollback": lambda peer, f: f"{peer} goes back to the state after {f['t']}: {f['reason']}",
}
#: Notes that every peer makes for the same log entry; the story has only the first of them.
_OF_THE_LOG: dict[str, Callable[[str, Fields], str]] = {
    "step": _step,
    "peer_removed": lambda peer, f: f"{f['subject']} is removed from the run: {f['reason']}",
    "peer_joined": lambda peer, f: f"{getattr(f['member'], 'id', '?')} is admitted",
    "peer_active": lambda peer, f: f"{f['subject']} serves from iteration {f['from_iteration']}",
}


def story(trial: SeedTrial) -> list[str]:
    """Lines of a seed's story, once it has run: description of the seed; `time event` in order of virtual
    time, what all peers note of a log entry only once; the result."""
    lines = sorted([*trial.story, *_noted(trial)], key=lambda line: line[0])
    return [trial.drawn.describe(), *(f"{at:9.3f} s  {text}" for at, text in lines), _end(trial)]


def _noted(trial: SeedTrial) -> Iterator[tuple[float, str]]:
    seen: set[str] = set()
    for at, peer, kind, fields in trial.world.notes:
        if kind in _OF_THE_LOG:
            what = f"{kind} {fields}"
            if what not in seen:
                seen.add(what)
                yield at, _OF_THE_LOG[kind](peer, fields)
        elif kind in _WORDS:
            yield at, _WORDS[kind](peer, fields)


def _end(trial: SeedTrial) -> str:
    outcome = trial.outcome
    after = f"{outcome.steps} steps, {len(outcome.faults)} faults, {outcome.events} events"
    if outcome.violation:
        broken = unmet(trial.world, outcome.steps)
        return f"{after}: FAILED, {outcome.violation}" + (f" (and there is no {broken})" if broken else "")
    if outcome.unmet:
        return f"{after}: it could not go on, for want of {'; '.join(outcome.unmet)}"
    return f"{after}: nothing is violated"
