"""Shared harness of the benchmarks: arguments, goals, Markdown tables, the machine in words, results as JSON.

A benchmark is a module of one of the folders beside this file and runs as `python -m benchmarks.FOLDER.NAME`.
The folder is the subject of its results. README.md describes the form of a result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from anabranch.executors import NAMES, Executor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "data"
#: Folder of what benchmarks keep between two runs, so that a run that was stopped goes on where it was.
CACHE = ROOT / "build"

_Job = TypeVar("_Job")
_Outcome = TypeVar("_Outcome")


class Goal(NamedTuple):
    """Goal of a benchmark. met: "met", "missed", or "open" where it was not measured."""

    goal: str
    target: str
    value: str
    met: str


def goal(name: str, target: str, value: str, held: bool | None) -> Goal:
    """held: None where the value does not decide it."""
    return Goal(name, target, value, {True: "met", False: "missed", None: "open"}[held])


def at_most(name: str, limit: float, value: float, form: str = "{:g}", half: float = 0.0) -> Goal:
    """Goal that `value` is not greater than `limit`; `form` formats all. half: half of the 95 % interval of
    the value, all of which has to be on the right side."""
    return goal(name, f"at most {form.format(limit)}", _spread(value, form, half), value + half <= limit)


def at_least(name: str, limit: float, value: float, form: str = "{:g}", half: float = 0.0) -> Goal:
    """Goal that `value` is not less than `limit`; else as `at_most`."""
    return goal(name, f"at least {form.format(limit)}", _spread(value, form, half), value - half >= limit)


def _spread(value: float, form: str, half: float) -> str:
    return f"{form.format(value)} ± {form.format(half)}" if half else form.format(value)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Argument parser with the module's docstring as its description, and `--dry`."""
    described = argparse.ArgumentParser(
        prog=f"python -m {module()}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("--dry", action="store_true", help="print the result, write no file")
    return described


def module() -> str:
    """Dotted name of the benchmark that runs, below the root of the checkout."""
    path = Path(sys.argv[0]).resolve()
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    return ".".join(inside.with_suffix("").parts)


def main_by_name() -> int:
    """Exit status of `main` of the benchmark that runs, imported under its own name: other machines find its
    functions and classes by that name, and not by `__main__`."""
    status: int = importlib.import_module(module()).main()
    return status


def command() -> str:
    """Command line that reproduces the result, without `--dry`."""
    return shlex.join(["python", "-m", module(), *(word for word in sys.argv[1:] if word != "--dry")])


def program() -> str:
    """Short commit of the checkout, with a + where files differ from it."""
    words = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """CPU model, cores, versions and load of this machine, in one line."""
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


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown table whose columns also line up as plain text."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write(
    name: str,
    title: str,
    body: str,
    *,
    goals: Sequence[Goal] = (),
    data: Any = None,
    reproduce: str = "",
    dry: bool = False,
) -> None:
    """Print a result and, unless `dry`, write it to `docs/results/data/NAME.json`.

    body: Markdown. data: figures as plain values, dataclasses or msgspec structs. reproduce: the command to
    name, where that is not the command line that runs.
    """
    print(f"{title}\n\n{body.strip()}", flush=True)
    if goals:
        print(f"\n{table(Goal._fields, goals)}", flush=True)
    if dry:
        return
    result = {
        "name": name,
        "title": title,
        "subject": Path(sys.argv[0]).resolve().parent.name,
        "command": reproduce or command(),
        "program": program(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "goals": [each._asdict() for each in goals],
        "body": body.strip(),
        "data": msgspec.to_builtins(data, str_keys=True) if data is not None else {},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_whole(path, json.dumps(result, ensure_ascii=False, indent=1).encode() + b"\n")
    print(f"\nwritten to {os.path.relpath(path)}", flush=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def in_processes(
    work: Callable[[_Job], _Outcome], jobs: Sequence[_Job], processes: int, what: str = "jobs"
) -> Iterator[_Outcome]:
    """Outcomes of `work` for each of `jobs`, in their order, from so many processes; counts on stderr."""
    with ProcessPoolExecutor(processes) as pool:
        for done, outcome in enumerate(pool.map(work, jobs), 1):
            print(f"{what}: {done} of {len(jobs)}", file=sys.stderr, flush=True)
            yield outcome


def add_executor(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose where a sweep is computed."""
    parser.add_argument("--processes", type=int, default=1)
    text = "processes of this machine, or a Ray cluster (RAY_ADDRESS)"
    parser.add_argument("--executor", choices=NAMES, default=NAMES[0], help=text)


def completed(
    work: Callable[[_Job], _Outcome], jobs: Sequence[_Job], where: Executor, what: str = "jobs"
) -> Iterator[tuple[_Job, _Outcome]]:
    """(job, outcome of `work`) as they come; counts on stderr."""
    for done, (number, outcome) in enumerate(where.completed(work, jobs), 1):
        print(f"{what}: {done} of {len(jobs)}", file=sys.stderr, flush=True)
        yield jobs[number], outcome
