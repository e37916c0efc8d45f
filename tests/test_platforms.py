"""Tests that other systems run (.github/workflows/tests.yml) can be collected without modules of Unix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Modules that Windows lacks, and that do not belong to pytest.
_ABSENT = ("fcntl", "resource", "termios", "tty", "pwd", "grp", "uvloop")
_COLLECT = f"""
import sys
import pytest
for name in {_ABSENT}:
    sys.modules[name] = None
from anabranch.net.wan import emulated_network
emulated_network.available = lambda: "the emulated network needs Linux"
options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "not slow and not soak and not thorough"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_tests_of_other_systems_are_collected_without_unix() -> None:
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    [line] = [line for line in workflow.partition("  others:")[2].splitlines() if "-m pytest" in line]
    folders = [word for word in line.split() if word.startswith("tests/")]
    assert folders
    done = subprocess.run(
        [sys.executable, "-c", _COLLECT, *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
