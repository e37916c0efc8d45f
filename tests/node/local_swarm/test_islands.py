"""Real processes that hold the whole model, or are crews of pipeline islands: synchronous steps, then rounds,
with a relay that is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import PeerJoined, Step
from anabranch.protocol.rounds.plan import counted, filled
from support.local_swarms import check_exact, created, history_of, small_run, swarm_of

#: Settings of rounds beside those of every run here, by preset: the rules of the preset, in small; "ahead":
#: steps ahead that are kept; "agreed": agreed moments.
SYSTEMS: dict[str, dict[str, object]] = {
    "anabranch": {},
    "diloco": {"round__first_moment": "keep", "round__contributions": "exact", "round__late": "wait"},
    "opendiloco": {"round__first_moment": "keep", "round__contributions": "fp16", "round__late": "wait"},
    "streaming-diloco": {
        "round__fragments": 2,
        "round__overlap": 1,
        "round__mix": 0.5,
        "round__unsent": "local",
        "round__first_moment": "keep",
    },
    "ahead": {
        "round__overlap": 2,
        "round__ahead": "keep",
        "round__unsent": "local",
        "round__first_moment": "keep",
    },
    "agreed": {
        "round__outer_momentum": 0.0,
        "round__unsent": "local",
        "round__first_moment": "agree",
    },
    "sparse": {
        "round__select": "largest",
        "round__unsent": "feedback",
        "round__unsent_decay": 0.95,
        "round__contributions": "int2",
        "round__results": "int4",
        "round__late": "carry",
    },
    "gaia": {"round__select": "significant", "round__unsent": "local", "round__contributions": "exact"},
}


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill_at", "system"),
    [
        (1, "anabranch"),
        (6, "agreed"),
        # In virtual time in tests/swarm/islands/test_slot_state.py.
        pytest.param(6, "ahead", marks=pytest.mark.soak),
        pytest.param(6, "sparse", marks=pytest.mark.soak),
        pytest.param(6, "streaming-diloco", marks=pytest.mark.soak),
        pytest.param(6, "anabranch", marks=pytest.mark.soak),
        pytest.param(6, "diloco", marks=pytest.mark.soak),
        pytest.param(6, "opendiloco", marks=pytest.mark.soak),
        pytest.param(6, "gaia", marks=pytest.mark.soak),
    ],
)
def test_a_killed_relay_costs_its_slot_and_no_bit(
    texts: Path, tmp_path: Path, supervisor: Supervisor, kill_at: int, system: str
) -> None:
    run = small_run(
        texts,
        **SYSTEMS[system],
        run__steps=36,
        pipeline__stages=0,
        round__slots=3,
        round__steps=4,
        round__start=0.112,
        fleet__relays_per_stage=[3],
        fleet__minimum=3,
        evaluation__every=8,
        checkpoint__every=100,
    )
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda seen: any(isinstance(e, Step) and e.t == kill_at for e in seen))
        swarm.processes["relay-1.1"].signal(signal.SIGKILL)
        swarm.to_the_end()
    check_exact(directory, 12)
    history = history_of(directory)
    rounds = [commit for commit in history.commits if commit.t in history.plans]
    assert swarm.processes["relay-1.1"].status == -signal.SIGKILL
    # So short a run may end before the leader removes it, which asks others first.
    joined = events_of(directory.events, PeerJoined)
    [victim] = {each.subject for each in joined if each.name == "relay-1.1"}
    last = rounds[-1].stages[1]
    assert victim not in {last.members[owner] for owner in last.owners if owner >= 0}
    assert len(rounds) == 8 and all(counted(commit.stages[1].owners) for commit in rounds)
    carried = [slot.carried for t in list(history.plans)[1:] for slot in history.plans[t] if slot.peer]
    assert (sum(t > 0 for t in carried) > len(carried) / 2) == (system != "anabranch")


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kill_at"),
    [
        ({"wire__activations": "int8", "wire__gradients": "int8"}, 6),
        pytest.param({"round__first_moment": "keep"}, 4, marks=pytest.mark.soak),
        pytest.param({"pipeline__stages": 3, "model__blocks": 3}, 1, marks=pytest.mark.soak),
    ],
)
def test_a_killed_relay_costs_its_crew_a_round_and_no_bit(
    texts: Path, tmp_path: Path, supervisor: Supervisor, changes: dict[str, object], kill_at: int
) -> None:
    """Pipeline islands. A stage has three relays, so that a new crew can be formed."""
    stages = changes.get("pipeline__stages", 2)
    settings: dict[str, object] = {
        "run__steps": 36,
        "pipeline__stages": 2,
        "round__slots": 2,
        "round__steps": 4,
        "round__start": 0.112,
        "fleet__relays_per_stage": [3] * int(str(stages)),
        "fleet__minimum": 3,
        "evaluation__every": 8,
        "checkpoint__every": 100,
    }
    run = small_run(texts, **(settings | changes))
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda seen: any(isinstance(e, Step) and e.t == kill_at for e in seen))
        swarm.processes["relay-2.1"].signal(signal.SIGKILL)
        swarm.to_the_end()
    check_exact(directory, 12)
    history = history_of(directory)
    rounds = [commit for commit in history.commits if commit.t in history.plans]
    assert swarm.processes["relay-2.1"].status == -signal.SIGKILL
    joined = events_of(directory.events, PeerJoined)
    [victim] = {each.subject for each in joined if each.name == "relay-2.1"}
    steps = [commit for commit in rounds if commit.verdict == "step"]
    counts = [filled(history.plans[commit.t], commit.stages) for commit in steps]
    assert len(rounds) == 8 and all(victim not in crew for crew in counts[-1].values())
    assert len(counts[-1]) == 2 and sum(map(len, counts)) >= 12
