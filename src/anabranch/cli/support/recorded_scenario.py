"""Scenario files of a recorded run: its machines, network and churn, for `anabranch simulate --from`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.errors import os_errors_named

if TYPE_CHECKING:
    from anabranch.sim.cluster.from_recording import RecordedRun

#: Folder in the run directory, and the files in it.
FOLDER = "simulated"
FILES = ("scenario.toml", "network.json", "churn.json")


def record(run_dir: Path, folder: Path | None = None) -> tuple[Path, RecordedRun]:
    """Write the scenario, network and churn files of a recorded run into `folder`, by default inside the run
    directory, over existing ones; returns the path of the scenario file, and what it describes. Raises
    UserError if the run cannot be read, or a file not written."""
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.config import load_run_file
    from anabranch.observe.event_log import read_events
    from anabranch.sim.cluster.churn_trace import render_trace
    from anabranch.sim.cluster.from_recording import recorded, render_scenario

    directory = RunDirectory.open(run_dir)
    with os_errors_named(f"{directory.events}: cannot be read"):
        found = recorded(read_events(directory.events), load_run_file(directory.run_file), run_dir.name)
    out = folder or directory.path / FOLDER
    scenario, network, churn = (out / name for name in FILES)
    trace = churn.name if found.trace.changes else ""
    with os_errors_named(f"{out}: cannot be written"):
        out.mkdir(parents=True, exist_ok=True)
        network.write_text(json.dumps(found.profile, indent=1) + "\n", "utf-8")
        churn.write_text(render_trace(found.trace), "utf-8")
        with_files = replace(
            found.scenario,
            network=replace(found.scenario.network, profile=network.name),
            churn=replace(found.scenario.churn, trace=trace),
        )
        scenario.write_text(render_scenario(with_files), "utf-8")
    return scenario, found
