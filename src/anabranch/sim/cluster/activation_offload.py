"""Model of activation offload to host memory (`fleet.park`): seconds of the copies."""

from __future__ import annotations

from collections import defaultdict

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Task
from anabranch.sim.cluster.device_model import Workload


class OffloadedActivations:
    """Record of the microbatches in flight at each host, and of which the activations are in host memory. As
    in the real worker, a microbatch is offloaded if device memory is full when it begins. work: sizes of the
    activations."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._held: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        self._iteration: dict[str, int] = {}

    def copy_s(self, host: str, stage: int, resident: int, link_bytes_per_s: float, task: Task) -> float:
        """Seconds of the copies between host and device memory that a task at a host needs; 0 for most tasks.
        Also records the begin (Forward of training) or end (InputGradient, Discard) of the task's microbatch,
        so each task is asked about once. The first task of another iteration clears the host's record. stage:
        of the host. resident: microbatches whose activations fit into its device memory. link_bytes_per_s:
        rate of its copies, above 0."""
        if not isinstance(task, tasks.Forward | tasks.InputGradient | tasks.Discard):
            return 0.0
        held = self._held[host]
        if self._iteration.get(host) != task.t:
            held.clear()
            self._iteration[host] = task.t
        if isinstance(task, tasks.Forward):
            if not (task.train and task.keep):
                return 0.0
            held[task.index] = parks = len(held) >= resident
        else:
            parks = held.pop(task.index, False) and isinstance(task, tasks.InputGradient)
        return self._work.kept_bytes(stage) / link_bytes_per_s if parks else 0.0
