"""Model shapes: the named sizes, their overrides from a run file, parameter counts and costs.

Imports no torch, so that `--help` and partitioning stay light.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from anabranch.config import ConfigError, ModelSection

ARCHITECTURES = ("llama", "gpt")
#: Bytes of one parameter's packed exact sum on the wire (`net/packing.py`). Measured by
#: benchmarks/packing.py: 5.1 to 5.3 over whole runs of both models, 5.4 in their first ten steps; rounded up.
SUM_WIRE_BYTES = 5.5
#: Bytes of one value that is rounded to so many bits, with the scale of its block (`net/scaled_packing.py`).
SCALED_BYTES = {4: 0.5 + 2 / 64, 8: 1.0 + 2 / 64}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Widths are in elements, `max_sequence` in tokens."""

    architecture: str
    """"llama" or "gpt"."""
    dim: int
    blocks: int
    heads: int
    kv_heads: int
    """Key and value heads (grouped-query attention); equal to `heads` for gpt."""
    ffn: int
    """Inner width of the feed-forward layer."""
    vocab_size: int
    max_sequence: int
    tied: bool
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    rope_factor: float = 1.0
    """Factor of Llama 3.1's rule for long rotary wavelengths (`train/model/llama.py`); 1: none."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim


_SIZES = {
    # Measured in docs/explanation/numerics.md: below 2 bits per byte on the standard library in two minutes.
    "llama-tiny": ModelConfig("llama", 128, 3, 4, 2, 352, 512, 128, tied=True),
    "gpt-tiny": ModelConfig("gpt", 128, 3, 4, 4, 512, 512, 128, tied=True),
    "gpt2-124m": ModelConfig("gpt", 768, 12, 12, 12, 3072, 50_257, 1024, tied=True),
    "gpt2-350m": ModelConfig("gpt", 1024, 24, 16, 16, 4096, 50_257, 1024, tied=True),
    "llama-160m": ModelConfig("llama", 768, 12, 12, 12, 3072, 32_000, 2048, tied=False, norm_eps=1e-6),
    "llama-350m": ModelConfig("llama", 1024, 24, 16, 16, 2736, 32_000, 1024, tied=False, norm_eps=1e-6),
    # The shapes of Llama 3.2 1B, Llama 2 7B and Llama 3 8B (without rope scaling).
    "llama-1b": ModelConfig("llama", 2048, 16, 32, 8, 8192, 128_256, 8192, tied=True, rope_theta=5e5),
    "llama-7b": ModelConfig("llama", 4096, 32, 32, 32, 11_008, 32_000, 4096, tied=False),
    "llama-8b": ModelConfig("llama", 4096, 32, 32, 8, 14_336, 128_256, 8192, tied=False, rope_theta=5e5),
}


def size_names() -> tuple[str, ...]:
    """Names of the known sizes, small ones first."""
    return tuple(_SIZES)


def named_size(name: str) -> ModelConfig:
    """Shape called `name`, with the vocabulary of the published model. Raises ConfigError if unknown."""
    if name not in _SIZES:
        raise ConfigError(f"model.size: there is no size {name!r}; choose one of {', '.join(_SIZES)}")
    return _SIZES[name]


def model_config(section: ModelSection, vocab_size: int) -> ModelConfig:
    """Shape that a run file asks for, with a tokenizer of `vocab_size` ids.

    Fields set in `section` override the named size. The vocabulary is the tokenizer's unless the section sets
    a larger one. Raises ConfigError (a ValueError) that names the key.
    """
    base = named_size(section.size)
    overrides = {
        field.name: value
        for field in fields(ModelConfig)
        if (value := getattr(section, field.name)) is not None
    }
    overrides.setdefault("vocab_size", vocab_size)
    if "heads" in overrides and "kv_heads" not in overrides and base.kv_heads == base.heads:
        overrides["kv_heads"] = overrides["heads"]
    config = replace(base, **overrides)
    if config.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size: {config.vocab_size} is smaller than the tokenizer's {vocab_size} ids"
        )
    validate(config)
    return config


def validate(config: ModelConfig) -> None:
    """Raise ConfigError, naming the key, if no model can have this shape."""
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(f"model.architecture: {config.architecture!r} is neither of {ARCHITECTURES}")
    for key in ("dim", "blocks", "heads", "kv_heads", "ffn", "vocab_size", "max_sequence"):
        value = getattr(config, key)
        if value < 1:
            raise ConfigError(f"model.{key}: {value} must be at least 1")
    if config.dim % config.heads:
        raise ConfigError(f"model.heads: {config.heads} does not divide model.dim = {config.dim}")
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.kv_heads: {config.kv_heads} does not divide model.heads = {config.heads}")
    if config.architecture == "gpt" and config.kv_heads != config.heads:
        raise ConfigError(f"model.kv_heads: a gpt has as many as model.heads = {config.heads}")
    if config.architecture == "llama" and config.head_dim % 2:
        raise ConfigError(
            f"model.heads: rotary embeddings need an even head width, not {config.dim}/{config.heads}"
        )
    if not config.norm_eps > 0:
        raise ConfigError(f"model.norm_eps: {config.norm_eps} must be above 0")
    if config.rope_factor != 1.0 and config.architecture != "llama":
        raise ConfigError(f"model.rope_factor: {config.rope_factor} is for llama only")
    if not config.rope_theta > 0:
        raise ConfigError(f"model.rope_theta: {config.rope_theta} must be above 0")


def block_parameters(config: ModelConfig) -> int:
    """Parameters of one transformer block."""
    dim, ffn = config.dim, config.ffn
    if config.architecture == "llama":
        return 2 * dim * dim + 2 * dim * config.kv_dim + 3 * dim * ffn + 2 * dim
    return 4 * dim * dim + 4 * dim + 2 * dim * ffn + ffn + dim + 4 * dim


def end_parameters(config: ModelConfig) -> int:
    """Parameters of stage 0: embedding (and learned positions), final norm, head."""
    tables = config.vocab_size * config.dim * (1 if config.tied else 2)
    if config.architecture == "llama":
        return tables + config.dim
    return tables + config.max_sequence * config.dim + 2 * config.dim


def token_bytes(vocab_size: int) -> int:
    """Bytes of a token id on the wire."""
    return 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4


def total_parameters(config: ModelConfig) -> int:
    return config.blocks * block_parameters(config) + end_parameters(config)


def block_flops(config: ModelConfig, sequence: int) -> int:
    """Floating-point operations of one block's forward per token, at `sequence` tokens (a product = 2)."""
    dim = config.dim
    projections = 2 * dim * dim + 2 * dim * config.kv_dim
    feed_forward = (3 if config.architecture == "llama" else 2) * dim * config.ffn
    attention = 2 * sequence * dim  # scores and their product with the values, unmasked, as computed
    return 2 * (projections + feed_forward + attention)


def head_flops(config: ModelConfig) -> int:
    """Floating-point operations of the head's forward per token."""
    return 2 * config.dim * config.vocab_size


def activation_elements_kept(config: ModelConfig) -> int:
    """Elements per token and block kept for the weight gradient: (x, dy) of each linear layer."""
    if config.architecture == "llama":
        return 6 * config.dim + 2 * config.kv_dim + 3 * config.ffn
    return 8 * config.dim + 2 * config.ffn
