"""Processes of a local swarm as their supervisor sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anabranch.node.local_swarm.supervisor import Process


def test_a_signal_to_a_process_that_has_ended_before_its_status_is_known() -> None:
    """The fork server has it first. Signal 0 reaches nobody, should the number be another process's now."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    child: Any = SimpleNamespace(pid=ended.pid, exitcode=None)
    Process("relay-1.0", Path("log"), child).signal(0)
