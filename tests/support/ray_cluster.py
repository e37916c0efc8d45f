"""Real Ray clusters of processes of this machine, for tests marked `soak`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Bytes of the object store of a node.
STORE_BYTES = 80 << 20


@contextmanager
def two_nodes(cpus: int) -> Iterator[Any]:
    """Head without processors and two nodes with `cpus` each. Skips the test where Ray is not installed."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'anabranch[ray]'")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES})
    for _ in range(2):
        add_node(found, cpus)
    yield found
    found.shutdown()


def add_node(cluster: Any, cpus: int) -> None:
    cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)


def kill_node(cluster: Any, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)


def is_computing(node: Any, task: str) -> bool:
    """True if a process of the node computes a task of this name."""
    [raylet] = [info.process.pid for info in node.all_processes["raylet"]]
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = int(status.read_text().partition("PPid:")[2].split()[0])
            words = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue  # it ended
        if parent == raylet and words.startswith(f"ray::{task}".encode()):
            return True
    return False
