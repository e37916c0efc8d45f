"""Refusals of commands that cannot work: one clear line, and nothing is lost."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch import PROTOCOL_VERSION
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.join import AGAIN
from anabranch.cli.main import main
from anabranch.config import render_run_file, with_changes
from anabranch.net.identity import Identity
from anabranch.net.ticket import PeerAddress, issue_ticket, parse_ticket
from anabranch.node.driver import initial_dial
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.protocol.log.records import NO_ENTRY, Entry, Genesis, encode_entry
from support.local_swarms import Swarm, created, small_run, swarm_of

Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused; its one line on stderr."""

    def check(arguments: list[str], status: int = 2) -> str:
        capfd.readouterr()
        assert main(arguments) == status
        error = capfd.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error, error
        return error

    return check


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- run files and run directories ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "replacement", "words"),
    [
        ("steps = 4", "stepz = 4", ["run.stepz", "did you mean `steps`"]),
        ("steps = 4", "steps = 0", ["run.steps is 0", "at least 1"]),
        ("stages = 2", "stages = 5", ["pipeline.stages 5", "model.blocks"]),
        ("boundary_budget_bytes = 4294967296", "boundary_budget_bytes = 1000", ["cannot hold the batch"]),
        ('size = "llama-tiny"', 'size = "llama-tiniest"', ["llama-tiniest"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "start"])
def test_run_files(
    tmp_path: Path, texts: Path, refused: Refused, command: str, line: str, replacement: str, words: list[str]
) -> None:
    run = small_run(texts, fleet__relays_per_stage=[], fleet__relays=6)
    text = render_run_file(run)
    assert line in text
    file = tmp_path / "run.toml"
    file.write_text(text.replace(line, replacement))
    error = refused([command, str(file), "--run-dir", str(tmp_path / "run")])
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("documents", ["missing", "empty", "short"])
def test_corpora(tmp_path: Path, texts: Path, refused: Refused, documents: str) -> None:
    folder = tmp_path / "texts"
    if documents != "missing":
        folder.mkdir()
    if documents == "short":
        (folder / "a.txt").write_text("a")
    file = tmp_path / "run.toml"
    file.write_text(render_run_file(with_changes(small_run(texts), {"data.path": str(folder)})))
    path = tmp_path / "run"
    error = refused(["train", str(file), "--run-dir", str(path)])
    assert str(folder) in error or "data." in error
    # Once the corpus is there, the same command works on: the folder is not in the way.
    again = refused(["train", str(file), "--run-dir", str(path)])
    assert "exists already" not in again


def test_directories(tmp_path: Path, texts: Path, refused: Refused) -> None:
    file = tmp_path / "run.toml"
    file.write_text(render_run_file(small_run(texts)))
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "mine.txt").write_text("keep this")
    assert "exists already" in refused(["train", str(file), "--run-dir", str(occupied)])
    assert [entry.name for entry in occupied.iterdir()] == ["mine.txt"]
    assert "cannot create" in refused(["train", str(file), "--run-dir", str(file / "run")])
    assert "not a run directory" in refused(["resume", str(occupied)])
    assert "not a run directory" in refused(["resume", str(occupied), "--local"])
    directory = created(tmp_path / "old", small_run(texts))
    (directory.path / "version").write_text("99\n")
    for local in ([], ["--local"]):
        assert "version 99" in refused(["resume", str(directory.path), *local])


def test_a_broken_log(tmp_path: Path, texts: Path, refused: Refused) -> None:
    directory = created(tmp_path / "run", small_run(texts))
    directory.log.write_bytes(b'{"not": "an entry"}\n')
    assert "log.jsonl" in refused(["resume", str(directory.path)])
    assert directory.log.read_bytes() == b'{"not": "an entry"}\n'


def test_a_run_of_another_protocol_version(tmp_path: Path, texts: Path, refused: Refused) -> None:
    run = small_run(texts)
    directory = created(tmp_path / "run", run)
    begun = Genesis("r", 1, PROTOCOL_VERSION - 1, "", "", render_run_file(run), 2, 6, 1, "", "", "", "", ())
    directory.log.write_bytes(encode_entry(Entry(0, 1, NO_ENTRY, begun)) + b"\n")
    error = refused(["resume", str(directory.path)])
    assert f"protocol version {PROTOCOL_VERSION - 1}" in error and "install the release" in error


