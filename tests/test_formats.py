"""The pages of file formats keep up with the code."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from pathlib import Path

import msgspec

from anabranch.checkpoint.directory import CheckpointManifest, StageFile
from anabranch.config import CONSTRAINTS, RunConfig
from anabranch.config.constraints import OneOf, Range
from anabranch.node.lifecycle.gate_file import ExpelledPeer, GateRecord, IssuedTicket
from anabranch.observe.events import KINDS
from anabranch.observe.view.peers import NODES_MAX
from anabranch.observe.view.recording import FRAMES_MAX, Recording
from anabranch.observe.view.run_view import EVALUATIONS_MAX, STEPS_MAX, STORY_MAX
from anabranch.observe.view.story import SUBJECTS
from anabranch.observe.view.time_series import HELD_OUT_COLUMNS, STEP_COLUMNS
from anabranch.protocol.log import records
from anabranch.sim.cluster.machine_spec import MachinePart
from anabranch.sim.cluster.scenario import Scenario
from anabranch.sim.cluster.scenario_schema import type_and_constraint
from anabranch.sim.fuzz.summary import Cell, Failure, FuzzSummary
from anabranch.sim.metrics.iteration_metrics import FIGURES, Row, Summary
from anabranch.sim.metrics.iteration_metrics import Outcome as SimulatedRun
from anabranch.sim.metrics.trial_result import DeliveredFaults, Outcome

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def page(name: str, section: str = "") -> str:
    """Text of a page, or of one section of its second level."""
    text = (REFERENCE / f"{name}.md").read_text(encoding="utf-8")
    return text.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0] if section else text


def row(first_cell: str, text: str) -> str:
    """The one table row of `text` that begins with this cell."""
    rows = [line for line in text.splitlines() if line.startswith(f"| `{first_cell}` |")]
    assert len(rows) == 1, f"{first_cell} has {len(rows)} rows"
    return rows[0]


def test_every_key_of_the_run_file_is_listed_with_its_default_and_choices() -> None:
    sys.path.insert(0, str(REFERENCE.parent))
    from generate.run_file_reference import keys

    sections = keys().split("## [")[1:]
    for section, text in zip(dataclasses.fields(RunConfig), sections, strict=True):
        assert text.startswith(f"{section.name}]")
        values = getattr(RunConfig(), section.name)
        for field in dataclasses.fields(values):
            name, value = field.name.rstrip("_"), getattr(values, field.name)
            _, _, default, allowed, meaning, _ = row(name, text).split(" | ".strip())[:6]
            assert default.strip() == ("not set" if value is None else f"`{json.dumps(value)}`")
            assert meaning.strip(), f"{section.name}.{name}"
            if isinstance(constraint := CONSTRAINTS.get(f"{section.name}.{name}"), OneOf):
                assert allowed.strip() == ", ".join(f'`"{choice}"`' for choice in constraint.choices)


def test_every_event_is_listed_with_its_fields() -> None:
    for kind in KINDS:
        line = row(str(msgspec.inspect.type_info(kind).tag), page("event-log"))  # type: ignore[attr-defined]
        for field in kind.__struct_fields__:
            if field not in ("time", "peer", "version"):
                assert f"`{field}`" in line, f"{kind.__name__}.{field}"


def test_every_key_of_a_checkpoint_is_named() -> None:
    section = page("run-directory", "Checkpoint")
    for field in (*CheckpointManifest.__struct_fields__, *StageFile.__struct_fields__):
        assert f"`{field}`" in section


def test_every_record_of_the_log_is_listed_with_its_fields() -> None:
    for kind in typing.get_args(records.AnyRecord):
        line = row(str(msgspec.inspect.type_info(kind).tag), page("commit-log"))  # type: ignore[attr-defined]
        for field in kind.__struct_fields__:
            assert f"`{field}`" in line, f"{kind.__name__}.{field}"


def test_every_key_of_a_simulation_result_is_listed() -> None:
    section = page("json-results", "Simulation result")
    for field in (*FuzzSummary.__struct_fields__, *Failure.__struct_fields__, *Cell.__struct_fields__):
        assert f"`{field}`" in section, field
    for field in (*Outcome.__struct_fields__, *DeliveredFaults.__struct_fields__):
        assert f"`{field}`" in section, field


def test_every_key_of_a_scenario_is_listed_with_its_default_and_range() -> None:
    hints = typing.get_type_hints(Scenario)
    parts = [part for part in hints if part not in ("name", "machines")]
    for key in (f"{part}.{key.name}" for part in parts for key in dataclasses.fields(hints[part])):
        part, _, name = key.partition(".")
        default = getattr(getattr(Scenario(), part), name)
        _, _, said, allowed, _, _ = row(key, page("scenario")).split("|")
        assert said.strip() == f"`{json.dumps(default)}`", key
        check_range(type(getattr(Scenario(), part)), name, allowed)


def check_range(section: type, key: str, said: str) -> None:
    """Check the range that the page says against that of a key of a scenario."""
    _, constraint = type_and_constraint(typing.get_type_hints(section, include_extras=True)[key])
    if isinstance(constraint, Range):
        assert said.strip() == f"{constraint.low:g} … {constraint.high:g}", key


def test_every_key_of_a_machine_is_listed_with_its_default_and_range() -> None:
    for field in dataclasses.fields(MachinePart):
        key = f"machines.{field.name}"
        _, _, said, allowed, _, _ = row(key, page("scenario")).split("|")
        assert said.strip() == f"`{json.dumps(field.default)}`", key
        check_range(MachinePart, field.name, allowed)


def test_every_key_of_a_simulated_iteration_is_listed() -> None:
    section = page("json-results", "Simulated iterations")
    structs = (Row, SimulatedRun, Summary)
    for field in (*FIGURES, *(field for kind in structs for field in kind.__struct_fields__)):
        assert f"`{field}`" in section, field


def test_the_recording_is_described_as_it_is() -> None:
    section = page("event-log", "Recording")
    for name in (*Recording().document(), *STEP_COLUMNS, *HELD_OUT_COLUMNS, *SUBJECTS):
        assert f"`{name}`" in section, name
    for most in (FRAMES_MAX, STEPS_MAX, EVALUATIONS_MAX, STORY_MAX, NODES_MAX):
        assert f" {most:,}" in section, most


def test_every_key_of_the_gate_record_is_named() -> None:
    section = page("run-directory", "Gate")
    for struct in (GateRecord, IssuedTicket, ExpelledPeer):
        for field in struct.__struct_fields__:
            assert f"`{field}`" in section, f"{struct.__name__}.{field}"


def test_every_key_of_a_member_is_listed_in_its_record() -> None:
    line = row("members", page("commit-log"))
    for field in records.Member.__struct_fields__:
        assert f"`{field}`" in line, field
