"""Files of contributions: every value comes back to the bit, damage is found, the folder stays within its
bound."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anabranch.train.islands.kept_contributions import (
    CHUNK,
    BadFile,
    ContributionFolder,
    Kept,
    contribution_digest,
    contribution_files,
    files_of,
    name_of,
    read_contribution,
)
from anabranch.train.model.layout import Layout
from anabranch.train.numerics.block_float import rounded
from anabranch.train.numerics.exact import ExactAccumulator

LAYOUT = Layout({"b": (37, 11), "a": (500,)})


def change_of(layout: Layout, bits: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return rounded(torch.randn(layout.elements, generator=draw, dtype=dtype), bits)


def about(change: Tensor, layout: Layout = LAYOUT, t: int = 3, slot: int = 1) -> Kept:
    digest = contribution_digest(layout, change)
    return Kept(
        run="r", t=t, slot=slot, peer="p", corpus="c", digest=digest, elements=change.numel(),
        dtype=str(change.dtype),
    )  # fmt: skip


@pytest.mark.parametrize("bits", [0, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_come_back_to_the_bit(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    change = change_of(LAYOUT, bits, dtype=dtype)
    ContributionFolder(tmp_path, 1 << 20).keep(about(change), change)
    [path] = files_of(tmp_path)
    header, found = read_contribution(path, LAYOUT, dtype)
    assert header == about(change) and torch.equal(found, change) and path.name == name_of(header)
    if bits in (2, 4):
        assert path.stat().st_size < 1.2 * change.numel()


def test_two_rounded_changes_together_and_several_chunks(tmp_path: Path) -> None:
    """A late contribution is added to the next one, and is no multiple of one power of two any more."""
    layout = Layout({"a": (CHUNK + 77,)})
    change = change_of(layout, 4) + change_of(layout, 4, seed=2) / 1024
    ContributionFolder(tmp_path, 1 << 30).keep(about(change, layout), change)
    [path] = files_of(tmp_path)
    assert torch.equal(read_contribution(path, layout, torch.float32)[1], change)


def test_the_digest_is_of_what_is_added() -> None:
    """The digest is of integers in units of 2⁻⁴⁸, as the exact sums have them; a zero has no sign."""
    change = change_of(LAYOUT, 0)
    sums = ExactAccumulator(LAYOUT, dict.fromkeys(LAYOUT.names, 1), torch.float32, torch.device("cpu"))
    for name, view in LAYOUT.views(change):
        sums.add(name, view, most=1)
    again = sums.flat.double() * 2.0**-48
    assert contribution_digest(LAYOUT, again) == contribution_digest(LAYOUT, change)
    signed = change.clone()
    change[5], signed[5] = 0.0, -0.0
    assert contribution_digest(LAYOUT, signed) == contribution_digest(LAYOUT, change)
    signed[5] = 2.0**-48
    assert contribution_digest(LAYOUT, signed) != contribution_digest(LAYOUT, change)


def test_damage_is_found(tmp_path: Path) -> None:
    change = change_of(LAYOUT, 4)
    ContributionFolder(tmp_path, 1 << 20).keep(about(change), change)
    [path] = files_of(tmp_path)
    data = path.read_bytes()
    begin = 4 + int.from_bytes(data[:4], "little")
    values = bytearray(zlib.decompress(data[begin + 4 :]))
    values[300] ^= 1
    packed = zlib.compress(bytes(values))
    flipped = data[:begin] + len(packed).to_bytes(4, "little") + packed
    for spoilt, words in (
        (flipped, "do not have the digest"),
        (data[:-9], "cut off"),
        (data + b"x", "more behind"),
        (b"\xff" * 40, "no header"),
        (data[:begin] + (9).to_bytes(4, "little") + b"notzlib..", "cannot be read"),
        (b"", "no header"),
    ):
        path.write_bytes(spoilt)
        with pytest.raises(BadFile, match=words):
            read_contribution(path, LAYOUT, torch.float32)
    path.write_bytes(data)
    with pytest.raises(BadFile, match="not 3 of"):
        read_contribution(path, Layout({"a": (3,)}), torch.float32)
    with pytest.raises(BadFile, match=r"torch\.float64"):
        read_contribution(path, LAYOUT, torch.float64)


def test_a_chunk_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    change = change_of(LAYOUT, 4)
    ContributionFolder(tmp_path, 1 << 20).keep(about(change), change)
    [path] = files_of(tmp_path)
    data = path.read_bytes()
    begin = 4 + int.from_bytes(data[:4], "little")
    bomb = zlib.compress(b"b" + bytes(1 << 24))
    path.write_bytes(data[:begin] + len(bomb).to_bytes(4, "little") + bomb)
    with pytest.raises(BadFile, match=r"cut off or too long|cannot be read"):
        read_contribution(path, LAYOUT, torch.float32)


def test_the_oldest_rounds_make_room(tmp_path: Path) -> None:
    changes = {t: change_of(LAYOUT, 4, seed=t) for t in range(1, 6)}
    folder = ContributionFolder(tmp_path, 1 << 20)
    folder.keep(about(changes[1], t=1), changes[1])
    size = files_of(tmp_path)[0].stat().st_size
    bounded = ContributionFolder(tmp_path, 3 * size + size // 2)
    for t in range(2, 6):
        bounded.keep(about(changes[t], t=t), changes[t])
    assert [path.name[:12] for path in files_of(tmp_path)] == ["round-000003", "round-000004", "round-000005"]
    ContributionFolder(tmp_path, size // 2).keep(about(changes[1], t=9), changes[1])
    assert len(files_of(tmp_path)) == 3  # too large for the folder: nothing else is lost for it
    ContributionFolder(tmp_path / "none", 0).keep(about(changes[1]), changes[1])
    assert not (tmp_path / "none").exists()


def test_after_a_rollback_the_void_rounds_make_room(tmp_path: Path) -> None:
    """Rounds begin again with lower numbers than those of files that are older."""
    changes = {t: change_of(LAYOUT, 4, seed=t) for t in range(1, 7)}
    folder = ContributionFolder(tmp_path, 1 << 20)
    for t in (4, 5, 6):
        folder.keep(about(changes[t], t=t), changes[t])
    for path in files_of(tmp_path):
        os.utime(path, (1e9, 1e9 + int(path.name[6:12])))
    bounded = ContributionFolder(tmp_path, sum(path.stat().st_size for path in files_of(tmp_path)) + 50)
    for t in (2, 3):
        bounded.keep(about(changes[t], t=t), changes[t])
    assert [int(path.name[6:12]) for path in files_of(tmp_path)] == [2, 3, 6]


def test_what_killed_processes_left_does_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = change_of(LAYOUT, 4)
    for number in range(3):
        monkeypatch.setattr("os.getpid", lambda number=number: 1000 + number)
        with monkeypatch.context() as killed:
            killed.setattr("pathlib.Path.unlink", lambda path, missing_ok=False: None)
            killed.setattr("os.replace", lambda *_: None)
            ContributionFolder(tmp_path, 1 << 20).keep(about(change), change)
    assert len(list(tmp_path.iterdir())) == 1
    ContributionFolder(tmp_path, 1 << 20).keep(about(change), change)
    assert list(tmp_path.iterdir()) == files_of(tmp_path)


def test_links_and_other_files_are_left_out(tmp_path: Path) -> None:
    change = change_of(LAYOUT, 4)
    ContributionFolder(tmp_path / "a" / "contributions", 1 << 20).keep(about(change), change)
    [path] = contribution_files([tmp_path])
    (tmp_path / "a" / path.name).symlink_to(path)
    (tmp_path / "round-000001-slot-000-0.txt").write_text("no")
    assert list(contribution_files([tmp_path])) == [path]
    assert list(contribution_files([tmp_path / "not there"])) == []
