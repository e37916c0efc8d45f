"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.operating_system import write_atomically


@pytest.mark.skipif(os.name != "posix", reason="links and modes of POSIX")
def test_what_lies_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    """A link at the unfinished file's name would lead elsewhere, and a file of another mode would be read."""
    path, elsewhere = tmp_path / "gate", tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / ".gate.unfinished").symlink_to(elsewhere)
    write_atomically(path, b"one", 0o600)
    assert (path.read_bytes(), elsewhere.read_text()) == (b"one", "kept")
    left = tmp_path / ".gate.unfinished"
    left.write_text("of a crash")
    left.chmod(0o666)
    write_atomically(path, b"two", 0o600)
    assert path.read_bytes() == b"two" and path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere", "gate"]
