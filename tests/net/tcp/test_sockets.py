"""Options of connected sockets."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.net.tcp.sockets import connect, tune


def test_a_connection_that_is_gone_already_is_an_error_of_the_connection() -> None:
    """uvloop has no socket for a transport that it closed, as when the other process was killed."""
    lane = SimpleNamespace(transport=SimpleNamespace(get_extra_info=lambda name: None))
    with pytest.raises(ConnectionError, match="lost"):
        tune(cast(Any, lane))


def test_a_descriptor_that_another_connection_believes_its_own_costs_the_dial_alone() -> None:
    """uvloop raises a RuntimeError then, which ended a leader once. The number stays open: the other
    connection closes it, and would close somebody else's if it was free."""
    uvloop = pytest.importorskip("uvloop")

    async def scenario() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        number, below = writer.get_extra_info("socket").fileno(), list[int]()
        os.close(number)
        while (free := os.open(os.devnull, os.O_RDONLY)) != number:
            below.append(free)
        os.close(number)
        with pytest.raises(OSError, match="Bad file descriptor"):
            await connect("127.0.0.1", port)
        os.fstat(number)
        writer.transport.abort()
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        for each in below:
            os.close(each)
        server.close()

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()
