"""The Python examples of the README, the guide and the docstrings run as they stand, with a smaller run."""

from __future__ import annotations

import doctest
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import anabranch
from support.api_runs import small_settings, texts_in

ROOT = Path(__file__).resolve().parents[2]
#: Run that the examples make, and the smaller one that is made here.
MADE, SMALLER = 'anabranch.Run.create({"run.steps": 50})', "anabranch.Run.create(SMALLER)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the run of the README's example, a smaller one, is finished."""
    found = tmp_path_factory.mktemp("examples")
    shutil.copy(ROOT / "docs" / "examples" / "python_choices.jsonl", found)
    [example] = blocks("README.md")
    printed = executed(example, found)
    assert re.search(r"^3 \d\.\d+ ", printed, flags=re.MULTILINE), printed
    assert printed.endswith("True\n")
    return found


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def settings(folder: Path) -> dict[str, Any]:
    texts = folder / "texts" if (folder / "texts").exists() else texts_in(folder)
    model = {"dim": 16, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 24}
    small = small_settings(texts, stages=1, relays=2, sequence=128)
    return {**small, "model": model, "run.steps": 3, "batch": {"microbatches": 4, "rows": 1, "sequence": 128}}


def executed(program: str, folder: Path) -> str:
    """Output of a program in a process of its own, with SMALLER in the place of the run that it makes."""
    assert MADE in program or "Run.create" not in program
    program = f"SMALLER = {settings(folder)!r}\n{program.replace(MADE, SMALLER)}"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_example_of_the_readme_has_ten_lines_at_most_and_runs(folder: Path) -> None:
    assert len(blocks("README.md")[0].splitlines()) <= 10
    assert (folder / "runs" / "tiny" / "checkpoints" / "step-000003").is_dir()


@pytest.mark.slow
def test_the_examples_of_docstrings_run(folder: Path) -> None:
    """Those that doctest skips, as they need a run. Their values are not this run's. One process runs them,
    each module's without the names of the other's."""
    program = ""
    for module in ("anabranch.api.evaluation", "anabranch.api.model"):
        found = doctest.DocTestFinder().find(importlib.import_module(module))
        examples = "".join(one.source for each in found for one in each.examples)
        assert "anabranch." in examples
        program += f"exec(compile({examples!r}, {module!r}, 'exec'), {{}})\n"
    executed(program, folder)


@pytest.mark.soak
def test_the_guide_s_first_example_runs(tmp_path: Path) -> None:
    first, *_ = blocks("docs/how-to/use-from-python.md")
    executed(first, tmp_path)
    assert anabranch.load(tmp_path / "tiny-hf").config.dim == 16