def test_a_port_in_use(tmp_path: Path, texts: Path, refused: Refused) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        directory = created(tmp_path / "run", small_run(texts, network__port=port))
        error = refused(["resume", str(directory.path)])
    assert f"port {port}" in error and "in use" in error and "network.port" in error


# --- tickets and doors -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, texts: Path, supervisor: Supervisor) -> Iterator[Swarm]:
    """A leader that waits for relays, and admits strictly."""
    run = small_run(texts)
    directory = created(tmp_path_factory.mktemp("waiting") / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        yield swarm


def test_tickets(tmp_path: Path, refused: Refused, waiting: Swarm) -> None:
    home = ["--home", str(tmp_path / "home")]
    ticket = waiting.ticket()
    assert "not a ticket" in refused(["join", "hello", *home])
    assert "damaged" in refused(["join", ticket[:-9], *home])
    changed = ticket[:40] + ("A" if ticket[40] != "A" else "B") + ticket[41:]
    assert "damaged" in refused(["join", changed, *home])
    owner = Identity.generate()
    here = [PeerAddress(owner.peer_id, "127.0.0.1", free_port())]
    old = issue_ticket(owner, run="r", role="relay", expires_at_s=int(time.time()) - 7200, peers=here)
    error = refused(["join", old.text, *home])
    assert "expired 2 hours ago" in error and "ask for a new one" in error
    assert "--corpus" in refused(["join", waiting.ticket("data"), *home])
    assert not (tmp_path / "home").exists()


def test_a_leader_that_cannot_be_reached(
    tmp_path: Path, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    owner = Identity.generate()
    port = free_port()
    here = [PeerAddress(owner.peer_id, "127.0.0.1", port)]
    ticket = issue_ticket(owner, run="r", role="relay", expires_at_s=int(time.time()) + 3600, peers=here)
    arguments = ["join", ticket.text, "--home", str(tmp_path / "home"), "--patience", "1"]
    error = refused(arguments, status=AGAIN)
    assert f"127.0.0.1:{port}" in error and "could not be reached" in error and "join again" in error
    assert main(arguments) == AGAIN
    out = capfd.readouterr().out
    assert out.count("retrying") == 1


def test_a_data_node_that_stays_away_is_told_ever_more_rarely() -> None:
    reminder, told = initial_dial.Reminder(), []
    reminder.begin(1000.0)
    for now in range(1000, 1000 + 5 * 3600, 15):
        told += [waited_s] if (waited_s := reminder.due(now)) else []
    assert told == [60.0, 180.0, 420.0, 900.0, 1860.0, 3780.0, 7380.0, 10980.0, 14580.0]
    reminder.begin(50_000.0)
    assert not reminder.due(50_059.0) and reminder.due(50_060.0) == 60.0


def test_join_says_that_it_still_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_dial, "REMIND_S", 0.2)
    owner = Identity.generate()
    here = [PeerAddress(owner.peer_id, "127.0.0.1", free_port())]
    ticket = issue_ticket(owner, run="r", role="relay", expires_at_s=int(time.time()) + 3600, peers=here)
    assert main(["join", ticket.text, "--home", str(tmp_path / "home"), "--patience", "2"]) == AGAIN
    out = capfd.readouterr().out
    assert "still no connection to the run's data node for 0:0" in out


def test_the_end_of_a_run_is_remembered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose service starts `join` again after the run is over: it does not look for the run until
    its ticket expires."""
    monkeypatch.setattr(initial_dial, "OVER_S", 0.5)
    owner, home = Identity.generate(), tmp_path / "home"
    here = [PeerAddress(owner.peer_id, "127.0.0.1", free_port())]
    ticket = issue_ticket(owner, run="r", role="relay", expires_at_s=int(time.time()) + 3600, peers=here)
    home.mkdir()
    (home / "ended").write_text("the run is over: all 4 steps are committed")
    for _ in range(2):
        assert main(["join", ticket.text, "--home", str(home), "--patience", "3600"]) == 0
        out = capfd.readouterr().out
        assert "the run is over: all 4 steps are committed; its data node does not answer\n" in out


def test_a_ticket_of_another_run(tmp_path: Path, refused: Refused, waiting: Swarm) -> None:
    """The ticket names this run's address, but another run and another key."""
    real = parse_ticket(waiting.ticket(), now_s=time.time()).peers[0]
    owner = Identity.generate()
    forged = [PeerAddress(owner.peer_id, real.host, real.port)]
    ticket = issue_ticket(owner, run="r", role="relay", expires_at_s=int(time.time()) + 3600, peers=forged)
    error = refused(["join", ticket.text, "--home", str(tmp_path / "home"), "--patience", "30"], status=1)
    assert "the run's data node was not reached: another peer answers at 127.0.0.1:" in error
    assert "a proxy" in error


def test_a_relay_ticket_for_a_data_node(tmp_path: Path, refused: Refused, waiting: Swarm) -> None:
    data_node = ["--stage", "0", "--corpus", str(waiting.directory.corpus)]
    error = refused(["join", waiting.ticket(), *data_node, "--home", str(tmp_path / "home")], status=1)
    assert "as a relay, not as a data node" in error


def test_a_stage_that_is_not_there(tmp_path: Path, refused: Refused, waiting: Swarm) -> None:
    error = refused(["join", waiting.ticket(), "--stage", "7", "--home", str(tmp_path / "home")], status=1)
    assert "no stage 7" in error


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_another_corpus(
    tmp_path: Path, texts: Path, refused: Refused, waiting: Swarm, tokenizer: str
) -> None:
    """Refused by its fingerprint, even if its vocabulary is larger than the model's."""
    other = tmp_path / "other"
    other.mkdir()
    for number in range(30):
        (other / f"{number}.txt").write_text(f"something else {number}\n" * 40)
    changes = {"data.path": str(other), "data.tokenizer": tokenizer, "data.vocab_size": 270}
    corpus = created(tmp_path / "run", with_changes(small_run(texts), changes)).corpus
    arguments = ["join", waiting.ticket("data"), "--corpus", str(corpus), "--home", str(tmp_path / "home")]
    error = refused(arguments, status=1)
    assert "your corpus is not this run's" in error and "copy" in error


def test_a_damaged_corpus(tmp_path: Path, refused: Refused, waiting: Swarm) -> None:
    """No failure of this machine, after which it would join again and again."""
    corpus = tmp_path / "corpus"
    shutil.copytree(waiting.directory.corpus, corpus)
    file = max(corpus.iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    arguments = ["join", waiting.ticket("data"), "--corpus", str(corpus), "--home", str(tmp_path / "home")]
    error = refused(arguments, status=1)
    assert f"{file} is damaged" in error and "crash" not in error


def test_another_numerics_class(
    tmp_path: Path, refused: Refused, waiting: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.train.numerics.numerics_class.numerics_class", lambda *_: ("f" * 16, {}))
    error = refused(["join", waiting.ticket(), "--home", str(tmp_path / "home")], status=1)
    assert "numerics class" in error and "f" * 12 in error and '"mixed"' in error


def test_another_protocol_version(
    tmp_path: Path, refused: Refused, waiting: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.protocol.peer.join.PROTOCOL_VERSION", 99)
    error = refused(["join", waiting.ticket(), "--home", str(tmp_path / "home")], status=1)
    assert "protocol version" in error and "install the release" in error


def test_a_damaged_key_or_incarnation(tmp_path: Path, refused: Refused, waiting: Swarm) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "incarnation").write_text("many\n")
    assert "incarnation" in refused(["join", waiting.ticket(), "--home", str(home)])
    (home / "incarnation").unlink()
    (home / "key").write_text("no key\n")
    assert "key" in refused(["join", waiting.ticket(), "--home", str(home)])
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in refused(["join", waiting.ticket(), "--home", str(file / "home")])


def test_a_truncated_checkpoint(
    tmp_path: Path, texts: Path, supervisor: Supervisor, refused: Refused
) -> None:
    """It is named, and left as it is."""
    run = small_run(texts, run__steps=2)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.to_the_end()
    newest = directory.latest_checkpoint()
    for stage in directory.checkpoint_path(newest).glob("stage-1*"):
        stage.write_bytes(stage.read_bytes()[:100])
    error = refused(["generate", str(directory.path), "--prompt", "line"])
    assert "stage-1" in error
    assert RunDirectory.open(directory.path).checkpoints() == [newest]
