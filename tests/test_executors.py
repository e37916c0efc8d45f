"""Executors: each result once, as it comes; errors, dead processes, an early end; Ray, if it is here."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch import executors
from anabranch.cli.main import main
from anabranch.data import corpus
from anabranch.errors import UserError
from anabranch.executors import Executor, Processes, Ray, executor
from benchmarks import harness
from support.executor_jobs import died_once, first_quick, killed, refused, refused_by_user_error, squared
from support.fake_ray import FakeRay, RayError, RayTaskError


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with two processors on this machine, whose workers find `support` where this process does."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'anabranch[ray]'")
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        yield
        ray.shutdown()


def on_ray(request: pytest.FixtureRequest) -> Executor:
    request.getfixturevalue("cluster")
    return Ray()


PLACES: dict[str, Callable[[pytest.FixtureRequest], Executor]] = {
    "here": lambda request: Processes(1),
    "processes": lambda request: Processes(2),
    "ray": on_ray,
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Ray's interface, as far as it is used, without Ray. Tests marked `soak` ask the real one."""
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.soak) if name == "ray" else name for name in PLACES]
)
def where(request: pytest.FixtureRequest) -> Executor:
    return PLACES[request.param](request)


def test_each_job_once(where: Executor) -> None:
    found = dict(where.completed(squared, iter(range(9))))
    assert {number: square for number, (square, _) in found.items()} == {n: n * n for n in range(9)}
    own = {process == os.getpid() for _, process in found.values()}
    assert own == {isinstance(where, Processes) and where.count == 1}


def test_no_jobs(where: Executor) -> None:
    assert list(where.completed(squared, ())) == []


def test_an_exception_of_the_work_is_raised_here(where: Executor) -> None:
    with pytest.raises(ValueError, match="job 3 cannot be computed"):
        list(where.completed(refused, range(9)))


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(UserError, match="a process of the sweep died"):
        list(Processes(2).completed(killed, range(9)))


def test_an_early_end_leaves_no_process(tmp_path: Path) -> None:
    """The caller stops after one result, as Ctrl+C does: processes that still compute are ended."""
    folder = str(tmp_path)
    results = Processes(2).completed(first_quick, [("", 0), (folder, 1), (folder, 2)])
    assert next(results) == (0, 0)
    while not list(tmp_path.iterdir()):
        time.sleep(0.05)
    results.close()  # type: ignore[attr-defined]
    for process in [int(path.name) for path in tmp_path.iterdir()]:
        while _runs(process):
            time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:1]


def test_names() -> None:
    assert isinstance(executor("ray", 3), Ray)
    here = executor("processes", 3)
    assert isinstance(here, Processes) and here.count == 3


