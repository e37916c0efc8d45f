"""Choice of the worker class for a stage of a run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anabranch.config import RunConfig
from anabranch.train.adapters.frozen import FrozenStore
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.stage.run_objects import Batches
from anabranch.train.stage.worker import Worker
from anabranch.train.workers.pipeline_worker import PipelineWorker
from anabranch.train.workers.whole_worker import OwnData, TokenSource, WholeWorker


def make_worker(
    run: RunConfig,
    model: ModelConfig,
    stage: int,
    batches: Batches | None = None,
    initial: Mapping[str, Tensor] | None = None,
    resident: int | None = None,
    frozen: FrozenStore | None = None,
    own: OwnData | None = None,
) -> Worker:
    """Worker of a stage, of the class that the run file needs. Arguments and errors are those of `Worker`;
    own: as of `WholeWorker`, unused by other classes."""
    kind = Worker
    if run.pipeline.whole and stage:
        return WholeWorker(run, model, stage, batches, initial, resident, frozen, own)
    if run.pipeline.whole:
        kind = TokenSource
    elif run.round.slots:
        kind = PipelineWorker
    return kind(run, model, stage, batches, initial, resident, frozen)
