"""Write the file with which a scheduler or a container engine starts peers of a run.

examples:
  anabranch fleet slurm --peers 16 --out relays.sh && sbatch relays.sh
  anabranch fleet kubernetes --peers 64 --image registry/anabranch --out relays.yaml
  anabranch plan fleet.toml --json > plan.json && anabranch fleet skypilot plan.json
  anabranch fleet ray --peers 8 --gpus 0 --out relays.py

Engines: kubernetes, slurm, skypilot, ray, dstack, compose. The peers are `--peers` like ones, or those of the
first plan in the output of `anabranch plan --json`: of each stage as many as it says. Data nodes need the
corpus and are not among them. No file holds the ticket: each says how to hand it over.

All engines rely on one contract (docs/how-to/start-a-fleet.md): the ticket comes from the environment;
SIGTERM makes a peer leave within --grace seconds; exit status 75 asks for another start, 1 and 2 do not."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from anabranch.cli.support.arguments import check_range
from anabranch.cli.support.outputs import add_out, check_out, write_out
from anabranch.config import Range
from anabranch.errors import UserError, os_errors_named
from anabranch.launch.fleet import Fleet, counted, planned

ENGINES = ("kubernetes", "slurm", "skypilot", "ray", "dstack", "compose")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", choices=ENGINES, help="engine that starts the peers")
    add("plan", nargs="?", type=Path, metavar="PLAN.json", help="output of `anabranch plan --json`")
    add("--peers", type=int, metavar="N", help="number of peers, instead of a plan")
    add("--stage", type=int, metavar="N", help="with --peers: stage to ask for (default: the run chooses)")
    add("--region", default="", help="with --peers: region of all of them, e.g. London")
    add("--name", default="run", help="name of the run, for names of jobs")
    add("--gpus", type=int, default=1, metavar="N", help="GPUs of each machine; 0: compute on its CPU")
    add("--cpus", type=int, default=4, metavar="N", help="CPU cores of each machine")
    add("--memory", type=int, default=16, metavar="GIB", help="memory of each machine in GiB")
    add("--image", default="anabranch", help="container image (kubernetes, dstack, compose)")
    add("--port", type=int, default=7700, metavar="N", help="port that a peer listens on")
    add("--grace", type=int, default=60, metavar="SECONDS", help="time to leave in when an engine says so")
    add_out(parser, "write there instead of printing")


def run(args: argparse.Namespace) -> int:
    from anabranch.launch import clouds, kubernetes, ray_script, slurm

    check_out(args.out, args.force)
    text = {
        "kubernetes": kubernetes.manifests,
        "slurm": slurm.script,
        "skypilot": clouds.skypilot,
        "ray": ray_script.program,
        "dstack": clouds.dstack,
        "compose": clouds.compose,
    }[args.engine](fleet_of(args))
    if args.out is None:
        sys.stdout.write(text)
    else:
        write_out(args.out, text)
    return 0


def fleet_of(args: argparse.Namespace) -> Fleet:
    """Fleet that the arguments describe. Raises UserError for options out of range or against each other, and
    for a plan that cannot be read."""
    if (args.plan is None) == (args.peers is None):
        raise UserError("give a PLAN.json or --peers N, one of them")
    if args.plan is not None and (args.stage is not None or args.region):
        raise UserError("--stage and --region go with --peers: a plan names them itself")
    check_range("--gpus", args.gpus, Range(0, 10_000))
    check_range("--cpus", args.cpus, Range(1, 10_000))
    check_range("--memory", args.memory, Range(1, 1_000_000))
    check_range("--grace", args.grace, Range(1, 86_400))
    check_range("--port", args.port, Range(1, 65_535))
    check_range("--stage", args.stage or 0, Range(0))
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", args.name):
        raise UserError(f"--name {args.name}: use letters, digits, '.', '_' and '-'")
    if not re.fullmatch(r"[\w./:@-]+", args.image):
        raise UserError(f"--image {args.image}: not the name of an image")
    if args.plan is not None:
        with os_errors_named(str(args.plan)):
            groups = planned(args.plan.read_text("utf-8"), str(args.plan))
    else:
        groups = counted(args.peers, args.stage, args.region)
    return Fleet(
        args.name, groups, args.gpus, args.cpus, args.memory, args.grace, args.image, args.port
    )
