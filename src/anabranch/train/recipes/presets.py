"""Presets of the run file: published systems as settings of one mechanism, each with its source.

Only systems whose mechanism is here have one; `differs` says what is not reproduced. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.config import RunConfig, with_changes


@dataclass(frozen=True)
class Preset:
    """Settings of a run file that follow a published system. source: its paper. says: text on what the
    settings do. differs: text on what differs from the paper; "" for nothing. settings: values by dotted
    key."""

    source: str
    says: str
    differs: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


#: Keys of every run whose machines hold the whole model.
_WHOLE = {"pipeline.stages": 0, "pipeline.blocks_per_stage": []}
_DILOCO = {
    **_WHOLE,
    "round.first_moment": "keep",
    "round.slots": 8,
    "round.steps": 500,
    "round.start": 0.27,  # 24,000 of 88,000 steps
    "round.outer_lr": 0.7,
    "round.outer_momentum": 0.9,
    "round.contributions": "exact",
    "round.results": "exact",
    "round.late": "wait",
}
#: Islands that agree on the mean of their weights and on Adam's moments (docs/decisions/0054). With this
#: decay of the second moment a round may have 25 steps for each slot, and its memory is two rounds of the
#: preset.
AGREED = {
    "optimizer.beta2": 0.99,
    "round.outer_lr": 1.0,
    "round.outer_momentum": 0.0,
    "round.first_moment": "agree",
}
PRESETS = {
    "gwtf": Preset(
        "Blagoev, Cox, Decouchant, Chen, \"Go With The Flow\", arXiv 2509.21221",
        "one pipeline of stages, synchronous; microbatches follow the published flow algorithm and return to "
        "the data node that sent them",
        settings={"routing.policy": "gwtf", "routing.return": "own"},
    ),
    "swarm": Preset(
        "Ryabinin et al., \"SWARM Parallelism\", arXiv 2301.11913",
        "one pipeline of stages, wired at random by the speed of the next stage's machines; activations and "
        "their gradients in 8 bits; a stage reduces when it has accumulated the target batch",
        "steps are synchronous (the paper's update is delayed by one); the batch is met exactly, each "
        "microbatch counted once",
        {
            "routing.policy": "swarm",
            "wire.activations": "int8",
            "wire.gradients": "int8",
            "wire.block": 4096,
        },
    ),
    "dedloc": Preset(
        "Diskin et al., \"Distributed Deep Learning in Open Collaborations\", arXiv 2106.10207",
        "machines that hold the whole model take as many microbatches of one large batch as they can, then "
        "all reduce; a linear program over their lines says who sums which share of the gradient; a machine "
        "that fell behind fetches the state",
        "one reduce over all machines takes the place of Moshpit groups; the program shares out the sums, "
        "not the computing, has the two directions of the exchange one after the other, and its shares are "
        "sixteenths; the batch is met exactly; AdamW takes the place of LAMB",
        {**_WHOLE, "batch.microbatches": 256, "fleet.spread": "program"},
    ),
    "diloco": Preset(
        "Douillard et al., \"DiLoCo\", arXiv 2311.08105",
        "8 islands of one machine each that keep their moments, 500 inner AdamW steps a round, outer "
        "Nesterov momentum 0.9 with rate 0.7, after 27 % of the steps taken together; the change of an "
        "island that is late or lost is left out (Asynchronous Communication, figure 8)",
        "quick machines take more inner steps; moments begin afresh where a slot goes to another machine; "
        "an island whose change was left out begins anew from the agreed weights (the paper's goes on from "
        "its own)",
        {**_DILOCO, "round.late": "drop"},
    ),
    "opendiloco": Preset(
        "Jaghouar, Ong, Hagemann, \"OpenDiLoCo\", arXiv 2407.07852",
        "as diloco, with 4 islands and contributions in fp16",
        "quick machines take more inner steps; moments begin afresh where a slot goes to another machine; "
        "the mean travels in fp32",
        {**_DILOCO, "round.slots": 4, "round.contributions": "fp16"},
    ),
    "streaming-diloco": Preset(
        "Douillard et al., \"Streaming DiLoCo with overlapping communication\", arXiv 2501.18512",
        "as diloco; the model is in 3 fragments of blocks far apart, each agreed on every 99 inner steps, "
        "one every 33; islands go on for 5 steps with their own weights before they take half of a result; "
        "contributions of 4 bits",
        "the 4 bits are integers with a scale for each 64 values (the paper's are floats), results have 8",
        {
            **_DILOCO,
            "round.steps": 33,
            "round.fragments": 3,
            "round.overlap": 5,
            "round.mix": 0.5,
            "round.outer_lr": 0.4,
            "round.unsent": "local",
            "round.contributions": "int4",
            "round.results": "int8",
        },
    ),
    "sparse": Preset(
        "Sarfi, Thérien, Lidin, Belilovsky, \"SparseLoCo\", arXiv 2508.15706",
        "8 islands that keep their moments, 30 inner steps a round; of each 4,096 changes the 64 largest are "
        "sent in 2 bits, the rest is fed back with decay 0.95; the mean is applied with rate 1",
        "2 bits are sign and zero times a power of two for each 64 values; results are exact",
        {
            **_DILOCO,
            "round.steps": 30,
            "round.outer_lr": 1.0,
            "round.outer_momentum": 0.0,
            "round.select": "largest",
            "round.select_share": 0.015625,
            "round.unsent": "feedback",
            "round.unsent_decay": 0.95,
            "round.contributions": "int2",
            "round.late": "drop",
        },
    ),
    "gaia": Preset(
        "Hsieh et al., \"Gaia\", NSDI 2017",
        "4 islands that send the changes of at least 1 % of a weight after each step, falling with the root "
        "of the number of rounds, and keep the others in their own weights",
        "an island is one machine; the mean of changes is applied, not their sum; every round is a barrier, "
        "so the selective barrier and the mirror clock have nothing to bound",
        {
            **_DILOCO,
            "round.slots": 4,
            "round.steps": 1,
            "round.start": 0.01,
            "round.outer_lr": 1.0,
            "round.outer_momentum": 0.0,
            "round.select": "significant",
            "round.threshold": 0.01,
            "round.unsent": "local",
        },
    ),
    "ravnest": Preset(
        "Menon, Menon, Ahirwar, \"Ravnest\", arXiv 2401.01728",
        "4 clusters, each one copy of the model cut over its machines, which keep their moments; after every "
        "50 inner steps the clusters' weights are averaged, each part of the model among the machines that "
        "hold it, all parts at the same time",
        "steps within a cluster are synchronous (the paper's pipeline is asynchronous, with delayed "
        "gradients and weights kept for each version); the average of a part is this project's exact reduce, "
        "not a ring, and weighs clusters by the inner steps that they took; the cut is the same in all "
        "clusters, and machines are put together by stage, speed and latency, not by a genetic search over "
        "memory and bandwidth; a cluster that loses a machine loses its round; 50 steps are a choice (the "
        "authors' program averages once an epoch unless told otherwise)",
        {
            "pipeline.stages": 2,
            "pipeline.blocks_per_stage": [],
            "round.first_moment": "keep",
            "round.slots": 4,
            "round.steps": 50,
            "round.start": 0.01,
            "round.outer_lr": 1.0,
            "round.outer_momentum": 0.0,
            "round.contributions": "exact",
            "round.results": "exact",
        },
    ),
    "anabranch": Preset(
        "this project (docs/explanation/islands.md)",
        "islands of one machine each after a synchronous fiftieth, which agree on the mean of their weights "
        "and on Adam's moments; contributions of 4 bits, results of 8, late islands left out",
        settings={
            **_WHOLE,
            **AGREED,
            "round.slots": 8,
            "round.steps": 50,
            "round.start": 0.02,  # a synchronous step of whole models takes longer than a round at home
            "round.contributions": "int4",
            "round.results": "int8",
            "round.late": "drop",
        },
    ),
}  # fmt: skip


def with_preset(config: RunConfig, name: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """Configuration with a preset's settings and then `changes`, by dotted key. With islands, the
    microbatches of a batch are rounded up to a multiple of the preset's number of slots, and a local swarm
    gets machines for each: a relay, or one of each stage and a data node; `changes` override that. Raises
    KeyError for an unknown preset, ConfigError for settings that do not fit."""
    changes = changes or {}
    settings = {**PRESETS[name].settings, **changes}
    slots = PRESETS[name].settings.get("round.slots", 0)
    if slots:
        stages = settings["pipeline.stages"]
        share = -(-config.batch.microbatches // slots)
        fleet = {"batch.microbatches": share * slots, "fleet.relays": max(1, stages) * slots}
        settings = fleet | ({"fleet.data_nodes": slots} if stages else {}) | settings
    return with_changes(config, settings)


def heading(name: str) -> str:
    """Comment lines for the head of a run file of the preset `name`: settings, source and differences."""
    preset = PRESETS[name]
    lines = [f"# Preset {name}: {preset.says}.", f"# Source: {preset.source}."]
    if preset.differs:
        lines.append(f"# Unlike there: {preset.differs}.")
    return "\n".join(lines) + "\n"
