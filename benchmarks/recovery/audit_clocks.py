"""Clocks around the parts of an audit in one peer of `audit_cost`: hashes, signatures, recomputation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.protocol.interface import tasks
from benchmarks import harness

#: File with the seconds of the parts of one peer, beside the log of its process.
PARTS_FILE = "parts.json"
#: Part that every run has, with audits or without, the same number of times: forwards and backwards of
#: microbatches, without hashes.
PASSES = "microbatches computed"
#: Part of the microbatches that audits compute again.
AGAIN = "units computed again"
#: Part of the hashes of received sums, on the thread that unpacks them. Frames hash all other payloads that
#: come, with audits or without.
CAME = "sums hashed as they come"
#: CPU seconds of the process, all threads, when its clocks were written.
PROCESS = "process"
_PASSES = tasks.Embed | tasks.Forward | tasks.Head | tasks.InputGradient | tasks.WeightGradient


class Clocks:
    """CPU seconds of one process by part, written to a file after each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    def wrap(self, part: str | Callable[..., str], owner: Any, name: str) -> None:
        """Replace the function `name` of a class or module by one that is clocked. part: name of the part, or
        a function of the arguments that gives it."""
        function = getattr(owner, name)

        def clocked(*arguments: Any, **named: Any) -> Any:
            label = part if isinstance(part, str) else part(*arguments, **named)
            begin = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.add(label, time.thread_time() - begin)

        setattr(owner, name, clocked)

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        self._calls[part] = self._calls.get(part, 0) + 1

    def hashing(self) -> float:
        """Seconds of all hashes so far."""
        return sum(seconds for part, seconds in self._seconds.items() if part.startswith("hashes"))

    def write(self) -> None:
        """Write all clocks, and the CPU seconds of the process up to now (`PROCESS`)."""
        self._seconds[PROCESS], self._calls[PROCESS] = time.process_time(), 1
        content = json.dumps({"seconds": self._seconds, "calls": self._calls}).encode()
        harness.write_whole(self._path, content)


def hashed(payload: Any) -> str:
    """Part of the hash of a payload that a worker makes: those of a gradient are vectors. With audits the
    frame that sends the payload does not hash it again."""
    return "hashes of gradients" if payload.dim() == 1 else "hashes of activations"


def run_clocked_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`, with clocks around the parts of an audit."""
    from anabranch.net.identity import IdentitySigner
    from anabranch.node.driver import tensor_codec
    from anabranch.protocol.audit.auditor import Auditor
    from anabranch.protocol.audit.kept_work import KeptWork
    from anabranch.protocol.coordinator import step_receipts
    from anabranch.protocol.reduce import work_receipt
    from anabranch.train.stage import worker
    from anabranch.train.stage.audit import AuditedSteps

    clocks = Clocks(Path(log).with_name(PARTS_FILE))
    clocks.wrap(hashed, worker, "payload_hash")
    clocks.wrap(CAME, tensor_codec, "payload_hash")
    clocks.wrap("signatures made", IdentitySigner, "sign")
    clocks.wrap("signatures checked", IdentitySigner, "verify")
    clocks.wrap("receipts encoded (with 1 signature)", work_receipt, "signed")
    clocks.wrap("receipts decoded (with 1 check)", step_receipts, "opened")
    clocks.wrap(AGAIN, AuditedSteps, "unit")
    clocks.wrap("their sums cut", AuditedSteps, "sum")
    clocks.wrap("weights kept", AuditedSteps, "keep")
    clocks.wrap("pieces handed over and taken", KeptWork, "on_fetch")
    clocks.wrap("pieces handed over and taken", Auditor, "on_work")
    honest = worker.Worker.run

    def run(self: Any, task: Any, inputs: Any = ()) -> Any:
        begin, hashing = time.thread_time(), clocks.hashing()
        result = honest(self, task, inputs)
        if isinstance(task, _PASSES):
            clocks.add(PASSES, time.thread_time() - begin - (clocks.hashing() - hashing))
        if type(task).__name__ == "Apply":
            clocks.write()
        return result

    worker.Worker.run = run  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)
