"""Pipeline islands: workers of all stages, driven by hand through rounds, have the reference's bits."""

from __future__ import annotations

import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from anabranch.audit.parallel_replay import ParallelStepper, do_order
from anabranch.audit.replay import SequentialStepper
from anabranch.config import PipelineSection, RunConfig
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Result, embed_unit, head_unit
from anabranch.protocol.log.records import Slot
from anabranch.train.model.interface import build, stage_layout
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics.exact import Overflow
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.inner_steps import Island, add_gradient
from anabranch.train.stage.island_stage import IslandStage
from anabranch.train.stage.run_objects import initial_state, initial_states, token_ids
from anabranch.train.workers.workers import make_worker
from support.grids import every_pair
from support.small_islands import IslandSwarm, Round, first_round, island_run, reference_round
from support.small_training import MadeUpBatches, bits_equal, done, small_model, with_section


def beginning(run: RunConfig, seed: int = 0, data_nodes: int = 1) -> tuple[IslandSwarm, Reference, int]:
    """Workers and reference before the first round, and its number; the synchronous step was skipped."""
    swarm = IslandSwarm(run, seed, data_nodes)
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    t = first_round(run)
    for skipped in range(1, t):
        swarm.skip(skipped)
        reference.skip(reference.share(skipped, []))
    return swarm, reference, t


def check(swarm: IslandSwarm, reference: Reference, t: int, plans: dict[int, Slot]) -> Round:
    """Take a round by workers and reference, and compare all that the log would have."""
    found = swarm.round(t, plans)
    expected = reference_round(reference, t, plans)
    assert not expected.skipped
    assert found.losses == expected.losses
    assert found.squares == expected.squares
    assert found.digests == expected.digests
    assert found.fingerprints == reference.fingerprints()
    return found


CODECS: list[dict[str, Any]] = [
    {},
    {"activations": "int8", "gradients": "int8"},
    {"activations": "int8", "gradients": "int8", "gradient_rounding": "stochastic"},
]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("model", "stages", "wire"),
    every_pair([("llama", False), ("llama", True), ("gpt", True)], [2, 3], CODECS),
)
def test_a_round_has_the_references_bits(
    model: tuple[str, bool], stages: int, wire: dict[str, Any]
) -> None:
    architecture, tied = model
    run = with_section(island_run(architecture, stages, tied), "wire", **wire)
    swarm, reference, t = beginning(run, seed=stages)
    check(swarm, reference, t, {0: Slot(0, 3), 1: Slot(0, 2)})
    check(swarm, reference, t + 1, {0: Slot(3, 1), 1: Slot(2, 4)})


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "rules",
    [
        {"first_moment": "keep"},
        {"first_moment": "agree", "outer_momentum": 0.0},
        {"first_moment": "estimate", "contributions": "exact"},
        {"unsent": "feedback", "select": "largest", "select_share": 0.1},
        {"unsent": "local", "first_moment": "keep", "fragments": 2, "mix": 0.5},
    ],
    ids=["moments", "agreed moments", "estimate", "feedback", "fragments"],
)
def test_each_stage_carries_its_part_of_a_slot(rules: dict[str, Any]) -> None:
    """Slot 1 is late in the second round, and merges that contribution in the third."""
    swarm, reference, t = beginning(island_run(**rules))
    carries = rounds_of(swarm.run).carries
    check(swarm, reference, t, {0: Slot(0, 2), 1: Slot(0, 3)})
    late = Slot(3, 2, carried=t * carries)
    swarm.take_part(t + 1, {1: late})
    for worker in swarm.crew(1):
        done(worker.run(tasks.Recount(t + 1, 1 if worker.spec.stage else embed_unit(1), -1)))
    reference.late = {1: late}
    reference.remember_late(t + 1, [1])
    check(swarm, reference, t + 1, {0: Slot(2, 3, carried=t * carries)})
    check(swarm, reference, t + 2, {0: Slot(5, 1), 1: Slot(5, 3, carried=t + 1, late=2)})


