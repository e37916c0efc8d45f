"""Shares of a core for processes: each gets so many seconds of processor time a second, by a control group.

Needs Linux, root and the cpu controller of control groups in version 1. A process that has used its share
rests until the next period, and has the first claim to it, whatever else runs: eight of them are eight slow
machines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from anabranch.errors import UserError
from anabranch.node.local_swarm.supervisor import Process, Supervisor

FOLDER = Path("/sys/fs/cgroup/cpu")
#: Microseconds of a period: short beside the delay of a line, long beside a switch between processes.
PERIOD_US = 20_000
#: Weight of a group beside other work on the machine, so that it has its share then, too: 16 ordinary tasks.
WEIGHT = 16 * 1024
#: Seconds that the kernel may take to empty the group of a killed process.
_EMPTY_S = 10.0


class LimitedSupervisor(Supervisor):
    """Supervisor whose processes have a share of a core each; close it to remove their groups."""

    def __init__(self, threads: int, share: float) -> None:
        """Raises UserError if there is no cpu controller of version 1 that this process may use."""
        super().__init__(threads)
        self._share, self._groups = share, dict[str, Path]()
        if not (FOLDER / "cgroup.procs").exists():
            raise UserError(f"{FOLDER}: no cpu controller of control groups in version 1")

    def start(self, name: str, arguments: Sequence[str], log: Path, *others: Any, **named: Any) -> Process:
        """Start a process as `Supervisor.start` does, with its share of a core."""
        process = super().start(name, arguments, log, *others, **named)
        group = FOLDER / f"anabranch-{os.getpid()}-{name}"
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * self._share)))
        (group / "cpu.shares").write_text(str(WEIGHT))
        (group / "cgroup.procs").write_text(str(process.pid))
        self._groups[name] = group
        return process

    def close(self) -> None:
        """Kill the processes that are still running, and remove their groups."""
        super().close()
        until = time.monotonic() + _EMPTY_S
        for group in self._groups.values():
            while group.exists() and time.monotonic() < until:
                with suppress(OSError):  # a process of it is still ending
                    group.rmdir()
                    break
                time.sleep(0.05)
        self._groups.clear()
