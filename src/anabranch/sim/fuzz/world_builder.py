"""Simulated world of a drawn swarm, and the results of a single machine to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import zip_longest

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Genesis
from anabranch.protocol.messages import AnyMessage, Burst
from anabranch.protocol.rounds.plan import Plan, Slots
from anabranch.sim.checks.invariants import GroundTruth
from anabranch.sim.fuzz.seed_drawing import DrawnSeed
from anabranch.sim.kernel.simulated_peer import Link, Node, TaskExecutor
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.network.lined_world import LinedWorld
from anabranch.sim.network.shared_link import Line, SharedLink
from anabranch.sim.workers.integer_arithmetic import digest_of, fingerprint, initial, predicted
from anabranch.sim.workers.integer_world import counting_world
from anabranch.sim.workers.single_machine import carried_after, step_of

#: Multiples of a seed's slowest line up that hosts draw, and of a host's line up for its line down. Choices.
LINE_MULTIPLES, DOWN_MULTIPLES = (1.0, 1.0, 4.0), (1.0, 4.0)


def build(drawn: DrawnSeed) -> tuple[World, GroundTruth]:
    """World of a drawn swarm that is not yet running, and the single machine to compare it with."""
    world: World
    truth: GroundTruth
    if drawn.torch:
        from anabranch.sim.fuzz.tensor_world import tensor_world

        world, truth = tensor_world(drawn)
    else:
        made = partial(CarrierWorld, drawn.line_bps) if drawn.line_bps else World
        world = counting_world(drawn.settings, drawn.machines, drawn.seed, drawn.model, make_world=made)
        truth = IntegerWorld(drawn.settings)
    if drawn.profile.tickets:
        world.ticket = tuple(machine.id for machine in drawn.machines if not machine.stage)
    for one, other, factor in drawn.slow:
        world.slow[frozenset((one, other))] = factor
    return world, truth


class CarrierWorld(LinedWorld):
    """World of a seed with access lines. A payload has the bytes of an activation, a bandwidth probe its own;
    once all of it has left, it meets the delays and faults that every message meets. line_bps: bandwidth of
    the slowest lines. Each host draws a multiple of it."""

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


class IntegerWorld:
    """Results of a single machine with integer workers. The key of a state (see `GroundTruth`) is the tuple
    of all stages' states, of what the next iteration computes with if it is delayed (else empty), and of what
    slots carry from the last round."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.first: object = tuple(map(initial, range(settings.stages + 1))), (), ()

    def after(self, key: object, t: int, stepped: bool, slots: Slots, plan: Plan) -> object:
        assert isinstance(key, tuple)
        states, seen, carried = key
        ahead = tuple(map(predicted, states)) if self._settings.delay.has(t + 1) else ()
        following = carried_after(self._settings, states, plan, carried)
        if stepped:
            states = step_of(self._settings, t, states, slots, carried, seen).states
        return states, ahead, following

    def fingerprints(self, key: object, t: int) -> tuple[str, ...]:
        assert isinstance(key, tuple)
        states, seen, _ = key
        return tuple(fingerprint(t, state, ahead) for state, ahead in zip_longest(states, seen))

    def step(self, key: object, t: int, slots: Slots) -> tuple[tuple[str, ...], tuple[float, ...]]:
        assert isinstance(key, tuple)
        step = step_of(self._settings, t, key[0], slots, key[2], key[1])
        return tuple(map(digest_of, step.gradients)), step.losses