def test_a_skipped_round_leaves_the_states_of_its_slots() -> None:
    """The round was skipped for slot 0; slot 1 merges its contribution in the next one, and is replayed."""
    swarm, reference, t = beginning(island_run(first_moment="keep"))
    plan = Slot(0, 2)
    swarm.take_part(t, {1: plan})
    swarm.skip(t)
    reference.slots, reference.late = {0: plan, 1: plan}, {1: plan}
    SequentialStepper(reference, lambda t: ()).skip(t)
    check(swarm, reference, t + 1, {1: Slot(2, 1, carried=t, late=2)})


class OtherProcess:
    """End of a pipe to a process of a replay, which is in this process here."""

    def __init__(self, reference: Reference, microbatches: int) -> None:
        self._of = reference, microbatches, 1, 2
        self._answers: list[object] = []

    def send(self, message: tuple[str, object]) -> None:
        self._answers.append(do_order(*self._of, *pickle.loads(pickle.dumps(message))))

    def recv(self) -> object:
        return self._answers.pop()


def test_processes_that_share_a_replay_find_the_overflows_of_each_others_slots() -> None:
    """The state that slot 1 carries is in the second process, which has to look for its overflow."""
    run = island_run(first_moment="keep")
    _, alone, t = beginning(run)
    (_, first, _), (_, second, _) = beginning(run), beginning(run)
    stepper = ParallelStepper(first, 6, [cast("Any", OtherProcess(second, 6))])
    for reference in (alone, first, second):
        reference.slots = {0: Slot(0, 1), 1: Slot(0, 2)}
    assert stepper.step(t) == SequentialStepper(alone, lambda t: ()).step(t)
    for reference in (alone, first, second):
        reference.slots = {0: Slot(1, 1, carried=t), 1: Slot(2, 2, carried=t)}
        layout = reference.states[0].layout
        layout.view(reference.states[0].weights, "model.norm.weight").fill_(3e38)
    found = stepper.witnesses(t + 1, 1)
    assert (0, "loss") in found and found == alone.witnesses(t + 1, 1)
    assert stepper.witnesses(t + 1, 0) == alone.witnesses(t + 1, 0)
    first.late = alone.late = {1: Slot(2, 2, carried=t)}
    assert stepper.skip(t + 1).fingerprints == SequentialStepper(alone, lambda t: ()).skip(t + 1).fingerprints
    assert second.t == t + 1


