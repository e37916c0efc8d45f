"""Files of a voter, read again: damage is refused by name, with a remedy."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from anabranch.errors import UserError
from anabranch.node.driver.raft_storage import RaftStorage
from anabranch.protocol.interface.events import Persist


def disk_in(folder: Path) -> RaftStorage:
    return RaftStorage(folder / "log.jsonl", folder / "vote.json")


def test_a_vote_is_read_as_it_was_written(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    nonce = disk.load().nonce
    disk.do(Persist(1, term=1 << 70, vote="x", start=0, lines=()))
    kept = disk_in(tmp_path).load()
    assert (kept.nonce, kept.term, kept.vote) == (nonce, 1 << 70, "x")


@pytest.mark.parametrize(
    "vote",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"version": 1, "nonce": "a", "term": 1e999, "vote": ""}',
        b'{"version": 1, "nonce": "a", "term": 1.5, "vote": ""}',
        b'{"version": 1, "nonce": "a", "term": "3", "vote": ""}',
        b'{"version": 1, "nonce": "a", "term": -1, "vote": ""}',
        b'{"version": 1, "nonce": "a", "term": 3, "vote": null}',
        b'{"version": 1, "nonce": "a", "vote": ""}',
        b'{"nonce": "a", "term": 3, "vote": ""}',
    ],
)
def test_a_damaged_vote_is_refused(tmp_path: Path, vote: bytes) -> None:
    """A term or vote that was never written must not be taken for one: a voter votes once in a term."""
    (tmp_path / "vote.json").write_bytes(vote)
    with pytest.raises(UserError, match=r"vote\.json cannot be read: remove it together with log\.jsonl"):
        disk_in(tmp_path)


def test_a_vote_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vote.json").write_bytes(b'{"version": 2, "term": {"high": 1, "low": 0}}')
    with pytest.raises(UserError, match="version 2, but this release reads version 1"):
        disk_in(tmp_path)


def test_a_log_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    line = b'{"index":0,"term":1,"previous":"","record":{"kind":' + b"[" * 100_000
    (tmp_path / "log.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UserError, match=r"log\.jsonl: .*nested too deeply; restore the file from a copy"):
        disk_in(tmp_path).load()


def line_of(number: int) -> bytes:
    return b'{"filler":"' + b"x" * 200 + f'{number}"}}'.encode()


def test_a_line_that_a_full_disk_cuts_off_is_not_acknowledged(tmp_path: Path) -> None:
    """A write may store a part and raise nothing: a peer that took this for success would announce an entry
    that its next start does not find."""
    disk = disk_in(tmp_path)
    disk.load()
    disk.do(Persist(1, term=1, vote="", start=0, lines=(line_of(0),)))
    whole = (tmp_path / "log.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
    try:
        with pytest.raises(UserError, match=r"log\.jsonl cannot be written: .*make room"):
            disk.do(Persist(2, term=1, vote="", start=1, lines=(line_of(1),)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log.jsonl").read_bytes() == whole, "what was acknowledged stays, and nothing else"
