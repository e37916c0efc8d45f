"""Write the weights of a checkpoint as a folder for other programs.

examples:
  anabranch export runs/tiny --to hf tiny-hf
  anabranch export runs/tiny --to hf tiny-hf-200 --step 200
  anabranch export runs/tuned --to peft tuned-adapter      the adapters alone, of a run with lora.rank

The folder holds weights, tokenizer, generation config, and a model card from the run's log:
  transformers.AutoModelForCausalLM.from_pretrained("tiny-hf")
A run file with model.initial_weights = "tiny-hf" continues training from it.
Adapters of a run with lora.rank are merged into the weights by --to hf, and written alone by --to peft:
  peft.PeftModel.from_pretrained(base, "tuned-adapter")
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
    formats = "format: hf is Hugging Face transformers, peft its adapters"
    add("--to", choices=("hf", "peft"), required=True, help=formats)
    add("out", type=Path, metavar="OUT", help="folder to write: a new or an empty one")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.api.model import load
    from anabranch.observe.console.progress import ticking

    with ticking("loading the checkpoint") as ticker:
        from anabranch.checkpoint.hf import check_unused

        check_unused(args.out)
        trained = load(args.run_dir, args.step)
        ticker.begin(f"writing {args.out}")
        if args.to == "peft":
            trained.export_adapters(args.out)
        else:
            trained.export(args.out)
    if args.json:
        print(json.dumps({"out": str(args.out), "step": trained.t}))
    else:
        what = "adapters" if args.to == "peft" else "weights"
        print(f"wrote {args.out}: the {what} after step {trained.t}")
    return 0
