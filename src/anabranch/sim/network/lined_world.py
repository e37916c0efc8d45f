"""World whose payloads share the access lines of hosts; on a carried link they take the carrier's line, too.

Not here: sizes of payloads and bandwidths, which a subclass knows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Genesis
from anabranch.protocol.messages import PAYLOAD_PRIORITY, AnyMessage, ReducePart
from anabranch.sim.kernel.simulated_peer import Link, Node, TaskExecutor
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.network.fair_share import Traffic
from anabranch.sim.network.in_flight_time import InFlightTime
from anabranch.sim.network.shared_link import Line, SharedLink

#: Greatest priority number of a payload without which an iteration does not end; states and probes have more.
OF_ITERATION = PAYLOAD_PRIORITY[ReducePart]


class LinedWorld(World):
    """World with access lines. line: host -> its access line. machine: host -> host that has its line. A
    payload is lost if its link breaks or is closed before the last byte has left, as on a live link.

    traffic: payloads in flight. under_way: for each host, seconds in which it had one in flight that it sent.
    carried_bytes: carrier -> bytes that it was given to carry for others, control messages included; given,
    handed_on: carrier -> payloads that it was given, and that it passed on whole. ended_circuits: (carrier,
    pair) of each link that broke because its carrier ended, or broke it.
    """

    def __init__(
        self,
        seed: int,
        settings: Settings,
        genesis: Genesis,
        make_computer: Callable[[int], TaskExecutor],
        line: Callable[[str], Line],
        model: Model | None = None,
        machine: Callable[[str], str] = str,
    ) -> None:
        super().__init__(seed, settings, genesis, make_computer, model)
        self.traffic = Traffic(self.clock, self._link, line, machine)
        self.under_way = InFlightTime(self.clock)
        self.carried_bytes = defaultdict[str, float](float)
        self.given: Counter[str] = Counter()
        self.handed_on: Counter[str] = Counter()
        self.ended_circuits: list[tuple[str, frozenset[str]]] = []

    @abstractmethod
    def _link(self, sender: str, receiver: str) -> SharedLink:
        """Link from one host to another, without other traffic and without their access lines."""

    def _put_on_line(
        self,
        sender: Node,
        link: Link,
        peer: str,
        message: AnyMessage,
        size_bytes: float,
        arrived: Callable[[], None],
    ) -> None:
        """Send the payload of a message over the access lines on its way; `arrived` is called when all of it
        is there, and never if it is lost."""
        via = link.via
        if via:
            self.carried_bytes[via] += size_bytes
            self.given[via] += 1
        self.under_way.begin(sender.id)

        def there() -> None:
            self.under_way.end(sender.id)
            if via:
                self.handed_on[via] += 1
            arrived()

        self.traffic.send(sender.id, peer, size_bytes, there, PAYLOAD_PRIORITY[type(message)], via)

    def carries_work(self, host: str) -> bool:
        """True if a payload that an iteration needs (no state or probe) goes through this carrier now."""
        return any(via == host and priority <= OF_ITERATION for via, priority in self.traffic.carried())

    def _bulk_s(
        self, sender: str, receiver: str, message: AnyMessage, size: int, bulky: bool, via: str
    ) -> float:
        """Seconds that the bytes of a control message take; 0 for a message with a payload (`bulky`), which
        `traffic` models. On a carried link the bytes are added to the carrier's."""
        if bulky:
            return 0.0
        if not via:
            return 8.0 * size / self._link(sender, receiver).rate_bps
        self.carried_bytes[via] += size
        return 8.0 * size / min(self._link(sender, via).rate_bps, self._link(via, receiver).rate_bps)

    # --- faults --------------------------------------------------------------------------------

    def end_circuits(self, carrier: str) -> None:
        links = self._carried.get(carrier, ())
        self.ended_circuits += [(carrier, link.ends) for link in links if link.open]
        super().end_circuits(carrier)

    def crash(self, peer: str) -> None:
        for link in self.nodes[peer].links.values():
            self._lose_payloads(link)
        super().crash(peer)

    def hang_up(self, node: Node, peer: str, reason: str) -> None:
        link = node.links.get(peer)
        super().hang_up(node, peer, reason)
        if link is not None:
            self._lose_payloads(link)

    def replace(self, node: Node, peer: str, link: Link) -> None:
        if link.open:  # else the other end has replaced it, and may have sent over the new link already
            self._lose_payloads(link)
        super().replace(node, peer, link)

    def _break(self, link: Link, reason: str) -> None:
        self._lose_payloads(link)
        super()._break(link, reason)

    def _lose_payloads(self, link: Link) -> None:
        """Lose the payloads of a link whose last byte has not left, in both directions."""
        one, other = link.nodes
        for sender, count in self.traffic.drop(one, other, link.via).items():
            self.under_way.end(sender, count)
