"""Planned crash of a peer's process: it kills itself (SIGKILL) at a named point of the protocol.

A plan is a JSON file: {"at": "mid_backward", "iteration": 3, "added": 1}. The crash happens the first time
that the point is reached in this iteration or a later one. Points:

    mid_backward  the peer has added at least `added` weight gradients of the iteration, and the gradient of
                  another microbatch has arrived whose weight gradient is not added yet
    ahead         the same, but of the second of two iterations in flight (`iteration.delay`)
    reducing      it has frozen its sums and sent its parts
    prepared      it has sent PREPARED to the leader
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from anabranch.node.driver.peer_driver import LivePeer
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.observe.events import FaultDelivered
from anabranch.protocol.interface import events as ev

#: File with a peer's plan, beside the log of its process.
PLAN_FILE = "fault.json"


def run_crashing_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`, with the plan beside `log` if there is one."""
    path = Path(log).with_name(PLAN_FILE)
    if path.exists():
        plan = msgspec.json.decode(path.read_bytes(), type=FaultPlan)
        plain = LivePeer.__init__

        def make(live: LivePeer, *values: Any, **named: Any) -> None:
            plain(live, *values, **named)
            live.watchers.append(plan.watch)

        LivePeer.__init__ = make  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A planned crash, and the point at which it happens."""

    at: str
    iteration: int
    added: int = 1

    def watch(self, live: LivePeer, event: ev.Event) -> None:
        """Kill this process if the planned point of the protocol is reached; called after each event."""
        if self._is_reached(live):
            iterations = live.peer.iterations
            iteration = iterations.ahead if self.at == "ahead" else iterations.current
            assert iteration is not None
            phase = f"{self.at} of iteration {iteration.t}"
            live.journal.write(FaultDelivered(peer=live.peer.ctx.me, fault="kill", phase=phase))
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_reached(self, live: LivePeer) -> bool:
        iterations = live.peer.iterations
        iteration = iterations.ahead if self.at == "ahead" else iterations.current
        if iteration is None or iteration.t < self.iteration:
            return False
        replica = live.peer.replica
        if self.at == "prepared":
            return replica.all_reduce.prepared is not None
        if self.at == "reducing":
            return replica.all_reduce.reduce is not None and bool(replica.all_reduce.reduce.parts)
        held = len(iteration.claims.held)
        pending = any(
            unit.gradient_in is not None and index not in iteration.claims.held
            for index, unit in iteration.units.items()
        )
        return held >= self.added and pending
