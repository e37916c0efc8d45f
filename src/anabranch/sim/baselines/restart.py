"""Baseline `restart`: the best central arrangement of paths; every crash restarts the iteration.

The batch is divided among the replicas of a stage by speed, and paths are arranged by DT-FM's objective
(`flow.policies.static`) over the true costs of links. When a relay dies, all work of the iteration is
discarded, and it restarts with the remaining relays from their own state, so that no checkpoint has to be
read (the best case of a system that restarts). A returning relay takes part from the next iteration on.
"""

from __future__ import annotations

from itertools import pairwise

from anabranch.flow.graph.problem import DataNode, Instance, Path, Relay, link_cost
from anabranch.flow.policies.static import arrange
from anabranch.protocol.placement.cost_model import shared_out
from anabranch.sim.baselines.pipeline_model import Microbatch, Pipelines
from anabranch.sim.cluster.scenario import Fleet


class Restart(Pipelines):
    """Baseline `restart`: fixed paths; a crash discards the iteration and begins it again."""

    def __init__(self, fleet: Fleet, policy: str, seed: int) -> None:
        super().__init__(fleet, policy, seed)
        self._plan: list[Path] = []

    def begin(self) -> None:
        self._plan = self._arranged()
        self.admit_batch(path[0] for path in self._plan)

    def _arranged(self) -> list[Path]:
        """Path of each microbatch of the batch, data node first: the arrangement of policy `static` over the
        relays that serve, which divide the batch by speed."""
        hosts = self.fleet.hosts
        each, more = divmod(self.microbatches, len(self.data_nodes))
        data = tuple(DataNode(name, each + (at < more)) for at, name in enumerate(self.data_nodes))
        relays: list[Relay] = []
        layers = [self.data_nodes]
        for stage in range(1, self.stages + 1):
            serving = sorted(self.serving[stage])
            pass_s = [hosts[name].machine.microbatch_s(stage) for name in serving]
            shares = shared_out(pass_s, self.microbatches)
            relays += [Relay(name, stage, share) for name, share in zip(serving, shares, strict=True)]
            layers.append(serving)
        hops = [
            (one, other)
            for before, after in pairwise([*layers, self.data_nodes])
            for one in before
            for other in after
        ]
        links = {hop: self._cost(*hop) for hop in hops}
        return list(arrange(Instance(self.stages, "any", data, tuple(relays), links)).paths)

    def _cost(self, one: str, other: str) -> float:
        """Seconds that a microbatch spends on the link of two nodes, both directions averaged. Times of
        computing are left out, since relays have microbatches by their speed."""
        there, back = self.fleet.link(one, other), self.fleet.link(other, one)
        size = self.fleet.scenario.work.activation_bytes
        return link_cost((0.0, 0.0), (there.latency_s, back.latency_s), (there.rate_bps, back.rate_bps), size)

    def onward(self, microbatch: Microbatch, sender: str) -> None:
        path = self._plan[microbatch.index]
        self.forward_to(microbatch, sender, path[len(microbatch.path)])

    def added(self, microbatch: Microbatch) -> None:
        """Take the step if all microbatches have returned, and each relay on each path and each head has
        added its gradient."""
        whole = self.stages + 1
        done = all(each.returned and len(each.added) == whole for each in self.attempts)
        if done and len(self.attempts) == self.microbatches:
            self.take_step()

    def lost(self, relay: str) -> None:
        """Give up the iteration and all queued tasks, and begin it again when the first data node has noticed
        the crash."""
        self.abandon_batch()
        self.reducing += 1
        batch = self._batch
        for worker in self.workers.values():
            worker.forget()
        self.recorder.add("recoveries", self.microbatches)

        def again() -> None:
            if self._batch == batch:
                self.begin()

        self.clock.after(self.fleet.link(relay, self.data_nodes[0]).latency_s, again)
