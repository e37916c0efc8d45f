"""Selection of what an island sends, and what its slot carries: the properties that define `sparse`, `gaia`
and `streaming-diloco`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anabranch.config import PipelineSection, RoundSection, RunConfig
from anabranch.train.islands.fragments import fragment_bounds, turn
from anabranch.train.islands.selection import CHUNK, largest, significant
from anabranch.train.islands.slot_state import SlotState, SlotStates
from anabranch.train.model.interface import DTYPES, build, stage_layout
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import rounds_of
from anabranch.train.stage.inner_steps import (
    Contribution,
    Island,
    contribution_of,
    slot_tokens,
    steps_with_tokens,
)
from anabranch.train.stage.outer_step import outer_step
from anabranch.train.stage.run_objects import initial_state
from anabranch.train.stage.state import StageState
from support.small_training import MadeUpBatches, small_model, small_run

DEVICE = torch.device("cpu")


def run_of(**changes: object) -> RunConfig:
    run = small_run(dtype="fp64")
    plain = RoundSection(slots=1, steps=4, start=0.1, contributions="exact", results="exact", outer_lr=1.0)
    rounds = replace(plain, outer_momentum=0.0, **changes)  # type: ignore[arg-type]
    batch = replace(run.batch, microbatches=2)
    return replace(run, batch=batch, pipeline=PipelineSection(stages=0), round=rounds)


def state_of(run: RunConfig) -> StageState:
    model = build(small_model(run), DEVICE, DTYPES[run.compute.dtype])
    spec = partition(small_model(run), run.pipeline)[1]
    return initial_state(run, model, stage_layout(model, spec), None, DEVICE)


def rounds(run: RunConfig, state: StageState, count: int, steps: int = 4) -> list[Contribution]:
    """Contributions of one slot to `count` rounds, each with its outer step."""
    model, found, carried = build(small_model(run), DEVICE, DTYPES[run.compute.dtype]), [], None
    for k in range(count):
        t = rounds_of(run).start + 1 + k
        tokens = slot_tokens(MadeUpBatches(run), run, 0, steps * k, steps_with_tokens(run, steps))
        found.append(contribution_of(run, model, Island(run, state, t, steps, carried), tokens))
        carried = found[-1].state
        outer_step(run, state, found[-1].change, 1.0, 1.0 / steps, t)
    return found


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "everything",
    [
        {"select": "significant", "threshold": 0.0, "unsent": "local"},
        {"select": "largest", "select_share": 1.0, "unsent": "feedback"},
    ],
)
def test_sending_everything_is_diloco(everything: dict[str, object]) -> None:
    """Gaia with threshold 0, and SparseLoCo with all values in full precision."""
    plain, filtered = run_of(), run_of(**everything)
    ours, theirs = state_of(plain), state_of(filtered)
    rounds(plain, ours, 3)
    rounds(filtered, theirs, 3)
    assert torch.allclose(ours.weights, theirs.weights, rtol=0, atol=1e-15)


def test_nothing_is_lost_by_feedback() -> None:
    """The sums of what was sent and what is still to be sent are those of all changes; and the rest stays
    bounded: what was not sent is sent later."""
    run = run_of(select="largest", select_share=0.05, unsent="feedback", contributions="int2")
    state = state_of(run)
    before = state.weights.clone()
    found = rounds(run, state, 6)
    moved = sum(each.change for each in found) / 4
    assert torch.allclose(before - state.weights, moved, rtol=0, atol=1e-12)
    states = [each.state for each in found if each.state is not None]
    rests = [float(each.unsent.norm()) for each in states if each.unsent is not None]
    assert len(rests) == 6 and rests[-1] < 6 * rests[0]


def test_an_island_goes_on_from_what_it_did_not_send() -> None:
    """A single island with `unsent = "local"` takes the steps of a machine alone, however little it sends."""
    alone = run_of(first_moment="keep", unsent="local")
    little = run_of(first_moment="keep", unsent="local", select="significant", threshold=0.3)
    one, other = state_of(alone), state_of(little)
    whole, part = rounds(alone, one, 3)[-1].state, rounds(little, other, 3)[-1].state
    assert whole and part and whole.unsent is not None and part.unsent is not None
    assert float(part.unsent.norm()) > 0
    assert torch.allclose(one.weights - whole.unsent, other.weights - part.unsent, rtol=0, atol=1e-12)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("overlap", [1, 3])
def test_steps_ahead_that_are_kept_are_those_of_a_machine_alone(overlap: int) -> None:
    """A single island whose steps ahead are kept goes on as if there were no rounds: nothing of them is lost,
    and nothing counts twice."""
    plain = {"first_moment": "keep", "unsent": "local"}
    alone, ahead = run_of(**plain), run_of(**plain, overlap=overlap, ahead="keep")
    optimizer = replace(alone.optimizer, warmup_steps=0, min_lr_ratio=1.0)  # steps ahead have another rate
    alone, ahead = replace(alone, optimizer=optimizer), replace(ahead, optimizer=optimizer)
    one, other = state_of(alone), state_of(ahead)
    rounds(alone, one, 4)
    last = rounds(ahead, other, 4)[-1].state
    assert torch.allclose(one.weights, other.weights, rtol=0, atol=1e-12)
    assert last is not None and last.unsent is not None and float(last.unsent.norm()) > 0


def test_every_tensor_has_one_turn() -> None:
    run = run_of()
    layout = state_of(run).layout
    for fragments in (1, 2, 3):
        seen = torch.zeros(layout.elements, dtype=torch.int64)
        for n in range(1, fragments + 1):
            for begin, end in fragment_bounds(layout, fragments, turn(n, fragments)):
                seen[begin:end] += 1
        assert bool((seen == 1).all())


def test_only_the_fragment_whose_turn_it_is_moves() -> None:
    run = run_of(fragments=2, overlap=1, mix=0.5, unsent="local", first_moment="keep")
    state = state_of(run)
    before = state.weights.clone()
    rounds(run, state, 1)
    moved = torch.zeros(state.layout.elements, dtype=torch.bool)
    for begin, end in fragment_bounds(state.layout, 2, 0):
        moved[begin:end] = True
    assert not bool((before != state.weights)[~moved].any()) and bool((before != state.weights)[moved].any())


def test_selections() -> None:
    values = torch.randn(3 * CHUNK + 5)
    mask = largest(values, 0.25)
    assert [int(part.sum()) for part in mask.split(CHUNK)] == [CHUNK // 4] * 3 + [5]
    first = values[:CHUNK].abs()
    assert first[mask[:CHUNK]].min() >= first[~mask[:CHUNK]].max()
    weights = torch.tensor([1.0, -2.0, 0.0, 4.0])
    chosen = significant(torch.tensor([0.1, 0.1, 0.0, -0.4]), weights, 0.1)
    assert chosen.tolist() == [True, False, True, True]


def test_a_machine_of_one_slot_after_the_other_keeps_states_of_two_rounds() -> None:
    """A state is several vectors, and a relay that takes second seats is of many slots in turn."""
    states = SlotStates()
    for t in range(1, 9):
        states.keep(t % 4, SlotState(t))
        states.keep(4 + t % 3, SlotState(t))
    found = {(slot, t) for slot in range(7) for t in range(1, 9) if states.find(slot, t)}
    assert found == {(3, 7), (5, 7), (0, 8), (6, 8)}
