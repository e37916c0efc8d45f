"""Settings that all tests share."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections import Counter
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
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A job in the background of a script ignores Ctrl+C, and so would the commands that tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: a second or more of CPU; left out of `make quick`")
    config.addinivalue_line("markers", "costly(stay=0): `make test` takes the first `stay` cells alone")
    config.addinivalue_line("markers", "thorough: what `costly` leaves out; run by `make thorough`")
    config.addinivalue_line("markers", "soak: long; left out of `make test`, run by `make soak`")
    if config.option.without_torch:
        config.pluginmanager.register(without_torch)
    settings.load_profile("exploring" if config.option.markexpr == "soak" else "steady")


@pytest.fixture(scope="session")
def needs_emulated_network() -> None:
    """Skips a test where no network can be emulated. That is found by making one, which takes a second: not
    when tests are collected, as each process of `make test` collects them all."""
    from anabranch.net.wan.emulated_network import available

    if (reason := available()) is not None:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # imports leave little garbage, and each collection visits all that was imported before
    try:
        return (yield)
    finally:
        gc.freeze()  # half a million objects of modules and tests stay to the end: no collection visits them
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    _mark_thorough(items)
    result = yield  # tests that `-m` does not ask for are taken out
    _order(items)
    return result


def _mark_thorough(items: list[pytest.Item]) -> None:
    """Mark the cells of costly tests that `make test` leaves out: all but the first `stay` of each function
    that are not marked `soak`."""
    count = Counter[str]()
    for item in items:
        costly = item.get_closest_marker("costly")
        if costly is not None and item.get_closest_marker("soak") is None:
            function = item.nodeid.partition("[")[0]
            count[function] += 1
            if count[function] > costly.kwargs.get("stay", 0):
                item.add_marker("thorough")


def _order(items: list[pytest.Item]) -> None:
    """Order the tests for several processes, each of which begins with an equal part of the list, and takes
    from the end of another's part when its own is done (`--dist worksteal`): modules with slow tests come
    first in each part, so that none of them is the last to begin while other processes have nothing left.
    Each part begins elsewhere in their order, so that it differs from the order of the files. That was to let
    tests that wait meet tests that compute; no time was seen to be saved."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1:
        return
    modules = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    slow = [tests for tests in modules if any(item.get_closest_marker("slow") for item in tests)]
    quick = [item for tests in modules if tests not in slow for item in tests]
    ordered, size = list[pytest.Item](), len(items)
    for part in range(count):
        mine = slow[part::count]
        begin = len(mine) * part // count
        ordered += itertools.chain.from_iterable(mine[begin:] + mine[:begin])
        room = max(0, size * (part + 1) // count - len(ordered))
        ordered, quick = ordered + quick[:room], quick[room:]
    items[:] = ordered + quick
