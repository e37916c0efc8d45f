"""Sweeps on a real Ray cluster of two nodes, one of which is killed while it computes: the results are those
of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.main import main
from benchmarks.simulation import policies
from support.ray_cluster import is_computing, kill_node, two_nodes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def sweep() -> Iterator[Callable[..., str]]:
    """Output of `python -m ...` on the cluster, a node of which is killed while it computes."""
    with two_nodes(cpus=1) as cluster:

        def swept(*arguments: str) -> str:
            command = [sys.executable, "-m", *arguments, "--executor", "ray"]
            environment = {**os.environ, "RAY_ADDRESS": cluster.address}
            with subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            ) as program:
                lost = next(iter(cluster.worker_nodes))
                while not is_computing(lost, "_call"):
                    assert program.poll() is None, "the sweep ended before its node was killed"
                    time.sleep(0.05)
                kill_node(cluster, lost)
                output = program.communicate()[0]
            assert program.returncode == 0
            return output

        yield swept


def test_seeds_are_those_of_one_process(
    sweep: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = ("simtest", "--seeds", "0:16", "--json")
    assert main([*seeds, "--jobs", "1"]) == 0
    here = capsys.readouterr().out
    assert outcomes(sweep("anabranch", *seeds)) == outcomes(here)


def outcomes(text: str) -> dict[str, Any]:
    """Summary of `simtest --json` without times."""
    return {key: value for key, value in json.loads(text).items() if not key.endswith("_s")}


def test_a_benchmark_s_outcomes_are_those_of_one_process(sweep: Callable[..., str]) -> None:
    cells = [policies.main_cell("LLaMA-like", f, c, policies.OURS, 3) for f in policies.FLEETS
             for c in policies.CHURN]  # fmt: skip
    for each in cells:
        policies.path_of(each, 0).unlink(missing_ok=True)
    size = ("--seeds", "1", "--iterations", "3")
    said = sweep("benchmarks.simulation.policies", "--dry", "--sections", "phases", *size)
    assert said.count("\n| equal") == said.count("\n| unequal") == len(policies.CHURN)
    for each in cells[::2]:
        assert policies.path_of(each, 0).read_bytes() == policies.computed((each, 0))
