"""Write the weights of a checkpoint as a folder for other programs.

examples:
  anabranch export runs/tiny --to hf tiny-hf
  anabranch export runs/tiny --to hf tiny-hf-200 --step 200

The folder holds weights, tokenizer, generation config, and a model card from the run's log:
  transformers.AutoModelForCausalLM.from_pretrained("tiny-hf")
A run file with model.initial_weights = "tiny-hf" continues training from it.
A model with model.subspace is written as the dense model that gives the same logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.cli.support.arguments import add_checkpoint, add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add = parser.add_argument
    add("--to", choices=("hf",), required=True, help="format: hf is Hugging Face transformers")
    add("out", type=Path, metavar="OUT", help="folder to write: a new or an empty one")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.api.model import load

    trained = load(args.run_dir, args.step)
    trained.export(args.out)
    if args.json:
        print(json.dumps({"out": str(args.out), "step": trained.t}))
    else:
        print(f"wrote {args.out}: the weights after step {trained.t}")
    return 0
