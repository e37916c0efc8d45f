"""Report of simulated policies as a table, for `anabranch simulate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anabranch.observe.wording import table

if TYPE_CHECKING:
    from anabranch.sim.cluster.scenario import Fleet, Scenario
    from anabranch.sim.metrics.iteration_metrics import Outcome, Summary

#: Row of the report -> key of the figure, its format and its factor.
_ROWS = {
    "iteration s": ("iteration_s", "{:.2f}", 1.0),
    "over bound": ("over_bound", "{:.2f}", 1.0),
    "s/microbatch": ("seconds_per_microbatch", "{:.3f}", 1.0),
    "tokens/s": ("tokens_per_s", "{:.0f}", 1.0),
    "× best machine": ("over_alone", "{:.2f}", 1.0),
    "sending s": ("communicating_s", "{:.1f}", 1.0),
    "GPU busy %": ("utilisation", "{:.1f}", 100.0),
    "wasted %": ("wasted_share", "{:.2f}", 100.0),
    "died %": ("died_share", "{:.2f}", 100.0),
    "wasted s": ("wasted_s", "{:.1f}", 1.0),
    "crashes": ("crashes", "{:.2f}", 1.0),
    "recoveries": ("recoveries", "{:.1f}", 1.0),
    "twice": ("twice", "{:.1f}", 1.0),
    "messages": ("messages", "{:.0f}", 1.0),
    "control kB": ("message_bytes", "{:.0f}", 1e-3),
}
#: Further rows for the protocol's own policies (s): phases of an iteration, a relay's compute in it.
_PHASES = {
    "  fill s": "fill_s",
    "  steady s": "steady_s",
    "  drain s": "drain_s",
    "  reduce s": "reduce_s",
    "  forward s": "forward_s",
    "  input gradient s": "input_gradient_s",
    "  weight gradient s": "weight_gradient_s",
    "  step s": "step_s",
}
#: Number of kinds of messages that are listed by name; the others are one figure.
_NAMED = 8


def heading(fleet: Fleet) -> str:
    """Line that describes the scenario: model, batch, fleet and churn."""
    scenario, model = fleet.scenario, fleet.scenario.model
    data = len(fleet.stage(0))
    return (
        f"{scenario.name}: {model.size}, {model.microbatches} microbatches of {model.rows}×{model.sequence} "
        f"tokens; {len(fleet.hosts) - data} relays {_arranged(scenario)}, {data} data nodes, "
        f"{churn_of(scenario)}"
    )


def _arranged(scenario: Scenario) -> str:
    """Stages of a scenario, or its islands, in words."""
    model, part = scenario.model, scenario.round
    machines = f"over {model.stages} stages" if model.stages else "with the whole model each"
    islands = f", at most {part.slots} islands of {part.steps} steps a round"
    return machines + islands * (part.slots > 0)


def churn_of(scenario: Scenario) -> str:
    """Churn of a scenario in words."""
    return "churn as traced" if scenario.churn.trace else f"{100 * scenario.churn.crash:g} % churn"


def report(summaries: Sequence[Summary]) -> str:
    """Table of means, with half the 95 % interval if there are several seeds; failures below it."""
    from anabranch.flow.policies.registry import POLICIES

    rows = [["per iteration", *(each.policy for each in summaries)]]
    rows += [
        [name, *(_cell(each, key, form, factor) for each in summaries)]
        for name, (key, form, factor) in _ROWS.items()
    ]
    if any(each.policy in POLICIES for each in summaries):
        rows += [
            [name, *(_cell(each, key, "{:.2f}") if each.policy in POLICIES else "–" for each in summaries)]
            for name, key in _PHASES.items()
        ]
    bounds = [each.figures["bound_s"].mean for each in summaries]
    rows.append(["lower bound s", *("–" if math.isnan(bound) else f"{bound:.2f}" for bound in bounds)])
    seeds, iterations = summaries[0].seeds, summaries[0].iterations
    lines = table(rows, right=True)
    lines.append(
        f"{seeds} seed{'s' * (seeds != 1)}, {iterations} iteration{'s' * (iterations != 1)} counted"
        + (": mean ± 95 %" if seeds > 1 else "")
    )
    lines += [
        f"control messages of a node, {each.policy}: {_kinds(each)}" for each in summaries if each.kinds
    ]
    lines += [f"FAILED {each.policy}, {failure}" for each in summaries for failure in each.failures]
    return "\n".join(lines)


def carried(policy: str, outcomes: Sequence[Outcome]) -> str:
    """Line with the bytes that hosts carried for others under `policy`, as a mean over the seeds of its
    outcomes; "" if they carried none."""
    each = [outcome.carried_bytes for outcome in outcomes if outcome.carried_bytes]
    if not each:
        return ""
    total, most = (sum(of(hosts.values()) for hosts in each) / len(outcomes) / 1e9 for of in (sum, max))
    return f"carried for others, {policy}: {total:.2f} GB in the whole run, {most:.2f} GB by the busiest host"


def _cell(summary: Summary, key: str, form: str, factor: float = 1.0) -> str:
    figure = summary.figures[key]
    if math.isnan(figure.mean):
        return "–"
    text = form.format(factor * figure.mean)
    return f"{text} ± {form.format(factor * figure.half)}" if summary.seeds > 1 else text


def _kinds(summary: Summary) -> str:
    """Words for the number of control messages of a node per iteration, by kind."""
    named = [f"{kind} {count:.1f}" for kind, count in list(summary.kinds.items())[:_NAMED]]
    others = sum(list(summary.kinds.values())[_NAMED:])
    return f"{sum(summary.kinds.values()):.1f} ({', '.join(named)}, others {others:.1f})"
