"""Mistral, Qwen2 and Gemma: the swarm's bits are the reference's, and its gradients those of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch.config import RunConfig
from anabranch.train.reference.independent import IndependentReference
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.run_objects import token_ids
from support.small_training import MadeUpBatches, SmallSwarm, small_model, small_run, with_section

transformers = pytest.importorskip("transformers")
FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"window": 5, "head_width": 10},
    "qwen2": {},
    "gemma": {"head_width": 12},
}


def run_of(architecture: str, stages: int = 2, dtype: str = "fp32") -> RunConfig:
    run = small_run("llama", stages, dtype)
    return replace(run, model=replace(run.model, architecture=architecture, **FAMILY[architecture]))


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("architecture", FAMILY)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_value_equals_the_reference(architecture: str, dtype: str) -> None:
    """Cut at every block (I3)."""
    run = run_of(architecture, 4, dtype)
    swarm, reference = SmallSwarm(run, seed=3), Reference(run, small_model(run), MadeUpBatches(run))
    losses = []
    for t in (1, 2, 3):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.squares, step.digests) == (record.losses, record.squares, record.digests)
        assert step.fingerprints == reference.fingerprints()
        losses.append(sum(step.losses.values()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("architecture", FAMILY)
def test_gradients_are_those_of_transformers(architecture: str) -> None:
    """The first moment after a step is the gradient times 1 - beta1; in fp64, so that nothing hides."""
    run = run_of(architecture, dtype="fp64")
    model, batches = small_model(run), MadeUpBatches(run)
    reference = Reference(run, model, batches)
    weights = {key[8:]: t.clone() for key, t in reference.tensors().items() if key.startswith("weights/")}
    family = architecture.capitalize()
    settings = {"sliding_window": model.window or None} if architecture == "mistral" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=model.vocab_size, hidden_size=model.dim, intermediate_size=model.ffn,
        num_hidden_layers=model.blocks, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, max_position_embeddings=model.max_sequence, rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tied, rope_theta=model.rope_theta, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}, **settings,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).double()
    theirs.load_state_dict(weights, strict=not model.tied)
    for index in range(run.batch.microbatches):
        ids, targets = token_ids(batches, run.batch.microbatches, 1, index, torch.device("cpu"))
        logits = theirs(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / batches.tokens_per_iteration).backward()
    record = reference.step(reference.share(1, range(run.batch.microbatches)))
    moments = {key[8:]: t for key, t in reference.tensors().items() if key.startswith("exp_avg/")}
    for name, parameter in theirs.named_parameters():
        gradient = moments[name] / (1 - run.optimizer.beta1) / record.clip_factor
        # Rotary angles of transformers are fp32, so the agreement is fp32's.
        assert (gradient - parameter.grad).norm() <= 3e-6 * parameter.grad.norm(), name


def test_the_independent_implementation_refuses_what_it_lacks() -> None:
    run = run_of("qwen2")
    with pytest.raises(ValueError, match="has llama and gpt only, not qwen2"):
        IndependentReference(run, small_model(run), MadeUpBatches(run), {})
    run = with_section(small_run(), "round", slots=1)
    with pytest.raises(ValueError, match="has no islands"):
        IndependentReference(run, small_model(run), MadeUpBatches(run), {})
