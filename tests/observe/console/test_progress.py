"""Progress: silent when quick, plain lines off the terminal, a bar on it."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anabranch.api.publish import push
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.cli.simulate import run_all
from anabranch.errors import UserError
from anabranch.observe.console.progress import Ticker, progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_quick_work_shows_nothing(kind: type[io.StringIO]) -> None:
    out, clock = kind(), Clock()
    with progress("corpus", 10, stream=out, now=clock) as advance:
        for _ in range(10):
            clock.now += 0.1
            advance(1)
    assert out.getvalue() == ""


def test_plain_lines_are_few() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("corpus", 80, unit="files", stream=out, now=clock) as advance:
        for _ in range(80):
            clock.now += 0.125  # exact in binary
            advance(1)
    assert out.getvalue().splitlines() == [
        "corpus: 20 % (16 of 80 files), 0:02",
        "corpus: 70 % (56 of 80 files), 0:07",
        "corpus: done in 0:10",
    ]


def test_plain_lines_of_long_work_are_fewer_and_say_what_is_left() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("replay", 3600, stream=out, now=clock) as advance:
        for _ in range(3600):
            clock.now += 1.0
            advance(1)
    lines = out.getvalue().splitlines()
    assert lines[1] == "replay: 0 % (7 of 3,600), 0:07" and 40 < len(lines) < 70
    assert lines[2] == "replay: 0 % (12 of 3,600), 0:12, about 59:48 left"


def test_bytes_and_unknown_totals() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("state", None, unit="bytes", stream=out, now=clock) as advance:
        clock.now = 3.0
        advance(2_500_000)
    assert out.getvalue().splitlines() == ["state: 2.5 MB, 0:03", "state: done in 0:03"]


def test_work_that_fails_is_not_called_done() -> None:
    out, clock = io.StringIO(), Clock()
    with pytest.raises(RuntimeError), progress("state", 5, stream=out, now=clock) as advance:
        clock.now = 3.0
        advance(1)
        raise RuntimeError
    assert out.getvalue().splitlines() == ["state: 20 % (1 of 5), 0:03"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out, clock = Terminal(), Clock()
    with progress("verifying", 4, stream=out, now=clock) as advance:
        for _ in range(4):
            clock.now += 1.0
            advance(1)
    assert "verifying" in out.getvalue() and "4/4" in out.getvalue()


def test_a_ticker_tells_how_long_work_has_been_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), Clock()
    ticker = Ticker(out, clock)
    ticker.begin("importing torch")
    clock.now = 1.5
    ticker.tick()
    ticker.begin("measuring stage 1")
    for _ in range(8):
        clock.now += 1.0
        ticker.tick()
    ticker.end()
    clock.now += 100.0
    ticker.tick()
    assert out.getvalue().splitlines() == ["measuring stage 1 ... 0:02", "measuring stage 1 ... 0:07"]

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out, clock = Terminal(), Clock()
    ticker = Ticker(out, clock)
    ticker.begin("measuring stage 1")
    for _ in range(4):
        clock.now += 1.0
        ticker.tick()
    ticker.end()
    line = "\r\033[Kmeasuring stage 1 ... 0:0"
    assert out.getvalue() == f"{line}2{line}3{line}4\r\033[K", "one line that moves, and goes"


def test_a_ticker_counts_on_in_one_activity() -> None:
    out, clock = io.StringIO(), Clock()
    ticker = Ticker(out, clock)
    ticker.begin("simulating 3 trials")
    clock.now = 4.0
    ticker.update("simulating: 1 of 3 trials are done")
    ticker.tick()
    assert out.getvalue() == "simulating: 1 of 3 trials are done ... 0:04\n"


class TickerOfOneCommand(Ticker):
    """Ticker whose labels are kept, in order."""

    labels: ClassVar[list[str]] = []

    def begin(self, label: str) -> None:
        self.labels.append(label)

    update = begin


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for module in ("anabranch.cli.simulate", "anabranch.cli.profile", "anabranch.api.publish"):
        monkeypatch.setattr(f"{module}.Ticker", TickerOfOneCommand)
    monkeypatch.setattr(TickerOfOneCommand, "labels", found := [])
    return found


def test_simulating_tells_its_count(labels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.cli.simulate._one", lambda trial: trial[1:])
    scenario: Any = None
    assert run_all(scenario, ["auction", "gwtf"], [0, 1], 1)[3] == ("gwtf", 1)  # type: ignore[comparison-overlap]
    assert labels[0] == "simulating 4 trials" and labels[-1] == "simulating: 4 of 4 trials are done"


def test_a_profile_tells_that_it_measures(labels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> None:
        raise UserError("no such device")

    monkeypatch.setattr("anabranch.node.diagnostics.device_benchmark.measure_device", refuse)
    assert main(["profile"]) == 2
    assert labels == ["measuring this machine"]


def test_a_push_tells_each_file(labels: list[str], tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    run = RunDirectory.create(tmp_path / "run")
    run.run_file.write_text("")
    run.write_checkpoint(2, "base", "run", {1: ([b"weights"], "f")})
    push(run.path, f"file://{tmp_path / 'copy'}")
    assert labels[0] == "preparing the copy of step 2"
    assert [label.split()[1] for label in labels[1:]] == ["run.toml", "stage-1.safetensors", "manifest.json"]
    assert labels[2].endswith("(0.0 MB), file 2 of 3")


def test_a_tickers_thread_ends_with_it() -> None:
    with Ticker(io.StringIO()) as ticker:
        ticker.begin("work")
    assert not any(thread.name == "ticker" for thread in threading.enumerate())