def test_ray_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["simtest", "--seeds", "0:1", "--executor", "ray"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "pip install" in error and error.count("\n") == 1


def test_jobs_are_handed_to_ray_and_taken_as_they_come(fake: FakeRay) -> None:
    found = list(Ray().completed(squared, iter(range(9))))
    assert dict(found) == {n: (n * n, os.getpid()) for n in range(9)}
    assert [number for number, _ in found] != sorted(dict(found)), "the fake has the last job done first"
    assert (
        fake.most_running == 4 and not fake.initialized
    )  # two for each processor; it ran for this sweep only
    assert [Path(path).name for path in fake.environment["py_modules"]] == ["anabranch", "support"]
    with pytest.raises(ValueError, match="job 3 cannot be computed"):
        list(Ray().completed(refused, range(9)))


def test_an_early_end_leaves_the_cluster_of_the_caller(fake: FakeRay) -> None:
    fake.init()
    results = Ray().completed(squared, range(9))
    assert next(results) == (3, (9, os.getpid()))
    results.close()  # type: ignore[attr-defined]
    assert fake.initialized, "a cluster that the caller began goes on"


def test_what_a_job_raises_on_another_machine_is_raised_as_it_is(fake: FakeRay) -> None:
    """Ray's own error has the whole traceback as its text, which is no message for a user."""
    with pytest.raises(UserError, match=r"^job 3: take another machine$") as caught:
        list(Ray().completed(refused_by_user_error, range(9)))
    assert type(caught.value) is UserError and isinstance(caught.value.__cause__, RayTaskError)


def test_a_job_that_ray_gives_up_is_told_in_one_line(fake: FakeRay) -> None:
    fake.lost = RayError("The worker died unexpectedly.\nState dump:\n...")
    with pytest.raises(UserError, match=r"gave a job of the sweep up: The worker died unexpectedly\.; see"):
        list(Ray().completed(squared, range(9)))


class Handed(Exception):
    """Work and first job of a sweep."""


@pytest.mark.parametrize(
    "arguments",
    [
        ["policies", "--sections", "tables", "--seeds", "1"],
        ["churn", "--seeds", "1"],
        ["comparison", "--seeds", "1"],
        ["sync_methods", "--steps", "60"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_a_benchmark_hands_out_is_found_by_other_machines(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node of a cluster has another `__main__`: it imports what the benchmark hands out by its own name."""

    def handed(where: Ray, work: Callable[..., object], jobs: Iterable[object]) -> None:
        raise Handed(work, next(iter(jobs)))

    name, *options = arguments
    monkeypatch.setattr(Ray, "completed", handed)
    monkeypatch.setattr(harness, "CACHE", tmp_path)
    monkeypatch.setattr(corpus, "materialise", lambda data, folder, *_: folder.mkdir())
    monkeypatch.setattr(corpus, "open_corpus", lambda folder: SimpleNamespace(fingerprint="of a corpus"))
    monkeypatch.setattr(sys, "argv", ["", "--dry", "--executor", "ray", *options])
    monkeypatch.delitem(sys.modules, f"benchmarks.simulation.{name}", raising=False)
    with pytest.raises(Handed) as caught:
        runpy.run_module(f"benchmarks.simulation.{name}", run_name="__main__", alter_sys=True)
    assert b"__main__" not in pickle.dumps(caught.value.args)


def test_what_ray_says_of_lost_nodes_is_no_output(fake: FakeRay, capsys: pytest.CaptureFixture[str]) -> None:
    """A thread of Ray prints it to standard output, where a result for a program may be."""
    results = Ray().completed(squared, range(9))
    next(results)
    speaker = threading.Thread(target=print, args=["(raylet) Raylet is terminated."])
    speaker.start()
    speaker.join()
    print('{"seeds": 9}')
    assert len(list(results)) == 8
    said = capsys.readouterr()
    assert (said.out, said.err) == ('{"seeds": 9}\n', "(raylet) Raylet is terminated.\n")


def test_ray_that_does_not_start_is_told(fake: FakeRay) -> None:
    fake.refusal = ConnectionError("no cluster at 10.0.0.1:6379")
    with pytest.raises(UserError, match=r"does not start: no cluster at 10\.0\.0\.1:6379; see RAY_ADDRESS"):
        list(Ray().completed(squared, range(9)))


@pytest.mark.soak
def test_a_job_whose_process_dies_is_computed_again(cluster: None, tmp_path: Path) -> None:
    assert list(Ray().completed(died_once, [str(tmp_path)])) == [(0, 1)]


@pytest.mark.soak
def test_seeds_on_ray_are_those_of_one_process(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    def outcomes(*more: str) -> dict[str, Any]:
        assert main(["simtest", "--seeds", "100:106", "--profile", "calm", "--json", *more]) == 0
        summary: dict[str, Any] = json.loads(capsys.readouterr().out)
        return {key: value for key, value in summary.items() if not key.endswith("_s")}

    assert outcomes("--executor", "ray") == outcomes("--jobs", "1")


@pytest.mark.soak
def test_a_job_that_always_dies_is_given_up(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "RETRIES", 1)
    with pytest.raises(UserError, match=r"Ray gave a job of the sweep up: .*see `ray status`"):
        list(Ray().completed(killed, [3]))


#: Sweep on a cluster of its own that ends after its first result, while others are computed.
ENDED_EARLY = """
import sys, pathlib, time
from anabranch.executors import Ray
from support.executor_jobs import first_quick
results = Ray().completed(first_quick, [("", 0), (sys.argv[1], 1), (sys.argv[1], 2)])
assert next(results) == (0, 0)
while not list(pathlib.Path(sys.argv[1]).iterdir()):
    time.sleep(0.05)
results.close()
import ray
assert not ray.is_initialized()
"""


@pytest.mark.soak
def test_a_cluster_of_its_own_gets_the_source_and_ends_with_the_sweep(tmp_path: Path) -> None:
    """Without a cluster Ray is started for the sweep, with the packages of the work, and stopped after it."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'anabranch[ray]'")
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    program = [sys.executable, "-c", f"{begin}\n{ENDED_EARLY}", str(tmp_path)]
    subprocess.run(program, check=True, env=environment)
    for process in [int(path.name) for path in tmp_path.iterdir()]:
        while _runs(process):
            time.sleep(0.05)
