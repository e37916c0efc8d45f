"""A corpus is tokenized by several threads, and has the same bytes whatever their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Program that prepares the corpus of a folder, and prints the nanoseconds that each of its threads computed.
PROGRAM = """
import json, sys
from pathlib import Path
from anabranch.config import DataSection
from anabranch.data.corpus import materialise
section = DataSection(source="text", path=sys.argv[1], tokenizer="bpe", vocab_size=400)
materialise(section, Path(sys.argv[2]))
threads = Path("/proc/self/task").iterdir()
print(json.dumps(sorted(int((thread / "schedstat").read_text().split()[0]) for thread in threads)))
"""


def prepared(texts: Path, out: Path, threads: int) -> list[int]:
    """Nanoseconds that each thread computed while the corpus `out` was made by `threads` threads."""
    command = [sys.executable, "-c", PROGRAM, str(texts), str(out)]
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.costly
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's times of threads")
def test_the_number_of_threads_changes_no_byte(tmp_path: Path) -> None:
    """A fifth of the work at least is the second thread's; with one thread alone the next one to it is the
    program's own, which reads."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(100):
        lines = (f"text {number} has a line {line * number % 977} of its own\n" for line in range(1500))
        (texts / f"{number:03}.txt").write_text("".join(lines))
    one, two = tmp_path / "one", tmp_path / "two"
    prepared(texts, one, 1)
    second, first = prepared(texts, two, 2)[-2:]
    assert second * 4 > first, "both threads of the tokenizer computed"
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir()) and "train.tokens" in names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
