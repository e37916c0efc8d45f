"""Simulated world of a drawn swarm, and the results of a single machine to compare with."""

from __future__ import annotations

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.rounds.plan import Slots
from anabranch.sim.checks.invariants import GroundTruth
from anabranch.sim.fuzz.seed_drawing import DrawnSeed
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import (
    batch_of,
    counting_world,
    digest_of,
    fingerprint,
    initial,
    single_machine,
)


def build(drawn: DrawnSeed) -> tuple[World, GroundTruth]:
    """World of a drawn swarm that is not yet running, and the results of a single machine."""
    world: World
    truth: GroundTruth
    if drawn.torch:
        from anabranch.sim.fuzz.tensor_world import tensor_world

        world, truth = tensor_world(drawn)
    else:
        world = counting_world(drawn.settings, drawn.machines, drawn.seed, drawn.model)
        truth = IntegerWorld(drawn.settings)
    for one, other, factor in drawn.slow:
        world.slow[frozenset((one, other))] = factor
    return world, truth


class IntegerWorld:
    """Results of a single machine with integer workers. The key of a state (see `GroundTruth`) is the tuple
    of all stages' states."""

    def __init__(self, settings: Settings) -> None:
        self._microbatches = settings.microbatches
        self.first: object = tuple(map(initial, range(settings.stages + 1)))

    def after(self, key: object, t: int, stepped: bool, slots: Slots) -> object:
        assert isinstance(key, tuple)
        return single_machine(t, key, batch_of(t, self._microbatches, slots)).states if stepped else key

    def fingerprints(self, key: object, t: int) -> tuple[str, ...]:
        assert isinstance(key, tuple)
        return tuple(fingerprint(t, state) for state in key)

    def step(self, key: object, t: int, slots: Slots) -> tuple[tuple[str, ...], tuple[float, ...]]:
        assert isinstance(key, tuple)
        step = single_machine(t, key, batch_of(t, self._microbatches, slots))
        return tuple(map(digest_of, step.gradients)), step.losses