def test_a_machine_that_was_away_gets_the_result_in_a_byte_a_value() -> None:
    """A quarter of its size in floats, and the same state after it, to the bit; floats are taken, too."""
    run = island_run()
    swarm, _, t = beginning(run)
    away = [make_worker(run, swarm.model, stage, swarm.batches) for stage in range(3)]
    for worker in away:
        done(worker.run(tasks.InitState(0)))
        for skipped in range(1, t):
            done(worker.run(tasks.Skip(skipped)))
    found = swarm.round(t, {0: Slot(0, 2), 1: Slot(0, 3)})
    apply = tasks.Apply(t, run.round.outer_lr, 1.0 / 5.0, 1.0, 1.0)
    for stage, worker in enumerate(away):
        (data,) = done(swarm.stage(stage)[0].run(tasks.ReadGradient(t))).outputs
        assert isinstance(data, Tensor)
        assert data.dtype == torch.uint8
        assert len(data) == 65 * -(-worker.layout.elements // 64)
        assert "are not the bytes" in worker.run(tasks.Assemble(t), (data[1:],)).error
        assert done(worker.run(tasks.Assemble(t), (data,))).digest == found.digests[stage]
        assert done(worker.run(apply)).fingerprint == found.fingerprints[stage]


def test_synchronous_steps_and_held_out_windows_around_the_rounds() -> None:
    """Two steps, a round with held-out windows, a step: as by workers of a run without rounds, and by the
    reference."""
    run = island_run("gpt", stages=3, start=0.1, end=0.4, steps=10, first_moment="estimate")
    swarm, reference = IslandSwarm(run, 5), Reference(run, small_model(run), MadeUpBatches(run))
    rounds = rounds_of(run)
    assert (rounds.start, rounds.last) == (2, 3)
    for t in (1, 2, 3, 4):
        windows = [swarm.window(t, index) for index in range(2)]
        assert windows == [loss for loss, _ in reference.evaluate(2)]
        if t == 3:
            check(swarm, reference, t, {0: Slot(0, 2), 1: Slot(0, 1)})
            continue
        found, expected = swarm.synchronous_step(t, reference), reference.fingerprints()
        assert found == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize("changes", [{"subspace": 8}, {}], ids=["subspace", "full"])
def test_dtypes_and_subspace_models(dtype: str, changes: dict[str, Any]) -> None:
    run = with_section(island_run("llama", 2, False, dtype), "model", **changes)
    swarm, reference, t = beginning(run)
    check(swarm, reference, t, {0: Slot(0, 1), 1: Slot(0, 2)})


def test_a_crew_may_have_its_data_node_for_itself() -> None:
    """Each data node has the ends of one slot, and both have the sum of both."""
    swarm, reference, t = beginning(island_run(), data_nodes=2)
    check(swarm, reference, t, {0: Slot(0, 2), 1: Slot(0, 1)})


def test_the_gradient_is_that_of_a_whole_model() -> None:
    """Without codecs and ties, an inner step through stages has the bits of plain autograd through all."""
    for architecture in ("llama", "gpt"):
        for stages in (1, 2, 4):
            run = with_section(island_run(architecture, tied=False), "pipeline", stages=stages)
            found, whole, _ = gradients(run, microbatches=3)
            assert bits_equal(found, whole)


def test_a_tied_tables_gradient_differs_in_the_order_of_its_sum_alone() -> None:
    """Head and embedding are summed apart, since the order of their tasks is a matter of speed."""
    run = island_run("gpt", tied=True)
    found, whole, table = gradients(run, microbatches=3)
    assert bits_equal(found[~table], whole[~table]) and not bits_equal(found[table], whole[table])
    assert torch.allclose(found[table], whole[table], rtol=1e-5, atol=1e-8)


def gradients(run: RunConfig, microbatches: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flat gradient of an inner step by stages and of the whole model, and mask of the lookup tables."""
    config, batches = small_model(run), MadeUpBatches(run)
    model = build(config, torch.device("cpu"), torch.float32)
    whole_spec = partition(config, PipelineSection(stages=0))[1]
    whole = initial_state(run, model, stage_layout(model, whole_spec), None, torch.device("cpu"))
    expected, by_name = torch.zeros_like(whole.weights), torch.zeros_like(whole.weights)
    leaves = {name: view.detach().requires_grad_() for name, view in whole.layout.views(whole.weights)}
    states = initial_states(run, model, None, torch.device("cpu"))
    islands = [Island(run, state, first_round(run), 1) for state in states]
    tokens = microbatches * run.batch.rows * run.batch.sequence
    parts = [
        IslandStage(model, spec, island, microbatches, tokens)
        for spec, island in zip(partition(config, run.pipeline), islands, strict=True)
    ]
    for number in range(microbatches):
        ids, targets = token_ids(batches, run.batch.microbatches, 2, number, torch.device("cpu"))
        joined = torch.cat((ids, targets[:, -1:]), 1)
        loss = add_gradient(model, whole, leaves, joined, expected, 1.0 / tokens)
        x = parts[0].embed(ids)
        for part in parts[1:]:
            x = part.forward(number, x)
        dy, found = parts[0].head(number, x, targets)
        assert found == loss
        for part in reversed(parts[1:]):
            dy = part.backward(number, dy)
        parts[0].embedding_gradient(number, ids, dy)
    for part, island in zip(parts, islands, strict=True):
        gradient = part.gradient()
        for name, view in island.local.layout.views(gradient):
            whole.layout.view(by_name, name).copy_(view)
    mask = torch.zeros_like(expected, dtype=torch.bool)
    for name in model.tables:
        whole.layout.view(mask, name).fill_(True)
    return by_name, expected, mask


# --- overflows --------------------------------------------------------------------------------------


def spoiled(swarm: IslandSwarm, reference: Reference, name: str, value: float) -> None:
    """Set a tensor of all states, of workers and reference, to a value."""
    for state in (*(worker.state for worker in swarm.workers()), *reference.states):
        if name in state.layout.names:
            state.layout.view(state.weights, name).fill_(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", float("inf")),
        ("model.layers.0.self_attn.o_proj.weight", 3e38),
        ("model.layers.3.mlp.down_proj.weight", float("inf")),
        ("model.norm.weight", 3e38),
        ("model.layers.2.input_layernorm.weight", 1e30),
    ],
)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_overflow_is_the_references_too(name: str, value: float, codec: str) -> None:
    run = with_section(island_run(tied=False), "wire", activations=codec, gradients=codec)
    swarm, reference, t = beginning(run)
    spoiled(swarm, reference, name, value)
    plan = Slot(0, 2)
    swarm.begin(t, 0, plan)
    stage, result = swarm.first_overflow(t, 0, plan)
    reference.slots = {0: plan}
    assert (stage, result) in reference.witnesses(t, 0)
    # The slot is over there; the round can be skipped, and another one begins.
    assert "not open" in swarm.crew(0)[stage].run(tasks.InnerStep(t, 0, 1)).error
    swarm.skip(t)
    assert not torch.cat(done(swarm.crew(0)[stage].run(tasks.Freeze(t + 1, 1))).outputs).any()


def test_a_contribution_out_of_range_is_the_references_too() -> None:
    run = with_section(island_run(contributions="exact"), "optimizer", lr=1e5)
    swarm, reference, t = beginning(run)
    plan = Slot(0, 1)
    swarm.begin(t, 0, plan)
    for result in swarm.inner_steps(t, 0, plan):
        done(result)
    ends, *relays = swarm.crew(0)
    byte = done(ends.run(tasks.Head(t, 0, True, 1), swarm.opened[0])).outputs
    reference.slots = {0: plan}
    witnesses = reference.witnesses(t, 0)
    for relay in relays:
        done(relay.run(tasks.InputGradient(t, 0), byte))
    for worker in (ends, *relays):
        unit = 0 if worker.spec.stage else embed_unit(0)
        found = worker.run(tasks.WeightGradient(t, unit), byte)
        assert (worker.spec.stage, found.overflow) in witnesses
        assert not torch.cat(done(worker.run(tasks.Freeze(t, 1))).outputs).any()
    assert not ends.run(tasks.WeightGradient(t, head_unit(0))).overflow


def test_gradients_that_are_not_finite_are_overflows() -> None:
    run = island_run()
    swarm, _, t = beginning(run)
    swarm.begin(t, 0, Slot(0, 1))
    relay = swarm.crew(0)[1]
    x = done(swarm.crew(0)[0].run(tasks.InnerForward(t, 0, 1, 0))).outputs
    (y,) = done(relay.run(tasks.InnerForward(t, 0, 1, 0), x)).outputs
    huge = torch.full_like(y, 3e38)
    assert relay.run(tasks.InnerBackward(t, 0, 1, 0), (huge,)).overflow == "input gradient"
    island = Island(run, relay.state, t, 1)
    island.gradient[5] = float("nan")
    with pytest.raises(Overflow, match="gradient"):
        island.step()


# --- order ------------------------------------------------------------------------------------------


def refused(result: Result, part: str) -> None:
    assert part in result.error and not result.outputs


def test_tasks_out_of_order_are_refused_and_change_nothing() -> None:
    """Each wrong task is refused, and the round has the reference's bits all the same."""
    run = island_run()
    swarm, reference, t = beginning(run)
    plan = Slot(4, 2)
    ends, relay, last = swarm.crew(0)
    x = done(ends.run(tasks.Embed(t, 6))).outputs  # any activation: that of a held-out window
    byte = (torch.zeros(1, dtype=torch.uint8),)
    refused(relay.run(tasks.InnerForward(t, 0, 5, 0), x), "slot 0 is not open here")
    refused(relay.run(tasks.InputGradient(t, 0), byte), "no contribution of slot 0")
    refused(relay.run(tasks.Forward(t, 0, True, True, 2, 0, 0, 4), x), "one byte")
    refused(relay.run(tasks.Forward(t, 2, True, True, 2, 0, 0, 4), byte), "no slot 2")
    refused(relay.run(tasks.Forward(t, 0, True, True, 2, 1, 0, 4), byte), "no state of slot 0 after round 1")
    swarm.begin(t, 0, plan)
    for step in (4, 6):
        refused(relay.run(tasks.InnerForward(t, 0, step, 0), x), f"inner step {step} of slot 0 is not open")
    refused(relay.run(tasks.InnerForward(t + 1, 0, 5, 0), x), f"iteration {t + 1}")
    refused(relay.run(tasks.InnerForward(t, 0, 5, 3), x), "3 microbatches")
    refused(relay.run(tasks.InnerBackward(t, 0, 5, 0), x), "backward passes are done of 0")
    refused(relay.run(tasks.InnerHead(t, 0, 5, 0), x), "only stage 0")
    refused(relay.run(tasks.InnerStep(t, 0, 5)), "backward passes are done of 0 microbatches of 3")
    refused(ends.run(tasks.InnerHead(t, 0, 5, 1), x), "the head of microbatch 1")
    refused(ends.run(tasks.InnerBackward(t, 0, 5, 0), x), "backward passes are done of 0")
    refused(ends.run(tasks.Head(t, 0, True, 2), byte), "taken 0 of its 2 inner steps")
    steps = swarm.inner_steps(t, 0, plan)
    (sent,) = done(next(steps)).outputs  # the first embedding: its activation is on its way to the relay
    done(relay.run(tasks.InnerForward(t, 0, 5, 2), (sent,)))
    refused(relay.run(tasks.InnerForward(t, 0, 5, 2), (sent,)), "not awaited")
    refused(relay.run(tasks.InnerBackward(t, 0, 5, 2), (sent,)), "backward passes are done of 0")
    done(relay.run(tasks.Discard(t, 0)))
    refused(relay.run(tasks.InnerForward(t, 0, 5, 0), (sent,)), "slot 0 is not open here")
    assert last.run(tasks.InnerStep(t, 0, 6)).error
    check(swarm, reference, t, {0: plan})  # begins it anew at all stages
    refused(relay.run(tasks.InnerStep(t + 1, 0, 7)), "slot 0 is not open here")


def test_the_work_of_a_slot_is_dropped_with_its_round() -> None:
    """After a step, a skip or another state nothing is left of a slot that was open or had ended."""
    run = island_run(first_moment="keep")
    for end in ("step", "skip", "load"):
        swarm, _, t = beginning(run)
        snapshot = [done(worker.run(tasks.Snapshot(t - 1))).outputs for worker in swarm.workers()]
        heads = swarm.take_part(t, {0: Slot(0, 1)})
        assert heads[0].tokens == 3 * run.batch.rows * run.batch.sequence
        swarm.begin(t, 1, Slot(0, 1))
        if end == "step":
            for stage in range(3):
                swarm.reduce(t, swarm.stage(stage))
            swarm.apply(tasks.Apply(t, 0.7, 1.0, 1.0, 1.0))
        elif end == "skip":
            swarm.skip(t)
        else:
            for worker, pieces in zip(swarm.workers(), snapshot, strict=True):
                done(worker.run(tasks.LoadState(t - 1), pieces))
        now = t if end == "load" else t + 1
        for worker in swarm.crew(0):
            unit = 0 if worker.spec.stage else embed_unit(0)
            refused(worker.run(tasks.Recount(now, unit, 1)), "no contribution of slot 0")
            refused(worker.run(tasks.InnerStep(now, 1, 1)), "slot 1 is not open here")
            assert not torch.cat(done(worker.run(tasks.Freeze(now, 1))).outputs).any()
        relay = swarm.crew(0)[1]
        byte = (torch.zeros(1, dtype=torch.uint8),)
        again = relay.run(tasks.Forward(now, 0, True, True, 1, t, 0, 1), byte)
        assert bool(again.error) == (end == "load")
