"""Partition of a model's blocks into pipeline stages. Imports no torch.

Stage 0 (embedding, final norm, head, loss) is on the data nodes and holds no block. The relay stages 1..S get
contiguous runs of blocks of equal length (the first ones may be longer by one) unless the run file sets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from anabranch.config import ConfigError, PipelineSection
from anabranch.train.model.sizes import ModelConfig, block_flops, head_flops


@dataclass(frozen=True)
class StageSpec:
    """Blocks first_block..last_block, both included, of one stage; stage 0 has (0, -1), none. ends: True if
    the stage holds embedding, final norm and head."""

    stage: int
    first_block: int
    last_block: int
    ends: bool = False

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.last_block + 1)


def partition(config: ModelConfig, pipeline: PipelineSection) -> tuple[StageSpec, ...]:
    """Stages 0..S of a run, in order; without a pipeline an empty stage 0 and a stage 1 that holds the whole
    model. Raises ConfigError if the settings do not fit the model."""
    if pipeline.whole:  # stage 0 holds nothing: data nodes are sources of token ids
        return StageSpec(0, 0, -1), StageSpec(1, 0, config.blocks - 1, ends=True)
    stages, split = pipeline.stages, pipeline.blocks_per_stage
    if stages > config.blocks:
        raise ConfigError(
            f"pipeline.stages: {stages} stages are more than the model's {config.blocks} blocks; "
            f"use at most {config.blocks}"
        )
    if split and sum(split) != config.blocks:
        problem = f"{list(split)} must sum to the model's {config.blocks} blocks"
        raise ConfigError(f"pipeline.blocks_per_stage: {problem}")
    # All blocks cost the same.
    even = [config.blocks // stages + (stage < config.blocks % stages) for stage in range(stages)]
    ends = [0, *accumulate(split or even)]
    relays = (StageSpec(stage, ends[stage - 1], ends[stage] - 1) for stage in range(1, stages + 1))
    return (StageSpec(0, 0, -1, ends=True), *relays)


def head_load(config: ModelConfig, sequence: int) -> float:
    """FLOPs of the head (on data nodes) over those of one block, per token at `sequence` tokens."""
    return head_flops(config, sequence) / block_flops(config, sequence)


def describe(config: ModelConfig, specs: Sequence[StageSpec], sequence: int) -> str:
    """Line of text for logs: the blocks of every stage and the load of the head."""
    if specs[1].ends:
        return f"every relay holds the whole model, {len(specs[1].blocks)} blocks; data nodes send token ids"
    stages = ", ".join(
        f"stage {spec.stage}: "
        + (
            f"block {spec.first_block}"
            if len(spec.blocks) == 1
            else f"blocks {spec.first_block}-{spec.last_block}"
        )
        for spec in specs
        if spec.stage > 0
    )
    return f"{stages}; the head on data nodes costs {head_load(config, sequence):.2f} blocks"
