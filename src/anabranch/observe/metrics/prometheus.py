"""Metrics of a run for Prometheus (text format 0.0.4), served at `/metrics` of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from anabranch.observe.view.peers import PRESENT, WAYS
from anabranch.observe.view.run_view import View
from anabranch.observe.view.time_series import STEP_COLUMNS

#: Name -> (type, help), as docs/reference/metrics.md lists them.
METRICS: dict[str, tuple[str, str]] = {
    "anabranch_step": ("gauge", "Last committed step"),
    "anabranch_steps": ("gauge", "Steps that the run is to take"),
    "anabranch_loss_nats": ("gauge", "Training loss of the last step, nats per token"),
    "anabranch_held_out_loss_nats": ("gauge", "Held-out loss, nats per token"),
    "anabranch_tokens_per_second": ("gauge", "Tokens per second of the last step"),
    "anabranch_iteration_seconds": ("gauge", "Seconds of the last iteration"),
    "anabranch_iteration_part_seconds": ("gauge", "Its parts, mean over the relays, by part"),
    "anabranch_peers": ("gauge", "Peers that take part, by stage and state"),
    "anabranch_indirect_links": ("gauge", "Ends of links that are not direct: carried, punched or relayed"),
    "anabranch_repaired_microbatches_total": ("counter", "Microbatches sent to another replica"),
    "anabranch_double_microbatches_total": ("counter", "Microbatches that two replicas computed"),
    "anabranch_skipped_steps_total": ("counter", "Iterations committed without a step"),
    "anabranch_crashed_peers_total": ("counter", "Peers that were removed without having left"),
    "anabranch_rollbacks_total": ("counter", "Times that the run went back"),
    "anabranch_refusals_total": ("counter", "Times that messages or a connection were refused"),
    "anabranch_sent_bytes_total": ("counter", "Bytes of activations, gradients and reduces sent"),
    "anabranch_computed_seconds_total": ("counter", "Seconds that peers computed"),
    "anabranch_wasted_seconds_total": ("counter", "Of these for nothing, an estimate"),
    "anabranch_last_event_timestamp_seconds": ("gauge", "Time of the last event, unix seconds"),
}
#: Metric (without prefix and suffix) -> its total in the state of a `View`.
TOTALS = {
    "repaired_microbatches": "repairs", "double_microbatches": "doubles", "skipped_steps": "skips",
    "crashed_peers": "removals", "rollbacks": "rollbacks", "refusals": "refused", "sent_bytes": "sent",
    "computed_seconds": "computed_s", "wasted_seconds": "wasted_s",
}  # fmt: skip

Sample = tuple[str, Mapping[str, str], float | None]


def metrics_text(view: View) -> str:
    """Metrics of a run in Prometheus's text format, in the order of METRICS; those that are not known yet are
    left out. Labels are numbers and words of this program only, no names of peers."""
    lines: list[str] = []
    described: set[str] = set()
    for name, labels, value in sorted(_samples(view), key=lambda sample: list(METRICS).index(sample[0])):
        if value is None:
            continue
        if name not in described:
            described.add(name)
            kind, words = METRICS[name]
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        marks = ",".join(f'{label}="{word}"' for label, word in labels.items())
        lines.append(f"{name}{{{marks}}} {value!r}" if marks else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def _samples(view: View) -> Iterator[Sample]:
    run, totals = view.state.get("run", ""), view.state.get("totals", "")
    yield "anabranch_step", {}, run.get("t")
    yield "anabranch_steps", {}, run.get("steps")
    yield "anabranch_last_event_timestamp_seconds", {}, view.time or None
    if view.steps.items:
        last = dict(zip(STEP_COLUMNS, view.steps.items[-1], strict=True))
        yield "anabranch_loss_nats", {}, last["loss"]
        yield "anabranch_tokens_per_second", {}, last["tps"]
        yield "anabranch_iteration_seconds", {}, last["seconds"]
    split = next((point for point in reversed(view.steps.items[-8:]) if point[5] is not None), None)
    if split is not None:
        for part in ("compute", "transfer", "reduce", "waiting"):
            yield "anabranch_iteration_part_seconds", {"part": part}, split[STEP_COLUMNS.index(part)]
    if view.evaluations.items:
        yield "anabranch_held_out_loss_nats", {}, view.evaluations.items[-1][2]
    nodes = view.state.sections.get("nodes", {}).values()
    present = Counter((node["stage"], node["state"]) for node in nodes if node["state"] in PRESENT)
    for (stage, state), count in sorted(present.items()):
        yield "anabranch_peers", {"stage": str(int(stage)), "state": state}, count
    ways = Counter(
        way if way in WAYS else "carried"
        for node in nodes
        if node["state"] in PRESENT
        for way in node["ways"].values()
    )
    for way in ("carried", *WAYS):
        yield "anabranch_indirect_links", {"way": way}, ways[way]
    for name, total in TOTALS.items():
        yield f"anabranch_{name}_total", {}, totals.get(total, 0)
