"""A swarm whose cuts carry a subspace takes the reference's steps to the last bit, whoever dies (I3)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import msgspec
import pytest
from torch import Tensor

from anabranch.config import ModelSection, RoutingSection, RunConfig, RunSection
from anabranch.config.schema import AuditSection
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.log.records import AnyRecord, Revoke, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.tensor_world import VOCABULARY
from anabranch.sim.kernel.simulated_peer import TaskExecutor
from anabranch.train.stage.audit import payload_hash
from support.grids import every_value
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, kill
from support.swarms.small_swarm import check_equal, small_run, small_world


def thin_run(architecture: str, stages: int = 2) -> RunConfig:
    run = small_run(architecture, stages, minimum=2)
    model: ModelSection = replace(run.model, subspace=4)
    return replace(run, model=model)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("architecture", "moment"), every_value(["llama", "gpt"], ["mid-backward", "third forward"])
)
def test_a_relay_dies(architecture: str, moment: str) -> None:
    run = thin_run(architecture)
    world = small_world(run, [2, 2], seed=1)
    assert world.settings.activation_bytes == 8 * (4 + 1) * 4
    when = faults.added_in_mid_backward(1) if moment == "mid-backward" else faults.received(msg.Forward, 1, 3)
    fault = Fault(world, ("r1.1", "r2.1"), when, kill())
    invariants = Invariants(world)
    world.run(until_s=600)
    history = check_equal(world, run)
    assert len(fault.delivered) == 1
    assert history.removals == 1
    assert invariants.computed


class FalseIds:
    """Worker that passes other token ids on than it received, with the right values, and signs them."""

    lies = 0

    def __init__(self, worker: TaskExecutor) -> None:
        self._worker = worker

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        result = self._worker.run(task, inputs)
        if not isinstance(task, tasks.Forward) or not task.train or task.t < 2 or result.error:
            return result
        self.lies += 1
        (output,) = cast(tuple[Tensor], result.outputs)
        false = output.clone()
        false[..., -1] = (output[..., -1] + 1) % VOCABULARY
        hashes = tuple(payload_hash(cast(Tensor, tensor)) for tensor in (*inputs, false))
        return msgspec.structs.replace(result, outputs=(false,), hashes=hashes if task.hashed else ())


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("lying", [False, True])
def test_audits_pass_honest_cuts_and_convict_a_relay_that_exchanges_token_ids(lying: bool) -> None:
    """Ids in range cannot be refused by who receives them; they are part of what is sealed and audited."""
    run = replace(thin_run("llama"), audit=AuditSection(share=1.0), run=RunSection(seed=7, steps=5))
    world = small_world(replace(run, routing=RoutingSection(policy="static")), [3, 2], seed=2)
    liars: list[FalseIds] = []

    def give_liar() -> None:
        node = world.nodes["r1.1"]
        if node.computer is None:
            world.clock.after(0.1, give_liar)
            return
        liars.append(FalseIds(node.computer))
        node.computer = liars[0]

    if lying:
        world.clock.after(0.6, give_liar)
    world.run(until_s=900)
    verdicts = {str(fields["verdict"]) for _, _, kind, fields in world.notes if kind == "audit"}
    revoked = [record.id for record in map(_record, world.log) if isinstance(record, Revoke)]
    if lying:
        assert liars[0].lies > 0
        assert revoked == ["r1.1"]
    else:
        assert verdicts == {"same"}
        assert not revoked
        check_equal(world, run)


def _record(line: bytes) -> AnyRecord:
    return decode_entry(line).record
