"""Relay process that lies: its worker gives false results in one kind of task.

A plan is a JSON file {"task": "Freeze", "since": 3} beside the log of the process, with "withholds":
["Claim"] to send no such messages from then on, "dies_with": "Prepared" to die instead of sending the
first one, or "factor": -50 by which the results are multiplied (-1 if it is left out).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
from torch import Tensor

from anabranch.checkpoint.directory import RunDirectory
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.protocol.context.outbox import Outbox
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.messages import AnyMessage
from anabranch.train.stage.audit import payload_hash
from anabranch.train.stage.worker import Worker
from support.local_swarms import Swarm, created, small_run, swarm_of

#: File with a peer's plan, beside the log of its process.
LIES_FILE = "lies.json"
LIAR = "relay-1.1"


@contextmanager
def swarm_with_a_liar(path: Path, texts: Path, supervisor: Supervisor, **changes: Any) -> Iterator[Swarm]:
    """Started swarm of eight audited steps, in which one of the three relays of stage 1, LIAR, negates its
    gradient sum in step 3, or the next one to which it contributes. changes: keys of the run file."""
    # Under "static" every replica has its share of the microbatches, the liar too.
    plain = {"run__steps": 8, "audit__share": 1.0, "routing__policy": "static"}
    run = small_run(texts, **{**plain, "fleet__relays_per_stage": [3, 3], **changes})
    directory = created(path, run)
    plan_a_lie(directory)
    with swarm_of(directory, run, supervisor, target=run_lying_peer) as swarm:
        yield swarm


def plan_a_lie(directory: RunDirectory, name: str = LIAR, task: str = "Freeze", **more: Any) -> None:
    """Let a relay give false results of a task in step 3, or the next one in which it has such tasks; by
    default it negates its gradient sum. more: other keys of the plan."""
    home = directory.peer(name)
    home.mkdir(parents=True, exist_ok=True)
    (home / LIES_FILE).write_bytes(msgspec.json.encode({"task": task, "since": 3} | more))


class LiePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kind of task whose outputs are false, in the first iteration from `since` on that has such a task.
    factor: of the false outputs to the right ones."""

    task: str
    since: int
    withholds: tuple[str, ...] = ()
    dies_with: str = ""
    factor: int = -1


def run_lying_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`, with the plan beside `log` if there is one."""
    path = Path(log).with_name(LIES_FILE)
    if path.exists():
        plan, honest = msgspec.json.decode(path.read_bytes(), type=LiePlan), Worker.run
        lied: set[int] = set()

        def lie(worker: Worker, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
            result = honest(worker, task, inputs)
            of_plan = type(task).__name__ == plan.task and task.t >= plan.since
            of_plan &= getattr(task, "train", True)
            if not of_plan or result.error or lied - {task.t}:
                return result
            lied.add(task.t)
            outputs = tuple(plan.factor * cast(Tensor, output) for output in result.outputs)
            hashes = [payload_hash(cast(Tensor, tensor)) for tensor in (*inputs, *outputs)]
            return msgspec.structs.replace(result, outputs=outputs, hashes=tuple(hashes))

        def send(outbox: Outbox, peer: str, message: AnyMessage, payload: Payload | None = None) -> None:
            kind = type(message).__name__
            if lied and kind == plan.dies_with:
                os._exit(1)
            if not lied or kind not in plan.withholds:
                say(outbox, peer, message, payload)

        say = Outbox.send
        Worker.run, Outbox.send = lie, send  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)
