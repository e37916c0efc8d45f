"""Program for a Ray cluster: each peer is a task that Ray starts again when its node or process dies.

https://docs.ray.io/en/latest/ray-core/fault_tolerance/tasks.html, read for version 2.60.
"""

from __future__ import annotations

import json

from anabranch.launch.fleet import AGAIN, TICKET_VARIABLE, Fleet

_PROGRAM = '''\
"""{peers} peers of the run {name} on a Ray cluster, for `ray job submit` or `python THIS_FILE`.

The ticket comes from the environment variable {variable}. Every node needs anabranch and ray.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import ray

#: Peers, and the words of the command that each of them runs after its address.
GROUPS = {groups}
CPUS, GPUS, GRACE_S, AGAIN = {cpus}, {gpus}, {grace_s}, {again}


class Again(Exception):
    """The run cannot be reached now, or this machine failed: the peer is started again."""


@ray.remote(
    num_cpus=CPUS, num_gpus=GPUS, max_retries=-1, retry_exceptions=[Again], scheduling_strategy="SPREAD"
)
def peer(number, words, ticket):
    """Join the run; returns the exit status."""
    address = ray.util.get_node_ip_address()
    node = ray.get_runtime_context().get_node_id()[:12]
    home = os.path.join(os.path.expanduser("~"), ".anabranch", f"ray-{{node}}-{{number}}")
    command = [sys.executable, "-m", "anabranch", "join", "--host", address, "--home", home, *words]
    environment = {{**os.environ, "{variable}": ticket}}
    child = subprocess.Popen(command, env=environment, preexec_fn=_leave_with_parent)
    if child.wait() == AGAIN or child.returncode < 0:
        time.sleep(1)
        raise Again(f"peer {{number}}: exit status {{child.returncode}}")
    return child.returncode


def _leave_with_parent():
    """Let the kernel send this process SIGTERM when Ray's worker dies: the peer then leaves the run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h


def main():
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), ignore_reinit_error=True)
    tasks = [words for count, words in GROUPS for _ in range(count)]
    waiting = [peer.remote(number, words, os.environ["{variable}"]) for number, words in enumerate(tasks)]
    statuses = []
    while waiting:
        over = 0 in statuses  # a peer that returns 0 knows that the run is over; others may still look for it
        done, waiting = ray.wait(waiting, timeout=GRACE_S if over else None)
        statuses += ray.get(done)
        if over and not done:
            for task in waiting:
                ray.cancel(task, force=True)
            return 0
    return 0 if 0 in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
'''


def program(fleet: Fleet) -> str:
    """Text of a Python program that starts the fleet's peers on a Ray cluster and waits until the run is
    over. The ticket is not in it: the program takes it from the environment."""
    groups = []
    for group in fleet.groups:
        words = fleet.join_words(group, "", port=0)[4:]
        groups.append((group.count, [word.strip("'") for word in words]))
    return _PROGRAM.format(
        peers=fleet.peers,
        name=fleet.name,
        variable=TICKET_VARIABLE,
        groups=json.dumps(groups),
        cpus=fleet.cpus,
        gpus=fleet.gpus,
        again=AGAIN,
        grace_s=fleet.grace_s,
    )
