"""Choice of a plan's codecs by the time that they save on the fleet's lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from anabranch.errors import UserError
from anabranch.sim.cluster.scenario import Regions, fleet_of
from anabranch.sim.cluster.wire_part import WirePart
from anabranch.sim.planning.estimate import estimate
from anabranch.sim.planning.search import Plan, Progress, simulated

#: Codecs that are weighed, those that round less first. int4 and fp16 cuts are left to whoever measures their
#: loss (docs/explanation/thin-lines.md).
CANDIDATES = (
    WirePart(),
    WirePart(activations="int8", gradients="int8"),
    WirePart(activations="int8", gradients="int8", reduce="coarse"),
)
#: Least relative gain for which a plan rounds more. A choice: far above what a simulation's seed changes, and
#: above what the loss may cost.
WORTH = 0.05


def weighed(
    plan: Plan, regions: Regions, iterations: int, progress: Progress = lambda activity, done, total: None
) -> list[Plan]:
    """Variants of the plan on the same machines, one with each of the codecs in CANDIDATES; simulated for
    `iterations`, or only estimated if that is 0."""
    found = []
    for wire in CANDIDATES:
        scenario = replace(plan.scenario, wire=wire)
        each = replace(plan, scenario=scenario, simulated=None)
        each = replace(each, estimated=estimate(fleet_of(scenario, regions, 0)))
        if iterations:
            committed = partial(_told, progress, f"weighing codecs: {named(wire)}", iterations)
            each = simulated(each, regions, iterations, 0, committed)
        found.append(each)
    return found


def _told(progress: Progress, activity: str, iterations: int, t: int) -> None:
    progress(activity, t, iterations)


def chosen(found: Sequence[Plan]) -> Plan:
    """Best of the plans: a later one is taken if it is quicker than the best one before it by more than
    WORTH. Plans whose simulation failed are left out. Raises UserError if all failed."""
    good = [plan for plan in found if plan.simulated is None or not plan.simulated.failures]
    if not good:
        raise UserError("every simulation of the plan failed; leave --wire out to see why")
    best = good[0]
    for plan in good[1:]:
        if plan.iteration_s < (1.0 - WORTH) * best.iteration_s:
            best = plan
    return best


def reasons(found: Sequence[Plan], taken: Plan) -> list[str]:
    """Lines of text: time and bytes of an iteration with each of the codecs, and why `taken` was chosen."""
    lines = []
    for plan in found:
        work = plan.scenario.work
        cut = (work.activation_bytes + work.gradient_bytes) / work.tokens
        mark = "chosen" if plan is taken else "  "
        lines.append(
            f"{named(plan.scenario.wire):28} {plan.iteration_s:9.2f} s an iteration, {cut:7.0f} bytes a "
            f"token and cut, {work.reduce_bytes:4.1f} a parameter  {mark}".rstrip()
        )
    gain = 1.0 - taken.iteration_s / found[0].iteration_s
    lines.append(
        f"codecs: {named(taken.scenario.wire)}; an iteration is {gain:.0%} shorter than without. Codecs "
        f"that round more are taken where they save more than {WORTH:.0%}"
    )
    return lines


def named(wire: WirePart) -> str:
    """Codecs in words."""
    cuts = "none" if wire.activations == "none" else f"{wire.activations} cuts"
    return cuts if wire.reduce == "exact" else f"{cuts}, {wire.reduce} sums"
