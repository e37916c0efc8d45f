"""Bytes of a tensor on the line by codec, without torch."""

from __future__ import annotations

#: Codecs of a run file, with the bits of an element where it is not that of the tensor.
BITS = {"none": 0, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
#: Bytes of a block's scale, a bf16 number.
SCALE_BYTES = 2


def encoded_bytes(name: str, block: int, elements: int, width: int) -> int:
    """Bytes of a tensor on the line in a codec. width: bytes of an element without one. block: elements of a
    block (int8 and int4)."""
    bits = BITS[name]
    if not bits:
        return elements * width
    if bits == 16:
        return elements * 2
    blocks = -(-elements // block)
    return blocks * (SCALE_BYTES + block * bits // 8)
