"""Clocks around the parts of an audit in one peer of `audit_cost`: hashes, signatures, recomputation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from anabranch.node.local_swarm.peer_process import run_peer
from benchmarks import harness

#: File with the seconds of the parts of one peer, beside the log of its process.
PARTS_FILE = "parts.json"


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
                self._seconds[label] = self._seconds.get(label, 0.0) + time.thread_time() - begin
                self._calls[label] = self._calls.get(label, 0) + 1

        setattr(owner, name, clocked)

    def write(self) -> None:
        content = json.dumps({"seconds": self._seconds, "calls": self._calls}).encode()
        harness.write_whole(self._path, content)


def hashed(payload: Any) -> str:
    """Part of the hash of a payload: those of a gradient are vectors."""
    return "hashes of gradients" if payload.dim() == 1 else "hashes of activations"


def run_clocked_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`, with clocks around the parts of an audit."""
    from anabranch.net.identity import IdentitySigner
    from anabranch.protocol.coordinator import audit_cases
    from anabranch.protocol.reduce import work_receipt
    from anabranch.train.stage import worker
    from anabranch.train.stage.audit import AuditedSteps

    clocks = Clocks(Path(log).with_name(PARTS_FILE))
    clocks.wrap(hashed, worker, "payload_hash")
    clocks.wrap("signatures made", IdentitySigner, "sign")
    clocks.wrap("signatures checked", IdentitySigner, "verify")
    clocks.wrap("receipts encoded (with 1 signature)", work_receipt, "signed")
    clocks.wrap("receipts decoded (with 1 check)", audit_cases, "opened")
    clocks.wrap("units computed again", AuditedSteps, "unit")
    clocks.wrap("their sums cut", AuditedSteps, "sum")
    clocks.wrap("weights kept", AuditedSteps, "keep")
    honest = worker.Worker.run

    def run(self: Any, task: Any, inputs: Any = ()) -> Any:
        result = honest(self, task, inputs)
        if type(task).__name__ == "Apply":
            clocks.write()
        return result

    worker.Worker.run = run  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)
