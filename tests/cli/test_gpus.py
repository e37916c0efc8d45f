"""Several GPUs: `join --device`, `join --gpus`, `doctor`. There is none here: torch's answers are
replaced."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from anabranch.cli.main import build_parser, main
from anabranch.cli.support import gpus
from anabranch.config import RunConfig, load_run_file, render_run_file, with_changes
from anabranch.errors import UserError
from anabranch.net.identity import Identity
from anabranch.net.ticket import PeerAddress, issue_ticket
from anabranch.node.lifecycle.training_machine import TrainingMachine
from anabranch.protocol.log.records import Member
from anabranch.train.devices.placement import SplitVector
from anabranch.train.model.sizes import ModelConfig, block_parameters, end_parameters, model_config
from anabranch.train.numerics import numerics_class
from anabranch.train.workers import machine_capacity
from anabranch.train.workers.machine_capacity import check_ends_fit, check_fit, measured_capacity
from support.local_swarms import created, small_run, write_texts

#: Child process in place of `anabranch`: prints its arguments and ends with the status at the end of them.
ECHO = (
    sys.executable, "-c",
    "import os, sys; print(*sys.argv[1:], os.environ['ANABRANCH_TICKET']); sys.exit(int(sys.argv[-1]))",
)  # fmt: skip


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    named = {0: "Alpha", 1: "Beta"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(name=named[n]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (n << 30, 24 << 30))


def parsed(*options: str) -> argparse.Namespace:
    words = ["join", "TICKET", *options]
    found = build_parser(words).parse_args(words)
    found.ticket = "".join(found.ticket)
    return found


@pytest.mark.usefixtures("two_gpus")
def test_one_peer_joins_for_each_gpu() -> None:
    options = ("--gpus", "all", "--name", "ada", "--region", "London", "--quiet", "--max-up", "8")
    args = parsed(*options, "--host", "0.0.0.0", "--port", "7700", "--advertise", "my.host:7800")
    assert gpus.chosen_gpus(args.gpus) == [0, 1]
    first, second = gpus.join_commands(args, [0, 1], Path("/home/ada/run"))
    children = [build_parser(command).parse_args(command) for command in (first, second)]
    assert [child.device for child in children] == ["cuda:0", "cuda:1"]
    assert [child.name for child in children] == ["ada-gpu0", "ada-gpu1"]
    assert [child.port for child in children] == [7700, 7701]
    assert [child.advertise for child in children] == ["my.host:7800", "my.host:7801"]
    assert [child.home for child in children] == [Path("/home/ada/run/gpu-0"), Path("/home/ada/run/gpu-1")]
    for child in children:
        assert child.max_up == 4.0, "they share the line"
        assert (child.ticket, child.region, child.host) == ([], "London", "0.0.0.0")
        assert child.quiet
        assert child.gpus == ""


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_are_not_here_are_named() -> None:
    assert gpus.chosen_gpus("1,0,1") == [0, 1]
    gpus.check_device("cuda:1")
    for text, words in (("0,2", "^--gpus 0,2: torch finds 2 GPUs"), ("some", "numbers with commas")):
        with pytest.raises(UserError, match=words):
            gpus.chosen_gpus(text)
    with pytest.raises(UserError, match='write "auto"'):
        gpus.check_device("gpu1")


@pytest.mark.usefixtures("two_gpus")
def test_several_devices_of_one_peer_are_checked_one_by_one() -> None:
    gpus.check_device("cuda:0,cuda:1")
    gpus.check_device("cpu:0,cpu:1")
    for text, words in (
        ("cuda:0,cuda:2", "--device cuda:2: torch finds 2 GPUs"),
        ("cuda:1,cuda:1", "names cuda:1 twice"),
        ("cpu:0,cuda:0", "mixes cpu and cuda"),
        ("cuda,cuda:1", "or several with commas"),
    ):
        with pytest.raises(UserError, match=words):
            gpus.check_device(text)


#: Bytes.
GIB = 1 << 30


@pytest.fixture
def gpus_with_memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Free bytes of each GPU, by number, as torch will tell them."""
    free = {0: 24 * GIB, 1: 24 * GIB}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index or 0], 24 * GIB))
    alpha = SimpleNamespace(name="Alpha", total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: alpha)
    return free


def large_run(device: str) -> tuple[RunConfig, ModelConfig]:
    """Run of two stages of eight blocks, and its model."""
    changes = {"compute.device": device, "pipeline.stages": 2, "batch.rows": 1, "batch.sequence": 64}
    run = with_changes(RunConfig(), {"model.dim": 4096, "model.ffn": 14336, "model.blocks": 16, **changes})
    return run, model_config(run.model, 1000)


