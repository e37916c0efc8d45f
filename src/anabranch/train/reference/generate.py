"""Sampling of text from a whole (unsplit) model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from anabranch.train.model.interface import Model, build, logits_of
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.sizes import ModelConfig


def generate(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 1,
    stop: int | None = None,
) -> Iterator[int]:
    """Up to `max_new_tokens` ids that continue `prompt_ids` (at least one id), each as soon as it is drawn.
    Of a longer text the model sees the last `max_sequence` ids.

    `weights` are all tensors of the model by name, of one dtype on one device. Temperature 0 takes the most
    likely id. Otherwise ids are drawn from softmax(logits / temperature), of the `top_k` most likely ones if
    that is not 0. The id `stop` is yielded and ends the text. For equal logits the draws are a pure function
    of `seed`.

    Raises ValueError for an empty prompt, an id outside the vocabulary, or a negative setting, when the first
    id is asked for.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: give at least one id, e.g. the tokenizer's separator")
    for number in prompt_ids:
        if not 0 <= number < config.vocab_size:
            raise ValueError(f"id {number} of the prompt is not in the vocabulary of {config.vocab_size}")
    if temperature < 0 or top_k < 0 or max_new_tokens < 0:
        raise ValueError("temperature, top_k and max_new_tokens must not be negative")
    generator = torch.Generator().manual_seed(seed)
    some = next(iter(weights.values()))
    model, plain = build(config, some.device, some.dtype), PlainWeights(weights)
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        logits = _next_logits(model, plain, ids[-config.max_sequence :], some.device)
        ids.append(_draw(logits, temperature, top_k, generator))
        yield ids[-1]
        if ids[-1] == stop:
            return


@torch.inference_mode()
def _next_logits(model: Model, weights: PlainWeights, ids: Sequence[int], device: torch.device) -> Tensor:
    """Logits (vocabulary,) of the token after `ids`, in fp64 on the CPU."""
    last = len(ids) - 1
    # Zeros after the last token change nothing before them. Padding to powers of two keeps the number of
    # sequence lengths small, each of which has a mask.
    padded = min(model.config.max_sequence, max(16, 1 << last.bit_length()))
    padded_ids = torch.tensor([[*ids, *[0] * (padded - len(ids))]], device=device)
    return logits_of(model, weights, padded_ids, last)[0, 0].double().cpu()


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        chosen = logits.topk(top_k)
        rank = torch.multinomial(torch.softmax(chosen.values / temperature, 0), 1, generator=generator)
        return int(chosen.indices[rank])
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
