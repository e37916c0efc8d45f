"""A large simulation's memory in large pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from anabranch.sim import pages
from anabranch.sim.pages import LARGE_BYTES, LargePages


def large_bytes() -> int:
    """Of this process's anonymous memory that is in large pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"AnonHugePages:\s+(\d+) kB", text)[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_memory_that_has_grown_is_put_into_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LEAST_BYTES", 1)
    held = [bytes([n % 256]) * 500 for n in range(200_000)]  # small objects: a hundred megabytes
    asked, before = LargePages(), large_bytes()
    asked.ask()
    if not asked.collapsed_bytes:
        pytest.skip("this kernel gives no large pages where they are asked for")
    assert large_bytes() >= max(before, 1) and asked.collapsed_bytes % LARGE_BYTES == 0
    assert all(text == bytes([n % 256]) * 500 for n, text in enumerate(held))
    asked.collapsed_bytes = 0
    asked.ask()  # nothing has grown: nothing is asked
    assert asked.collapsed_bytes == 0


def test_small_simulations_ask_for_none() -> None:
    asked = LargePages()
    asked._looked_at_bytes = 1 << 50
    asked.ask()
    assert asked.collapsed_bytes == 0
