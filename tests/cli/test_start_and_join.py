"""`start` and `join` as people use them, each in a terminal of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.join import AGAIN, TICKET_VARIABLE, ticket_text
from anabranch.cli.main import build_parser, main
from anabranch.cli.support.arguments import Line
from anabranch.cli.support.lead_run import page_beside
from anabranch.cli.support.outputs import Outputs
from anabranch.cli.support.own_relays import OwnRelays
from anabranch.config import RunConfig, render_run_file, with_changes
from anabranch.errors import UserError
from anabranch.net.identity import Identity
from anabranch.net.tcp.transport import CAP_BURST_S
from anabranch.net.ticket import PeerAddress, issue_ticket
from anabranch.node.operator.owner_actions import LeaderOwner
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Timing

COMMAND = [sys.executable, "-m", "anabranch.cli.main"]
TIMEOUT_S = 60


def line_with(process: subprocess.Popen[str], part: str) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if part in line:
            return line
    raise AssertionError(f"it ended without saying {part!r}:\n{''.join(seen)}")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox\n" * 20)
    config = with_changes(
        RunConfig(),
        {
            "run.steps": 100_000,
            "model.dim": 16,
            "model.blocks": 2,
            "model.heads": 2,
            "model.ffn": 24,
            "data.source": "text",
            "data.path": str(texts),
            "data.tokenizer": "bytes",
            "batch.microbatches": 4,
            "batch.rows": 1,
            "batch.sequence": 16,
            "pipeline.stages": 1,
            "fleet.relays": 1,
            "evaluation.every": 0,
            "compute.device": "cpu",
        },
    )
    file = tmp_path / "run.toml"
    file.write_text(render_run_file(config))
    return file


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "65536"], "--port 65536: it must be at least 0 and at most 65535"),
        (["--advertise", "my.host"], '--advertise is "my.host"; write it as host:port'),
        (["--advertise", "my.host:0"], "the port in 1..65535"),
        (["--host", "0.0.0.0"], '--host is "0.0.0.0", which nobody can dial; set --advertise'),
        (["--host", "no..such"], "--host no..such: not an address of this machine"),
        (["--patience", "nan"], "--patience nan"),
        (["--stage", "-2"], "--stage -2"),
        (["--corpus", "nowhere"], "--corpus nowhere: there is no corpus"),
        ([], "this is not a ticket"),
    ],
)
def test_join_refuses_bad_input_before_it_dials(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", "ticket", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


def test_a_tickets_words_name_no_folder_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Identity.generate()
    door = [PeerAddress(owner.peer_id, "127.0.0.1", 1)]
    expires_at_s = int(time.time()) + 60
    ticket = issue_ticket(owner, run="../../x", role="relay", expires_at_s=expires_at_s, peers=door)
    for command in ("join", "watch"):
        assert main([command, ticket.text]) == 2
        assert "--home" in capsys.readouterr().err
    looks_on = issue_ticket(owner, run="x", role="watch", expires_at_s=expires_at_s, peers=door)
    assert main(["join", looks_on.text]) == 2
    assert "anabranch watch TICKET" in capsys.readouterr().err
    assert main(["relay", looks_on.text, "--home", str(tmp_path)]) == 2
    assert "only permits watching" in capsys.readouterr().err
    audits = issue_ticket(owner, run="x", role="auditor", expires_at_s=expires_at_s, peers=door)
    assert main(["join", audits.text]) == 2
    assert "anabranch audit TICKET" in capsys.readouterr().err
    assert main(["audit", ticket.text]) == 2
    assert "a ticket of role relay" in capsys.readouterr().err
    assert main(["watch", "anabranch1:damaged"]) == 2


def test_a_port_in_use_is_told_in_the_words_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A volunteer has no run file in which it could set network.port."""
    owner = Identity.generate()
    door = [PeerAddress(owner.peer_id, "127.0.0.1", 1)]
    ticket = issue_ticket(owner, run="x", role="relay", expires_at_s=int(time.time()) + 60, peers=door)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["join", ticket.text, "--port", port, "--home", str(tmp_path / "home")]) == 2
    error = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in error
    assert "network.port" not in error


