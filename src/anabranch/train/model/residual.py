"""Residual stream of a model: at full width, or confined to a fixed subspace so that cuts carry few values.

In a subspace model (Ramasinghe et al., "Protocol Models", arXiv 2506.01260; here reparametrised) the stream
of a token is

    fixed embedding of the token + U z,    U (dim, k) with orthonormal columns, z (k,)

Every layer that writes into the stream writes z, and the trained embeddings of token and position have k
values. U and the fixed embedding are constants of the architecture: pure functions of (dim, k, vocabulary),
drawn with operations that IEEE 754 rounds correctly, in a fixed order, so that every machine has the same
bits. A cut carries z and the token ids, as digits that the dtype holds exactly; the receiver forms the stream
from them. Nothing is lost at a cut. One block at full width is behind the last cut, with the head.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

import blake3
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.train.model.layout import Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.sizes import ModelConfig, id_columns, id_digit_bits

#: Hashed into the key of every constant. Another text gives other subspace models.
DRAW = "anabranch subspace 1"
#: Values drawn at a time: 8 MiB of random words.
_DRAWN = 1 << 20
#: Fixed embeddings in use in this process, by their shape. A copy on an accelerator keeps none here.
_tables: WeakValueDictionary[tuple[int, int], npt.NDArray[np.float32]] = WeakValueDictionary()


class ResidualStream(Protocol):
    """Residual stream between blocks. x (rows, sequence, columns) is what a cut carries; its first `width`
    columns are values z, which have gradients, and the others, if any, are the token ids."""

    width: int
    columns: int

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Tensors on the device that are no parameters."""
        ...

    def values(self, x: Tensor) -> Tensor:
        """Values z (rows, sequence, width) of x: its columns without those of the token ids."""
        ...

    def problem(self, x: Tensor) -> str:
        """Clause with the reason to refuse a received x that is finite and of the right shape, because its
        token ids are none of the vocabulary; "" if they are, and in models without token ids in x."""
        ...

    def begin(self, z: Tensor, ids: Tensor) -> Tensor:
        """Stream x that enters the first block: the trained embedding's values z, followed in a subspace
        model by the token ids (rows, sequence), from which later stages look up the fixed embedding."""
        ...

    def fixed(self, x: Tensor) -> Tensor | None:
        """Untrained token embedding (rows, sequence, dim) that `wide` adds to the values of a subspace model,
        looked up by the token ids in x; None in other models."""
        ...

    def wide(self, z: Tensor, fixed: Tensor | None) -> Tensor:
        """Stream at full width (rows, sequence, dim) of the values z. fixed: `fixed` of the same tokens."""
        ...

    def moved(self, x: Tensor, z: Tensor) -> Tensor:
        """Stream x after a block: the block's output values z, with the token ids of the x before it."""
        ...


