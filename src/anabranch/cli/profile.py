"""Measure what this machine computes and moves per second, as a device profile (JSON) for `simulate`.

examples:
  anabranch profile                                     print this machine's figures
  anabranch profile --name attic --out devices.json     add them to a file of devices
  anabranch simulate wan10 --set fleet.devices=devices.json 'fleet.device=["attic"]' fleet.achieved=1.0

The rates are measured, not those of a data sheet, so a scenario that uses them sets fleet.achieved = 1.0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.cli.support.outputs import write_out
from anabranch.errors import UserError
from anabranch.observe.console.progress import Ticker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--name", default="mine", help="name of the device")
    add("--device", default="auto", help="device to measure: auto, cpu, cuda, cuda:1")
    add("--out", type=Path, metavar="FILE", help="file of devices to add the profile to")


def run(args: argparse.Namespace) -> int:
    from anabranch.node.diagnostics.device_benchmark import measure_device
    from anabranch.sim.cluster.device_model import parse_devices, read_devices

    if not args.name:
        raise UserError("--name: must not be empty")
    devices = {}
    if args.out is not None and args.out.exists():
        read_devices(args.out)
        devices = json.loads(args.out.read_text("utf-8"))
    elif args.out is not None and not args.out.parent.is_dir():  # checked now: measuring takes a while
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}")
    with Ticker() as ticker:
        ticker.begin("measuring this machine")
        devices[args.name] = measure_device(args.device)
    text = json.dumps(devices, indent=1) + "\n"
    parse_devices(text, "this machine")
    if args.out is None:
        print(text, end="")
        return 0
    write_out(args.out, text)
    print(f"{args.name} is in {args.out}: use it with --set fleet.devices={args.out}")
    return 0
