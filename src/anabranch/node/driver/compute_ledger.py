"""Ledger of a peer's compute tasks in a file, to measure wasted compute; a killed process leaves it complete.

A peer keeps a ledger if its environment names a file (`LEDGER_VARIABLE`): one JSON array per line, written
unbuffered. Only tasks on a microbatch of a step are listed (not the optimizer step, snapshots, evaluation).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from anabranch.checkpoint.directory import RunDirectory
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Task, embed_unit, full_cover, head_unit

LEDGER_VARIABLE = "ANABRANCH_LEDGER"
#: Tasks on inner steps, of which a slot has many.
INNER = (tasks.InnerForward, tasks.InnerHead, tasks.InnerBackward, tasks.InnerStep)


def ledger_of(directory: RunDirectory, name: str) -> Path:
    """Path of the file that lists the compute tasks of the peer `name` of a local swarm."""
    return directory.peer(name) / "ledger.jsonl"


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """Compute task on the unit `unit` (numbered as in `full_cover`) in iteration t at `stage`, which took
    `seconds` until the Unix time `at`. kind: type of the task, and on an inner step its numbers
    ("InnerForward 5.0": microbatch 0 of inner step 5)."""

    at: float
    t: int
    stage: int
    unit: int
    kind: str
    seconds: float


class Ledger:
    """Ledger of this peer in the file `path`: `add` appends an `Entry` for a compute task; nothing for a task
    on no unit of a step."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (as long as the process)

    @classmethod
    def from_environment(cls) -> Ledger | None:
        """Open the ledger that the environment variable LEDGER_VARIABLE names; None if it is not set."""
        path = os.environ.get(LEDGER_VARIABLE)
        return cls(Path(path)) if path else None

    def add(self, task: Task, stage: int, microbatches: int, seconds: float) -> None:
        unit, kind = _unit_of(task, stage), type(task).__name__
        if unit in full_cover(stage, microbatches):
            if isinstance(task, tasks.StepAhead):
                kind += f" {task.step}"
            elif isinstance(task, INNER):
                kind += f" {task.step}" + ("" if isinstance(task, tasks.InnerStep) else f".{task.number}")
            entry = Entry(time.time(), task.t, stage, unit, kind, seconds)
            self._file.write(msgspec.json.encode(entry) + b"\n")


def read_ledger(path: Path) -> list[Entry]:
    """Compute tasks that a `Ledger` wrote to `path`, without a last line that is cut off; none without it."""
    if not path.exists():
        return []
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
    return [msgspec.json.decode(line, type=Entry) for line in lines]


def _unit_of(task: Task, stage: int) -> int:
    """Number of the microbatch or slot (in the numbering of `full_cover`) that a task works on at `stage`; -1
    if on none."""
    match task:
        case tasks.InnerForward(_, index) | tasks.InnerBackward(_, index) | tasks.InnerStep(_, index):
            return index if stage else embed_unit(index)
        case tasks.InnerHead(_, index):
            return head_unit(index)
        case tasks.Embed(_, index):
            return embed_unit(index)
        case tasks.Head(_, index, True):
            return head_unit(index)
        case tasks.Forward(_, index, True) | tasks.InputGradient(_, index) | tasks.StepAhead(_, index):
            return index
        case tasks.WeightGradient(_, unit) | tasks.Recount(_, unit, _):
            return unit
    return -1
