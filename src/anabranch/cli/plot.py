"""Draw training and held-out loss, and throughput with live peers and faults, as PNG and SVG.

examples:
  anabranch plot runs/tiny                    into runs/tiny/plots
  anabranch plot runs/tiny --out docs/images
  anabranch plot runs/tiny --json             the paths, for a program
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.support.arguments import add_json, add_run_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    out = "folder for the pictures (default: RUN_DIR/plots)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.observe.console.progress import ticking

    directory = RunDirectory.open(args.run_dir)
    with ticking("drawing"):  # the first time, matplotlib looks for fonts
        from anabranch.observe.plots.run_plots import plot_run

        written = [str(path) for path in plot_run(directory.path, args.out or directory.path / "plots")]
    print(json.dumps({"files": written}) if args.json else "\n".join(written))
    return 0
