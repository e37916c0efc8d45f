"""Several GPUs: `join --device`, `join --gpus`, `doctor`. There is none here: torch's answers are
replaced."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anabranch.cli.main import build_parser, main
from anabranch.cli.support import gpus
from anabranch.config import RunConfig, load_run_file, render_run_file, with_changes
from anabranch.errors import UserError
from anabranch.net.identity import Identity
from anabranch.net.ticket import PeerAddress, issue_ticket
from anabranch.node.lifecycle import training_machine
from anabranch.node.lifecycle.training_machine import TrainingMachine
from anabranch.protocol.log.records import Member
from support.local_swarms import created, small_run, write_texts

#: Child process in place of `anabranch`: prints its arguments and ends with the status at the end of them.
ECHO = (sys.executable, "-c", "import sys; print(*sys.argv[1:]); sys.exit(int(sys.argv[-1]))")


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
    options = ("--gpus", "all", "--name", "ada", "--region", "London", "--quiet")
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
        assert (child.ticket, child.region, child.host) == (["TICKET"], "London", "0.0.0.0")
        assert child.quiet
        assert child.gpus == ""


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_are_not_here_are_named() -> None:
    assert gpus.chosen_gpus("1,0,1") == [0, 1]
    gpus.check_device("cuda:1")
    for text, words in (("0,2", "torch finds 2 GPUs"), ("some", "numbers with commas")):
        with pytest.raises(UserError, match=words):
            gpus.chosen_gpus(text)
    with pytest.raises(UserError, match='write "auto"'):
        gpus.check_device("gpu1")


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
    assert gpus.run_all([["join", "0"], ["join", "1"]], ["gpu 0: ", "gpu 1: "], lines.append, ECHO) == 1
    assert sorted(lines) == ["gpu 0: join 0", "gpu 1: join 1"]


@pytest.mark.usefixtures("two_gpus")
def test_doctor_shows_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    checks = {check["name"]: check["found"] for check in json.loads(capsys.readouterr().out)}
    assert checks["device cuda:0"].startswith("Alpha, 0.0 GiB of 24.0")
    assert checks["device cuda:1"].startswith("Beta, 1.0 GiB")
    assert "--gpus all" in checks["GPUs"]


def test_a_volunteers_device_replaces_the_run_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = created(tmp_path / "run", small_run(write_texts(tmp_path / "texts")))
    run = with_changes(load_run_file(directory.run_file), {"compute.device": "cuda:1"})
    genesis = SimpleNamespace(config=render_run_file(run), run="run", epoch=1, corpus_fingerprint="")
    seen: list[str] = []

    def capacity(run: RunConfig, _: object) -> int:
        seen.append(run.compute.device)
        return 1

    monkeypatch.setattr(training_machine, "measured_capacity", capacity)
    machine = TrainingMachine(Member("p", 1, 1, "", 1), None, "cpu")
    machine.describe(genesis)  # type: ignore[arg-type]
    assert seen == ["cpu"]
    assert machine.run is not None and machine.run.compute.device == "cpu"
