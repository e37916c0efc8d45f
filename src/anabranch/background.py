"""Tasks that nobody awaits: their failures reach the event loop's exception handler at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def background(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Run the coroutine `work` as a task, which is returned; an exception of it goes to the event loop's
    exception handler as soon as the task ends. asyncio alone does so only when the task is collected as
    garbage: never, if somebody keeps it."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_tell_failure)
    return task


def _tell_failure(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        context = {"message": "a background task failed", "exception": error, "future": task}
        task.get_loop().call_exception_handler(context)
