"""Peer process of a run that takes its time, for swarms that go on until something else has happened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.protocol.interface.tasks import Embed, Payload, Result, Task
from anabranch.train.stage.worker import Worker

#: Seconds that the first microbatch of each iteration takes longer at its data node: several times as long as
#: a step of a small run.
PAUSE_S = 0.3


def run_unhurried_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`, but each step takes PAUSE_S longer, in which nobody computes: the processor is free for
    whatever the test waits for, and few steps are to be verified."""
    at_once = Worker.run

    def run(worker: Worker, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        if isinstance(task, Embed) and task.index == 0:
            time.sleep(PAUSE_S)
        return at_once(worker, task, inputs)

    Worker.run = run  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)
