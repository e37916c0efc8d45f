"""Planned crash of a peer's process: it kills itself (SIGKILL) at a named point of the protocol.

A plan is a JSON file: {"at": "mid_backward", "iteration": 3, "added": 1}. The crash happens the first time
that the point is reached in this iteration or a later one. Points:

    mid_backward  the peer has added at least `added` weight gradients of the iteration, and the gradient of
                  another microbatch has arrived whose weight gradient is not added yet
    ahead         the same, but of the second of two iterations in flight (`iteration.delay`)
    computing     it has a microbatch or a slot of one machine whose computing has not ended
    inner         it computes an inner step of a crew's slot, and a further one is to come
    reducing      it has frozen its sums and sent its parts, and does not have the result
    prepared      it has sent PREPARED to the leader
    committed     it has learned that the step of the iteration is committed, and has not applied it
    accused       it leads, and an auditor found a difference in the iteration that is not decided yet

after_s: seconds for which the point must have lasted. armed: path of a file without which nothing happens.
"""

from __future__ import annotations

import asyncio
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
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.reduce.all_reduce import AllReduce

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
    after_s: float = 0.0
    armed: str = ""

    def watch(self, live: LivePeer, event: ev.Event) -> None:
        """Kill this process if the planned point of the protocol is reached; called after each event."""
        t = self._reached(live)
        if t is not None and self.after_s:
            asyncio.get_running_loop().call_later(self.after_s, self._strike, live, t)
        elif t is not None:
            self._strike(live, t)

    def _strike(self, live: LivePeer, t: int) -> None:
        if self._reached(live) == t:
            phase = f"{self.at} of iteration {t}"
            live.journal.write(FaultDelivered(peer=live.peer.ctx.me, fault="kill", phase=phase))
            os.kill(os.getpid(), signal.SIGKILL)

    def _reached(self, live: LivePeer) -> int | None:
        """Iteration of which the point is reached now; None if it is not."""
        if self.armed and not Path(self.armed).exists():
            return None
        iterations, replica = live.peer.iterations, live.peer.replica
        if self.at == "accused":
            lead = live.peer.lead
            cases = [] if lead is None else [case for case in lead.audits._cases.values() if not case.over]
            return min((c.drawn.t for c in cases if "different" in c.verdicts.values()), default=None)
        if self.at == "committed":
            t = replica.t + 1
            return t if t >= self.iteration and t in replica.pending else None
        iteration = iterations.ahead if self.at == "ahead" else iterations.current
        if iteration is None or iteration.t < self.iteration:
            return None
        return iteration.t if self._is_reached(replica.all_reduce, iteration) else None

    def _is_reached(self, all_reduce: AllReduce, iteration: Iteration) -> bool:
        if self.at == "prepared":
            return all_reduce.prepared is not None
        if self.at == "reducing":
            reduce = all_reduce.reduce
            return all_reduce.prepared is None and reduce is not None and bool(reduce.parts)
        if self.at == "computing":
            return any(unit.train and not unit.forward_done for unit in iteration.units.values())
        if self.at == "inner":
            slots = iteration.islands._slots.values()
            return any(slot._begun and slot.step < slot._last for slot in slots)
        held = len(iteration.claims.held)
        pending = any(
            unit.gradient_in is not None and index not in iteration.claims.held
            for index, unit in iteration.units.items()
        )
        return held >= self.added and pending
