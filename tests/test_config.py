"""The run file: what it holds, and how it refuses what it cannot use."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import config as configuration
from anabranch.config import (
    CONSTRAINTS,
    ConfigError,
    Range,
    RunConfig,
    check_fleet_holds,
    check_removed_options,
    config_from_dict,
    config_to_dict,
    load_run_file,
    relays_by_stage,
    render_run_file,
    with_changes,
)
from anabranch.config.load import parse_toml


def refused(changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        with_changes(RunConfig(), changes, where="run.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message


def test_the_written_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    config = with_changes(
        RunConfig(),
        {
            "run.name": "a.b-c",
            "model.dim": 256,
            "model.tied": False,
            "pipeline.blocks_per_stage": [2, 1, 1],
            "fleet.relays_per_stage": [3, 1, 2],
            "routing.return": "own",
            "optimizer.lr": 1,
            "data.text_field": 'a "quoted" \\ näme\n\x7f',
        },
    )
    path = tmp_path / "run.toml"
    path.write_text(render_run_file(config), encoding="utf-8")
    assert load_run_file(path) == config
    assert config.routing.return_ == "own"
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)


@settings(deadline=None, max_examples=50)
@given(st.text(), st.floats(1e-12, 1e3), st.integers(0, 2**63 - 1), st.one_of(st.none(), st.booleans()))
def test_any_values_survive_the_file(text: str, rate: float, seed: int, tied: bool | None) -> None:
    config = RunConfig()
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, seed=seed),
        model=dataclasses.replace(config.model, tied=tied, initial_weights=text),
        optimizer=dataclasses.replace(config.optimizer, lr=rate),
    )
    assert config_from_dict(parse_toml(render_run_file(config))) == config
    assert config_from_dict(config_to_dict(config)) == config


def test_every_key_is_written_below_its_sentence() -> None:
    lines = render_run_file(RunConfig()).splitlines()
    for section in dataclasses.fields(RunConfig):
        for field in dataclasses.fields(getattr(RunConfig(), section.name)):
            key = field.name.rstrip("_")
            at = [n for n, line in enumerate(lines) if line.lstrip("#").startswith(f"{key} =")]
            assert at, f"{section.name}.{key} is not written"
            assert all(lines[n - 1].startswith("# ") and len(lines[n - 1]) > 10 for n in at), key


def test_every_number_has_a_range() -> None:
    types = {
        f"{section.name}.{name.rstrip('_')}": str(kind)
        for section in dataclasses.fields(RunConfig)
        for name, kind in typing.get_type_hints(type(getattr(RunConfig(), section.name))).items()
    }
    numbers = {key for key, kind in types.items() if "int" in kind or "float" in kind}
    assert len(numbers) > 40
    assert numbers == {key for key, constraint in CONSTRAINTS.items() if isinstance(constraint, Range)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run.sede": 3}, ["unknown key run.sede", "did you mean `seed`"]),
        ({"batch.zzz": 3}, ["unknown key batch.zzz", "microbatches, rows, sequence"]),
        ({"optimiser.lr": 1.0}, ["unknown section [optimiser]", "did you mean `optimizer`"]),
        ({"routing.return_": "any"}, ["unknown key routing.return_", "did you mean `return`"]),
        ({"routing.policy": "optimal"}, ['choose one of "auction"', 'only "anabranch route" has that']),
        ({"run.steps": "many"}, ["run.steps must be a whole number", "'many'"]),
        ({"run.steps": 1.5}, ["run.steps must be a whole number"]),
        ({"run.steps": True}, ["run.steps must be a whole number"]),
        ({"optimizer.lr": float("nan")}, ["optimizer.lr must be a finite number"]),
        ({"model.tied": 1}, ["model.tied must be true or false"]),
        ({"run.name": 7}, ["run.name must be a string"]),
        ({"fleet.relays_per_stage": 3}, ["fleet.relays_per_stage must be a list of whole numbers"]),
        ({"fleet.relays_per_stage": [1, "2", 3]}, ["fleet.relays_per_stage must be a list"]),
        ({"run.steps": 0}, ["run.steps is 0", "at least 1"]),
        ({"run.seed": -1}, ["run.seed is -1", "at least 0"]),
        ({"optimizer.beta2": 1}, ["optimizer.beta2 is 1", "less than 1"]),
        ({"optimizer.min_lr_ratio": 1.1}, ["at least 0 and at most 1"]),
        ({"optimizer.lr": 0}, ["optimizer.lr is 0", "more than 0"]),
        ({"network.port": 70000}, ["network.port is 70000", "at most 65535"]),
        ({"fleet.data_nodes": 0}, ["fleet.data_nodes is 0"]),
        ({"fleet.relays_per_stage": [2, 0, 2]}, ["fleet.relays_per_stage is 0"]),
        ({"run.reduction": "exakt"}, ['run.reduction is "exakt"', '"exact", "fast"']),
        ({"routing.return": "both"}, ['"any", "own"']),
        ({"run.name": "../x"}, ["run.name", "folder name"]),
        ({"compute.device": "gpu"}, ["compute.device", "cuda:N"]),
        ({"network.advertise": "example.org"}, ["network.advertise", "host:port"]),
        ({"network.advertise": "example.org:70000"}, ["network.advertise", "1..65535"]),
        ({"network.host": "0.0.0.0"}, ['network.host is "0.0.0.0"', "set network.advertise"]),
        ({"pipeline.blocks_per_stage": [1, 2]}, ["2 numbers for pipeline.stages = 3"]),
        ({"model.blocks": 2}, ["pipeline.stages 3 is more than model.blocks 2"]),
        ({"model.blocks": 4, "pipeline.blocks_per_stage": [1, 1, 1]}, ["sums to 3", "model.blocks is 4"]),
        ({"fleet.relays": 2}, ["fleet.relays 2 cannot fill pipeline.stages 3"]),
        ({"fleet.relays_per_stage": [2, 2]}, ["fleet.relays_per_stage has 2 numbers"]),
        ({"fleet.minimum": 3}, ["fleet.minimum 3 is never reached", "only 2"]),
        ({"model.dim": 100, "model.heads": 3}, ["model.dim 100 is not a multiple of model.heads 3"]),
        ({"model.heads": 4, "model.kv_heads": 3}, ["not a multiple of model.kv_heads 3"]),
        ({"model.subspace": 8, "model.tied": True}, ["model.tied does not work with model.subspace"]),
        (
            {"model.subspace": 8, "model.initial_weights": "folder"},
            ["model.subspace does not work with model.initial_weights", "no dense model fits"],
        ),
        ({"model.max_sequence": 64}, ["batch.sequence 128 is longer than model.max_sequence 64"]),
        ({"data.source": "text"}, ["data.path is empty"]),
        ({"data.source": "web"}, ['"web"', "stdlib", "parquet", "dataset"]),
        ({"data.vocab_size": 256}, ["data.vocab_size", "at least 257"]),
        ({"pipeline.stages": -1}, ["pipeline.stages", "at least 0"]),
        ({"pipeline.stages": 1, "round.slots": 4}, ["round.slots works with pipeline.stages = 0"]),
        ({"round.slots": 4, "round.late": "wait"}, ['round.late = "wait"', "islands of one machine"]),
        ({"round.slots": 4, "wire.reduce": "coarse"}, ["wire.reduce does not work with round.slots"]),
        (
            {"pipeline.stages": 0, "round.slots": 4, "round.ahead": "keep"},
            ['round.ahead = "keep" needs round.overlap'],
        ),
        (
            {"pipeline.stages": 0, "round.slots": 4, "round.first_moment": "agree"},
            ["needs round.outer_momentum = 0"],
        ),
        (
            {
                **{"pipeline.stages": 0, "round.slots": 4, "round.first_moment": "agree"},
                **{"round.outer_momentum": 0.0, "round.unsent": "local", "round.overlap": 1},
            },
            ['round.overlap needs round.unsent = "local" and round.first_moment = "keep"'],
        ),
        (
            {
                **{"pipeline.stages": 0, "round.slots": 4, "round.first_moment": "agree"},
                **{"round.outer_momentum": 0.0, "optimizer.beta2": 0.9, "round.steps": 11},
            },
            ["needs round.steps of at most 10 here"],
        ),
        ({"pipeline.stages": 0, "round.slots": 3}, ["round.slots 3 does not divide batch.microbatches 8"]),
        ({"pipeline.stages": 0, "pipeline.blocks_per_stage": [3]}, ["blocks_per_stage is for relay stages"]),
        ({"data.private": True}, ["data.private needs pipeline.stages = 0"]),
        ({"data.private": True, "round.slots": 4}, ["data.private needs pipeline.stages = 0"]),
        ({"data.private": True, "pipeline.stages": 0}, ["data.private is for rounds", "set round.slots"]),
        (
            {"data.private": True, "pipeline.stages": 0, "round.slots": 4, "audit.share": 0.5},
            ["audit.share does not work with data.private"],
        ),
        (
            {"pipeline.stages": 2, "round.slots": 4, "audit.share": 0.5},
            ["audit.share does not work with islands of several machines"],
        ),
        *(
            ({"pipeline.stages": 0, "round.slots": 4, "audit.share": 0.5, f"round.{key}": value}, [key])
            for key, value in (
                *(("first_moment", "keep"), ("unsent", "local"), ("unsent", "feedback")),
                *(("select", "largest"), ("select", "significant"), ("late", "carry")),
            )
        ),
        ({"pipeline.blocks_per_stage": [2, 2, 0]}, ["pipeline.blocks_per_stage", "at least 1"]),
        ({"model.vocab_size": 300}, ["model.vocab_size 300 is smaller", "512"]),
        ({"optimizer.decay_steps": 10}, ["optimizer.decay_steps 10 ends before"]),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], words: list[str]) -> None:
    message = refused(changes)
    for word in words:
        assert word in message


@pytest.mark.parametrize("header", [None, {}, {"version": 2}, {"version": True}, {"version": "1"}, 1])
def test_another_version_is_refused(header: Any) -> None:
    with pytest.raises(ConfigError, match=r"anabranch\.version"):
        config_from_dict({} if header is None else {"anabranch": header})


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match="no such run file; `anabranch init"):
        load_run_file(path)
    path.write_text("[run\nseed = 1")
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML.*line 1"):
        load_run_file(path)
    path.write_text("[run]\nseed = " + "9" * 5000)
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML.*4300"):
        load_run_file(path)
    for key in ("[run]\nseed", "[run]\nsteps", "[fleet]\nrelays_per_stage", "[optimizer]\nlr"):
        value = "9" * 400
        path.write_text(f"[anabranch]\nversion = 1\n{key} = {f'[{value}]' if 'per_stage' in key else value}")
        with pytest.raises(ConfigError, match="must be a"):
            load_run_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run_file(path)
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory$"):
        load_run_file(tmp_path)


def test_a_key_outside_a_section_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run must be a section: write \[run\]"):
        config_from_dict({"anabranch": {"version": 1}, "run": 3})


def test_relays_spread_over_stages() -> None:
    assert relays_by_stage(RunConfig()) == (2, 2, 2)
    assert relays_by_stage(with_changes(RunConfig(), {"fleet.relays": 7})) == (3, 2, 2)
    assert relays_by_stage(with_changes(RunConfig(), {"fleet.relays_per_stage": [1, 4, 1]})) == (1, 4, 1)


def test_a_batch_is_refused_where_its_boundaries_do_not_fit() -> None:
    # 9 microbatches over 2 data nodes: the fuller one keeps 5 x 4 tensors x 1,000 bytes.
    fitting = with_changes(
        RunConfig(),
        {"batch.microbatches": 9, "fleet.relays": 9, "fleet.boundary_budget_bytes": 5 * 4 * 1000},
    )
    check_fleet_holds(fitting, activation_bytes=1000)
    with pytest.raises(ConfigError) as caught:
        check_fleet_holds(fitting, activation_bytes=1001)
    message = str(caught.value)
    for words in ("stage 0", "each of 2 data nodes", "5 of 9 microbatches", "5 x 4 tensors", "20020"):
        assert words in message
    assert "fleet.data_nodes to 3" in message

    relays = with_changes(fitting, {"fleet.data_nodes": 3, "fleet.relays_per_stage": [3, 1, 3]})
    with pytest.raises(ConfigError, match=r"stage 2 each of 1 relays keeps .* 9 of 9"):
        check_fleet_holds(relays, activation_bytes=1000)
    with pytest.raises(ConfigError, match=r"or lower batch\.rows$"):
        check_fleet_holds(relays, activation_bytes=1_000_000)


def test_the_auction_refuses_return_to_own_data_nodes() -> None:
    """Where a run begins; a run file of an earlier release is still read, so that it can be verified."""
    run = with_changes(RunConfig(), {"routing.return": "own"})
    with pytest.raises(ConfigError, match=r'set routing\.return = "any", or routing\.policy = "gwtf"'):
        check_removed_options(run)
    check_removed_options(with_changes(run, {"routing.policy": "gwtf"}))
    check_removed_options(with_changes(run, {"routing.return": "any"}))


def test_kept_gradients_are_refused_by_name() -> None:
    run = with_changes(RunConfig(), {"snapshots.redo": "gradients"})
    with pytest.raises(ConfigError, match=r'snapshots\.redo = "gradients" was removed; set "replay"'):
        check_removed_options(run)


def test_the_public_names_are_there() -> None:
    for name in configuration.__all__:
        assert hasattr(configuration, name)
