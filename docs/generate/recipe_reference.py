"""Table of the recipes of the named model sizes."""

from __future__ import annotations

from anabranch.train.model.sizes import named_size, size_names, total_parameters
from anabranch.train.recipes.recipes import recipe_of, recipe_run
from generate import code, table


def recipes() -> str:
    """One row for each size: parameters, batch, rate, steps and source."""
    rows = []
    for size in size_names():
        run = recipe_run(size)
        tokens = run.batch.microbatches * run.batch.rows * run.batch.sequence
        rows.append(
            [
                code(size),
                f"{total_parameters(named_size(size)) / 1e6:,.1f} M",
                f"{run.optimizer.lr:g}",
                f"{run.optimizer.warmup_steps:,}",
                f"{tokens:,}",
                f"{run.batch.sequence:,}",
                f"{run.data.vocab_size:,}",
                f"{run.run.steps:,}",
                recipe_of(size).source,
            ]
        )
    heads = ["size", "parameters", "rate", "warm-up steps", "tokens a step", "sequence", "ids", "steps"]
    return table([*heads, "source"], rows)