def test_two_terminals(tmp_path: Path, run_file: Path, processes: list[subprocess.Popen[str]]) -> None:
    def spawn(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    leader = spawn("start", str(run_file), "--run-dir", str(tmp_path / "run"))
    assert leader.stdout is not None
    # The ticket comes first: others may need it while this machine is still busy.
    assert leader.stdout.readline() == f"run directory: {tmp_path / 'run'}\n"
    page = line_with(leader, "watch it: http://127.0.0.1:").split()[-1]
    with urlopen(page, timeout=TIMEOUT_S) as answer:
        assert b"anabranch" in answer.read()
    line_with(leader, "watch and control it (keep this address secret): http://127.0.0.1:")
    ticket = line_with(leader, "anabranch join ").split()[-1]
    line_with(leader, "warning: these tickets work on this machine only")
    line_with(leader, "waiting for peers of stage 1 (0 of 1)")

    for second in (["resume", str(tmp_path / "run")], ["resume", str(tmp_path / "run"), "--local"]):
        line_with(spawn(*second), "another process leads the run")

    home = str(tmp_path / "home")
    volunteer = spawn("join", ticket, "--home", home, "--name", "ada", "--region", "London", "--grace", "5")
    for part in ("connecting to", "measuring", "admitted to stage 1", "serving stage 1 from iteration 1"):
        line_with(volunteer, part)
    assert "4 of this step's 4 units" in line_with(volunteer, "is committed")
    line_with(leader, "ada in London joins as a relay of stage 1")
    line_with(leader, "step ")

    leader.send_signal(signal.SIGINT)
    line_with(leader, "stopping after the present step")
    line_with(leader, "continue with: anabranch resume")
    assert leader.wait(TIMEOUT_S) == 0
    # The volunteer does not take this for the end of the run: it waits, and is back when the run is resumed.
    stopped = line_with(volunteer, "the run's data node stopped after step ")
    assert "of 100000, until its owner resumes the run; joining again" in stopped and "is over" not in stopped
    assert "until it answers" in line_with(volunteer, "no connection to the run's data node")

    resumed = spawn("resume", str(tmp_path / "run"))
    assert line_with(resumed, "anabranch join ").split()[-1] == ticket, "port and ticket stay"
    line_with(volunteer, "connected to the run's data node again")
    line_with(volunteer, "serving stage 1 from iteration ")
    line_with(volunteer, "is committed")

    # A scheduler ends it: it leaves, and asks to be started again elsewhere.
    volunteer.send_signal(signal.SIGTERM)
    assert "committed units of work" in line_with(volunteer, "in all")
    assert volunteer.wait(TIMEOUT_S) == AGAIN
    resumed.kill()

    # Alone, it waits for a stage that nobody serves; twice Ctrl+C ends even that.
    again = spawn("resume", str(tmp_path / "run"))
    line_with(again, "waiting for peers of stage 1 (0 of 1)")
    again.send_signal(signal.SIGINT)
    line_with(again, "Ctrl+C again stops at once")
    again.send_signal(signal.SIGINT)
    line_with(again, "continue with: anabranch resume")
    assert again.wait(TIMEOUT_S) in (0, 1)


def test_ctrl_c_while_it_waits_is_no_failure(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    owner = Identity.generate()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        door = [PeerAddress(owner.peer_id, "127.0.0.1", taken.getsockname()[1])]
    ticket = issue_ticket(owner, run="x", role="relay", expires_at_s=int(time.time()) + 600, peers=door)
    process = subprocess.Popen(
        [*COMMAND, "join", "--home", str(tmp_path / "home"), "--grace", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, TICKET_VARIABLE: ticket.text},
    )  # fmt: skip
    processes.append(process)
    line_with(process, "retrying for")
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 0


@pytest.mark.costly
def test_a_founder_that_serves(
    tmp_path: Path, run_file: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """Its relay joins with the run's own ticket, and leaves with it: one command is a whole run."""
    file = tmp_path / "short.toml"
    file.write_text(run_file.read_text().replace("steps = 100000", "steps = 3"))
    command = [*COMMAND, "start", str(file), "--run-dir", str(tmp_path / "run"), "--no-page", "--serve"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes.append(leader)
    line_with(leader, "own-0: serving stage 1 from iteration 1")
    line_with(leader, "own-0: the run is over: all 3 steps are committed")
    assert leader.wait(TIMEOUT_S) == 0
    assert verify(tmp_path / "run").promise == "bits"


@pytest.mark.soak  # test_line_caps.py holds the cap, of each kind of link
def test_a_leader_sends_no_more_than_its_cap(
    tmp_path: Path, run_file: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """Bytes of the payloads of four steps, which have all arrived when the last one is applied."""
    rate, steps = 0.1e6 / 8, 4

    def spawn(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    directory = tmp_path / "run"
    leader = spawn("start", str(run_file), "--run-dir", str(directory), "--no-page", "--max-up", "0.1")
    ticket = line_with(leader, "anabranch join ").split()[-1]
    spawn("join", ticket, "--home", str(tmp_path / "home"))
    timings: list[Timing] = []
    while len(timings) <= steps:
        line_with(leader, "step ")
        timings = [event for event in events_of(directory / "events.jsonl", Timing) if event.stage == 0]
    first, *later = timings
    sizes = [event.bytes_activations + event.bytes_reduce for event in later]
    assert min(sizes) > 1000
    allowed = rate * (later[-1].time - first.time + CAP_BURST_S) + max(sizes)
    assert sum(sizes) <= allowed


def test_peers_of_one_machine_share_the_caps_of_its_line() -> None:
    words = ["start", "run.toml", "--carry", "2", "--max-up", "20", "--max-down", "8"]
    line = Line.of(build_parser(words).parse_args(words))
    assert line.words() == words[2:]
    relays = OwnRelays(RunDirectory(Path("run")), ["cuda:0", "cuda:1", "cuda:2"], Outputs(), line)
    carry, caps = relays.line.limits()
    assert (caps.up_bytes_per_s, caps.down_bytes_per_s, carry.bytes_per_s) == (625e3, 250e3, 62.5e3)
    assert Line(carry=0.0).shared_by(2).limits()[0].circuits == 0
    with pytest.raises(UserError, match="8 peers of this machine share it"):
        Line(max_up=0.5).shared_by(8)
    assert Line().words() == [] and Line(carry=0.0).words() == ["--carry", "0"]


@pytest.mark.parametrize("command", ["start", "resume", "join", "audit"])
def test_caps_of_the_line_are_checked(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, mbit in (("--max-up", "0.01"), ("--carry", "-1")):
        assert main([command, "nothing", option, mbit]) == 2
        assert f"{option} {mbit}: it must be" in capsys.readouterr().err
    if command == "resume":
        assert main([command, "nothing", "--local", "--max-down", "9"]) == 2
        assert "all bytes stay on this machine" in capsys.readouterr().err


def test_a_ticket_comes_from_the_command_line_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TICKET_VARIABLE, raising=False)
    assert ticket_text(["anabranch1:ab", "cd"], None, 0) == "anabranch1:abcd"
    file = tmp_path / "ticket"
    for refused in ((["a"], file), ([], file), ([], None)):
        with pytest.raises(UserError, match="--ticket-file"):
            ticket_text(*refused, 0)
    file.write_text("anabranch1:ef\n")
    assert ticket_text([], file, 0) == "anabranch1:ef"
    file.write_text('{"relay": "anabranch1:gh", "data": "anabranch1:ij"}')
    assert ticket_text([], file, 0) == "anabranch1:gh"
    file.write_text('{"relay"')
    with pytest.raises(UserError, match="there is no ticket"):
        ticket_text([], file, 0)
    monkeypatch.setenv(TICKET_VARIABLE, "anabranch1:kl")
    assert ticket_text([], None, 0) == "anabranch1:kl"


def test_the_two_addresses_of_the_page_say_what_they_are(tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory.create(tmp_path / "run")
    directory.events.touch()
    with page_beside(directory, said.append, owner=LeaderOwner(directory.path)):
        pass
    assert said[0].startswith("watch it: http://127.0.0.1:")
    assert said[1].startswith("watch and control it (keep this address secret): http://127.0.0.1:")
    assert len(said) == 2 and said[0].split()[-1] != said[1].split()[-1]
