"""`anabranch recover --new-epoch` on a run directory whose log was kept by three."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.net.identity import Identity
from anabranch.node.driver.raft_storage import RaftStorage
from anabranch.node.lifecycle.create_run import LEADER_NAME
from anabranch.protocol.consensus.log_replay import fold
from anabranch.protocol.interface.events import Persist
from anabranch.protocol.log.records import AnyRecord, Entry, Genesis, Voters, encode_entry
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.types import voter_id
from support.local_swarms import created, small_run


def written(directory: RunDirectory, *others: str) -> str:
    """A log with these voters besides the founder; the founder's own name as one."""
    folder = directory.peer(LEADER_NAME)
    disk = RaftStorage(directory.log, folder / "vote.json")
    me = voter_id(Identity.load_or_create(folder / "key").peer_id, disk.load().nonce)
    genesis = Genesis("run", 1, 1, me, me, "", 1, 2, 10, "c", "t", "n", "w", ("f0", "f1"))
    records: list[AnyRecord] = [genesis, Voters((me,)), Voters((me, *others))]
    log = RaftLog()
    for record in records:
        log.append(encode_entry(Entry(log.length, 1, log.position.previous, record)))
    disk.do(Persist(1, 3, "somebody", 0, log.entries_from(0)))
    return me


def test_the_founder_remains_the_only_voter(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = created(tmp_path / "run", small_run(texts))
    me = written(directory, "aaaa/1", "bbbb/2")
    path = str(directory.path)
    assert main(["recover", path]) == 2
    assert "add --new-epoch" in capsys.readouterr().err
    assert main(["recover", path, "--new-epoch"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "epoch 2 begins after step 0; voters given up: aaaa/1, bbbb/2",
        f"continue with: anabranch resume {path}",
    ]
    kept = RaftStorage(directory.log, directory.peer(LEADER_NAME) / "vote.json").load()
    assert RaftLog(kept.lines).voters == (me,) and fold(kept.lines).epoch == 2
    assert kept.term == 4 and kept.vote == me
    assert main(["recover", path, "--new-epoch"]) == 2
    assert "only voter" in capsys.readouterr().err


def test_a_directory_without_a_run(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = created(tmp_path / "run", small_run(texts))
    assert main(["recover", str(directory.path), "--new-epoch"]) == 2
    assert "nothing to recover" in capsys.readouterr().err


def test_a_log_without_its_first_entry(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = created(tmp_path / "run", small_run(texts))
    written(directory, "aaaa/1", "bbbb/2")
    cut = directory.log.read_bytes().partition(b"\n")[2]
    directory.log.write_bytes(cut)
    assert main(["recover", str(directory.path), "--new-epoch"]) == 2
    error = capsys.readouterr().err
    assert f"{directory.log}: " in error and "restore the file from a copy" in error
    assert directory.log.read_bytes() == cut
