"""Presets of the run file: published systems as settings of one mechanism, each with its source.

Only systems whose mechanism is here have a preset. What a preset cannot reproduce of its paper is said in
`differs`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.config import RunConfig, with_changes


@dataclass(frozen=True)
class Preset:
    """Settings by dotted key. source: paper. says: what the settings do. differs: from the paper."""

    source: str
    says: str
    differs: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


#: Keys of every run whose machines hold the whole model.
_WHOLE = {"pipeline.stages": 0, "pipeline.blocks_per_stage": []}
_DILOCO = {
    **_WHOLE,
    "round.slots": 8,
    "round.steps": 500,
    "round.start": 0.27,  # 24,000 of 88,000 steps
    "round.outer_lr": 0.7,
    "round.outer_momentum": 0.9,
    "round.contributions": "exact",
    "round.results": "exact",
    "round.late": "wait",
}
PRESETS = {
    "gwtf": Preset(
        "Blagoev, Cox, Decouchant, Chen, \"Go With The Flow\", arXiv 2509.21221",
        "one pipeline of stages, synchronous; microbatches follow the published flow algorithm and return to "
        "the data node that sent them",
        settings={"routing.policy": "gwtf", "routing.return": "own"},
    ),
    "diloco": Preset(
        "Douillard et al., \"DiLoCo\", arXiv 2311.08105",
        "8 islands of one machine each, 500 inner AdamW steps a round, outer Nesterov momentum 0.9 with rate "
        "0.7, after 27 % of the steps taken together",
        "inner moments begin afresh each round (the paper keeps them); quick machines take more inner steps",
        _DILOCO,
    ),
    "opendiloco": Preset(
        "Jaghouar, Ong, Hagemann, \"OpenDiLoCo\", arXiv 2407.07852",
        "as diloco, with 4 islands and contributions in fp16",
        "inner moments begin afresh each round (the paper keeps them); quick machines take more inner steps; "
        "the mean travels in fp32",
        {**_DILOCO, "round.slots": 4, "round.contributions": "fp16"},
    ),
    "anabranch": Preset(
        "this project (docs/explanation/islands.md)",
        "islands of one machine each after a synchronous quarter; the mean of their weights, from which "
        "Adam's first moment is estimated; contributions of 4 bits, results of 8, late islands left out",
        settings={
            **_WHOLE,
            "round.slots": 8,
            "round.steps": 50,
            "round.start": 0.25,
            "round.outer_lr": 1.0,
            "round.outer_momentum": 0.0,
            "round.first_moment": "estimate",
            "round.contributions": "int4",
            "round.results": "int8",
            "round.late": "drop",
        },
    ),
}  # fmt: skip


def with_preset(config: RunConfig, name: str) -> RunConfig:
    """Configuration with a preset's settings. With islands, the microbatches of a batch are rounded up to a
    multiple of their number, and a local swarm gets a relay for each."""
    settings = dict(PRESETS[name].settings)
    slots = settings.get("round.slots", 0)
    if slots:
        share = -(-config.batch.microbatches // slots)
        settings |= {"batch.microbatches": share * slots, "fleet.relays": slots}
    return with_changes(config, settings)


def heading(name: str) -> str:
    """Comment at the head of a run file that a preset made."""
    preset = PRESETS[name]
    lines = [f"# Preset {name}: {preset.says}.", f"# Source: {preset.source}."]
    if preset.differs:
        lines.append(f"# Unlike there: {preset.differs}.")
    return "\n".join(lines) + "\n"
