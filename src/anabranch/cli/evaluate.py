"""Score the model of a checkpoint on a task: multiple choice, cloze, or plain text.

examples:
  anabranch evaluate runs/tiny --task docs/examples/python_choices.jsonl
  anabranch evaluate runs/tiny --task held-out.txt             perplexity of a text
  anabranch evaluate tiny-hf --task lambada.jsonl --limit 500  of a Hugging Face folder, the first 500 lines
  anabranch evaluate runs/tiny --task questions.jsonl --step 200 --json

Each line of a .jsonl file is one of
  {"context": "The sky is", "choices": ["blue", "square"], "answer": 0}
  {"context": "Mary had a little", "target": "lamb"}
  {"text": "A document, whose tokens are all predicted."}
Any other file is one plain text. Accuracy is by log-likelihood, as in the EleutherAI harness.
docs/how-to/evaluate-a-model.md says how texts are joined and cut, and what each score is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.cli.support.arguments import add_json, check_range
from anabranch.config import Range
from anabranch.observe.wording import plain_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="RUN_DIR|FOLDER", help="run directory, or a Hugging Face folder")
    add("--task", type=Path, required=True, metavar="FILE", help="task (.jsonl), or a text")
    add("--step", type=int, metavar="T", help="checkpoint after step T (default: the newest)")
    add("--limit", type=int, default=0, metavar="N", help="take the first N lines only; 0: all")
    add("--device", default="cpu", help="cpu or cuda")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.api.evaluation import evaluate

    check_range("--limit", args.limit, Range(0))
    found = evaluate(args.path, args.task, args.step, args.limit, args.device)
    if args.json:
        print(json.dumps(found.as_dict(), allow_nan=False))
    else:
        print(plain_lines("\n".join(found.lines())))
    return 0
