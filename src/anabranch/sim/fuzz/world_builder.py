"""Simulated world of a drawn swarm, and the results of a single machine to compare with."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.rounds.plan import Plan, Slots
from anabranch.sim.checks.invariants import GroundTruth
from anabranch.sim.fuzz.seed_drawing import DrawnSeed
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.network.drawn_lines_world import DrawnLinesWorld
from anabranch.sim.workers.integer_arithmetic import digest_of, fingerprint, initial, predicted
from anabranch.sim.workers.integer_world import counting_world
from anabranch.sim.workers.single_machine import carried_after, step_of


def build(drawn: DrawnSeed) -> tuple[World, GroundTruth]:
    """(world of a drawn swarm, not yet running; results of a single machine to compare it with)."""
    world: World
    truth: GroundTruth
    if drawn.torch:
        from anabranch.sim.fuzz.tensor_world import tensor_world

        world, truth = tensor_world(drawn)
    else:
        made = partial(DrawnLinesWorld, drawn.line_bps) if drawn.line_bps else World
        world = counting_world(drawn.settings, drawn.machines, drawn.seed, drawn.model, make_world=made)
        truth = IntegerWorld(drawn.settings)
    if drawn.profile.tickets:
        world.ticket = tuple(machine.id for machine in drawn.machines if not machine.stage)
    for one, other, factor in drawn.slow:
        world.slow[frozenset((one, other))] = factor
    return world, truth


class IntegerWorld:
    """Results of a single machine with integer workers (methods: see `GroundTruth`). The key of a state is a
    tuple of three: states of all stages; predicted states with which the next iteration computes if it is
    delayed (else empty); states that slots carry from the last round."""

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