def test_a_stage_must_fit_the_memory_of_its_devices(gpus_with_memory: dict[int, int]) -> None:
    run, model = large_run("cuda:0")
    need = block_parameters(model) * 24
    with pytest.raises(UserError, match=r"cuda:0 has 24.0 GiB free, and its 8 blocks .*cuda:0,cuda:1"):
        check_fit(run, model)
    gpus_with_memory[0] = 9 * need
    check_fit(run, model)
    run, model = large_run("cuda:0,cuda:1")
    gpus_with_memory.update({0: 5 * need, 1: 5 * need})
    check_fit(run, model)
    gpus_with_memory[1] = 4 * need
    with pytest.raises(UserError, match=r"cuda:1 has .* its 4 blocks"):
        check_fit(run, model)


@pytest.mark.parametrize(("rules", "more"), [({}, 28), ({"round.first_moment": "keep"}, 44)])
def test_an_island_must_fit_beside_its_stage(
    gpus_with_memory: dict[int, int], rules: dict[str, object], more: int
) -> None:
    """An inner copy with moments, gradient and what is made when it closes; moments that are carried."""
    run, model = large_run("cuda:0")
    run = with_changes(run, {"round.slots": 2, "batch.microbatches": 4, **rules})
    gpus_with_memory[0] = block_parameters(model) * 9 * 24
    with pytest.raises(UserError, match=r"its 8 blocks"):
        check_fit(run, model)
    gpus_with_memory[0] = block_parameters(model) * (8 * (24 + more) + 5)
    check_fit(run, model)


def test_a_data_node_of_crews_must_hold_the_ends_of_its_share_of_the_slots(
    gpus_with_memory: dict[int, int],
) -> None:
    run, model = large_run("cuda:0")
    ends = end_parameters(model)
    gpus_with_memory[0] = ends * 30
    check_ends_fit(run, model)  # no crews
    run = with_changes(run, {"round.slots": 4, "batch.microbatches": 4, "fleet.data_nodes": 2})
    gpus_with_memory[0] = ends * (24 + 2 * 28) - 1
    with pytest.raises(UserError, match=r"cuda:0 has .*embedding and head .* 2 of the 4 slots"):
        check_ends_fit(run, model)
    gpus_with_memory[0] = ends * (24 + 2 * 28)
    check_ends_fit(run, model)
    with pytest.raises(UserError, match=r"0.0 GiB to use, .* give more with --memory"):
        check_ends_fit(run, model, 1)


def test_the_device_with_least_room_limits_the_microbatches(gpus_with_memory: dict[int, int]) -> None:
    run, model = large_run("cuda:0,cuda:1")
    both = measured_capacity(run, model)
    gpus_with_memory[1] //= 2
    assert measured_capacity(run, model) == pytest.approx(both / 2, abs=1)


def test_a_machine_lends_no_more_memory_than_its_owner_says() -> None:
    run, model = large_run("cpu")
    held = measured_capacity(run, model, 1 << 50)
    assert 1 < measured_capacity(run, model, GIB) < held
    with pytest.raises(UserError, match=r"cpu has 1.0 GiB to use, and its 8 blocks .*more with --memory"):
        check_fit(run, model, GIB)


def test_a_machine_without_room_for_the_stage_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = large_run("cpu")
    monkeypatch.setattr("anabranch.train.workers.machine_capacity.free_memory_bytes", lambda: GIB)
    with pytest.raises(UserError, match=r"cpu has 1.0 GiB free, and its 8 blocks .*end other programs"):
        check_fit(run, model)
    monkeypatch.setattr("anabranch.train.workers.machine_capacity.free_memory_bytes", lambda: 1 << 50)
    check_fit(run, model)


def test_other_threads_than_the_run_s_are_for_mixed_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = created(tmp_path / "run", small_run(write_texts(tmp_path / "texts")))
    run, me = load_run_file(directory.run_file), Member("me", 1, 1, "", 1)
    configured: list[int] = []
    monkeypatch.setattr(numerics_class, "configure", configured.append)
    for numerics in ("strict", "auto", "mixed"):
        text = render_run_file(with_changes(run, {"run.numerics": numerics}))
        genesis = SimpleNamespace(config=text, run="r", epoch=0, corpus_fingerprint="")
        machine = TrainingMachine(me, None, threads=3)
        if numerics == "mixed":
            machine.describe(cast(Any, genesis))
            assert machine.run is not None and machine.run.compute.threads == 3 and configured == [3]
        else:
            with pytest.raises(UserError, match="--threads 3: all machines of this run compute with 1"):
                machine.describe(cast(Any, genesis))


