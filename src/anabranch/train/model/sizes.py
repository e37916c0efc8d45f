"""Model shapes: the named sizes, their overrides from a run file, parameter counts and costs.

Imports no torch, so that `--help` and partitioning stay light.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol

from anabranch.config import ConfigError, ModelSection
from anabranch.train.codec.sizes import encoded_bytes
from anabranch.train.model import registry
from anabranch.train.model.registry import ARCHITECTURES

#: Relatives of llama, whose heads may be wider or narrower than dim / heads.
FAMILY = ("mistral", "qwen2", "gemma")
#: Bytes of one parameter's packed exact sum on the wire (`net/packing.py`). Measured by
#: benchmarks/packing.py: 5.1 to 5.3 over whole runs of both models, 5.4 in their first ten steps; rounded up.
SUM_WIRE_BYTES = 5.5
#: Bytes of one value that is rounded to so many bits, with the scale of its block (`net/scaled_packing.py`).
SCALED_BYTES = {4: 0.5 + 2 / 64, 8: 1.0 + 2 / 64}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Widths are in elements, `max_sequence` in tokens."""

    architecture: str
    """Name in ARCHITECTURES, or of a model that a user registered (`train/model/registry.py`)."""
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
    subspace: int = 0
    """Values per token that a cut carries (`train/model/residual.py`); 0: the residual stream itself."""

    head_width: int = 0
    """Width of an attention head; 0: dim / heads."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all before it."""

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.heads

    @property
    def attention_dim(self) -> int:
        """Values per token of all heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def free_block(self) -> int | None:
        """Number of stage 0's block at full width before a subspace model's final norm; None in others."""
        return self.blocks if self.subspace else None

    @property
    def stream(self) -> int:
        """Values per token of the residual stream, into which attention and feed-forward layer write."""
        return self.subspace or self.dim


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
    """Names of the predefined model sizes, as `named_size` takes them."""
    return tuple(_SIZES)


#: Largest values of a shape, far beyond every model: the shape may be a stranger's, and before any memory is
#: compared a list has an entry for each block, and a table a row for each position.
MOST = {
    "dim": 1 << 20,
    "blocks": 1 << 14,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "ffn": 1 << 24,
    "vocab_size": 1 << 24,
    "max_sequence": 1 << 24,
}
#: Largest table of positions, in elements: longest sequence times width of a head.
MOST_POSITIONS = 1 << 28


def named_size(name: str) -> ModelConfig:
    """Predefined shape called `name`, with the vocabulary of the published model. Raises ConfigError if there
    is none of that name."""
    if name not in _SIZES:
        raise ConfigError(f"model.size: there is no size {name!r}; choose one of {', '.join(_SIZES)}")
    return _SIZES[name]


def model_config(section: ModelSection, vocab_size: int) -> ModelConfig:
    """Shape that a run file asks for, with a tokenizer of `vocab_size` ids. Fields set in `section` override
    the named size. If not set: the vocabulary is the tokenizer's (a smaller one is refused), a subspace model
    has an untied head, and kv_heads follows `heads` where the size has as many of both. Raises ConfigError (a
    ValueError) that names the key."""
    base = named_size(section.size)
    overrides = {
        field.name: value
        for field in fields(ModelConfig)
        if (value := getattr(section, field.name)) is not None
    }
    overrides.setdefault("vocab_size", vocab_size)
    if overrides.get("subspace"):
        overrides.setdefault("tied", False)
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
    if config.architecture not in ARCHITECTURES and config.architecture not in registry.registered():
        known = ", ".join([*ARCHITECTURES, *registry.registered()])
        raise ConfigError(
            f"model.architecture: {config.architecture!r} is none of {known}; install the package that "
            f"registers it, or set {registry.VARIABLE}={config.architecture}=module:function"
        )
    for key in ("dim", "blocks", "heads", "kv_heads", "ffn", "vocab_size", "max_sequence"):
        value = getattr(config, key)
        if value < 1:
            raise ConfigError(f"model.{key}: {value} must be at least 1")
        if value > MOST[key]:
            raise ConfigError(f"model.{key}: {value} must be at most {MOST[key]}")
    _validate_family(config)
    if not config.head_width and config.dim % config.heads:
        raise ConfigError(f"model.heads: {config.heads} does not divide model.dim = {config.dim}")
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.kv_heads: {config.kv_heads} does not divide model.heads = {config.heads}")
    if config.architecture == "gpt" and config.kv_heads != config.heads:
        raise ConfigError(f"model.kv_heads: a gpt has as many as model.heads = {config.heads}")
    if config.head_width < 0 or config.head_dim * config.max_sequence > MOST_POSITIONS:
        raise ConfigError(
            f"model.max_sequence: {config.max_sequence} positions of heads of {config.head_dim} values are "
            f"beyond {MOST_POSITIONS}"
        )
    if config.architecture in ("llama", *FAMILY) and config.head_dim % 2:
        raise ConfigError(
            f"model.heads: rotary embeddings need an even head width, not {config.dim}/{config.heads}"
        )
    if not config.norm_eps > 0:
        raise ConfigError(f"model.norm_eps: {config.norm_eps} must be above 0")
    if config.rope_factor != 1.0 and config.architecture != "llama":
        raise ConfigError(f"model.rope_factor: {config.rope_factor} is for llama only")
    if config.subspace and not 0 < config.subspace < config.dim:
        raise ConfigError(
            f"model.subspace: {config.subspace} must be at least 1 and less than model.dim = {config.dim}, "
            "or 0 for none"
        )
    if config.subspace and config.tied:
        raise ConfigError(
            "model.tied: the embedding of a subspace model is partly fixed and cannot be the head too; "
            "leave model.tied out, or set it to false"
        )
    if not config.rope_theta > 0:
        raise ConfigError(f"model.rope_theta: {config.rope_theta} must be above 0")


def _validate_family(config: ModelConfig) -> None:
    """Raise ConfigError for a head width or window that is negative or of another architecture than FAMILY,
    and for a subspace of another than llama and gpt."""
    for key in ("head_width", "window"):
        value = getattr(config, key)
        if value < 0 or (value and config.architecture not in FAMILY):
            raise ConfigError(f"model.{key}: {value} is for {', '.join(FAMILY)} only, and at least 0")
    if config.subspace and config.architecture not in ("llama", "gpt"):
        raise ConfigError(f"model.subspace: {config.architecture} has none; llama and gpt may have one")


def block_parameters(config: ModelConfig) -> int:
    """Number of parameters of one block; of a registered model that of the block with the most."""
    if config.architecture not in ARCHITECTURES:
        return registry.counts_of(config).block
    if config.architecture in FAMILY:
        matrices = 2 * config.dim * (config.attention_dim + config.kv_dim) + 3 * config.dim * config.ffn
        biases = config.attention_dim + 2 * config.kv_dim if config.architecture == "qwen2" else 0
        return matrices + biases + 2 * config.dim
    dim, ffn, stream = config.dim, config.ffn, config.stream
    if config.architecture == "llama":
        return dim * dim + stream * dim + 2 * dim * config.kv_dim + (2 * dim + stream) * ffn + 2 * dim
    return 3 * dim * dim + stream * dim + 3 * dim + (dim + stream) * ffn + ffn + 2 * stream + 4 * dim


def end_parameters(config: ModelConfig) -> int:
    """Number of parameters of stage 0: embedding (and learned positions), free block, final norm, head (an
    untied one)."""
    if config.architecture not in ARCHITECTURES:
        return registry.counts_of(config).end
    head = 0 if config.tied else config.vocab_size * config.dim
    if config.subspace:
        head += block_parameters(replace(config, subspace=0))
    tables = head + config.vocab_size * config.stream
    if config.architecture != "gpt":
        return tables + config.dim
    return tables + config.max_sequence * config.stream + 2 * config.dim


def fixed_elements(config: ModelConfig) -> int:
    """Number of elements of a subspace model's constants, which every stage holds; 0 for other models."""
    return (config.vocab_size + config.subspace) * config.dim if config.subspace else 0