def residual_stream(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ResidualStream:
    """Residual stream of a model on `device`."""
    return SubspaceStream(config, device, dtype) if config.subspace else FullStream(config.dim)


class FullStream:
    """Stream whose values are the stream itself."""

    constants: tuple[Tensor, ...] = ()

    def __init__(self, dim: int) -> None:
        self.width = self.columns = dim

    def values(self, x: Tensor) -> Tensor:
        return x

    def problem(self, x: Tensor) -> str:
        return ""

    def begin(self, z: Tensor, ids: Tensor) -> Tensor:
        return z

    def fixed(self, x: Tensor) -> Tensor | None:
        return None

    def wide(self, z: Tensor, fixed: Tensor | None) -> Tensor:
        return z

    def moved(self, x: Tensor, z: Tensor) -> Tensor:
        return z


class SubspaceStream:
    """Residual stream of a subspace model: `fixed embedding of the token + U z` at full width. x carries only
    z and the token's id, as columns of whole numbers small enough to be exact in the dtype. The constants are
    drawn when they are first used."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.width = config.subspace
        self._bits = id_digit_bits(dtype.itemsize)
        self.columns = self.width + id_columns(config.vocab_size, dtype.itemsize)
        self._config, self._device, self._dtype = config, device, dtype

    @functools.cached_property
    def basis(self) -> Tensor:
        """U (dim, k) with orthonormal columns."""
        return self._constant(subspace_basis(self._config.dim, self._config.subspace))

    @functools.cached_property
    def tokens(self) -> Tensor:
        """Fixed embedding of every token (vocabulary, dim)."""
        return self._constant(fixed_embedding(self._config.vocab_size, self._config.dim))

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return self.basis, self.tokens

    def values(self, x: Tensor) -> Tensor:
        return x[..., : self.width]

    def problem(self, x: Tensor) -> str:
        digits = x[..., self.width :]
        whole = (digits == digits.floor()) & ~torch.signbit(digits) & (digits < float(1 << self._bits))
        if not bool(whole.all()):
            return "holds token ids that are no whole numbers in range"
        if int(self._ids(x).max()) >= self._config.vocab_size:
            return f"holds token ids beyond the vocabulary of {self._config.vocab_size}"
        return ""

    def begin(self, z: Tensor, ids: Tensor) -> Tensor:
        digits = [
            (ids >> shift) & ((1 << self._bits) - 1)
            for shift in range(0, (self.columns - self.width) * self._bits, self._bits)
        ]
        return torch.cat((z, torch.stack(digits, -1).to(z.dtype)), -1)

    def fixed(self, x: Tensor) -> Tensor | None:
        return F.embedding(self._ids(x), self.tokens)

    def wide(self, z: Tensor, fixed: Tensor | None) -> Tensor:
        assert fixed is not None
        return fixed + F.linear(z, self.basis)

    def moved(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.cat((z, x.detach()[..., self.width :]), -1)

    def _ids(self, x: Tensor) -> Tensor:
        """Token ids (rows, sequence), decoded from the last columns of x, behind the stream's values; they
        select the rows of the fixed embedding."""
        digits = x.detach()[..., self.width :].to(torch.int64)
        ids = digits[..., 0]
        for place in range(1, digits.shape[-1]):
            ids = ids + (digits[..., place] << (place * self._bits))
        return ids

    def _constant(self, values: npt.NDArray[np.float64] | npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._dtype).to(self._device)


@functools.lru_cache(maxsize=4)
def subspace_basis(dim: int, k: int) -> npt.NDArray[np.float64]:
    """U (dim, k) in fp64: uniform draws, orthonormalised column by column (modified Gram-Schmidt). Library
    routines for this differ between machines. Here are only +, −, ×, ÷ and √ of IEEE 754, and sums in a fixed
    order, so the bits are the same everywhere. Cached: callers must not change it."""
    rows = np.empty((k, dim))  # the columns of U
    words = _philox(f"basis/{dim}/{k}")
    for row in rows:
        row[:] = (words.random_raw(dim) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    for column in range(k):
        q = rows[column]
        q /= math.sqrt(float(_sum(q * q)))
        rest = rows[column + 1 :]
        rest -= _sum(rest * q)[:, None] * q
    return np.ascontiguousarray(rows.T)


def fixed_embedding(rows: int, dim: int) -> npt.NDArray[np.float32]:
    """Untrained token embedding (rows, dim) of a subspace model, the same on every machine: uniform draws of
    standard deviation `fixed_std(dim)`. Row r does not depend on `rows`. The table is cached: all callers get
    one array and must not change it."""
    table = _tables.get((rows, dim))
    if table is None:
        table = _tables[rows, dim] = _drawn_embedding(rows, dim)
    return table


def _drawn_embedding(rows: int, dim: int) -> npt.NDArray[np.float32]:
    scale = np.float32(math.sqrt(3.0) * fixed_std(dim))
    table = np.empty(rows * dim, dtype=np.float32)
    words = _philox(f"tokens/{dim}")
    for begin in range(0, rows * dim, 2 * _DRAWN):
        some = table[begin : begin + 2 * _DRAWN]
        raw = words.random_raw(-(-len(some) // 2)).astype("<u8", copy=False).view("<u4")[: len(some)]
        some[:] = ((raw >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)) * scale
    return table.reshape(rows, dim)


def fixed_std(dim: int) -> float:
    """Standard deviation of the untrained token embedding of a subspace model, sqrt(2 / (5 dim)) (Nguyen and
    Salazar 2019, arXiv 1910.05895)."""
    return math.sqrt(2 / (5 * dim))


def _philox(name: str) -> np.random.Philox:
    key = blake3.blake3(f"{DRAW}/{name}".encode()).digest()[:16]
    return np.random.Philox(key=int.from_bytes(key, "little"))


def _sum(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum along the last axis in a fixed order: halves are added until one value is left."""
    count = values.shape[-1]
    size = 1 << max(0, count - 1).bit_length()
    padded = np.zeros((*values.shape[:-1], size))
    padded[..., :count] = values
    while size > 1:
        size //= 2
        padded = padded[..., :size] + padded[..., size:]
    return padded[..., 0]


class StreamModel(ABC):
    """Blocks and head of a transformer by its residual stream; a subclass has the layers and the shapes.
    end_names: names of the embedding, of the final norm (without `.weight`), and of an untied head."""

    config: ModelConfig
    stream: ResidualStream
    end_names: tuple[str, str, str]
    embedding_scale: float = 1.0
    initial_gain: float = 1.0

    @abstractmethod
    def block_shapes(self, block: int) -> dict[str, Shape]:
        """Names and shapes of a block's parameters."""

    @abstractmethod
    def _layers(self, weights: Weights, block: int, z: Tensor, wide: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward pass of one block: the residual stream's values z before it -> those behind it. wide: from
        values to full width, the same but in a subspace model."""

    @abstractmethod
    def _norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """x, normalised by the norm `name`."""

    def _ends(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        """Names and shapes of all parameters of stage 0: `shapes`, of embedding and final norm, to which an
        untied head and a free block are added."""
        if not self.config.tied:
            shapes[self.end_names[2]] = (self.config.vocab_size, self.config.dim)
        free = self.config.free_block
        return shapes if free is None else shapes | self.block_shapes(free)

    def block(self, weights: Weights, block: int, x: Tensor) -> Tensor:
        stream, fixed = self.stream, self.stream.fixed(x)
        z = self._layers(weights, block, stream.values(x), lambda z: stream.wide(z, fixed))
        return stream.moved(x, z)

    def head(self, weights: Weights, x: Tensor, at: int | None = None) -> Tensor:
        embedding, final_norm, head = self.end_names
        x = self.stream.wide(self.stream.values(x), self.stream.fixed(x))
        if self.config.free_block is not None:
            x = self._layers(weights, self.config.free_block, x, lambda x: x)
        if at is not None:
            x = x[:, at : at + 1]
        x = self._norm(weights, final_norm, x)
        return weights.linear(x, embedding if self.config.tied else head)
