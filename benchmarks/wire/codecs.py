"""Bytes and CPU seconds of the codecs at the cuts, beside the time that a line needs for the bytes saved.

    python -m benchmarks.wire.codecs [--rounds 15]

Encodes and decodes the activations of one microbatch (1,024 tokens of width 1,024) on one thread, in CPU
seconds, and packs gradient sums in coarse units. Writes the result `wire-codecs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from anabranch.train.numerics.numerics_class import configure

configure(1)  # before torch is imported

import torch  # noqa: E402

from anabranch.train.codec.codecs import codec_named  # noqa: E402
from benchmarks import harness  # noqa: E402

TOKENS, WIDTH, BLOCK = 1024, 1024, 64
LINE_BPS = 1e9
#: Goal: encoding and decoding take at most this share of the line's time for the bytes that are saved.
SHARE = 0.1
CODECS = (
    ("bf16", None), ("fp16", None), ("int8", None), ("int8", 7), ("int4", None), ("int4", 7)
)  # fmt: skip


def cpu_ns(work: Callable[[], Any], values: int, rounds: int) -> float:
    """Least CPU nanoseconds for a value, of several rounds."""
    work()
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return 1e9 * min(found) / values


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    x = torch.randn((TOKENS, WIDTH), generator=torch.Generator().manual_seed(1))
    rows, goals, data = [], [], []
    for name, key in CODECS:
        codec = codec_named(name, BLOCK)
        assert codec is not None
        payload = codec.encode(x, key)
        error = float((codec.decode(payload, x.shape, x.dtype) - x).norm() / x.norm())
        encode = cpu_ns(partial(codec.encode, x, key), x.numel(), args.rounds)
        decode = cpu_ns(partial(codec.decode, payload, x.shape, x.dtype), x.numel(), args.rounds)
        each = len(payload) / x.numel()
        line = 1e9 * 8.0 * (4.0 - each) / LINE_BPS
        share = (encode + decode) / line
        called = name if key is None else f"{name}, stochastic"
        seconds = [f"{encode:.2f}", f"{decode:.2f}", f"{line:.1f}", f"{share:.3f}"]
        rows.append([called, f"{each:.3f}", f"{error:.4f}", *seconds])
        goals.append(harness.at_most(f"CPU over the line's time saved, {called}", SHARE, share, "{:.3f}"))
        data.append(
            {"codec": called, "bytes": each, "error": error, "encode_ns": encode, "decode_ns": decode}
        )
    head = ["codec", "bytes a value", "relative error", "encode ns", "decode ns", "line ns saved", "share"]
    body = (
        f"Normal values, {TOKENS} x {WIDTH}, fp32, blocks of {BLOCK}, one CPU thread, least CPU time of "
        f"{args.rounds} rounds. *line ns saved*: time of a line of 1 Gbit/s for the bytes that are saved.\n\n"
        f"{harness.table(head, rows)}"
    )
    harness.write(
        "wire-codecs", "Codecs at the cuts: bytes and time", body, goals=goals, data=data, dry=args.dry
    )


if __name__ == "__main__":
    main()
