"""Check a model for what would break exactness, before a swarm trains it.

examples:
  anabranch check-model run.toml              the model of a run file
  ANABRANCH_MODELS=moe=my_models:moe anabranch check-model run.toml

A model that is cut into stages must be a function of its weights and of x alone: the check finds state in
buffers, random numbers, changes of the input in place, parameters without a gradient, tokens that see later
ones, and anything that passes from block to block besides x. It computes on the CPU, with one small batch.

Exit status 0: nothing was found. Exit status 1: something was, with what to do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.cli.support.arguments import add_json
from anabranch.observe.wording import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path, metavar="RUN.toml", help="run file, whose model is checked")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.config import load_run_file
    from anabranch.observe.console.progress import ticking
    from anabranch.train.numerics.numerics_class import configure

    config = load_run_file(args.run_file)
    with ticking("loading torch"):
        configure(1)  # before any other module imports torch

    from anabranch.train.model.check import check_model
    from anabranch.train.model.sizes import model_config, total_parameters

    model = model_config(config.model, config.model.vocab_size or config.data.vocab_size)
    with ticking("computing one batch"):
        findings = check_model(model, config.run.seed)
    holds = not any(finding.problem for finding in findings)
    if args.json:
        listed = [{"what": finding.what, "problem": finding.problem} for finding in findings]
        print(json.dumps({"holds": holds, "parameters": total_parameters(model), "checks": listed}))
        return 0 if holds else 1
    print(f"{model.architecture}: {model.blocks} blocks, {total_parameters(model):,} parameters")
    for finding in findings:
        print(f"{'FAILED' if finding.problem else 'ok':<7}{finding.what}")
        if finding.problem:
            print(f"       {plain(finding.problem, 500)}")
    return 0 if holds else 1
