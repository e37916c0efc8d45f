"""Program that runs the commands of container/compose.yaml as processes, in a network and a mount namespace
of its own, in which the services' names are this machine.

    unshare --mount --net python compose_commands.py FOLDER RELAYS

A relay is killed after the third step. Prints a line of JSON: what the page answers, the step that the run
reached, and how the leader ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

CONTAINER = Path(__file__).resolve().parents[2] / "container"
#: Seconds after which the demonstration counts as stuck.
LIMIT_S = 300.0


class Demonstration:
    """Services of the compose file. folder: stands for the volume /runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.monotonic()
        self._services: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]
        self._environment = os.environ | {
            "HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def start(self, service: str, number: int = 0) -> subprocess.Popen[bytes]:
        """Start a service's command as its entry point does, with the volume and the configuration here."""
        described = self._services[service]
        text = described["command"][0].replace("$$", "$").replace("/runs/", f"{self._folder}/")
        text = text.replace("/demo.toml", str(CONTAINER / "demo.toml"))
        with open(self._folder / f"{service}-{number}.txt", "ab") as log:
            return subprocess.Popen(
                [*described["entrypoint"], text], env=self._environment, cwd=self._folder, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_for(self, t: int) -> int:
        """Wait for a step later than t - 1; returns it. Raises TimeoutError."""
        while (reached := self.reached()) < t:
            if time.monotonic() > self._began + LIMIT_S:
                raise TimeoutError(f"step {reached} is the last one")
            time.sleep(0.3)
        return reached

    def reached(self) -> int:
        events = self._folder / "demo" / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        return max((json.loads(line)["t"] for line in lines if line.startswith('{"kind":"step"')), default=0)


def main(folder: Path, relays: int) -> None:
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost leader {socket.gethostname()}\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    shown = Demonstration(folder)
    leader, page = shown.start("leader"), shown.start("page")
    peers = [shown.start("relay", number) for number in range(relays)]
    try:
        shown.wait_for(3)
        with urllib.request.urlopen("http://127.0.0.1:8600/?secret=demonstration", timeout=60) as answer:
            answered = answer.status
        peers[0].send_signal(signal.SIGKILL)
        peers.append(shown.start("relay", relays))
        reached = shown.wait_for(shown.reached() + 3)
        leader.send_signal(signal.SIGTERM)
        stopped = leader.wait(LIMIT_S)
        leader = shown.start("leader")  # the run directory is there: it resumes
        resumed = shown.wait_for(shown.reached() + 2)
        result = {"page": answered, "reached": reached, "stopped": stopped, "resumed": resumed}
        print(json.dumps(result), flush=True)
    finally:
        for process in (leader, page, *peers):
            process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
