"""Write a run file (TOML) that defines a run, with a comment on each key.

examples:
  anabranch init                                     run.toml with the defaults: llama-tiny on this machine
  anabranch init gpt.toml --model gpt-tiny --steps 200
  anabranch init islands.toml --preset diloco          islands that agree every 500 steps
  anabranch init thin.toml --model llama-350m --subspace 160      for lines of homes: cuts of 160 values
  anabranch init home.toml --wire int8 --sums coarse   for thin lines: a quarter of the bytes
  anabranch init home.toml --wire subspace             cuts of an eighth of the model's width
  anabranch init big.toml --model llama-1b --data /data/texts --stages 8 --data-nodes 8 --relays 64

Each size comes with a recipe: learning rate, warm-up, batch in tokens, sequence, vocabulary and steps, with
its source (docs/reference/run-file.md). Every other key (data, routing, ...) is in the file too: edit it
there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.config import CONSTRAINTS, RunConfig, render_run_file, with_changes
from anabranch.errors import UserError
from anabranch.train.model.partition import partition
from anabranch.train.model.sizes import model_config, size_names
from anabranch.train.recipes.presets import PRESETS, heading, with_preset
from anabranch.train.recipes.recipes import (
    DEFAULT_SIZE,
    boundary_bytes,
    cut_line,
    recipe_line,
    recipe_values,
    warnings_about,
)

#: option -> (dotted key of the run file, type, help)
_OPTIONS: dict[str, tuple[str, type, str]] = {
    "--name": ("run.name", str, "name of the run; its directory is runs/NAME (default: the model's)"),
    "--model": ("model.size", str, "model size, from the list below"),
    "--subspace": (
        "model.subspace", int, "values per token that a cut carries instead of the model's width"
    ),
    "--delay": ("iteration.delay", int, "1: two iterations in flight, so that nobody waits for a reduce"),
    "--steps": ("run.steps", int, "optimizer steps to train for"),
    "--stages": ("pipeline.stages", int, "relay stages that the model is split into"),
    "--data-nodes": ("fleet.data_nodes", int, "data nodes of a local swarm"),
    "--relays": ("fleet.relays", int, "relays of a local swarm, spread over the stages"),
    "--seed": ("run.seed", int, "seed of weights and sampling"),
    "--data": ("data.path", str, "text to train on: a file or folder of text, JSON lines or Parquet"),
    "--dtype": ("compute.dtype", str, "precision of the computation"),
    "--reduction": ("run.reduction", str, "how gradients are summed: bit-exact, or as floats"),
    "--numerics": ("run.numerics", str, "peers that are admitted: of one numerics class, or any"),
    "--sums": ("wire.reduce", str, "units of gradient sums: exact, or coarse (2 to 4 bytes, not 9)"),
}
#: Keys that --wire sets.
_WIRE = ("wire.activations", "wire.gradients")
#: Value of --wire for a subspace model, and share of the width that its cuts carry unless --subspace says.
_SUBSPACE, _CARRIED = "subspace", 1 / 8


#: Endings of files -> data.source.
_SOURCES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{parser.epilog}\n\nmodel sizes: {', '.join(size_names())}\n"
    parser.add_argument(
        "output", nargs="?", type=Path, default=Path("run.toml"), help="file to write (default: run.toml)"
    )
    for option, (key, kind, text) in _OPTIONS.items():
        choices = getattr(CONSTRAINTS.get(key), "choices", None)
        metavar = None if choices else "N" if kind is int else "NAME"
        parser.add_argument(option, dest=key, type=kind, choices=choices, help=text, metavar=metavar)
    parser.add_argument(
        "--wire",
        choices=(*CONSTRAINTS[_WIRE[0]].choices, _SUBSPACE),  # type: ignore[union-attr]
        help="codec of activations and input gradients on the line (docs/explanation/thin-lines.md); or "
        "subspace: a model whose cuts carry an eighth of its width, or --subspace values, uncoded",
    )
    preset = f"settings of a published system, named in the file: {', '.join(PRESETS)}"
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=preset)
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    values = vars(args)
    changes: dict[str, Any] = {key: values[key] for key, _, _ in _OPTIONS.values() if values[key] is not None}
    recipe = recipe_values(changes.get("model.size", DEFAULT_SIZE), steps=changes.get("run.steps", 0))
    if args.wire not in (None, _SUBSPACE):
        changes |= dict.fromkeys(_WIRE, args.wire)
    if "data.path" in changes:
        changes |= {"data.path": str(Path(changes["data.path"]).absolute()), "data.source": _source_of(args)}
    if (size := changes.get("model.size", DEFAULT_SIZE)) != DEFAULT_SIZE:
        recipe["run.name"] = size
    config = with_changes(RunConfig(), recipe)
    config = with_preset(config, args.preset, changes) if args.preset else with_changes(config, changes)
    model = model_config(config.model, config.data.vocab_size)
    if args.wire == _SUBSPACE and not config.model.subspace:
        config = with_changes(config, {"model.subspace": max(1, int(model.dim * _CARRIED))})
        model = model_config(config.model, config.data.vocab_size)
    partition(model, config.pipeline)
    needed = boundary_bytes(config, model)
    if needed > config.fleet.boundary_budget_bytes:
        config = with_changes(config, {"fleet.boundary_budget_bytes": needed})
    output: Path = args.output
    try:
        # "x" fails if the file exists, without a gap between looking and writing.
        with open(output, "w" if args.force else "x", encoding="utf-8") as file:
            file.write((heading(args.preset) if args.preset else "") + render_run_file(config))
    except FileExistsError:
        raise UserError(f"{output} exists; give another name, or --force to overwrite it") from None
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    print(recipe_line(config, model))
    if line := cut_line(config, model):
        print(line)
    if needed > RunConfig().fleet.boundary_budget_bytes:
        print(
            f"fleet.boundary_budget_bytes: each node keeps up to {needed / 2**30:.0f} GiB of activations and "
            "gradients in host memory until a step ends; more relays or a smaller batch make it less"
        )
    for sentence in warnings_about(config, model):
        print(f"warning: {sentence}")
    print(f"wrote {output}; next: anabranch train {output}")
    return 0


def _source_of(args: argparse.Namespace) -> str:
    """Value of `data.source` for the file or folder that --data names: "dataset" for a folder with a
    state.json, else by the ending of the file, or of the folder's first file (by path) with a known one, else
    "text". Raises UserError if it is not there."""
    path = Path(vars(args)["data.path"])
    if not path.exists():
        raise UserError(f"--data {path}: there is no such file or folder")
    if (path / "state.json").is_file():
        return "dataset"
    inside = [path] if path.is_file() else sorted(path.rglob("*"))
    return next((_SOURCES[file.suffix] for file in inside if file.suffix in _SOURCES), "text")
