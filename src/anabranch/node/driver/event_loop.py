"""Choice of the asyncio event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_async(main: Coroutine[Any, Any, _T]) -> _T:
    """Run the coroutine `main` to its end, on uvloop if that is installed, else on asyncio's own event loop;
    returns its result, or raises its error. An OSError or RuntimeError of the loop after that end is
    ignored."""
    results: list[_T] = []

    async def kept() -> None:
        results.append(await main)

    try:
        _run(kept())
    except (OSError, RuntimeError):
        # The end of a loop needs descriptors of its own. The result stands although there are none.
        if not results:
            raise
    return results[0]


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
