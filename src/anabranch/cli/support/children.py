"""Child processes that run commands of `anabranch`, with their output among that of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from anabranch.launch.fleet import TICKET_VARIABLE
from anabranch.node.local_swarm.peer_process import die_with_parent
from anabranch.operating_system import SIGNALS_ASK

#: Command that a child process runs.
PROGRAM = (sys.executable, "-m", "anabranch")
#: Seconds that a child has to leave the run before it is killed. A choice: a step of a slow machine.
LEAVE_S = 30.0


class Children:
    """Processes that run commands of `anabranch` at the same time, started when this is made, each in a
    session of its own: Ctrl+C in the terminal reaches them once, through this process. On Linux they die with
    it.

    labels: text before each line that a process writes. show: prints such a line. program: words before those
    of each command. ticket: handed over in the environment, as other users of the machine can read a command
    line; "" for none.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        labels: Sequence[str],
        show: Callable[[str], None],
        program: Sequence[str] = PROGRAM,
        ticket: str = "",
    ) -> None:
        self._show = show
        environment = os.environ | ({TICKET_VARIABLE: ticket} if ticket else {})
        self._processes = [
            subprocess.Popen(
                [*program, *command],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
            for command in commands
        ]
        self._threads = [
            threading.Thread(target=self._follow, args=pair, daemon=True)
            for pair in zip(self._processes, labels, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, process: subprocess.Popen[str], label: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._show(f"{label}{line.rstrip()}")

    def signal(self, number: int) -> None:
        """Send the signal `number` to the processes that still run. Nothing on Windows: they have the
        terminal's Ctrl+C already, and no other signal asks."""
        for process in self._processes:
            if SIGNALS_ASK and process.poll() is None:
                process.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until all processes have ended and their output is shown; returns the largest exit status, 128
        + N for one that signal N ended. timeout_s: for each process, None for no limit. Raises
        subprocess.TimeoutExpired if one still runs then."""
        statuses = [process.wait(timeout_s) for process in self._processes]
        for thread in self._threads:
            thread.join()
        return max(status if status >= 0 else 128 - status for status in statuses)

    def end(self) -> None:
        """Send each process SIGINT, at which it leaves its run; kill those that are left after LEAVE_S, and
        wait until all have ended."""
        self.signal(signal.SIGINT)
        try:
            self.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            for process in self._processes:
                process.kill()
            self.wait()
