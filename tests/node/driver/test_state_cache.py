"""Folder of kept states: bound, damage, and what a process of another run finds."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from anabranch.node.driver import state_cache
from anabranch.node.driver.state_cache import StateCache, kept_text
from anabranch.node.driver.worker_thread import Computer
from anabranch.protocol.interface.events import KeptState
from anabranch.protocol.interface.tasks import PIECE_BYTES, Payload, Result, Snapshot, Task


def state(t: int, size: int = 1000) -> KeptState:
    pieces = tuple(torch.full((count,), t, dtype=torch.uint8) for count in (size, 7))
    return KeptState(t, f"print {t}", pieces, (f"a{t}", f"b{t}"))


def equal(one: KeptState | None, other: KeptState) -> bool:
    if one is None or (one.t, one.fingerprint, one.hashes) != (other.t, other.fingerprint, other.hashes):
        return False
    return all(map(torch.equal, one.pieces, other.pieces))  # type: ignore[arg-type]


def test_a_stage_has_one_state_of_each_run_and_the_last_one(tmp_path: Path) -> None:
    cache = StateCache(tmp_path / "states", 10_000)
    assert cache.load("run", 1) is None
    assert not cache.keep("run", 1, state(3)) and not cache.keep("run", 1, state(4))
    assert not cache.keep("run", 2, state(5))
    assert equal(cache.load("run", 1), state(4)) and equal(cache.load("run", 2), state(5))
    assert cache.load("../run", 1) is None
    assert len(list(cache.folder.iterdir())) == 2
    cache.clear()
    assert cache.load("run", 1) is None and not list(cache.folder.iterdir())


def test_the_oldest_states_make_room_and_none_is_larger_than_the_bound(tmp_path: Path) -> None:
    cache = StateCache(tmp_path / "states", 3000)
    for stage in (1, 2, 3):
        assert not cache.keep("run", stage, state(stage))
        os.utime(cache.path("run", stage), (stage, stage))
    assert cache.load("run", 1) is None
    assert equal(cache.load("run", 2), state(2)) and equal(cache.load("run", 3), state(3))
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= 3000
    assert "--cache" in cache.keep("run", 3, state(9, size=4000))
    assert cache.load("run", 3) is None, "the former state of the stage is outdated"
    assert "off" in StateCache(tmp_path / "none", 0).keep("run", 1, state(1))
    assert StateCache(cache.folder, 0).load("run", 2) is None and not list(cache.folder.iterdir())


def test_most_of_a_disk_stays_free(tmp_path: Path, monkeypatch: object) -> None:
    cache = StateCache(tmp_path / "states", 10**9)
    free = type("Usage", (), {"free": 1500})
    monkeypatch.setattr(state_cache.shutil, "disk_usage", lambda folder: free)  # type: ignore[attr-defined]
    assert cache.keep("run", 1, state(1))
    assert not list(cache.folder.iterdir())


def test_what_is_damaged_is_not_read(tmp_path: Path) -> None:
    cache = StateCache(tmp_path / "states", 10**6)
    assert not cache.keep("run", 1, state(3))
    path = cache.path("run", 1)
    whole = path.read_bytes()
    size = int.from_bytes(whole[:4], "little")
    for wrong in (b"", whole[:-1], whole + b"0", b"\xff" * 40, whole[:4] + b"[" * 4000,
                  whole.replace(b'"stage":1', b'"stage":2'), whole[:4] + b"{}".ljust(size) + whole[4 + size:],
                  whole.replace(b"1000,7", b"1008,-1")):  # fmt: skip
        path.write_bytes(wrong)
        assert cache.load("run", 1) is None, wrong[:60]
    path.write_bytes(whole)
    assert equal(cache.load("run", 1), state(3))


def test_a_crash_while_a_state_is_written_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = StateCache(tmp_path / "states", 10**6)
    cache.folder.mkdir()
    (cache.folder / ".left.state.unfinished").write_bytes(b"half")
    assert not cache.keep("run", 1, state(3))
    assert [path.name for path in cache.folder.iterdir()] == [cache.path("run", 1).name]


def test_a_step_that_is_taken_as_the_peer_ends_is_kept_with_it(tmp_path: Path) -> None:
    class Worker(Computer):
        def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
            assert isinstance(task, Snapshot)
            if task.t != 8:
                return Result(error="another step")
            kept = state(8)
            return Result(kept.pieces, fingerprint=kept.fingerprint, hashes=kept.hashes)

    cache = StateCache(tmp_path / "states", 10**6)
    assert "after iteration 8 is kept" in kept_text(cache, Worker(), "run", 1, 7)
    assert equal(cache.load("run", 1), state(8))
    assert "is not kept" in kept_text(cache, Worker(), "run", 1, 5)
    assert "is not kept" in kept_text(StateCache(tmp_path / "small", 10), Worker(), "run", 1, 8)


def test_a_write_that_is_given_up_keeps_the_former_state(tmp_path: Path) -> None:
    """The second signal, or the end of the grace, comes while the second piece is written."""
    cache, looks = StateCache(tmp_path / "states", 10**6), iter((False, True))
    assert not cache.keep("run", 1, state(3))
    assert "no time" in cache.keep("run", 1, state(4), lambda: next(looks))
    assert equal(cache.load("run", 1), state(3))
    assert not cache.keep("run", 1, state(5)) and equal(cache.load("run", 1), state(5))
    assert len(list(cache.folder.iterdir())) == 1


def test_pieces_larger_than_any_are_not_read(tmp_path: Path) -> None:
    """They would be sent to others, whose links take no such piece."""
    cache = StateCache(tmp_path / "states", 10**9)
    assert not cache.keep("run", 1, state(3, size=PIECE_BYTES + 1))
    assert cache.load("run", 1) is None


def test_a_worker_without_memory_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    class Worker(Computer):
        def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
            raise torch.OutOfMemoryError("CUDA out of memory")

    cache = StateCache(tmp_path / "states", 10**6)
    assert "is not kept on this machine's disk: CUDA out of memory" in kept_text(cache, Worker(), "run", 1, 7)
