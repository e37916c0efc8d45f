"""What all benchmarks share: the machine in words, and the sections of docs/results.md that they rewrite."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results.md"


def machine() -> str:
    """CPU model, cores and versions, in one line."""
    import torch

    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{model} ({capability}), {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f} at the end"
    )


def command() -> str:
    """The command line that reproduces a section."""
    return shlex.join([".venv/bin/python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write_section(name: str, body: str, with_command: str | None = None, path: Path = RESULTS) -> None:
    """Print `body` and put it, with command, date and machine, between the markers of section `name`.

    `with_command`: what reproduces it, where that is not the command line that runs.
    """
    print(body, flush=True)
    date = time.strftime("%Y-%m-%d")
    section = f"{body.strip()}\n\nMeasured on {date} with `{with_command or command()}`: {machine()}."
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = path.read_text("utf-8") if path.exists() else "# Results\n"
    if begin not in text:
        text = f"{text.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{section}\n{end}{after}", "utf-8")
    print(f"\nwritten to {os.path.relpath(path)}, section {name}")
