"""Report of fleet plans as text and as JSON values, for `anabranch plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anabranch.observe.wording import counted, table

if TYPE_CHECKING:
    from anabranch.sim.cluster.machine_spec import MachinePart
    from anabranch.sim.planning.estimate import Estimated
    from anabranch.sim.planning.search import Plan

_HEAD = [
    "", "stages", "replicas", "left out", "microbatches", "activations",
    "estimate s", "simulated s", "tokens/s",
]  # fmt: skip
#: Parts of an iteration in words -> names of the estimate's figures.
_PARTS = {"reduce": "reduce_s", "links": "lines_s", "memory slots": "places_s", "latency": "way_s"}


def as_values(plan: Plan) -> dict[str, Any]:
    """Plain values of a plan, for JSON."""
    model, simulated = plan.scenario.model, plan.simulated
    return {
        "stages": model.relay_stages,
        "rows": model.rows,
        "sequence": model.sequence,
        "microbatches": model.microbatches,
        "park": plan.scenario.fleet.park,
        "recompute": plan.scenario.fleet.recompute,
        "replicas": plan.replicas,
        "placement": [dict(each) for each in _placement(plan)],
        "left_out": dict(_kinds(plan.left_out)),
        "with_all": None if plan.with_all is None else asdict(plan.with_all),
        "estimated": asdict(plan.estimated),
        "simulated_s": None if simulated is None else simulated.figures["iteration_s"].mean,
        "failures": [] if simulated is None else simulated.failures,
        "iteration_s": plan.iteration_s,
        "slots": plan.scenario.round.slots,
        "steps": plan.steps,
        "tokens_per_s": plan.tokens_per_s,
        "price_per_hour": plan.price_per_hour or None,
        "price_per_billion_tokens": _price_per_billion(plan) if plan.price_per_hour else None,
    }


def report(ranked: Sequence[Plan], considered: int) -> str:
    """Text for people: the ranked plans as a table, then time, cost and placement of the first. considered:
    number of plans that were compared."""
    best = ranked[0]
    scenario, model = best.scenario, best.scenario.model
    relays, out = sum(best.replicas), len(best.left_out)
    used = f"{relays} of {relays + out}" if out else f"{relays}"
    priced, islands = bool(best.price_per_hour), any(plan.scenario.round.slots for plan in ranked)
    rows = [_HEAD[:3] + ["islands"] * islands + _HEAD[3:] + ["per 10⁹ tokens"] * priced]
    for number, plan in enumerate(ranked, start=1):
        price = [f"{_price_per_billion(plan):.2f}"] if priced else []
        row = _row(plan)
        row[2:2] = [_islands(plan)] * islands
        rows.append([f"{number}.", *row, *price])
    lines = [
        f"{model.size} on {scenario.name}: {used} relays, "
        f"{counted(len(scenario.machines) - relays, 'data node')}; {model.microbatches * model.rows} × "
        f"{model.sequence} tokens per {'optimizer step' if islands else 'iteration'}; "
        f"{counted(considered, 'plan')} compared",
        *table(rows),
    ]
    if priced:
        cost = best.price_per_hour * best.iteration_s / 3600.0
        lines.append(
            f"price of these machines: {best.price_per_hour:.2f} per hour, {cost:.4f} per iteration (in the "
            "currency of the fleet's price_per_hour; the shipped fleets': US dollars)"
        )
    parts = best.estimated
    of_what = f"estimate of a round of {best.steps} inner steps" if best.scenario.round.slots else "estimate"
    bound = f"; lower bound of any policy: {parts.bound_s:.2f} s" if parts.bound_s else ""
    lines.append(
        f"{of_what}: the longest of compute {parts.computing_s:.2f} s, links {parts.lines_s:.2f} s and "
        f"memory slots {parts.places_s:.2f} s; then latency {parts.way_s:.2f} s and reduce "
        f"{parts.reduce_s:.2f} s{bound}"
    )
    if best.scenario.round.slots:
        lines.append(
            "islands need more tokens for a loss than synchronous steps, which is not counted here: "
            "docs/explanation/islands.md"
        )
    for stage, machines in enumerate(_placement(best)):
        where = f"anabranch join TICKET --stage {stage}" if stage else "data nodes"
        lines.append(f"  stage {stage}: {_in_words(machines)}  ({where})")
    if best.left_out and best.with_all is not None:
        why = _cost_of_all(best.with_all, best.estimated)
        lines.append(f"  left out: {_in_words(_kinds(best.left_out))}: {why}")
    return "\n".join(lines)


def lines_advice(plan: Plan) -> list[str]:
    """Sentence, as a list of one, on what makes thin lines count less, if lines and the reduce take more than
    half of the plan's iteration by estimate; else []. Lines count only where they take longer than computing.
    """
    parts, whole_s = plan.estimated, plan.estimated.iteration_s
    links_s = parts.lines_s if parts.lines_s > max(parts.computing_s, parts.places_s) else 0.0
    if links_s + parts.reduce_s <= whole_s / 2:
        return []
    return [
        f"the lines take {links_s + parts.reduce_s:.2f} s of the {whole_s:.2f} s: --wire auto weighs codecs; "
        "where each machine holds the whole model, islands exchange far less (init --preset anabranch)"
    ]


def _row(plan: Plan) -> list[str]:
    model, simulated = plan.scenario.model, plan.simulated
    return [
        str(model.relay_stages),
        _short(plan.replicas),
        str(len(plan.left_out)) if plan.left_out else "–",
        f"{model.microbatches} of {model.rows}×{model.sequence}",
        _activations(plan),
        f"{plan.estimated.iteration_s:.2f}",
        "–" if simulated is None else "failed" if simulated.failures else f"{plan.iteration_s:.2f}",
        f"{plan.tokens_per_s:.0f}",
    ]


def _islands(plan: Plan) -> str:
    """Words for a plan's number of islands and inner steps of a round; "–" for a plan without islands."""
    slots = plan.scenario.round.slots
    return f"{slots}, {plan.steps} steps" if slots else "–"


