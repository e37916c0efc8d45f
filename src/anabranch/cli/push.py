"""Copy checkpoints of a run to an object store or a model hub, once or as they are written.

examples:
  anabranch push runs/tiny s3://bucket/tiny              the newest checkpoint
  anabranch push runs/tiny s3://bucket/tiny --follow     each new checkpoint, until Ctrl+C
  anabranch push runs/tiny hf://NAME/tiny --as hf        a folder for transformers, with a model card
  anabranch push runs/tiny file:///backup/tiny --step 200

Addresses are those of fsspec (pip install 'anabranch[remote]', and s3fs, gcsfs or huggingface_hub for
theirs), which find their credentials as they always do. A checkpoint is checked against its hashes, and its
manifest is copied last: a copy that has one is complete. A failure ends this command, never the run."""

from __future__ import annotations

import argparse
import time

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.support.arguments import add_checkpoint
from anabranch.errors import UserError

#: Seconds between looks for new checkpoints.
FOLLOW_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add = parser.add_argument
    add("url", metavar="URL", help="address of a folder, e.g. s3://bucket/folder")
    kinds = "what to copy: the checkpoint, or the model as a folder for Hugging Face transformers"
    add("--as", dest="kind", choices=("checkpoint", "hf"), default="checkpoint", help=kinds)
    add("--follow", action="store_true", help="go on with each new checkpoint until Ctrl+C")


def run(args: argparse.Namespace) -> int:
    from anabranch.api.publish import push, push_new

    if args.follow and args.step is not None:
        raise UserError("--follow and --step: choose one of them")
    seen: set[str] = set()

    def pushed(address: str) -> None:
        if args.kind == "hf" or address not in seen:
            print(f"pushed {address}", flush=True)
        seen.add(address)

    if not args.follow:
        pushed(push(args.run_dir, args.url, args.step, args.kind))
        return 0
    count = -1
    while True:
        newest = max(RunDirectory.open(args.run_dir).checkpoints(), default=-1)
        if newest != count:
            push_new(args.run_dir, args.url, args.kind, pushed)
            count = newest
        time.sleep(FOLLOW_S)
