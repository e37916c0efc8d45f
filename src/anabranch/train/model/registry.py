"""Models of users: ordinary torch modules in parts, registered on this machine by name, and their counts.

A run file names an architecture; the code behind the name is what this machine's user has registered, by an
installed package (entry point group `anabranch.models`) or `register_model`. A run's owner can choose among
these names and nothing else: no peer makes another one import or execute anything.

Imports torch only to build a model.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from anabranch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Names of the built-in architectures, which no registered model can take.
ARCHITECTURES = ("llama", "gpt", "mistral", "qwen2", "gemma")
#: Group of entry points in which a package declares its models: NAME = "package.module:function".
GROUP = "anabranch.models"
#: Environment variable with further models of this machine: NAME=module:function, commas between.
VARIABLE = "ANABRANCH_MODELS"
#: Tokens of the forward pass from which kept activations are counted.
COUNTED_TOKENS = 16
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_WHERE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class CausalModel:
    """Parts of a causal language model. embedding: table of token embeddings. blocks: modules x -> x in
    order, x of shape (rows, sequence, dim). head: module x -> logits (rows, sequence, vocabulary); a head
    whose parameter is `embedding.weight` itself is tied. positions: table of learned positions that are added
    to the embeddings, if any. loss: (output of the head, targets (rows, sequence)) -> sum over the targets
    (None: cross-entropy, nats)."""

    embedding: nn.Embedding
    blocks: Sequence[nn.Module]
    head: nn.Module
    positions: nn.Embedding | None = None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Counts:
    """Sizes of a registered model, for memory estimates; a tied parameter counts once. block: parameters of
    the block with the most. end: of stage 0 (embeddings and head). total: of the whole model. kept: elements
    per token that a block holds from its forward to its weight gradients, in the block that holds the most:
    activations, and as many again for the gradients that wait with them."""

    block: int
    end: int
    total: int
    kept: int


def register_model(name: str, where: str) -> None:
    """Register a model for this process and those that it starts, in the environment variable VARIABLE. name:
    value of `model.architecture`. where: "module:function", a function that takes the run's `ModelConfig` and
    returns a `CausalModel`. It is not imported here. Raises ConfigError if name or `where` is ill-formed, or
    the name is that of a built-in architecture."""
    if name in ARCHITECTURES:
        raise ConfigError(f"{name!r} is a built-in architecture: give your model another name")
    if not _NAME.fullmatch(name) or not _WHERE.fullmatch(where):
        raise ConfigError(f'{name} = "{where}": write a name of small letters and "module:function"')
    models = {**_of_environment(), name: where}
    os.environ[VARIABLE] = ",".join(f"{each}={place}" for each, place in models.items())


def registered() -> dict[str, str]:
    """Models that are registered on this machine: name -> "module:function". Those of the environment replace
    those of packages. Nothing is imported."""
    found = {point.name: point.value for point in metadata.entry_points(group=GROUP)}
    return found | _of_environment()


def _of_environment() -> dict[str, str]:
    pairs = (each.partition("=") for each in os.environ.get(VARIABLE, "").split(",") if each)
    return {name.strip(): where.strip() for name, _, where in pairs}


def parts_of(config: Any) -> CausalModel:
    """Parts of the model that a `ModelConfig` names: imports its user's function and calls it. The current
    folder becomes part of the module search path. Raises ConfigError if it is not registered on this machine,
    or its function fails or returns no CausalModel of config.blocks blocks."""
    name = config.architecture
    where = registered().get(name)
    if where is None:
        raise ConfigError(
            f"model.architecture: {name!r} is not registered on this machine; install the package that has "
            f"it, or set {VARIABLE}={name}=module:function"
        )
    module, _, function = where.partition(":")
    if "" not in sys.path:  # a module of the current folder, as `python` itself finds it
        sys.path.insert(0, "")
    try:
        parts = getattr(importlib.import_module(module), function)(config)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"model {name} ({where}): {type(error).__name__}: {error}") from error
    if not isinstance(parts, CausalModel) or len(parts.blocks) != config.blocks:
        raise ConfigError(f"model {name} ({where}): it must return a CausalModel of {config.blocks} blocks")
    return parts


@functools.lru_cache(maxsize=8)
def counts_of(config: Any) -> Counts:
    """Counts of a registered model, by building it once in a process. Raises ConfigError if it cannot be
    built."""
    parts = parts_of(config)
    blocks = [sum(p.numel() for p in block.parameters()) for block in parts.blocks]
    ends = {id(p): p.numel() for p in [*parts.embedding.parameters(), *parts.head.parameters()]}
    if parts.positions is not None:
        ends[id(parts.positions.weight)] = parts.positions.weight.numel()
    end = sum(ends.values())
    kept = max(_kept(block, config) for block in parts.blocks)
    return Counts(max(blocks), end, sum(blocks) + end, kept)


def _kept(block: nn.Module, config: Any) -> int:
    """Elements per token that wait between a block's forward and its weight gradients: what autograd keeps of
    the forward, without parameters, and the block's input; twice, for the gradients that wait with them.
    Raises ConfigError if the block fails."""
    import torch

    tokens = min(COUNTED_TOKENS, config.max_sequence)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = max(tensor.numel(), sizes.get(storage.data_ptr(), 0))
        return tensor

    x = torch.zeros(1, tokens, config.dim, requires_grad=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"model {config.architecture}: a block failed: {error}") from error
    elements: int = 2 * (sum(sizes.values()) // tokens + config.dim)
    return elements
