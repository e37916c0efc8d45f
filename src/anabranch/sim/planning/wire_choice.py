"""Choice of a plan's codecs and delay by the time to the same loss: seconds of an iteration on the fleet's
lines, times the tokens that a run needs more because of what is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from anabranch.errors import UserError
from anabranch.sim.cluster.device_model import Machine, WirePart, known_devices
from anabranch.sim.cluster.scenario import Regions, Scenario
from anabranch.sim.planning.crews import estimate_of
from anabranch.sim.planning.search import DELAYED, Plan, Progress, simulated
from anabranch.train.model.sizes import named_size

#: Codecs that are weighed, those that round less first. int4 and fp16 cuts are left to whoever measures their
#: loss (docs/explanation/thin-lines.md).
CANDIDATES = (
    WirePart(),
    WirePart(activations="int8", gradients="int8"),
    WirePart(activations="int8", gradients="int8", reduce="coarse"),
)
#: Tokens that a run needs, over those for the same loss without, as measured on llama-tiny (docs/results:
#: wire-loss, delayed-loss-1024; a doubling of the tokens was worth 0.263 nats there). int8 cuts: less than
#: the spread of two seeds, and coarse sums nothing besides. Delay: of three seeds, begun after 300 steps, a
#: tenth; begun after 120 it was 1.21 in one seed (delayed-loss). Subspace: the published reference run; own
#: runs of 3,000 steps (subspace-loss-1024) ended as far above as half of the tokens would.
ROUNDED_TOKENS, DELAYED_TOKENS, SUBSPACE_TOKENS = 1.02, 1.01, 3.1
#: Width of the subspace that is weighed, as a share of the model's width.
NARROW = 8
#: Least relative gain for which a plan gives up more. A choice: far above what a simulation's seed changes.
WORTH = 0.05
#: Beginning of the sentence that says what was chosen, and why.
WHY = "codecs: "


def weighed(
    plan: Plan, regions: Regions, iterations: int, progress: Progress = lambda activity, done, total: None
) -> list[Plan]:
    """Variants of the plan on the same machines, for `chosen`: one with each of the codecs in CANDIDATES, in
    this order; then of the best of them one with two iterations in flight, if memory suffices, and one in a
    subspace, if it has none. A plan with pipeline islands gets neither coarse sums nor two iterations in
    flight. iterations: each is simulated for so many (some may fail); 0: only estimated, without the variant
    with two iterations, which the estimate does not know. progress: told what is done."""
    of_rounds = plan.scenario.round.slots > 0  # their exchange has roundings of its own
    found = [
        _weigh(plan, replace(plan.scenario, wire=wire), regions, iterations, progress)
        for wire in CANDIDATES
        if not of_rounds or wire.reduce == "exact"
    ]
    good = [each for each in found if not _failed(each)]
    best = chosen(good).scenario if good else plan.scenario
    delayed, model = replace(best, run=replace(best.run, delay=1)), best.model
    if iterations and not best.run.delay and not of_rounds and _fits(delayed):
        found.append(_weigh(plan, delayed, regions, iterations, progress))
    if not model.subspace:
        narrow = replace(best, model=replace(model, subspace=named_size(model.size).dim // NARROW))
        found.append(_weigh(plan, narrow, regions, iterations, progress))
    return found


def _weigh(plan: Plan, scenario: Scenario, regions: Regions, iterations: int, progress: Progress) -> Plan:
    each = replace(plan, scenario=scenario, simulated=None)
    each = replace(each, estimated=estimate_of(scenario, regions))
    if not iterations:
        return each
    whole = iterations + DELAYED * scenario.run.delay
    committed = partial(_told, progress, f"weighing codecs: {named(scenario)}", whole)
    return simulated(each, regions, iterations, committed)


def _told(progress: Progress, activity: str, iterations: int, t: int) -> None:
    progress(activity, t, iterations)


def _fits(scenario: Scenario) -> bool:
    """True if each relay can hold its stage and two microbatches, one of each of two iterations in flight."""
    devices = known_devices(scenario.fleet.devices)
    relays = [part for part in scenario.machines if part.role == "relay"]
    return all(Machine(devices[part.device], scenario.work).capacity(part.stage) >= 2 for part in relays)


def tokens(scenario: Scenario) -> float:
    """Tokens that a run with the scenario's codecs, delay and subspace needs for some loss, as a multiple of
    those without; 1 without any."""
    rounded = scenario.wire.activations != "none" or scenario.wire.reduce != "exact"
    factors = (
        (ROUNDED_TOKENS, rounded),
        (DELAYED_TOKENS, bool(scenario.run.delay)),
        (SUBSPACE_TOKENS, bool(scenario.model.subspace)),
    )
    product = 1.0
    for factor, there in factors:
        product *= factor if there else 1.0
    return product


def same_loss_s(plan: Plan) -> float:
    """Seconds of an optimizer step, times `tokens`. It is proportional to the time until a given loss, if
    plans differ in codecs, delay and subspace only."""
    return plan.step_s * tokens(plan.scenario)


def chosen(found: Sequence[Plan]) -> Plan:
    """Best of the plans, one at least: a later one is taken if it is quicker to the same loss than the best
    one before it by more than WORTH. Plans whose simulation failed are left out, and those with another model
    than the first: a subspace is only proposed. Raises UserError if all failed."""
    same_model = [plan for plan in found if plan.scenario.model == found[0].scenario.model]
    good = [plan for plan in same_model if not _failed(plan)]
    if not good:
        raise UserError("every simulation of the plan failed; leave --wire out to see why")
    best = good[0]
    for plan in good[1:]:
        if same_loss_s(plan) < (1.0 - WORTH) * same_loss_s(best):
            best = plan
    return best


def _failed(plan: Plan) -> bool:
    return bool(plan.simulated and plan.simulated.failures)


def reasons(found: Sequence[Plan], taken: Plan) -> list[str]:
    """Lines of text about plans that `weighed` returned: one on each, then why `taken` was chosen, what the
    delay costs, and a quicker other model (subspace) if there is one."""
    lines = []
    for plan in found:
        work, more = plan.scenario.work, tokens(plan.scenario)
        cut = (work.activation_bytes + work.gradient_bytes) / work.tokens
        held = max(work.step_bytes(stage) for stage in range(1, work.stages + 1)) / 1e9
        mark = "chosen" if plan is taken else "  "
        lines.append(
            f"{named(plan.scenario):40} {plan.step_s:8.2f} s a step, {cut:6.0f} bytes a token and "
            f"cut, {work.reduce_bytes:4.1f} a parameter, {held:5.2f} GB of state a relay; {more:.2f} × the "
            f"tokens: {same_loss_s(plan):8.2f} s  {mark}".rstrip()
        )
    gain, shorter = (1.0 - of(taken) / of(found[0]) for of in (same_loss_s, lambda plan: plan.step_s))
    lines.append(
        f"{WHY}{named(taken.scenario)}; an iteration is {shorter:.0%} shorter than without, the time to "
        f"the same loss {gain:.0%}. What gives up more is taken where that saves more than {WORTH:.0%}"
    )
    if taken.scenario.run.delay and not found[0].scenario.run.delay:
        lines.append(
            f"delay: for the loss of a synchronous run raise run.steps to {DELAYED_TOKENS:.2f} times as many "
            "(measured on a tiny model, three seeds, with the delay begun after 300 steps; in a run of fewer "
            "than 3,000 set iteration.delay_from to their share: docs/explanation/thin-lines.md)"
        )
    narrow = found[-1]
    is_model = narrow.scenario.model != taken.scenario.model and not _failed(narrow)
    if is_model and same_loss_s(narrow) < (1.0 - WORTH) * same_loss_s(taken):
        lines.append(
            f"subspace: another model, which plan does not choose, would take "
            f"{same_loss_s(narrow) / same_loss_s(taken):.0%} of that time: model.subspace = "
            f"{narrow.scenario.model.subspace} in the fleet file plans for it (docs/explanation/subspace.md)"
        )
    return lines


def named(scenario: Scenario) -> str:
    """Codecs, delay and subspace of a scenario in words, such as "int8 cuts, coarse sums"; "none" for
    none."""
    wire = scenario.wire
    words = ["none" if wire.activations == "none" else f"{wire.activations} cuts"]
    words += [f"{wire.reduce} sums"] * (wire.reduce != "exact")
    words += ["delay 1"] * scenario.run.delay
    words += [f"subspace {scenario.model.subspace}"] * bool(scenario.model.subspace)
    return ", ".join(words)
