"""Actions that a run's owner takes on the web page: stop, pause, expel or kill a peer, ... They are requested
in the page's thread and carried out in the swarm's thread."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from anabranch.errors import UserError
from anabranch.node.lifecycle import control_file, tickets
from anabranch.node.local_swarm.local_swarm import LEADER, LocalSwarm
from anabranch.operating_system import KILL, SIGNALS_ASK

#: Signal to the process of a local swarm, by action; Windows can only end processes.
SIGNALS: dict[str, int] = {"kill": KILL}
if SIGNALS_ASK:
    SIGNALS |= {"drain": signal.SIGINT, "freeze": signal.SIGSTOP, "wake": signal.SIGCONT}
STOP = "stop"
EXPEL = "expel"
#: Refusal of a second stop: like a second Ctrl+C it would end the run at once, without a checkpoint.
STOPPING = "the run is stopping already"


class SwarmOwner:
    """Owner's actions on a local swarm. actions: names that `ask` takes. stop: called for the first request
    to stop; ends the run after the current step."""

    actions = (STOP, *control_file.ACTIONS, *SIGNALS, EXPEL)

    def __init__(self, swarm: LocalSwarm, stop: Callable[[], None]) -> None:
        self._swarm = swarm
        self._stop = stop
        self._requests: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._stopped = threading.Lock()

    def ask(self, action: str, name: str, steps: int = 0) -> str:
        """Request an action on the peer of this name ("" for the run), from any thread. A stop and signals to
        processes wait for `poll`; other actions are handed to the founder's process at once.

        Returns the reason if the action is refused, else "". name: the peer's id for "expel", as names are
        the peers' own choice. steps: the new number of steps, for "steps".
        """
        if action == STOP:
            if not self._stopped.acquire(blocking=False):
                return STOPPING
            self._requests.put((action, ""))
            return ""
        if action in control_file.ACTIONS:
            return control_file.request(self._swarm.directory.path, action, steps)
        if action == EXPEL:
            return _expel(self._swarm.directory.path, name)
        process = self._swarm.processes.get(name)
        if action not in SIGNALS:
            return f"there is no action {action!r}"
        if process is None:
            return f"{name} is not a process of this machine's swarm"
        if name == LEADER:
            return f"{LEADER} leads the run; stop the run instead"
        if not process.running:
            return f"{name} has ended"
        self._requests.put((action, name))
        return ""

    def poll(self) -> None:
        """Carry out the requested stops and signals, in the thread that owns the swarm. (Control requests and
        expulsions were written by `ask`.)"""
        while not self._requests.empty():
            action, name = self._requests.get()
            if action == STOP:
                self._stop()
            else:
                self._swarm.processes[name].signal(SIGNALS[action])


def _expel(run_dir: Path, peer: str) -> str:
    """Expel the peer with this id from the run in `run_dir`, whose page asked for it; returns the reason if
    that is refused, else ""."""
    try:
        tickets.expel(run_dir, peer, "expelled on the page")
    except UserError as error:
        return str(error)
    return ""


class LeaderOwner:
    """Owner's actions on a run that this process leads. actions: names that `ask` takes. A first request to
    stop sends this process the signal of Ctrl+C; a second is refused."""

    actions = (STOP, *control_file.ACTIONS, EXPEL)

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stopped = threading.Lock()

    def ask(self, action: str, name: str, steps: int = 0) -> str:
        """Request an action on the run; returns the reason if it is refused, else "". name: id of the peer to
        expel; ignored for other actions. steps: new number of steps, for "steps"."""
        if action in control_file.ACTIONS:
            return control_file.request(self._run_dir, action, steps)
        if action == EXPEL:
            return _expel(self._run_dir, name)
        if action != STOP:
            return "this action exists in a local swarm only"
        if not self._stopped.acquire(blocking=False):
            return STOPPING
        signal.raise_signal(signal.SIGINT)
        return ""
