"""Audited run of honest real processes for `audit_honest`: over TLS on this machine, with all contributions
audited; with trouble, relays are killed at any moment and come back."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anabranch.config import RunConfig, config_from_dict
from anabranch.node.driver.crash_report import REPORT
from anabranch.node.local_swarm.local_swarm import LeaderFailed, LocalSwarm
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Event, Step
from benchmarks.recovery.audit_cost import write_corpus

#: Steps between two kills of a relay (choices): the stage has its replicas again in between.
KILL_EVERY = (8, 16)


def configuration(sizes: tuple[int, int, int], replicas: int, seed: int, corpus: Path) -> RunConfig:
    """Run file of a tiny model. sizes: stages, microbatches and steps."""
    stages, microbatches, steps = sizes
    return config_from_dict(
        {
            "anabranch": {"version": 1},
            "run": {"name": "audit-honest", "seed": seed, "steps": steps, "numerics": "strict"},
            "model": {
                "size": "llama-tiny", "dim": 16, "ffn": 24, "blocks": stages, "heads": 2, "max_sequence": 16,
            },
            "batch": {"microbatches": microbatches, "rows": 1, "sequence": 16},
            "pipeline": {"stages": stages},
            "fleet": {"data_nodes": 1, "relays_per_stage": [replicas] * stages, "minimum": 2},
            "data": {"source": "text", "path": str(corpus), "tokenizer": "bytes"},
            "compute": {"device": "cpu", "threads": 1},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 10 * steps},
            "audit": {"share": 1.0},
        }
    )  # fmt: skip


def audited_run(
    sizes: tuple[int, int, int], replicas: int, seed: int, kills: bool
) -> tuple[Sequence[Event], Sequence[bytes], int, bool]:
    """Events and log lines of a run that has ended, number of relays that were killed, and True if `verify`
    found no bit that differs."""
    from anabranch.audit.verify import verify
    from anabranch.node.lifecycle.create_run import create_run

    rng, killed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder, Supervisor(1) as supervisor:
        corpus = Path(folder) / "texts"
        write_corpus(corpus)
        run = configuration(sizes, replicas, seed, corpus)
        directory = create_run(run, Path(folder) / "run")
        swarm = LocalSwarm(directory, run, supervisor)
        at = rng.randint(*KILL_EVERY) if kills else run.run.steps + 1
        try:
            swarm.start()
            for event in swarm.events():
                if isinstance(event, Step) and event.t >= at:
                    stage, n = rng.randrange(sizes[0]) + 1, rng.randrange(replicas)
                    name = f"relay-{stage}.{n}"
                    swarm.processes[name].signal(9)
                    swarm.processes[name].wait(10.0)
                    swarm.join(name, swarm.ticket(), ["--stage", str(stage)])
                    killed, at = killed + 1, event.t + rng.randint(*KILL_EVERY)
            swarm.check_leader()
            swarm.end()
        except LeaderFailed:
            for report in Path(folder).rglob(REPORT):  # the folder is about to go
                print(report.read_text(), file=sys.stderr)
            raise
        finally:
            swarm.kill()
        report = verify(directory.path)
        lines = directory.log.read_bytes().splitlines()
        return events_of(directory.events, Event), lines, killed, report.holds and report.promise == "bits"
