"""Presets of the run file: each is a valid run with its source in the file and the mechanism it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.cli.chaos import MOST_ISLANDS, ROUND_STEPS, configured
from anabranch.cli.main import main
from anabranch.config import load_run_file, relays_by_stage
from anabranch.train.model.rounds import rounds_of
from anabranch.train.recipes.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_run_that_names_its_source(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), "--preset", name]) == 0
    run, preset = load_run_file(path), PRESETS[name]
    assert preset.source in path.read_text() and preset.differs in path.read_text()
    for key, value in preset.settings.items():
        section, _, field = key.partition(".")
        found = getattr(getattr(run, section), "return_" if field == "return" else field)
        assert found == (tuple(value) if isinstance(value, list) else value), key
    if run.round.slots:
        assert run.pipeline.stages != 1 and run.batch.microbatches % run.round.slots == 0
        assert set(relays_by_stage(run)) == {run.round.slots}
        assert rounds_of(run).has(rounds_of(run).iterations(run.run.steps))


def test_an_option_is_stronger_than_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), "--preset", "diloco", "--steps", "5000", "--relays", "3"]) == 0
    run = load_run_file(path)
    assert (run.run.steps, run.fleet.relays, run.round.steps) == (5000, 3, 500)


def test_clusters_get_a_machine_for_each_stage_and_a_data_node(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), "--preset", "ravnest", "--stages", "3"]) == 0
    run = load_run_file(path)
    assert relays_by_stage(run) == (4, 4, 4) and run.fleet.data_nodes == 4


@pytest.mark.parametrize("name", PRESETS)
def test_chaos_has_one_machine_more_than_islands_need_at_each_stage(name: str) -> None:
    run = configured(None, None, name)
    if run.round.slots:
        assert set(relays_by_stage(run)) == {run.round.slots + 1}
        assert run.round.slots <= MOST_ISLANDS and run.round.steps <= ROUND_STEPS
