"""What the owner of a run may do to it from the page: asked for in the page's thread, done in the swarm's."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable

from anabranch.node.swarm import LEADER, LocalSwarm

#: Action on one peer of a local swarm -> the signal that its process gets.
SIGNALS = {
    "kill": signal.SIGKILL,
    "drain": signal.SIGINT,
    "freeze": signal.SIGSTOP,
    "wake": signal.SIGCONT,
}
STOP = "stop"


class SwarmOwner:
    """Of a local swarm. `stop` ends the run after the present step."""

    actions = (STOP, *SIGNALS)

    def __init__(self, swarm: LocalSwarm, stop: Callable[[], None]) -> None:
        self._swarm = swarm
        self._stop = stop
        self._asked: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def ask(self, action: str, name: str) -> str:
        """Have something done to the peer of this name ("" for the run); why not, or "". Any thread."""
        if action == STOP:
            self._asked.put((action, ""))
            return ""
        process = self._swarm.processes.get(name)
        if action not in SIGNALS:
            return f"there is no action {action!r}"
        if process is None:
            return "it is no process of this machine's swarm"
        if name == LEADER:
            return f"{LEADER} leads the run; stop the run instead"
        if not process.running:
            return "it has ended"
        self._asked.put((action, name))
        return ""

    def poll(self) -> None:
        """Do what was asked for; called by the thread that owns the swarm."""
        while not self._asked.empty():
            action, name = self._asked.get()
            if action == STOP:
                self._stop()
            else:
                self._swarm.processes[name].signal(SIGNALS[action])


class LeaderOwner:
    """Of a run that this process leads: it can be stopped, as by Ctrl+C."""

    actions = (STOP,)

    def ask(self, action: str, name: str) -> str:
        """As `SwarmOwner.ask`."""
        if action != STOP:
            return "that can be done in a local swarm only"
        os.kill(os.getpid(), signal.SIGINT)
        return ""
