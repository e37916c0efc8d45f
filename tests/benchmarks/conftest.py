"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """Folder of 40 small texts, for a corpus of bytes."""
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(40):
        (folder / f"{n}.txt").write_text("".join(f"{n} and {k} are {n * k}; " for k in range(60)))
    return folder
