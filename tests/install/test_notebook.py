"""The notebook's cells as a script, on this machine instead of Colab, against a run of this machine."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

import anabranch
from support.api_runs import small_settings, texts_in

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "examples" / "lend-a-colab-machine.ipynb"


def executed(cell: str, names: dict[str, Any]) -> None:
    """Run a cell as IPython does: lines with `!` are for a shell, in which $name is a variable of Python."""
    for line in re.split(r"^(?=[!%])|(?<=\n)(?=\S)", cell, flags=re.MULTILINE):
        if line.startswith("!"):
            command = re.sub(r"\$(\w+)", lambda found: str(names.get(found[1], found[0])), line[1:])
            subprocess.run(command, shell=True, check=True)
        elif line.startswith("%"):
            assert line.strip() == "%pip install --quiet anabranch-*.whl"  # tests/install/test_wheel.py
        else:
            exec(line, names)


@pytest.mark.soak
def test_the_cells_lend_this_machine_until_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ANABRANCH_TICKET", "")
    shape = {"dim": 16, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 24}
    settings = small_settings(texts_in(tmp_path), stages=1, relays=1, sequence=16)
    settings |= {"fleet": settings["fleet"] | {"minimum": 1}, "model": shape, "run.steps": 3}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with anabranch.Run.create(settings, tmp_path / "run", local=False) as run:
        monkeypatch.setattr(getpass, "getpass", lambda question: run.tickets["relay"])
        names: dict[str, Any] = {}
        for cell in notebook.cells:
            if cell.cell_type == "code":
                executed(cell.source, names)
        assert run.wait() == 3
    assert list((tmp_path / ".anabranch").iterdir()), "the peer's home is there"
    report = anabranch.verify(tmp_path / "run")
    assert report.holds and report.steps == 3
