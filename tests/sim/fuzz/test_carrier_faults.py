"""Seeds of `anabranch simtest` with carriers: lines that they share, and faults that hit them at work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from anabranch.protocol.log.records import Commit, Rollback, decode_entry
from anabranch.sim.fuzz.fault_kinds import CARRIER_KINDS, PROFILES
from anabranch.sim.fuzz.peer_phases import CARRYING
from anabranch.sim.fuzz.seed_drawing import draw, profile_of
from anabranch.sim.fuzz.trial import STEPS_AFTER, SeedTrial
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.network.lined_world import LinedWorld
from support.grids import first_of


def test_every_seed_of_the_profile_has_carriers_with_lines() -> None:
    drawn = [draw(seed, "carriers") for seed in range(100)]
    for each in drawn:
        stages = Counter(machine.stage for machine in each.machines)
        assert min(stages.values()) > 1 and each.line_bps and not each.torch
        assert len(each.aims) >= 2 and {aim.phase for aim in each.aims} == {CARRYING}
    assert sum(any(not machine.reachable for machine in each.machines) for each in drawn) == len(drawn)
    assert {aim.kind for each in drawn for aim in each.aims} == set(CARRIER_KINDS)
    assert len({each.line_bps for each in drawn}) > 1


def test_of_the_other_seeds_some_with_hidden_relays_have_lines() -> None:
    """Each profile with faults aims one more at a carrier there. Seeds that tests kept before have none
    (LINES_SALT)."""
    drawn = [draw(seed, profile_of(seed)) for seed in range(1200)]
    lined = [each for each in drawn if each.line_bps]
    hidden = [each for each in drawn if any(not machine.reachable for machine in each.machines)]
    assert all(each in hidden for each in lined) and 0.2 < len(lined) / len(hidden) < 0.4
    assert {each.profile.name for each in lined} == set(PROFILES)
    for each in drawn:
        carrying = sum(aim.phase == CARRYING for aim in each.aims)
        assert carrying == bool(each.line_bps and each.profile.kinds)
    assert not any(draw(seed, "hostile").line_bps for seed in (303, 1406, 1096, 283, 6200334, 8300012))


@pytest.mark.parametrize("seed", first_of([7, 9, 11, 5, 15, 3, 6, 18], 3))
def test_carriers_die_and_crawl_while_they_carry_and_no_step_is_lost(seed: int) -> None:
    """Each fault hit a peer over which payloads of an iteration were under way; the dead carrier's circuits
    broke, and what was on them was lost. The log has one commit for each step (C1 to C3, I1 to I6)."""
    trial = SeedTrial(draw(seed, "carriers"))
    world, lost = trial.world, []
    assert isinstance(world, LinedWorld)
    strike, drop = trial.strike, world.traffic.drop

    def seen(kind: str, node: Node, aimed: str = "") -> bool:
        assert kind in CARRIER_KINDS and aimed == CARRYING and world.carries_work(node.id)
        before, ended = len(lost), len(world.ended_circuits)
        done = strike(kind, node, aimed)
        if done and kind == "carrier crash":
            assert {carrier for carrier, _ in world.ended_circuits[ended:]} == {node.id}
            assert node.id in lost[before:] and not world.carries_work(node.id)
        return done

    def dropped(one: str, other: str, via: str = "") -> dict[str, int]:
        found = drop(one, other, via)
        lost.extend([via] * sum(found.values()))
        return found

    trial.strike = seen  # type: ignore[method-assign]
    world.traffic.drop = dropped  # type: ignore[method-assign]
    outcome = trial.run()
    assert not outcome.violation and not outcome.unmet
    assert outcome.faults and outcome.steps >= STEPS_AFTER
    records = [decode_entry(line).record for line in world.log]
    assert [record.t for record in records if isinstance(record, Commit)] == [*range(1, outcome.steps + 1)]
    assert not any(isinstance(record, Rollback) for record in records)


def test_narrow_lines_of_carriers_make_steps_longer() -> None:
    """The same swarm without faults, over lines of 25 Mbit/s and of 40 Gbit/s."""
    drawn = replace(draw(0, "carriers"), aims=())
    narrow, wide = (SeedTrial(replace(drawn, line_bps=bps)) for bps in (2.5e7, 4e10))
    slow, quick = narrow.run(), wide.run()
    assert not slow.violation and not quick.violation and slow.steps == quick.steps
    assert slow.virtual_s > 2.0 * quick.virtual_s
    assert isinstance(narrow.world, LinedWorld) and sum(narrow.world.handed_on.values()) > 0


def test_the_story_names_lines_and_the_carrier(capsys: pytest.CaptureFixture[str]) -> None:
    from anabranch.cli.main import main

    assert main(["simtest", "--trace", "11", "--profile", "carriers"]) == 0
    told = capsys.readouterr().out
    assert "nobody can dial" in told and "Mbit/s on" in told and "which carries for others" in told