def test_a_volunteer_with_several_devices_holds_a_split_stage(tmp_path: Path) -> None:
    directory = created(tmp_path / "run", small_run(write_texts(tmp_path / "texts")))
    run = load_run_file(directory.run_file)
    genesis = SimpleNamespace(config=render_run_file(run), run="run", epoch=1, corpus_fingerprint="")
    machine = TrainingMachine(Member("p", 1, 1, "", 1), None, "cpu:0,cpu:1")
    described = machine.describe(genesis)  # type: ignore[arg-type]
    alone = TrainingMachine(Member("p", 1, 1, "", 1), None, "cpu")
    assert described.member.numerics_class == alone.describe(genesis).member.numerics_class  # type: ignore[arg-type]
    split, whole = machine.build(1), alone.build(1)
    assert split[1] == whole[1]
    assert isinstance(split[0].state.weights, SplitVector)  # type: ignore[attr-defined]
    for devices, corpus, words in (
        ("cpu:0,cpu:1,cpu:2", None, "3 devices are more than the blocks of stage 1"),
        ("cpu:0,cpu:1", directory.corpus, "a data node holds no blocks"),
    ):
        with pytest.raises(UserError, match=words):
            TrainingMachine(Member("p", 1, 1, "", 1), corpus, devices).describe(genesis)  # type: ignore[arg-type]


def test_without_a_gpu_join_refuses_before_it_dials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    owner = Identity.generate()
    ticket = issue_ticket(
        owner, run="run", role="relay", expires_at_s=int(time.time()) + 600,
        peers=[PeerAddress(owner.peer_id, "127.0.0.1", 9)],
    ).text  # fmt: skip
    assert main(["join", ticket, "--device", "cuda:1"]) == 2
    assert "--device cuda:1: torch finds 0 GPUs here" in capsys.readouterr().err
    assert main(["join", ticket, "--gpus", "all"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err
    assert main(["join", ticket, "--gpus", "all", "--device", "cpu"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_lines_carry_the_gpu_and_the_worst_status_counts() -> None:
    lines: list[str] = []
    commands, labels = [["join", "0"], ["join", "1"]], ["gpu 0: ", "gpu 1: "]
    assert gpus.run_all(commands, labels, lines.append, ECHO, "TICKET") == 1
    assert sorted(lines) == ["gpu 0: join 0 TICKET", "gpu 1: join 1 TICKET"]


@pytest.mark.usefixtures("two_gpus")
def test_doctor_shows_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    checks = {check["name"]: check["found"] for check in json.loads(capsys.readouterr().out)}
    assert checks["device cuda:0"].startswith("Alpha, 0.0 GiB of 24.0")
    assert checks["device cuda:1"].startswith("Beta, 1.0 GiB")
    assert "--gpus all" in checks["GPUs"]


@pytest.mark.parametrize(
    ("device", "line", "words"),
    [
        ("cuda", "device", "the run needs cuda, but torch finds no GPU"),
        ("cuda:0,cuda:1", "device", "the run needs cuda:0,cuda:1, but torch finds no GPU"),
        ("cpu:0,cpu:1,cpu:2", "devices of a stage", "3 devices are more than the blocks of stage 1"),
    ],
)
def test_doctor_names_devices_on_which_no_stage_can_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    device: str, line: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    run = with_changes(RunConfig(), {"compute.device": device, "model.blocks": 4, "pipeline.stages": 2})
    (tmp_path / "run.toml").write_text(render_run_file(run))
    assert main(["doctor", str(tmp_path / "run.toml"), "--json"]) == 1
    (check,) = (each for each in json.loads(capsys.readouterr().out) if each["name"] == line)
    assert check["verdict"] == "red" and words in check["found"]


def test_a_volunteers_device_replaces_the_run_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = created(tmp_path / "run", small_run(write_texts(tmp_path / "texts")))
    run = with_changes(load_run_file(directory.run_file), {"compute.device": "cuda:1"})
    genesis = SimpleNamespace(config=render_run_file(run), run="run", epoch=1, corpus_fingerprint="")
    seen: list[str] = []

    def capacity(run: RunConfig, *_: object) -> int:
        seen.append(run.compute.device)
        return 1

    monkeypatch.setattr(machine_capacity, "measured_capacity", capacity)
    machine = TrainingMachine(Member("p", 1, 1, "", 1), None, "cpu")
    machine.describe(genesis)  # type: ignore[arg-type]
    assert seen == ["cpu"]
    assert machine.run is not None and machine.run.compute.device == "cpu"
