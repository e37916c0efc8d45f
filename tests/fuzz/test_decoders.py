"""Whatever bytes come, each decoder returns or raises what it documents (I7).

The corpus is tried in full, and some hundred seeded mutations of it; `make fuzz` goes on for longer and keeps
what reaches something new.
"""

from __future__ import annotations

import os
import random

import pytest

from support.coverage_fuzzer import Failure, Fuzzer, run
from support.decoders import decoders, read_frames

DECODERS = decoders()
RUNS = 200


@pytest.mark.parametrize("name", DECODERS)
def test_returns_or_raises_what_it_documents(name: str) -> None:
    decoder = DECODERS[name]
    fuzzer = Fuzzer(name, decoder.decode, decoder.documented, decoder.seeds)
    before = len(fuzzer.arcs)
    fuzzer.fuzz(random.Random(name), RUNS)
    assert fuzzer.runs >= RUNS and len(fuzzer.arcs) >= before > 0


def test_the_frames_to_begin_with_are_whole() -> None:
    """A mutation of a payload with a wrong checksum would never reach what unpacks it."""
    for seed in DECODERS["frames"].seeds:
        read_frames(seed, 1 << 16)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", DECODERS)
def test_for_longer(name: str) -> None:
    decoder = DECODERS[name]
    fuzzer = Fuzzer(name, decoder.decode, decoder.documented, decoder.seeds)
    fuzzer.fuzz(random.Random(), seconds=float(os.environ.get("FUZZ_S", "60")), keep=True)
    reached, lines = fuzzer.coverage()
    print(
        f"{name}: {fuzzer.runs} runs, {len(fuzzer.inputs)} inputs, {len(fuzzer.arcs)} arcs, "
        f"{reached} of {lines} lines ({reached / lines:.0%}) of the functions that it calls"
    )


def test_the_fuzzer_finds_a_planted_error() -> None:
    """It is guided: an error three steps deep is found, which blind chance would not hit."""
    from anabranch.net.framing import FrameReader

    reached: list[bytes] = []

    def decode(data: bytes) -> None:
        FrameReader(max_payload_bytes=1 << 12).feed(data)
        if data[:1] == b"\x02" and len(data) > 16:
            reached.append(data)
            raise KeyError("planted")

    decoder = DECODERS["frames"]
    fuzzer = Fuzzer("none", decode, decoder.documented, [b"\x01\x00\x00\x00\x00\x00\x00\x00"])
    with pytest.raises(Failure, match="planted"):
        fuzzer.fuzz(random.Random(3), 50_000)
    assert run(decoder.decode, decoder.documented, reached[0])
