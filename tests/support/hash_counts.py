"""Peer process that counts the payloads that it hashes, and those that it must hash."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from anabranch.net import chunk_queue, framing
from anabranch.node.driver import tensor_codec
from anabranch.node.local_swarm.local_swarm import LocalSwarm
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.protocol.interface.tasks import Apply, Payload, Result, Task
from anabranch.train.stage import audit
from anabranch.train.stage.worker import Worker


def run_hash_counting_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`. After each step the process prints `hashed N of M` so far: N hashes of payloads, and M
    payloads that came, were made with a hash, or were sent without one."""
    hashed = needed = 0

    def counted(owner: Any, function: str) -> None:
        plain: Callable[[Any], str] = getattr(owner, function)

        def hashing(given: Any) -> str:
            nonlocal hashed
            hashed += 1
            return plain(given)

        setattr(owner, function, hashing)

    for owner, function in ((framing, "hash_text"), (chunk_queue, "hash_text"), (audit, "_hash_of")):
        counted(owner, function)
    packing, unpacking, computing = tensor_codec.to_blob, tensor_codec.from_blob, Worker.run

    def to_blob(payload: Payload) -> framing.Blob:
        nonlocal needed
        needed += not (isinstance(payload, Tensor) and audit.known_hash(payload))
        return packing(payload)

    def from_blob(blob: framing.Blob) -> Any:
        nonlocal needed
        needed += 1
        return unpacking(blob)

    def run(worker: Worker, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        nonlocal needed
        result = computing(worker, task, inputs)
        needed += len(result.outputs) if task.hashed else 0
        if isinstance(task, Apply):
            print(f"hashed {hashed} of {needed}", flush=True)
        return result

    tensor_codec.to_blob, tensor_codec.from_blob = to_blob, from_blob
    Worker.run = run  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)


def hash_counts(swarm: LocalSwarm) -> tuple[int, int]:
    """Hashes of payloads in all processes of a swarm of `run_hash_counting_peer`, and how many are needed."""
    logs = [process.log.read_text() for process in swarm.processes.values()]
    last = [re.findall(r"^hashed (\d+) of (\d+)$", log, flags=re.MULTILINE)[-1] for log in logs]
    return sum(int(hashed) for hashed, _ in last), sum(int(needed) for _, needed in last)
