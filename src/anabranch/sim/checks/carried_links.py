"""Demands C1 to C3 on a world whose links go through carriers with access lines of their own.

C1: two members that met at a carrier which ended are linked again in time, if there is another way. C2: where
only carriers fail, the log never goes back, and steps go on in time. C3: all that passes a host's line shares
its bandwidth, what it carries for others included, and a carrier hands on each payload once.
"""

from __future__ import annotations

from collections import defaultdict

from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.records import Commit, Rollback, decode_entry
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.violation import Violation
from anabranch.sim.network.lined_world import LinedWorld

#: Greatest virtual time (s) from the end of a carrier until its pairs are linked again, and of a step; times
#: the seed's slowness. Choices: a first dial after half a second, and two that fail; several repairs.
REPLACED_S, STEP_S = 4.0, 60.0
#: Share by which rates may exceed a line's bandwidth, for rounding.
ROUNDING = 1e-6


class CarriedLinks:
    """Observer of a world that checks C3 after every event, and C1 and C2 if no faults but those of carriers
    occur (only_carriers); raises Violation. slower: factor on the seconds that C1 and C2 allow."""

    def __init__(self, world: LinedWorld, only_carriers: bool, slower: float) -> None:
        self.world, self._strict = world, only_carriers
        self._replaced_s, self._step_s = REPLACED_S * slower, STEP_S * slower
        self._apart: dict[frozenset[str], tuple[str, float]] = {}
        """Pair that met at a carrier which ended, and is not linked again -> carrier, and time since which
        there has been another way."""
        self._log_read = self._ends_read = 0
        self._committed_at = 0.0
        world.watchers.append(self)

    def __call__(self, node: Node, event: ev.Event) -> None:
        self._check_lines()
        if not self._strict:
            return
        world, now = self.world, self.world.clock.now
        for carrier, pair in world.ended_circuits[self._ends_read :]:
            self._apart[pair] = carrier, now
        self._ends_read = len(world.ended_circuits)
        for pair in list(self._apart):
            self._look(pair, now)
        self._read_log(now)

    def done(self) -> bool:
        """True if no pair that met at a carrier which ended still waits for a new link."""
        return not self._apart

    # --- C1 ------------------------------------------------------------------------------------

    def _look(self, pair: frozenset[str], now: float) -> None:
        carrier, since = self._apart[pair]
        one, other = sorted(pair)
        nodes = self.world.nodes[one], self.world.nodes[other]
        link = nodes[0].links.get(other)
        if (link is not None and link.open) or not self._wanted(*nodes):
            del self._apart[pair]
        elif not self._another_way(*nodes):
            self._apart[pair] = carrier, now
        elif now > since + self._replaced_s:
            late_s = now - since
            text = f"{one} and {other}, which met at {carrier}, have had another way for {late_s:.0f} s"
            raise Violation("C1", f"{text} and are not linked")

    def _wanted(self, one: Node, other: Node) -> bool:
        """True if two peers should be linked: both run and are members, of the same stage or adjacent ones
        (stage 0 is adjacent to the last)."""
        run = self.world.leading().peer.ctx.run
        stages = [run.membership.stage_of(node.id) for node in (one, other)]
        if not (one.running and other.running) or stages[0] is None or stages[1] is None:
            return False
        count = run.settings.stages + 1
        return (stages[0] - stages[1]) % count in (0, 1, count - 1)

    def _another_way(self, one: Node, other: Node) -> bool:
        """True if a running member could carry for the two now: the one of them that dials reaches it, and
        the other one has dialled it."""
        membership = self.world.leading().peer.ctx.run.membership
        if not membership.dials(one.id, other.id):
            one, other = other, one
        nodes, members = self.world.nodes, membership.members.keys() - {one.id}
        carriers = [peer for peer in other.links if peer in members and nodes[peer].member.address]
        return bool(self.world.carrier_to(one, other.id, carriers))

    # --- C2 ------------------------------------------------------------------------------------

    def _read_log(self, now: float) -> None:
        for line in self.world.log[self._log_read :]:
            record = decode_entry(line).record
            if isinstance(record, Rollback):
                raise Violation("C2", f"the log goes back to the state after {record.t}: {record.reason}")
            if isinstance(record, Commit):
                self._committed_at = now
        self._log_read = len(self.world.log)
        if self._committed_at and now > self._committed_at + self._step_s:
            silent_s = now - self._committed_at
            raise Violation("C2", f"no step in {silent_s:.0f} virtual seconds, and only carriers failed")

    # --- C3 ------------------------------------------------------------------------------------

    def _check_lines(self) -> None:
        world = self.world
        for host, count in world.handed_on.items():
            if count > world.given[host]:
                raise Violation("C3", f"{host} carries {world.given[host]} payloads, of which {count} arrive")
        up, down = defaultdict[str, float](float), defaultdict[str, float](float)
        for (sender, receiver, via), bps in world.traffic.rates().items():
            up[sender] += bps
            down[receiver] += bps
            if via:
                up[via] += bps
                down[via] += bps
        for host in up.keys() | down.keys():
            line = world.traffic.line(host)
            if up[host] > (1.0 + ROUNDING) * line.up_bps or down[host] > (1.0 + ROUNDING) * line.down_bps:
                text = f"{host} sends {up[host]:.3g} and receives {down[host]:.3g} bit/s"
                raise Violation("C3", f"{text} on a line of {line.up_bps:.3g} and {line.down_bps:.3g}")