def _placement(plan: Plan) -> list[Counter[str]]:
    """Placement of a plan: for each stage from 0 on, the number of its machines by "DEVICE REGION"."""
    machines = plan.scenario.machines
    stages = range(plan.scenario.model.relay_stages + 1)
    return [_kinds(part for part in machines if part.stage == stage) for stage in stages]


def _kinds(machines: Iterable[MachinePart]) -> Counter[str]:
    """Number of machines by "DEVICE REGION"."""
    return Counter(f"{part.device} {part.region}" for part in machines)


def _in_words(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in kinds.items())


def _price_per_billion(plan: Plan) -> float:
    """Price of 10⁹ tokens on the plan's machines, in the currency of the scenario's prices; machines without
    a price count as 0."""
    return plan.price_per_hour * 1e9 / (3600.0 * plan.tokens_per_s)


def _activations(plan: Plan) -> str:
    """Words for what becomes of activations between forward and backward: "kept", or "offloaded" and
    "recomputed" with the factor by which that multiplies the microbatches that a machine holds."""
    park, again = plan.scenario.fleet.park, plan.scenario.fleet.recompute
    words = (["offloaded"] if park else []) + (["recomputed"] if again else [])
    return f"{', '.join(words)}, {(1 + park) * (1 + again):g}× slots" if words else "kept"


def _cost_of_all(with_all: Estimated, chosen: Estimated) -> str:
    """Sentence that compares the best plan with all machines (`with_all`) with the chosen plan; it names the
    part of an iteration that differs most."""
    of_all, of_chosen = asdict(with_all), asdict(chosen)
    part = max(_PARTS, key=lambda part: of_all[_PARTS[part]] - of_chosen[_PARTS[part]])
    long_s, short_s = of_all[_PARTS[part]], of_chosen[_PARTS[part]]
    return (
        f"with all machines the best plan takes {with_all.iteration_s:.2f} s by estimate, not "
        f"{chosen.iteration_s:.2f} s ({part}: {long_s:.2f}, not {short_s:.2f} s); they can replace others"
    )


def _short(replicas: Sequence[int]) -> str:
    """Replicas per stage, e.g. (4, 4, 3) as "2×4 1×3" if that is shorter than "4 4 3"."""
    text = " ".join(map(str, replicas))
    groups = " ".join(f"{count}×{number}" for number, count in Counter(replicas).items())
    return min(text, groups, key=len)
