"""`pytest --without-torch` skips what fails for lack of torch, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = {
    "folder/conftest.py": "import torch",
    "folder/test_one.py": "def test_never_reached(): pass",
    "test_module.py": "import torch",
    "test_body.py": "def test_imports_inside():\n    import torch\n\ndef test_plain(): pass",
    "test_other.py": "def test_lacks_another():\n    import no_such_module",
}
_RUN = """
import sys
import pytest
sys.modules["torch"] = None
sys.exit(pytest.main(["-p", "no:cacheprovider", "-p", "support.without_torch", "."]))
"""


def test_only_a_failed_import_of_torch_skips(tmp_path: Path) -> None:
    for name, text in _TESTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-c", _RUN]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed, 3 skipped" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_other.py::test_lacks_another" in done.stdout
