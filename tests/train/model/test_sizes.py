"""Named sizes, their validation, parameter counts against the tensors, and that none of it needs torch."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from anabranch.config import ConfigError, ModelSection
from anabranch.train.model.interface import build
from anabranch.train.model.sizes import (
    block_flops,
    block_parameters,
    cut_columns,
    end_parameters,
    fixed_elements,
    head_flops,
    model_config,
    named_size,
    size_names,
    total_parameters,
)


def test_sizes_and_partition_do_not_import_torch() -> None:
    code = (
        "import sys, anabranch.train.model.sizes, anabranch.train.model.partition, "
        "anabranch.train.numerics.step_scalars, "
        "anabranch.train.numerics.numerics_class; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "millions"),
    # Published counts; the llama ones are those of JackFram/llama-160m, Llama 3.2 1B, Llama 2 7B, Llama 3 8B.
    [
        ("gpt2-124m", 124.4398),
        ("gpt2-350m", 354.8232),
        ("llama-160m", 162.4174),
        ("llama-1b", 1235.8144),
        ("llama-7b", 6738.4156),
        ("llama-8b", 8030.2612),
    ],
)
def test_published_parameter_counts(name: str, millions: float) -> None:
    assert total_parameters(named_size(name)) / 1e6 == pytest.approx(millions, abs=1e-4)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
@pytest.mark.parametrize(("tied", "subspace"), [(True, 0), (False, 0), (None, 16)])
def test_counts_are_those_of_the_tensors(name: str, tied: bool | None, subspace: int) -> None:
    config = model_config(ModelSection(size=name, tied=tied, subspace=subspace), 300)
    model = build(config, torch.device("cpu"), torch.float32)
    assert sum(math.prod(shape) for shape in model.block_shapes(0).values()) == block_parameters(config)
    assert sum(math.prod(shape) for shape in model.end_shapes().values()) == end_parameters(config)


def test_every_named_size_is_valid() -> None:
    assert size_names()[:2] == ("llama-tiny", "gpt-tiny")
    for name in size_names():
        size = named_size(name)
        assert model_config(ModelSection(size=name), size.vocab_size) == size


def test_flops_are_twice_the_weights_plus_attention() -> None:
    config = named_size("llama-8b")
    matrices = block_parameters(config) - 2 * config.dim
    assert block_flops(config, 100) == 2 * matrices + 4 * 100 * config.dim
    assert head_flops(config, 100) == 2 * config.dim * config.vocab_size


def test_a_subspace_saves_in_layers_that_write_and_widens_before_each_norm() -> None:
    dense = replace(named_size("llama-350m"), tied=False)
    thin = replace(dense, subspace=160)
    saved = (dense.dim - 160) * (dense.dim + dense.ffn)
    assert block_parameters(dense) - block_parameters(thin) == saved
    assert block_flops(dense, 1024) - block_flops(thin, 1024) == 2 * (saved - 2 * 160 * dense.dim)
    assert (cut_columns(dense, 2), cut_columns(thin, 2), cut_columns(thin, 4)) == (1024, 162, 161)
    assert fixed_elements(dense) == 0
    assert fixed_elements(thin) == (thin.vocab_size + 160) * 1024


def test_overrides_and_the_vocabulary() -> None:
    config = model_config(ModelSection(size="llama-tiny", blocks=4, vocab_size=700), 512)
    assert (config.blocks, config.vocab_size, config.dim) == (4, 700, 128)
    assert model_config(ModelSection(size="gpt-tiny", heads=8), 512).kv_heads == 8


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(size="llama-tinny"), "model.size.*llama-tinny.*llama-tiny"),
        (ModelSection(vocab_size=100), "model.vocab_size: 100 .*512"),
        (ModelSection(heads=3, kv_heads=1), "model.heads: 3 does not divide model.dim = 128"),
        (ModelSection(kv_heads=3), "model.kv_heads: 3 does not divide"),
        (ModelSection(size="gpt-tiny", kv_heads=2), "model.kv_heads: a gpt"),
        (ModelSection(heads=128, kv_heads=1), "model.heads: rotary"),
        (ModelSection(architecture="bert"), "model.architecture"),
        (ModelSection(blocks=0), "model.blocks: 0 must be at least 1"),
        (ModelSection(norm_eps=0.0), "model.norm_eps"),
        (ModelSection(subspace=128), "model.subspace: 128 must be at least 1 and less than model.dim = 128"),
        (ModelSection(subspace=8, tied=True), "model.tied: the embedding of a subspace model"),
        (ModelSection(rope_theta=-1.0), "model.rope_theta"),
    ],
)
def test_impossible_shapes_are_refused_by_the_name_of_the_key(section: ModelSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(section, 512)
