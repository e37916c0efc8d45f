"""Write the weights of a checkpoint as a folder for other programs.

examples:
  anabranch export runs/tiny --to hf tiny-hf
  anabranch export runs/tiny --to hf tiny-hf-200 --step 200

The folder holds weights, tokenizer and generation config:
  transformers.AutoModelForCausalLM.from_pretrained("tiny-hf")
A run file with model.initial_weights = "tiny-hf" continues training from it.
A model with model.subspace is written as the dense model that gives the same logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.cli.support.arguments import add_json
from anabranch.cli.support.trained_model import add_checkpoint_arguments, load_trained_model
from anabranch.errors import UserError, os_errors_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser)
    add = parser.add_argument
    add("--to", choices=("hf",), required=True, help="format: hf is Hugging Face transformers")
    add("out", type=Path, metavar="OUT", help="folder to write: a new or an empty one")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    trained = load_trained_model(args.run_dir, args.step)

    from anabranch.checkpoint.hf import export_hf
    from anabranch.data.corpus import TOKENIZER

    try:
        with os_errors_named(f"cannot write {args.out}"):
            export_hf(trained.weights, trained.model, trained.directory.corpus / TOKENIZER, args.out)
    except ValueError as error:
        raise UserError(f"the checkpoint of step {trained.t} does not fit its run file: {error}") from error
    if args.json:
        print(json.dumps({"out": str(args.out), "step": trained.t}))
    else:
        print(f"wrote {args.out}: the weights after step {trained.t}")
    return 0
