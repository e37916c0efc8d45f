"""A small coverage-guided fuzzer: inputs that reach lines of the program in a new order are kept and mutated.

In the manner of AFL: coverage is the set of arcs (line to line) executed in the package's own files, seen by
`sys.settrace`. What is kept lies in tests/fuzz/corpus/<decoder>/, one file an input, named by its hash.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anabranch

PACKAGE = str(Path(anabranch.__file__).parent)
CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
#: Longest input (bytes).
LONGEST = 4096
#: Bytes that mean something in msgpack, JSON, TOML and frame headers, and whole words.
TOKENS = (
    *(bytes([byte]) for byte in b"\x00\xff\x7f\x80\xc0\xc1\xca\xcb\xcf\xdc\xdd\xde[]{}\"\n="),
    *(b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"null", b"true", b"-1", b"1e999"),
    *(b"NaN", b"18446744073709551616", b"\xf0\x9f\x8c\x8a", b"[" * 2000, b'{"a":' * 700),
)

Decode = Callable[[bytes], object]


class Failure(AssertionError):
    """A decoder raised what it does not document."""


def run(
    decode: Decode,
    documented: tuple[type[Exception], ...],
    data: bytes,
    entered: set[CodeType] | None = None,
) -> set[tuple[str, int, int]]:
    """Decode once; returns the arcs. Raises Failure, with the input, for an undocumented error. entered: the
    package's functions that were called are added to it."""
    arcs: set[tuple[str, int, int]] = set()
    codes = set[CodeType]() if entered is None else entered

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if event == "line":
            arcs.add((frame.f_code.co_filename, last, frame.f_lineno))
            last = frame.f_lineno
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        codes.add(frame.f_code)
        return local

    last, before = 0, sys.gettrace()
    sys.settrace(enter)
    try:
        decode(data)
    except documented:
        pass
    except Exception as error:
        sys.settrace(before)
        raise Failure(f"{type(error).__name__}: {error}, for the input {data!r}") from error
    finally:
        sys.settrace(before)
    return arcs


def mutated(draw: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A few random changes: bits, bytes, tokens, cuts, doublings, and pieces of other inputs."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4, 8])):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << draw.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = draw.randrange(256)
            case 2:
                changed[at:at] = draw.choice(TOKENS)
            case 3:
                token = draw.choice(TOKENS)
                changed[at : at + len(token)] = token
            case 4:
                del changed[at : at + draw.choice([1, 2, 8, 64])]
            case 5:
                changed[at:at] = changed[at : at + draw.choice([1, 4, 32])]
            case 6:
                other = draw.choice(others)
                start = draw.randrange(len(other) + 1)
                changed[at : at + draw.choice([0, 8])] = other[start : start + draw.choice([4, 16, 256])]
    return bytes(changed[:LONGEST])


class Fuzzer:
    """Fuzzer of a decoder. `seeds` are well-formed inputs; the corpus on disk is added to them."""

    def __init__(
        self, name: str, decode: Decode, documented: tuple[type[Exception], ...], seeds: Iterable[bytes]
    ) -> None:
        self.name = name
        self.decode = decode
        self.documented = documented
        self.folder = CORPUS / name
        self.inputs = [*seeds, *(file.read_bytes() for file in sorted(self.folder.glob("*")))]
        self.arcs: set[tuple[str, int, int]] = set()
        self.entered: set[CodeType] = set()
        self.runs = 0
        for data in self.inputs:
            self._try(data)

    def _try(self, data: bytes) -> bool:
        self.runs += 1
        arcs = run(self.decode, self.documented, data, self.entered)
        new = not arcs <= self.arcs
        self.arcs |= arcs
        return new

    def coverage(self) -> tuple[int, int]:
        """Lines that were executed, and all lines, of the package's functions that the decoder called."""
        lines = {
            (code.co_filename, line)
            for code in self.entered
            for _, _, line in code.co_lines()
            if line is not None and line > code.co_firstlineno
        }
        return len(lines & {(file, line) for file, _, line in self.arcs}), len(lines)

    def fuzz(self, draw: random.Random, runs: int = 0, seconds: float = 0.0, keep: bool = False) -> int:
        """Try so many mutations, or for so long; returns how many inputs reached something new (`keep`: they
        are written to the corpus)."""
        until, found = time.monotonic() + seconds, 0
        while runs > 0 or time.monotonic() < until:
            runs -= 1
            data = mutated(draw, draw.choice(self.inputs), self.inputs)
            if self._try(data):
                found += 1
                self.inputs.append(data)
                if keep:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    (self.folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        return found
