"""Sampling from a trained model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.train.model.interface import build, initial_weights
from anabranch.train.model.layout import Layout
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.sizes import ModelConfig, named_size
from anabranch.train.reference.generate import generate as stream

CPU = torch.device("cpu")
LLAMA = replace(named_size("llama-tiny"), blocks=2, max_sequence=24)
GPT = replace(named_size("gpt-tiny"), blocks=2, max_sequence=24)
both = pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])


def generate(*arguments: Any, **options: Any) -> list[int]:
    return list(stream(*arguments, **options))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def seeded_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Initial weights with a head loud enough that greedy choices are clear."""
    model = build(config, CPU, torch.float32)
    shapes = model.end_shapes()
    for block in range(config.blocks):
        shapes.update(model.block_shapes(block))
    layout = Layout(shapes)
    return {name: 5 * view for name, view in layout.views(initial_weights(model, layout, 1, torch.float32))}


def next_logits(config: ModelConfig, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits after the last of `ids`, without padding."""
    model, plain = build(config, CPU, torch.float32), PlainWeights(weights)
    with torch.no_grad():
        x = model.embed(plain, torch.tensor([ids[-config.max_sequence :]]))
        for block in range(config.blocks):
            x = model.block(plain, block, x)
        return model.head(plain, x)[0, -1]


@both
def test_greedy_ids_are_the_most_likely_ones_beyond_the_longest_sequence(config: ModelConfig) -> None:
    weights = seeded_weights(config)
    ids = [7, 300, 12]
    continued = generate(weights, config, ids, 40, temperature=0)
    assert len(continued) == 40
    for number in continued:
        assert number == next_logits(config, weights, ids).argmax()
        ids.append(number)


@pytest.mark.costly(stay=1)
@both
def test_draws_follow_the_distribution(config: ModelConfig) -> None:
    """First ids of 400 seeds against the probabilities of the 3 most likely (4.5 deviations)."""
    weights = seeded_weights(config)
    chosen = next_logits(config, weights, [5, 6]).topk(3)
    probabilities = torch.softmax(chosen.values.double() / 2, 0)
    draws = [generate(weights, config, [5, 6], 1, 2.0, 3, seed)[0] for seed in range(400)]
    assert set(draws) <= set(chosen.indices.tolist())
    for number, p in zip(chosen.indices.tolist(), probabilities.tolist(), strict=True):
        assert abs(draws.count(number) - 400 * p) < 4.5 * (400 * p * (1 - p)) ** 0.5


@both
def test_the_seed_decides_and_top_1_is_greedy(config: ModelConfig) -> None:
    weights = seeded_weights(config)
    one, same, other = (generate(weights, config, [1], 20, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    greedy = generate(weights, config, [1], 20, temperature=0)
    assert generate(weights, config, [1], 20, top_k=1, seed=9) == greedy


def test_it_ends_after_the_stop_id() -> None:
    weights = seeded_weights(LLAMA)
    whole = generate(weights, LLAMA, [1], 20, seed=3)
    stop = whole[4]
    assert generate(weights, LLAMA, [1], 20, seed=3, stop=stop) == whole[: whole.index(stop) + 1]
    assert next(stream(weights, LLAMA, [1], 20, seed=3)) == whole[0]
    assert generate(weights, LLAMA, [1], 0) == []


def test_what_cannot_be_continued_is_refused() -> None:
    weights = seeded_weights(LLAMA)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(weights, LLAMA, [], 5)
    with pytest.raises(ValueError, match="id 512 of the prompt"):
        generate(weights, LLAMA, [1, 512], 5)
    with pytest.raises(ValueError, match="negative"):
        generate(weights, LLAMA, [1], 5, temperature=-1)
