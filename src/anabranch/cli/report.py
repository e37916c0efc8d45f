"""Write a run, with its replay, as one self-contained HTML file.

examples:
  anabranch report runs/tiny --html tiny.html
  anabranch report runs/tiny --tensorboard tb        write the metrics for TensorBoard, too

The file holds the page of `anabranch watch` with the whole run to replay: river, numbers, story and peers. It
opens in a browser from disk, and loads nothing from any network.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.support import outputs
from anabranch.cli.support.arguments import add_json, add_run_dir
from anabranch.errors import UserError, os_errors_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    html = "file to write (default: RUN_DIR/report.html)"
    parser.add_argument("--html", type=Path, metavar="FILE", help=html)
    outputs.add_writers(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.observe.console.progress import progress, ticking
    from anabranch.observe.event_log import read_events
    from anabranch.observe.page.html_report import report_html
    from anabranch.observe.view.recording import Recording

    directory = RunDirectory.open(args.run_dir)
    if not directory.events.exists():
        raise UserError(f"{directory.events} does not exist: the run has not begun")
    recording = Recording()
    exporter = outputs.Outputs.of(args).exporter(directory)
    with progress("reading the events", None, unit="events") as advance:
        for event in read_events(directory.events):
            recording.take(event)
            if exporter is not None:
                exporter.take(event)
            advance(1)
    if exporter is not None:
        exporter.close()
    out: Path = args.html or directory.path / "report.html"
    with ticking(f"writing {out}"), os_errors_named(f"cannot write {out}"):
        out.write_text(report_html(recording), encoding="utf-8")
    size = out.stat().st_size
    result = {"file": str(out), "bytes": size}
    print(json.dumps(result) if args.json else f"wrote {out} ({size / 1e6:.1f} MB)")
    return 0
