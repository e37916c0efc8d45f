"""Peer folders: one process each, so that two joins on a machine are two peers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.errors import UserError
from anabranch.node.lifecycle import peer_home
from anabranch.node.lifecycle.peer_home import claimed
from anabranch.operating_system import lock


def test_who_comes_second_gets_a_folder_beside_it(tmp_path: Path) -> None:
    home = tmp_path / "run"
    with claimed(home, exclusive=False) as first, claimed(home, exclusive=False) as second:
        assert (first, second) == (home, tmp_path / "run-2")
        assert second.stat().st_mode & 0o077 == 0
    with claimed(home, exclusive=False) as again:
        assert again == home


def test_a_folder_at_which_another_process_looks_is_not_taken_for_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pause` holds the lock for a moment to see whether a peer has it."""
    look = os.open(tmp_path / peer_home.LOCK, os.O_RDWR | os.O_CREAT)
    lock(look)
    monkeypatch.setattr(peer_home.time, "sleep", lambda seconds: os.close(look))
    with claimed(tmp_path, exclusive=False) as home:
        assert home == tmp_path


def test_a_folder_that_was_named_is_not_swapped_for_another(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match=r"in use by another process.*--home")
    with claimed(tmp_path, exclusive=True), refused, claimed(tmp_path, exclusive=True):
        raise AssertionError("two processes have it")


def test_the_folder_of_a_killed_process_is_free(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from anabranch.node.lifecycle.peer_home import claimed\n"
        "with claimed(Path(sys.argv[1]), exclusive=True): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(UserError), claimed(tmp_path, exclusive=True):
            pass
        process.kill()
        process.wait()
    with claimed(tmp_path, exclusive=True) as home:
        assert home == tmp_path
