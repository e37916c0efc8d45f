"""The measurement of a stage on an accelerator runs on a CPU, too, with and without a subspace."""

from __future__ import annotations

import pytest
import torch

from benchmarks.overhead.stage_gpu import PROOF, Shape, body_of, measure


@pytest.mark.parametrize("subspace", [0, 4])
def test_both_sides_are_measured(subspace: int) -> None:
    shape = Shape(32, 48, 2, 2, 1, 16, 2, subspace)
    figures = measure(shape, torch.device("cpu"), torch.float32, steps=2, peak_flops=1e12)
    assert set(PROOF) < set(figures["ours"]["parts_s"])
    assert 0 < figures["proof_share"] < 1
    assert figures["plain"]["tokens_per_s"] > 0
    assert 0 < figures["ours"]["mfu"] < 1
    text = body_of(figures, shape, "CPU")
    assert "fingerprint" in text
    assert "| plain PyTorch" in text
