"""`train`: what Ctrl+C does to the swarm, and what it says then. Whole swarms are in tests/node."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.cli.support.create_directory import create
from anabranch.cli.train import _Stopping, _what_next, train_directory
from anabranch.config import RunConfig, render_run_file, with_changes
from anabranch.errors import UserError
from anabranch.node.local_swarm.local_swarm import Interrupted, LeaderFailed, LocalSwarm
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.console.event_console import Console


def test_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    out = io.StringIO()
    with Supervisor(1) as supervisor:
        swarm = LocalSwarm(directory, RunConfig(), supervisor)
        stopping = _Stopping(swarm, Console(stream=out))
        stopping.poll()
        assert not swarm.stopping and out.getvalue() == ""
        stopping.ask(2, None)
        stopping.poll()
        stopping.poll()
        assert swarm.stopping and not stopping.at_once
        stopping.ask(2, None)
        stopping.poll()
        assert stopping.at_once
    first, second = out.getvalue().splitlines()
    assert "after the present step" in first and second == "stopping at once"


def test_a_run_that_is_over_is_not_to_be_continued() -> None:
    path = Path("runs/tiny")
    assert _what_next(path, False, False) == "continue with: anabranch resume runs/tiny --local"
    assert _what_next(path, False, True).endswith("--local, without the emulated network")
    assert _what_next(path, True, False).endswith("anabranch verify runs/tiny")


def test_a_device_that_is_not_here_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(render_run_file(with_changes(RunConfig(), {"compute.device": "cuda:99"})))
    assert main(["train", str(file), "--run-dir", str(tmp_path / "run")]) == 2
    assert 'compute.device is "cuda:99", but torch finds' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_the_corpus_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anabranch.data.corpus.write_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt, match="nothing is left behind"):
        create(RunConfig(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(render_run_file(with_changes(RunConfig(), {"network.port": port})))
        assert main(["start", str(file), "--run-dir", str(tmp_path / "run")]) == 2
    assert f"network.port = {port} on 127.0.0.1: Address already in use; set" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dead_leader_leaves_a_run_that_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(_: LocalSwarm) -> None:
        raise LeaderFailed(-9, "the leading data node was ended by SIGKILL")

    monkeypatch.setattr(LocalSwarm, "start", dies)
    directory = RunDirectory.create(tmp_path / "run")
    directory.run_file.write_text(render_run_file(RunConfig()))
    with Supervisor(1) as supervisor:
        assert train_directory(directory.path, supervisor) == 1
    shown = capsys.readouterr()
    assert shown.err == "error: the leading data node was ended by SIGKILL\n"
    assert f"continue with: anabranch resume {directory.path} --local\n" in shown.out


def test_a_signal_that_ends_the_fork_server_too_is_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` and systemd send theirs to all processes: the next peer could not be started."""

    def refused(swarm: LocalSwarm) -> None:
        raise UserError("the process of data-0 cannot be started: unexpected EOF")

    monkeypatch.setattr(LocalSwarm, "restart_leader", refused)
    with Supervisor(1) as supervisor:
        swarm = LocalSwarm(RunDirectory.create(tmp_path / "run"), RunConfig(), supervisor)
        with pytest.raises(UserError, match="unexpected EOF"):
            swarm.start()
        swarm.stopping = True
        with pytest.raises(Interrupted):
            swarm.start()


def test_a_run_that_could_write_no_checkpoint_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anabranch.cli.train._follow", lambda *_: True)
    directory = RunDirectory.create(tmp_path / "run")
    directory.run_file.write_text(render_run_file(RunConfig()))
    with Supervisor(1) as supervisor:
        assert train_directory(directory.path, supervisor) == 1
    assert "no checkpoint could be written: the trained weights are lost" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["a..b", "203.0.113.1"])
def test_an_address_that_is_not_this_machines_is_refused_before_anything_is_made(
    host: str, tmp_path: Path
) -> None:
    """It was refused after the corpus was tokenized, without the key."""
    run = with_changes(RunConfig(), {"network.host": host})
    with pytest.raises(UserError, match=rf"network.host = {host}: .*; set it to an address of this machine"):
        create(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()
