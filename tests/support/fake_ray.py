"""Stand-in for the module `ray`: the calls that executors make, computed in this process at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class RayError(Exception):
    """Base of Ray's errors."""


class RayTaskError(RayError):
    """Error of a task. cause: what it raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::_call() (pid=1)\n  traceback\n{cause!r}")
        self.cause = cause


class FakeRay(ModuleType):
    """Cluster of two processors in this process. lost: error of all jobs, as of nodes that died.

    The job that was handed out last is done first. Works, jobs and results are pickled, as they are on the
    way to another machine.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.initialized = False
        self.refusal: Exception | None = None
        self.environment: dict[str, list[str]] = {}
        self.running: set[int] = set()
        self.most_running = 0
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.lost: RayError | None = None
        self._results: dict[int, Callable[[], Any]] = {}

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, runtime_env: dict[str, list[str]] | None = None, **_: object) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.initialized, self.environment = True, runtime_env or {}

    def shutdown(self) -> None:
        self.initialized = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def put(self, value: object) -> bytes:
        return pickle.dumps(value)

    def remote(self, **_: object) -> Callable[[Callable[..., Any]], Any]:
        return lambda function: _Task(self, function)

    def submit(self, function: Callable[..., Any], shared: bytes, job: object) -> int:
        number, content = len(self._results), pickle.dumps(job)
        self._results[number] = lambda: function(pickle.loads(shared), pickle.loads(content))
        self.running.add(number)
        self.most_running = max(self.most_running, len(self.running))
        return number

    def wait(self, references: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        assert num_returns == 1 and set(references) == self.running
        return [max(references)], sorted(references)[:-1]

    def get(self, reference: int) -> Any:
        self.running.remove(reference)
        if self.lost is not None:
            raise self.lost
        try:
            return pickle.loads(pickle.dumps(self._results[reference]()))
        except Exception as error:
            raise RayTaskError(error) from None


class _Task:
    def __init__(self, ray: FakeRay, function: Callable[..., Any]) -> None:
        self._ray, self._function = ray, function

    def remote(self, shared: bytes, job: object) -> int:
        return self._ray.submit(self._function, shared, job)
