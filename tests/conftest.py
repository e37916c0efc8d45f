"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

from support import without_torch

#: The same examples in every run of `make test`; `make soak` draws new ones.
settings.register_profile("steady", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("exploring", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-torch", action="store_true", help="skip what imports torch")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["ANABRANCH_CORPORA"] = "off"  # no test reads or writes the user's cache
    config.addinivalue_line("markers", "slow: a second or more of CPU; left out of `make quick`")
    config.addinivalue_line("markers", "soak: long; left out of `make test`, run by `make soak`")
    if config.option.without_torch:
        config.pluginmanager.register(without_torch)
    settings.load_profile("exploring" if config.option.markexpr == "soak" else "steady")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # imports leave little garbage, and each collection visits all that was imported before
    try:
        return (yield)
    finally:
        gc.enable()
