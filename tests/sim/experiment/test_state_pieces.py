"""Pieces of simulated states: of one size in all stages, and no more than a joiner believes of an offer."""

from __future__ import annotations

import pytest

from anabranch.net.wan.profile import find_profile
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.protocol.messages import StateOffer
from anabranch.protocol.state.download import Download, State
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.initial_placement import placed
from anabranch.sim.experiment.modelled_world import PIECES_MAX, pieces_of, settings_of


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("wan10", {}),
        ("volunteers", {}),
        ("volunteers", {"model.stages": 0, "round.slots": 4}),
        ("volunteers-8b", {"round.slots": 4}),
        ("volunteers-8b", {"round.slots": 4, "model.subspace": 512}),
    ],
)
def test_joiners_believe_the_offers_of_all_stages(name: str, changes: dict[str, object]) -> None:
    scenario = load_scenario(name, changes)
    work = scenario.work
    settings = settings_of(placed(scenario, find_profile(scenario.network.profile), 0), "auction")
    for stage in range(work.stages + 1):
        pieces = pieces_of(work, stage)
        assert pieces <= PIECES_MAX
        ctx, failed = make_context("a", 1, stage, settings, "d"), list[str]()
        done = list[State]()
        download = Download(ctx, stage, 3, ["b"], done.append, failed.append)
        download.start()
        download.on_offer("b", StateOffer(stage, 3, "f", pieces, tuple(map(str, range(pieces)))))
        assert not failed
        assert download.sources["b"].asked
        if work.parameters(stage):
            whole = work.state_bytes * work.parameters(stage)
            assert whole / pieces <= max(PIECE_BYTES, settings.piece_bytes)
