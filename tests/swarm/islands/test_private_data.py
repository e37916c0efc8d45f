"""Rounds on private data in virtual time, with real tensors: what each machine contributed is a value in the
log, and whoever has the values, or the data, computes the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch.config import PipelineSection, RoundSection, RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Forward, Head, InitState, Skip, Task, WeightGradient
from anabranch.protocol.log.records import Commit
from anabranch.protocol.messages import Fence
from anabranch.protocol.rounds.plan import late_slots, slots_of, with_owners
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.tensor_world import VOCABULARY
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.torch_world import node_member
from anabranch.train.islands.kept_contributions import contribution_digest
from anabranch.train.model.rounds import inner_microbatches, iterations, rounds_of
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.run_objects import Ids
from anabranch.train.workers.workers import make_worker
from support.swarms.small_swarm import MadeUpBatches, small_model, small_run
from support.swarms.training_world import training_world

STEPS = 20


def private_run(**changes: Any) -> RunConfig:
    """Two synchronous steps, then six rounds of three optimizer steps each."""
    rounds = RoundSection(slots=3, steps=3, start=0.1)
    run = replace(small_run(steps=STEPS), pipeline=PipelineSection(stages=0))
    run = replace(run, data=replace(run.data, private=True))
    return replace(run, round=replace(rounds, **changes))


@dataclass
class MadeUpData:
    """Private data of a machine: rows that depend on it, the slot and the step; and its kept contributions by
    round, slot and digest."""

    run: RunConfig
    peer: str
    kept: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)

    def step_rows(self, slot: int, step: int) -> Ids:
        batch = self.run.batch
        shape = inner_microbatches(self.run) * batch.rows, batch.sequence + 1
        draw = np.random.default_rng([*self.peer.encode(), slot, step])
        return draw.integers(0, VOCABULARY, shape)

    def keep(self, t: int, slot: int, digest: str, change: Tensor) -> None:
        self.kept[t, slot, digest] = change.clone()


class PrivateSwarm:
    """World of relays that have data of their own."""

    def __init__(self, run: RunConfig, relays: int = 3, seed: int = 1) -> None:
        self.run, self.model, self.batches = run, small_model(run), MadeUpBatches(run)
        times = Model(task_s={"Forward": 0.5, "Embed": 0.002})
        self.world = training_world(
            run, self.model, self.batches, [relays], 2, seed, capacity=2, times=times
        )
        self.world.make_own = self.worker
        self.data: dict[str, MadeUpData] = {}
        Invariants(self.world)

    def worker(self, peer: str, stage: int) -> Any:
        own = self.data.setdefault(peer, MadeUpData(self.run, peer))
        batches = self.batches if stage == 0 else None
        return make_worker(self.run, self.model, stage, batches, own=own)

    def check(self, known: Callable[[str], bool]) -> int:
        """Replay the log by one process that has the data of the machines `known`, and of all others their
        contributions alone; returns the number of contributions that it computed."""
        history = self.world.history()
        plans = {t: with_owners(plan, history.commits[t - 1]) for t, plan in history.plans.items()
                 if t <= history.t}  # fmt: skip
        private = Known(plans, {c.t: c for c in history.commits}, self.data, known)
        reference = Reference(self.run, self.model, self.batches, private=private)
        computed = 0
        assert history.t == iterations(self.run)
        for commit in history.commits:
            plan = history.plans.get(commit.t, ())
            reference.slots = slots_of(plan, commit)
            reference.late = late_slots(plan, history.plans.get(commit.t + 1, ()))
            batch = reference.batch(commit.t, lambda t: range(self.run.batch.microbatches))
            share = reference.share(commit.t, batch)
            reference.remember_late(commit.t, sorted(reference.late))
            record = reference.step(share)
            assert tuple(stage.digest for stage in commit.stages) == record.digests, commit.t
            assert tuple(stage.fingerprint_before for stage in commit.stages) == record.fingerprints
            for slot, loss in record.losses.items():
                assert np.isnan(loss) or commit.loss_sums[slot] == loss, (commit.t, slot)
            for slot, digest in record.contributions.items():
                assert commit.stages[1].contributions[slot] == digest, (commit.t, slot)
                computed += 1
        return computed


@dataclass
class Known:
    """Data and contributions that a replay has (`Reference.PrivateRounds`)."""

    plans: dict[int, Any]
    commits: dict[int, Commit]
    data: dict[str, MadeUpData]
    known: Callable[[str], bool]

    def step_rows(self, t: int, slot: int) -> Callable[[int, int], Ids] | None:
        peer = self.plans[t][slot].peer
        return self.data[peer].step_rows if self.known(peer) else None

    def contribution(self, t: int, slot: int) -> Tensor | None:
        peer, entry = self.plans[t][slot].peer, self.commits[t].stages[1]
        return self.data[peer].kept[t, slot, entry.contributions[slot]]


def everybody(peer: str) -> bool:
    return True


def nobody(peer: str) -> bool:
    return False


@pytest.mark.costly
@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({}, marks=pytest.mark.soak),
        {"late": "carry", "unsent": "feedback", "contributions": "int2", "select": "largest"},
        {"unsent": "local", "first_moment": "keep", "overlap": 1, "ahead": "keep"},
        {"first_moment": "agree", "outer_momentum": 0.0},
        pytest.param({"late": "wait", "contributions": "exact", "results": "exact"}, marks=pytest.mark.soak),
    ],
    ids=["plain", "carried late", "steps ahead", "agreed moments", "exact"],
)
def test_a_crash_and_a_joiner_leave_values_that_anybody_adds_up(rules: dict[str, Any]) -> None:
    swarm = PrivateSwarm(private_run(**rules))
    world, struck = swarm.world, list[str]()

    def watch(node: Node, event: ev.Event) -> None:
        """Crash a relay in its inner steps of round 4; another one joins."""
        message = event.message if isinstance(event, ev.Received) else None
        if struck or not isinstance(message, msg.Forward) or not node.id.startswith("r"):
            return
        if message.fence.t == 4 and message.train:
            struck.append(node.id)
            world.clock.after(0.1, lambda: world.crash(struck[0]))
            world.add(node_member("r1.9", 1), "d0", at=world.clock.now + 0.2)

    world.watchers.append(watch)
    world.run(until_s=3000)
    commits = world.history().commits
    joined = [c.t for c in commits if len(c.stages) > 1 and "r1.9" in owners_of(c)]
    assert struck and struck[0] not in owners_of(commits[-1])
    assert joined, "the joiner filled no slot"
    slots = sum(len(owners_of(c)) for c in commits if rounds_of(swarm.run).has(c.t))
    assert swarm.check(nobody) == 0
    assert 0 < swarm.check(lambda peer: peer == "r1.9") < slots
    assert swarm.check(everybody) == slots


def owners_of(commit: Commit) -> list[str]:
    part = commit.stages[1]
    return [part.members[owner] for owner in part.owners if owner >= 0]


def test_a_slot_that_two_machines_computed_has_the_loss_of_the_one_that_counts() -> None:
    """A machine dies after its loss went to the data node and before it claimed the slot. Another one fills
    it, whose data give another loss: the log's is that one's."""
    swarm = PrivateSwarm(private_run(late="wait"), relays=3)
    world, struck, losses = swarm.world, list[str](), list[tuple[int, float]]()

    def watch(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and isinstance(event.task, Head) and event.task.t == 4:
            losses.append((event.task.index, event.result.loss_sum))
        task: Task | None = event.task if isinstance(event, ev.Finished) else None
        if not struck and isinstance(task, Forward) and task.t == 4 and task.steps and node.id[0] == "r":
            struck.append(node.id)
            struck.append(str(task.index))
            world.clock.after(0.15, partial(world.crash, node.id))

    def slow(node: Node, task: Task) -> float:
        late = node.id in struck and isinstance(task, WeightGradient)
        return 5.0 if late else honest(node, task)

    honest, world.task_s = world.task_s, slow  # type: ignore[method-assign]
    world.watchers.append(watch)
    world.run(until_s=3000)
    commit = world.history().commits[3]
    assert struck and struck[0] not in owners_of(commit) and len(owners_of(commit)) == 3
    slot = int(struck[1])
    of_slot = [loss for index, loss in losses if index == slot]
    assert of_slot and commit.loss_sums[slot] != of_slot[0]  # the data node had the first one's
    assert swarm.check(everybody) > 0 == swarm.check(nobody)


def test_the_data_node_sends_no_tokens_in_a_round() -> None:
    swarm = PrivateSwarm(private_run())
    sizes: dict[bool, set[int]] = {True: set(), False: set()}

    def watch(node: Node, event: ev.Event) -> None:
        message = event.message if isinstance(event, ev.Received) else None
        if isinstance(message, msg.Forward) and isinstance(event, ev.Received) and node.id[0] == "r":
            payload: Any = event.payload
            of_round = rounds_of(swarm.run).has(message.fence.t) and message.train
            sizes[of_round].add(payload.numel())

    swarm.world.watchers.append(watch)
    swarm.world.run(until_s=2000)
    rows, sequence = swarm.run.batch.rows, swarm.run.batch.sequence
    assert sizes == {True: {1}, False: {rows * (sequence + 1)}}


def test_a_machine_without_data_refuses_a_slot() -> None:
    run = private_run()
    worker = make_worker(run, small_model(run), 1)
    worker.run(InitState(0))
    for t in (1, 2):
        worker.run(Skip(t))
    result = worker.run(Forward(3, 0, train=True, steps=3), (torch.zeros(1, dtype=torch.uint8),))
    assert result.error == "the run's data are private, and this machine has none"


def test_the_result_of_a_weight_gradient_has_digest_and_loss() -> None:
    """A slot has them, and no microbatch and nothing of stage 0."""
    swarm = PrivateSwarm(private_run())
    found: dict[tuple[bool, str], set[bool]] = {}

    def watch(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and isinstance(event.task, WeightGradient):
            of_round = rounds_of(swarm.run).has(event.task.t)
            found.setdefault((of_round, node.id[0]), set()).add(bool(event.result.digest))

    swarm.world.watchers.append(watch)
    swarm.world.run(until_s=2000)
    assert found == {(True, "r"): {True}, (True, "d"): {False}, (False, "r"): {False}, (False, "d"): {False}}
    layout = next(n for n in swarm.world.nodes.values() if n.id == "r1.0").computer.layout  # type: ignore[union-attr]
    for data in swarm.data.values():
        for (_, _, digest), change in data.kept.items():
            assert contribution_digest(layout, change) == digest


def test_the_leader_takes_digests_of_slots_alone() -> None:
    """Whatever a relay reports: no other number gets into the log, and an impossible loss costs its seat."""
    swarm = PrivateSwarm(private_run())
    world, refused = swarm.world, list[str]()

    def watch(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iteration
        if refused or node.id != "d0" or iteration is None or iteration.t != 4:
            return
        refused.append("")  # once
        fence = Fence(1, 1, 4, iteration.base, 1)
        for peer, stage, digests, losses in (
            ("r1.0", 1, {7: "d"}, {7: 1.0}),
            ("r1.0", 1, {0: "d"}, {1: 1.0}),
            ("r1.0", 1, {0: "d"}, {0: 1e300}),
        ):
            before = len(world.notes)
            node.handle(ev.Received(peer, msg.ContributionDigests(fence, stage, digests, losses), None))
            told = [fields["reason"] for _, _, kind, fields in world.notes[before:] if kind == "refused"]
            refused.extend(map(str, told))

    world.watchers.append(watch)
    world.run(until_s=3000)
    of_no_slot = "ContributionDigests: digests of contributions that no slot has"
    assert refused == ["", of_no_slot, of_no_slot, "ContributionDigests: a loss that no slot has"]
    assert "r1.0" not in world.history().membership.members
    assert swarm.check(nobody) == 0
