"""Continue a prompt with the model of a checkpoint.

examples:
  anabranch generate runs/tiny --prompt "def main("
  anabranch generate runs/tiny --prompt "import " --tokens 300 --temperature 0.7 --top-k 40 --seed 3
  anabranch generate runs/tiny --prompt "class " --temperature 0      the most likely token each time
  anabranch generate runs/tiny --prompt "for x in" --json

The same command gives the same text each time; another --seed gives another text.
"""

from __future__ import annotations

import argparse
import json
import math

from anabranch.cli.support.arguments import add_checkpoint, add_json, check_range
from anabranch.config import Range
from anabranch.errors import UserError
from anabranch.observe.console.progress import progress, ticking
from anabranch.observe.wording import plain_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add = parser.add_argument
    add("--prompt", default="", help="text to continue (default: the start of a document)")
    add("--tokens", type=int, default=200, metavar="N", help="most tokens to generate")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 takes the most likely token each time",
    )
    add("--top-k", type=int, metavar="K", default=0, help="sample from the K most likely tokens; 0: from all")
    add("--seed", type=int, default=1, metavar="N", help="seed of the sampling")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_range("--temperature", args.temperature, Range(0, math.inf, open_high=True))
    for option, value in (("--tokens", args.tokens), ("--top-k", args.top_k), ("--seed", args.seed)):
        check_range(option, value, Range(0, 2**63 - 1))
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not UTF-8 text; set the terminal to UTF-8") from None

    from anabranch.api.model import load

    with ticking("loading the checkpoint"):
        trained = load(args.run_dir, args.step)
    ids = []
    with progress("generating", args.tokens, unit="tokens") as advance:
        for token in trained.sample(args.prompt, args.tokens, args.temperature, args.top_k, args.seed):
            ids.append(token)
            advance(1)
    text = trained.decode(args.prompt, ids)
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": text, "tokens": len(ids), "step": trained.t}))
    else:
        print(plain_lines(text))
    return 0
