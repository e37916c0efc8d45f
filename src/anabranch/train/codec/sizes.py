"""Bytes on the line: of a tensor by codec, of a parameter in a reduce. Imports no torch."""

from __future__ import annotations

import math

#: Codecs of a run file, with the bits of an element where it is not that of the tensor.
BITS = {"none": 0, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
#: Bytes of a block's scale, a bf16 number.
SCALE_BYTES = 2
#: Digits of a coarse sum -> bytes of a parameter's sum and of its reduced gradient on the line, packed.
#: Measured on llama-tiny (docs/explanation/thin-lines.md).
COARSE_BYTES = {4: (1.04, 1.1), 5: (1.15, 1.55), 6: (1.55, 1.95), 7: (1.85, 2.05)}


def encoded_bytes(name: str, block: int, elements: int, width: int) -> int:
    """Bytes of a tensor on the line in the codec `name`. width: bytes of an element in "none". block:
    elements of a block."""
    bits = BITS[name]
    if not bits:
        return elements * width
    if bits == 16:
        return elements * 2
    blocks = -(-elements // block)
    return blocks * (SCALE_BYTES + block * bits // 8)


def coarse_digits(microbatches: int) -> int:
    """Binary digits by which the unit of a coarse sum lies below the gradient's root mean square. Each
    microbatch's contribution is rounded by itself, so the error grows with the root of their number: 4 digits
    for up to 16 of them, one more for each factor of four. Measured on llama-tiny with 8 microbatches, the
    error of the sum is 0.04 to 0.16 of the gradient's norm (docs/explanation/thin-lines.md)."""
    return 4 + math.ceil(max(0.0, math.log2(microbatches / 16)) / 2)


def coarse_bytes(microbatches: int) -> tuple[float, float]:
    """Bytes per parameter that a coarse reduce of a batch of `microbatches` sends: (sum of gradients, reduced
    gradient). More digits than COARSE_BYTES has count as its last."""
    return COARSE_BYTES[min(coarse_digits(microbatches), max(COARSE_BYTES))]
