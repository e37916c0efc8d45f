"""However the model is cut and the swarm is manned, the steps are the reference's, to the last bit (I3)."""

from __future__ import annotations

import itertools

import pytest

from anabranch.sim.checks.invariants import Invariants
from support.grids import every_pair
from support.swarms.small_swarm import check_equal, small_run, small_world

EVEN = {1: [2], 2: [2, 2], 4: [2, 2, 2, 2]}
UNEVEN = {1: [3], 2: [1, 3], 4: [1, 2, 1, 3]}
STAGES, DATA_NODES = (1, 2, 4), (1, 3)
#: Fleet of gpt: the protocol assigns stages without regard to the architecture, so one fleet is enough.
GPT_FLEET = (3, UNEVEN)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("architecture", "stages", "data_nodes", "replicas"),
    [
        *every_pair(["llama"], STAGES, DATA_NODES, (EVEN, UNEVEN)),
        *(
            pytest.param("gpt", stages, *fleet, marks=pytest.mark.soak if fleet != GPT_FLEET else ())
            for stages in STAGES
            for fleet in itertools.product(DATA_NODES, (EVEN, UNEVEN))
        ),
    ],
)
def test_zero_bits_differ(
    architecture: str, stages: int, data_nodes: int, replicas: dict[int, list[int]]
) -> None:
    run = small_run(architecture, stages, blocks=4)
    world = small_world(run, replicas[stages], data_nodes, seed=stages)
    invariants = Invariants(world)
    world.run()
    history = check_equal(world, run)
    assert all(commit.clip_factor < 1 for commit in history.commits)
    assert set(history.evaluations) == {0, 2, 3}
    assert sorted(world.checkpoints) == [2, 3]
    assert history.removals == 0
    assert all(len(peers) == 1 for peers in invariants.computed.values())


@pytest.mark.parametrize("policy", ["greedy", pytest.param("static", marks=pytest.mark.soak)])
def test_the_same_seed_gives_the_same_history(policy: str) -> None:
    run = small_run(policy=policy)
    worlds = [small_world(run, [2, 2], 2, seed) for seed in (5, 5, 6)]
    for world in worlds:
        world.run()
    first, again, other = worlds
    assert first.log == again.log
    assert repr(first.notes) == repr(again.notes)
    assert repr(first.notes) != repr(other.notes)
