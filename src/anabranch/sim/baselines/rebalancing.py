"""Moves of SWARM's peers between stages, as its paper has them.

Every period each peer publishes its queue length; the load of a stage is the sum over its peers. The peer
with the shortest queue of the least loaded stage moves to the most loaded one and downloads its state there.
The last peer of a stage stays. Queue lengths are means over the period; a move begins with an iteration, so
that no microbatch is lost by it, in SWARM's favour.
"""

from __future__ import annotations

from collections import defaultdict

from anabranch.sim.baselines.pipeline_model import Pipelines

#: Virtual seconds between two looks at the queues (a choice).
LOOK_S = 1.0


class Rebalancing:
    """Rule that moves relays of a swarm between stages: at most one in each `every_s` virtual seconds. It
    observes the queues from its creation on."""

    def __init__(self, swarm: Pipelines, every_s: float) -> None:
        self._swarm, self._every_s = swarm, every_s
        self._next_at_s = every_s
        self._queued: dict[str, float] = defaultdict(float)
        """Relay -> sum of its queue lengths at all looks of this period."""
        swarm.clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        swarm = self._swarm
        for names in swarm.serving.values():
            for relay in names - set(swarm.data_nodes):
                self._queued[relay] += swarm.memories[relay].queued + swarm.workers[relay].queued
        swarm.clock.after(LOOK_S, self._look)

    def committed(self) -> None:
        """If `every_s` has passed since the loads were last compared, compare them anew and move the relay
        with the shortest queue of the least loaded stage to the most loaded one. Nothing moves if the loads
        are equal, or if each stage has one relay. Called between two iterations."""
        swarm = self._swarm
        if swarm.clock.now < self._next_at_s:
            return
        self._next_at_s = swarm.clock.now + self._every_s
        stages = range(1, swarm.stages + 1)
        load = {s: sum(self._queued[relay] for relay in swarm.serving[s]) for s in stages}
        able = [stage for stage in stages if len(swarm.serving[stage]) > 1]
        queued, self._queued = self._queued, defaultdict(float)
        most = max(stages, key=lambda stage: load[stage])
        least = min(able, key=lambda stage: load[stage], default=most)
        if load[least] < load[most]:
            swarm.move(min(sorted(swarm.serving[least]), key=lambda relay: queued[relay]), most)
