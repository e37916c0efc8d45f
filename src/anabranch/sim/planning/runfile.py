"""Run file of a plan, for `anabranch start` and `anabranch train`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from anabranch.config import (
    BatchSection,
    RunConfig,
    check_fleet_holds,
    config_from_dict,
    config_to_dict,
    render_run_file,
    with_changes,
)
from anabranch.errors import ConfigError, UserError
from anabranch.sim.planning.search import Plan
from anabranch.sim.planning.wire_choice import WHY
from anabranch.train.model.partition import partition
from anabranch.train.model.sizes import model_config, named_size
from anabranch.train.recipes.presets import AGREED
from anabranch.train.recipes.recipes import recipe_values, warnings_about

#: Precision: name in a scenario -> name in a run file.
DTYPES = {"fp32": "fp32", "fp16": "bf16"}
#: Keys of [fleet] that the run file takes from the scenario.
AS_SIMULATED = ("park", "recompute", "rebalance", "deal", "spread", "spare")
#: Boundary payloads of a microbatch that a peer keeps until the step is released.
KEPT = 4


def run_config(plan: Plan, note: str = "") -> RunConfig:
    """Run file of a plan, with the recipe of the model's size. note: its `run.note`. Raises UserError if a
    rule of run files forbids it. The vocabulary is that of the named model size; a tokenizer may have fewer
    ids."""
    scenario = plan.scenario
    model, shape = scenario.model, named_size(scenario.model.size)
    data_nodes = sum(part.role == "data" for part in scenario.machines)
    fewest = min(data_nodes, *plan.replicas)
    kept = -(-model.microbatches // fewest) * KEPT * scenario.work.activation_bytes
    batch = BatchSection(model.microbatches, model.rows, model.sequence)
    changes: dict[str, dict[str, Any]] = {
        "run": {
            "name": _name(f"{model.size}-{scenario.name}"),
            "numerics": "mixed" if len({part.device for part in scenario.machines}) > 1 else "strict",
            "note": note,
        },
        "model": {
            "size": model.size,
            "vocab_size": shape.vocab_size,
            **({"subspace": model.subspace} if model.subspace else {}),
        },
        "pipeline": {"stages": model.stages},
        "iteration": {"delay": scenario.run.delay},
        "fleet": {
            "data_nodes": data_nodes,
            "relays": sum(plan.replicas),
            "relays_per_stage": list(plan.replicas),
            "minimum": min(plan.replicas),
            **{key: getattr(scenario.fleet, key) for key in AS_SIMULATED},
            "boundary_budget_bytes": max(RunConfig().fleet.boundary_budget_bytes, kept),
        },
        "compute": {"dtype": DTYPES[model.dtype]},
        "wire": asdict(scenario.wire),
    }
    if scenario.round.slots:
        part = scenario.round
        changes["round"] = {key: getattr(part, key) for key in ("slots", "steps", "contributions", "results")}
    rules = AGREED if scenario.round.slots else {}
    values = config_to_dict(with_changes(RunConfig(), recipe_values(model.size, batch) | rules))
    for section, keys in changes.items():
        values[section] |= keys
    try:
        config = config_from_dict(values, "the plan")
        partition(model_config(config.model, config.data.vocab_size), config.pipeline)
        check_fleet_holds(config, scenario.work.activation_bytes)
    except ConfigError as error:
        raise UserError(str(error)) from None
    return config


def run_warnings(plan: Plan) -> list[str]:
    """Warnings about a plan's run file (`warnings_about`): what its owner has to fill in, a batch or sequence
    much smaller than the recipe's, and what else differs from published runs. [] if there are none. Raises
    UserError as `run_config`."""
    config = run_config(plan)
    return warnings_about(config, model_config(config.model, config.data.vocab_size))


def run_file(plan: Plan, notes: Sequence[str] = ()) -> str:
    """Text of a plan's run file, after comments: its expected speed, and the lines of `notes`. The note on
    the choice of codecs (begins with WHY) becomes `run.note`, too. Raises UserError as `run_config`."""
    model = plan.scenario.model
    what = f"a round of {plan.steps} steps" if plan.scenario.round.slots else "an iteration"
    head = (
        f"# Planned for {plan.scenario.name}: {plan.iteration_s:.1f} s {what} of "
        f"{model.microbatches * model.rows * model.sequence} tokens, {plan.tokens_per_s:.0f} tokens/s.\n"
    )
    head += "".join(f"# {note}\n" for note in notes)
    why = next((note for note in notes if note.startswith(WHY)), "")
    return head + render_run_file(run_config(plan, why))


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:100].lstrip(".-") or "planned"
