"""Small runs through the Python API: real swarms of processes, one of which is killed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anabranch


def texts_in(root: Path) -> Path:
    """Folder of forty short texts, in `root`."""
    texts = root / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox\n" * 20)
    return texts


def small_settings(texts: Path, *, stages: int, relays: int, sequence: int) -> dict[str, Any]:
    """Run-file settings of a small run on these texts, by bytes; the caller adds model and steps."""
    return {
        "data": {"source": "text", "path": str(texts), "tokenizer": "bytes"},
        "batch": {"microbatches": 4, "rows": 1, "sequence": sequence},
        "pipeline": {"stages": stages},
        "fleet": {"data_nodes": 1, "relays": relays},
        "evaluation": {"every": 0},
        "compute": {"device": "cpu"},
    }


def verified_losses(
    settings: dict[str, Any], directory: Path, victim: str
) -> tuple[anabranch.Run, list[float]]:
    """Train to the end, kill the process `victim` after step 2, and check that zero bits differ from a single
    process (I3); returns the run and the loss of every step."""
    losses, killed = [], False
    with anabranch.Run.create(settings, directory) as run:
        for step in run.metrics():
            losses.append(step.loss)
            if step.t == 2 and not killed:
                run.kill(victim)
                killed = True
    report = run.verify()
    assert report.holds and report.promise == "bits" and report.steps == settings["run.steps"] and killed
    return run, losses
