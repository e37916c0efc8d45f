"""World whose hosts draw access lines of unlike bandwidth by the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Genesis
from anabranch.protocol.messages import AnyMessage, Burst
from anabranch.sim.kernel.simulated_peer import Link, Node, TaskExecutor
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.network.lined_world import LinedWorld
from anabranch.sim.network.shared_link import Line, SharedLink

#: Multiples of a seed's slowest line up that hosts draw, and of a host's line up for its line down. Choices.
LINE_MULTIPLES, DOWN_MULTIPLES = (1.0, 1.0, 4.0), (1.0, 4.0)


class DrawnLinesWorld(LinedWorld):
    """World in which each host has an access line, drawn by the seed.

    A payload has the bytes of an activation, a bandwidth probe its own; once all of it has left, it meets the
    delays and faults that every message meets. line_bps: bandwidth (bits per second) of the slowest lines;
    each host draws a multiple of it.
    """

    def __init__(
        self,
        line_bps: float,
        seed: int,
        settings: Settings,
        genesis: Genesis,
        make_computer: Callable[[int], TaskExecutor],
        model: Model | None,
    ) -> None:
        self._line_bps = line_bps
        self._lines: dict[str, Line] = {}
        super().__init__(seed, settings, genesis, make_computer, self._line, model)

    def _line(self, host: str) -> Line:
        if host not in self._lines:
            rng = random.Random(f"line {self.seed} {host}")
            up_bps = self._line_bps * rng.choice(LINE_MULTIPLES)
            self._lines[host] = Line(up_bps, up_bps * rng.choice(DOWN_MULTIPLES))
        return self._lines[host]

    def _link(self, sender: str, receiver: str) -> SharedLink:
        return SharedLink(0.0, min(self._line(sender).up_bps, self._line(receiver).down_bps))

    def _deliver(
        self, sender: Node, link: Link, peer: str, decoded: AnyMessage, size: int, payload: Payload | None
    ) -> None:
        deliver = partial(super()._deliver, sender, link, peer, decoded, size, payload)
        if payload is None:
            deliver()
            return
        payload_bytes = self.settings.activation_bytes
        if isinstance(decoded, Burst) and isinstance(payload, bytes):
            payload_bytes = len(payload)
        self._put_on_line(sender, link, peer, decoded, payload_bytes, deliver)