def id_digit_bits(itemsize: int) -> int:
    """Bits of a token id in one of its columns at the cuts of a subspace model: those of a whole number that
    a float of `itemsize` bytes (2: bf16, 4: fp32, 8: fp64) holds exactly."""
    return {2: 8, 4: 24, 8: 53}[itemsize]


def id_columns(vocab_size: int, itemsize: int) -> int:
    """Number of floats of `itemsize` bytes that hold a token id of this vocabulary exactly."""
    return -(-max(1, (vocab_size - 1).bit_length()) // id_digit_bits(itemsize))


def cut_columns(config: ModelConfig, itemsize: int) -> int:
    """Elements per token of an activation at a cut: the stream's values and, in a subspace model, the token
    id in columns of `itemsize` bytes. The gradient that goes back has the values only (`config.stream`)."""
    return config.stream + (id_columns(config.vocab_size, itemsize) if config.subspace else 0)


class Wire(Protocol):
    """Codecs at the cuts, as run files and scenarios name them."""

    @property
    def activations(self) -> str: ...
    @property
    def gradients(self) -> str: ...
    @property
    def block(self) -> int: ...


def cut_bytes(config: ModelConfig, wire: Wire, tokens: int, itemsize: int) -> tuple[int, int]:
    """Bytes on the line at a cut between stages, for so many tokens: (activation with token ids, gradient).
    itemsize: bytes of an element without a codec."""
    values = tokens * config.stream
    ids = tokens * (cut_columns(config, itemsize) - config.stream) * itemsize
    activation, gradient = (
        encoded_bytes(codec, wire.block, values, itemsize) for codec in (wire.activations, wire.gradients)
    )
    return activation + ids, gradient


def token_bytes(vocab_size: int) -> int:
    """Bytes of a token id on the wire."""
    return 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4


def total_parameters(config: ModelConfig) -> int:
    if config.architecture not in ARCHITECTURES:
        return registry.counts_of(config).total
    return config.blocks * block_parameters(config) + end_parameters(config)


def block_flops(config: ModelConfig, sequence: int) -> int:
    """Floating-point operations of one block's forward per token, at `sequence` tokens; a multiplication with
    its addition counts as two. Of a registered model all parameters count as those of matrix products."""
    dim, stream = config.dim, config.stream
    projections = dim * dim + stream * dim + 2 * dim * config.kv_dim
    feed_forward = ((2 if config.architecture == "llama" else 1) * dim + stream) * config.ffn
    attention = 2 * sequence * dim  # scores and their product with the values, unmasked, as computed
    if config.architecture not in ARCHITECTURES:
        return 2 * (registry.counts_of(config).block + attention)  # as if all parameters were of products
    if config.architecture in FAMILY:
        projections = 2 * dim * (config.attention_dim + config.kv_dim)
        feed_forward = 3 * dim * config.ffn
        attention = 2 * sequence * config.attention_dim
    widened = 2 * config.subspace * dim  # from the subspace to full width, before each norm
    return 2 * (projections + feed_forward + attention + widened)


def head_flops(config: ModelConfig, sequence: int) -> int:
    """FLOPs of the head's forward per token, at `sequence` tokens, with a subspace model's free block."""
    free = block_flops(replace(config, subspace=0), sequence) if config.subspace else 0
    return free + 2 * config.dim * (config.vocab_size + config.subspace)


def activation_elements_kept(config: ModelConfig) -> int:
    """Elements per token and block that a microbatch keeps from its forward to its weight gradient: (x, dy)
    of each linear layer; of a registered model what its largest block keeps."""
    if config.architecture not in ARCHITECTURES:
        return registry.counts_of(config).kept
    if config.architecture in FAMILY:
        return 4 * config.dim + 2 * (config.attention_dim + config.kv_dim) + 3 * config.ffn
    if config.architecture == "llama":
        return 4 * config.dim + 2 * config.stream + 2 * config.kv_dim + 3 * config.ffn
    return 6 * config.dim + 2 * config.stream + 2 * config.ffn
