"""The program for Ray on a real local cluster: a node is killed while it trains, and no bit differs (I3)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.cli.main import main
from support.ray_cluster import add_node, kill_node, two_nodes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
#: Seconds that the program may take to end after the run.
LIMIT_S = 300.0
STEPS = 40


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with room for two peers each, whose home is in the test's folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # Ray's workers inherit it from the cluster
    with two_nodes(cpus=2) as found:
        yield found


def peers_of(node: str) -> list[int]:
    """Process ids of the peers whose home names a Ray node."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "join" in words and any(f"ray-{node[:12]}-" in word for word in words):
                found.append(int(entry.name))
    return found


def test_a_node_of_a_ray_cluster_is_killed(cluster: Any, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox\n" * 20)
    program = tmp_path / "relays.py"
    arguments = ["--peers", "4", "--gpus", "0", "--cpus", "1", "--grace", "5", "--out", str(program)]
    assert main(["fleet", "ray", *arguments]) == 0
    config = {
        "model": {"dim": 64, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 96},
        "data": {"source": "text", "path": str(texts), "tokenizer": "bytes"},
        "batch": {"microbatches": 8, "rows": 4, "sequence": 64},
        "pipeline": {"stages": 2},
        "fleet": {"data_nodes": 1, "relays": 4, "minimum": 2},
        "checkpoint": {"every": 20},
        "compute": {"device": "cpu"},
        "run.steps": STEPS,
    }
    with anabranch.Run.create(config, tmp_path / "run", local=False) as run:
        environment = {
            **os.environ, "RAY_ADDRESS": cluster.address, "ANABRANCH_TICKET": run.tickets["relay"],
        }  # fmt: skip
        driver = subprocess.Popen([sys.executable, str(program)], env=environment)
        try:
            killed = None
            for event in run.metrics():
                if event.t >= 5 and killed is None:
                    killed = next(node for node in cluster.worker_nodes if peers_of(node.node_id))
                    for peer in peers_of(killed.node_id):
                        os.kill(peer, signal.SIGKILL)
                    kill_node(cluster, killed)
                    add_node(cluster, cpus=2)
            assert killed is not None and run.step == STEPS
            assert driver.wait(LIMIT_S) == 0
        finally:
            driver.kill()
    homes = (tmp_path / "home" / ".anabranch").iterdir()
    assert len({home.name.rpartition("-")[0] for home in homes}) >= 2, "peers ran on two nodes"
    report = anabranch.verify(tmp_path / "run")
    assert report.holds and report.promise == "bits" and report.removals >= 1
