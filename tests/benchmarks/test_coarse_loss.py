"""Roundings of the benchmark `coarse_loss` against those of a run's own sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch.config import PipelineSection, with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import materialise
from anabranch.train.model.layout import Layout
from anabranch.train.model.llama import EMBEDDING
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics.coarse_sums import CoarseAccumulator, segments, unit_exponents
from anabranch.train.numerics.exact import reduced
from anabranch.train.recipes.recipes import recipe_run
from anabranch.train.reference.reference import Reference
from benchmarks.wire.coarse_loss import SummedStack, in_units

CPU = torch.device("cpu")


def test_contributions_are_rounded_as_in_a_coarse_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    layout = Layout({"one": (30, 5), "two": (70,)})
    contributions = torch.randn(4, layout.elements, generator=generator) * 1e-3
    second = torch.rand(layout.elements, generator=generator) * 1e-6
    exponents = unit_exponents(layout, second, 0.95, 7, 4)
    sums = CoarseAccumulator(layout, dict.fromkeys(layout.names, 4), torch.float32, CPU)
    sums.prepare(exponents)
    for some in contributions:
        for name in layout.names:
            sums.add(name, layout.view(some, name))
    units = torch.ldexp(torch.ones(len(exponents)), exponents)
    units = units.repeat_interleave(segments(layout, CPU).lengths)
    found = in_units(contributions, units).sum(0)
    assert torch.equal(found.float(), reduced(sums.flat, torch.float32))
    assert not torch.equal(found, contributions.double().sum(0))


@pytest.mark.parametrize("reduce", ["coarse", "exact"])
def test_sums_of_a_stack_are_those_of_the_reference(
    reduce: str, sentences: Path, tmp_path: Path
) -> None:
    """From the second step on, as the first has no units yet. Beside the embedding, of which the stack rounds
    the gradients of both uses together."""
    shape = {"model.dim": 16, "model.blocks": 1, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 24}
    batch = {"batch.microbatches": 4, "batch.rows": 1, "batch.sequence": 16, "run.steps": 20}
    data = {"data.source": "text", "data.path": str(sentences), "data.vocab_size": 257}
    others = {"compute.device": "cpu", "pipeline.stages": 1, "optimizer.lr": 0.01, "wire.reduce": reduce}
    run = with_changes(recipe_run("llama-tiny"), shape | batch | data | others)
    run = replace(run, pipeline=PipelineSection(stages=0))
    corpus = materialise(run.data, tmp_path / "corpus")
    shape_of, seed = model_config(run.model, corpus.vocab_size), run.run.seed
    stack = SummedStack([run], corpus, reduce == "coarse")
    reference = Reference(run, shape_of, Batches(corpus, run.batch, seed))
    reference.step(reference.share(1, range(4)))
    stack.iterate(1)
    [sums] = [sums for sums in reference.share(2, range(4)).sums if len(sums)]
    theirs, ours = reduced(sums, torch.float32), stack.sums(2, range(4))[0].float()
    for name, (begin, end) in stack.layout.bounds.items():
        if name != EMBEDDING:
            # Bits differ before they are rounded, so a few values near the middle go the other way.
            close = torch.isclose(ours[begin:end], theirs[begin:end], rtol=1e-3, atol=1e-7)
            assert close.float().mean() > 0.98, name
