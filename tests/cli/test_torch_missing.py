"""Commands where torch is not installed: each works without it, or says in one line how to install it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.command_lines import SHOWN, filled_in

_PROGRAM = """
import importlib.abc, json, sys
from anabranch.cli.main import main
from anabranch.observe.console import progress
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("looked for torch", *(type(one).__name__ for one in progress._entered), file=sys.stderr)
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Missing())
lines = json.loads(sys.argv[1])
print(json.dumps([main(line) for line in lines]), file=sys.stderr)
"""
#: Commands that compute with a model.
NEED = {"check-model", "evaluate", "export", "generate", "start", "train", "verify"}
#: Commands that refuse here before they compute: there is nobody to expel, and no step is left.
REFUSED = {"expel", "resume"}


@pytest.mark.costly
@pytest.mark.slow
def test_a_command_without_torch_says_how_to_install_it(finished: Path, tmp_path: Path) -> None:
    lines = {}
    for name in SHOWN:
        (folder := tmp_path / name).mkdir()
        lines[name] = filled_in(name, finished, folder)
    lines["start"] = ["start", str(finished / "run.toml"), "--run-dir", str(tmp_path / "led")]
    lines["doctor"] = ["doctor"]
    command = [sys.executable, "-c", _PROGRAM, json.dumps(list(lines.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    statuses = dict(zip(lines, json.loads(done.stderr.splitlines()[-1]), strict=True))
    assert {name for name, status in statuses.items() if status == 2} == NEED | REFUSED
    python = sys.executable
    remedy = f"error: torch is not installed for {python}; {python} -m pip install torch"
    told = done.stderr.splitlines()
    assert told.count(remedy) == len(NEED)
    looks = [line for line in told if line.startswith("looked for torch")]
    assert len(looks) >= len(NEED)
    assert "looked for torch" not in looks, "it may take seconds: a line or a bar is entered meanwhile"
    assert not (tmp_path / "led").exists()
