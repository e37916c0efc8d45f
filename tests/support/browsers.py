"""A real browser, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """Chromium, started with further `arguments`. Where none is installed the test is skipped, but never in
    continuous integration."""
    if CHROMIUM is None and not os.environ.get("CI"):
        pytest.skip("no chromium here (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", *arguments]
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield started
        started.close()
