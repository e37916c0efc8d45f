"""Golden histories: the reference, and swarms under faults, go through the states that were kept (I3)."""

from __future__ import annotations

import pytest

from support.swarms.golden_histories import (
    FOLDER,
    SCENARIOS,
    STEPS,
    class_of,
    kept,
    play,
    rollbacks,
    told_by_reference,
    told_by_swarm,
)


def golden(name: str) -> list[str]:
    """The kept history of a scenario in this machine's numerics class."""
    key, described = class_of(SCENARIOS[name].run)
    classes = kept(name)
    assert classes, f"{name}: nothing is kept"
    if key not in classes:
        known = [entry["described"] for entry in classes.values()]
        pytest.skip(f"kept for other numerics classes only: {known}; this machine is {described}")
    history: list[str] = classes[key]["history"]
    return history


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_reference_goes_through_the_states_that_were_kept(name: str) -> None:
    assert told_by_reference(SCENARIOS[name].run) == golden(name)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_swarm_under_faults_goes_through_the_states_that_were_kept(name: str) -> None:
    scenario = SCENARIOS[name]
    world, planned = play(scenario)
    assert all(fault.delivered for fault in planned), [fault.delivered for fault in planned]
    assert max(fault.delivered[0][2] for fault in planned) < STEPS, "no step after the last fault"
    assert rollbacks(world) >= scenario.rollbacks
    told = told_by_swarm(world)
    assert len(told) == STEPS + 1
    assert told == golden(name)


def test_what_is_kept_tells_numbers_apart() -> None:
    """No line comes twice, and none of fp32 is one of bf16."""
    lines = golden("llama-crashes")
    assert len(set(lines)) == len(lines) == STEPS + 1
    assert not set(lines) & set(golden("bf16-crashes"))


def test_the_files_are_small_and_each_has_a_scenario() -> None:
    files = sorted(FOLDER.glob("*.json"))
    assert [file.stem for file in files] == sorted(SCENARIOS)
    assert all(file.stat().st_size < 8000 for file in files)
