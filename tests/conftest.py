"""What all tests share."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: long; left out of `make test`, run by `make soak`")
