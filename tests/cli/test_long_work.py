"""Commands that may take over two seconds show themselves, can be stopped and taken up again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import COMMANDS, INTERRUPTED, main
from anabranch.cli.simulate import run_all
from anabranch.config import load_run_file
from anabranch.observe.console.progress import Progress, Ticker
from anabranch.sim.metrics.trial_result import Outcome
from support.command_lines import SHOWN, filled_in

#: The other commands: how they show themselves, or why they need not.
OTHERS = {
    "init": "writes one file",
    "fleet": "writes one file",
    "service": "writes two files",
    "start": "a line for each step; on a terminal, one that moves between them (test_event_console.py)",
    "join": "a sentence for each event, and the time since then on a terminal (test_start_and_join.py)",
    "audit": "as join",
    "pause": "writes small files",
    "relay": "serves others until Ctrl+C, and tells whom",
    "watch": "serves a page that moves",
    "chaos": "a line for each fault, and the time since then on a terminal",
    "doctor": "a line for each check, and what is being checked (test_doctor.py)",
    "recover": "as expel: the log is read",
    "profile": "tests/observe/console/test_progress.py",
    "simulate": "tests/observe/console/test_progress.py",
    "plan": "tests/sim/planning: the first table within seconds, then better ones",
}


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the lines and bars that were made."""
    found: list[str] = []
    begin, made = Ticker.begin, Progress.__init__

    def begun(self: Ticker, label: str) -> None:
        found.append(label)
        begin(self, label)

    def shown(self: Progress, label: str, *others: Any) -> None:
        found.append(label)
        made(self, label, *others)

    monkeypatch.setattr(Ticker, "begin", begun)
    monkeypatch.setattr(Progress, "__init__", shown)
    return found


def test_every_command_is_one_that_shows_itself_or_need_not() -> None:
    assert not SHOWN.keys() & OTHERS.keys()
    assert SHOWN.keys() | OTHERS.keys() == COMMANDS.keys()


@pytest.mark.costly(stay=1)
@pytest.mark.slow
@pytest.mark.parametrize("command", SHOWN)
def test_a_command_shows_what_it_does(
    command: str, finished: Path, labels: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = SHOWN[command][1]
    status = main(filled_in(command, finished, tmp_path))
    assert label in labels, capsys.readouterr()
    assert status == (2 if command in ("expel", "resume") else 0)  # nobody to expel, and no step left


@pytest.mark.slow
def test_an_interrupted_verification_says_what_is_left(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advance = Progress.advance

    def two_steps(self: Progress, amount: float) -> None:
        advance(self, amount)
        if self._done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "advance", two_steps)
        assert main(["verify", str(finished)]) == INTERRUPTED
    said = capsys.readouterr().err
    rest = f"anabranch verify {finished} --rounds 3:4"
    assert f"interrupted: no bit differs in steps 1 to 2; the rest: {rest}" in said
    assert main(rest.split()[1:]) == 0
    assert "only iterations 3 to 4 were taken again" in capsys.readouterr().out


def test_an_interrupted_simtest_says_which_seeds_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(*_: object) -> Iterator[Outcome]:
        for seed in (5, 7):
            yield Outcome(seed, "calm", False, 3, violation="lost a bit" if seed == 7 else "")
        raise KeyboardInterrupt

    monkeypatch.setattr("anabranch.sim.fuzz.runner.run_seeds", two)
    assert main(["simtest", "--seeds", "5:9", "--jobs", "1"]) == INTERRUPTED
    assert "2 of 4 seeds were run, 1 failed; the rest: --seeds 6:9" in capsys.readouterr().err


def test_an_interrupted_simulation_reports_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(trial: tuple[object, str, int]) -> object:
        if trial[1:] == ("gwtf", 0):
            raise KeyboardInterrupt
        return trial[1:]

    monkeypatch.setattr("anabranch.cli.simulate._one", one)
    scenario: Any = None
    done: list[Any] = run_all(scenario, ["auction", "gwtf"], [0, 1], 1)
    assert done == [("auction", 0), ("auction", 1)]
    with pytest.raises(KeyboardInterrupt):
        run_all(scenario, ["gwtf"], [0], 1)


def stopping_after(t: int) -> Callable[[Any, int], Any]:
    """Method `step` of `Alone` in which Ctrl+C is pressed during step t."""
    from anabranch.train.reference.alone import Alone

    take = Alone.step

    def step(self: Alone, at: int) -> Any:
        if at == t:
            signal.raise_signal(signal.SIGINT)
        return take(self, at)

    return step


def test_training_alone_is_taken_up_again_without_a_trace(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in step 2 of four, it ends that step; continued, it has every bit of a run in one go."""
    monkeypatch.setenv("ANABRANCH_CORPORA", "off")
    run_file = str(trained / "run.toml")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", run_file, "--alone", "--steps", "4", "--run-dir", str(whole)]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr("anabranch.train.reference.alone.Alone.step", stopping_after(2))
        assert main(["train", run_file, "--alone", "--steps", "4", "--run-dir", str(parts)]) == 0
    said = capsys.readouterr().out
    assert f"stopped after step 2; continue with: anabranch resume {parts} --alone" in said
    assert main(["resume", str(parts)]) == 2
    assert "was trained alone: add --alone" in capsys.readouterr().err
    with RunDirectory.open(parts).led():
        assert main(["resume", str(parts), "--alone"]) == 2
    assert "another process leads the run" in capsys.readouterr().err
    assert main(["resume", str(parts), "--alone"]) == 0
    assert "step 3/4" in capsys.readouterr().out
    stages = range(load_run_file(whole / "run.toml").pipeline.stages + 1)
    for stage in stages:
        assert RunDirectory.open(parts).read_stage(4, stage) == RunDirectory.open(whole).read_stage(4, stage)
    assert main(["resume", str(parts), "--alone"]) == 2
    assert "all 4 steps are taken" in capsys.readouterr().err
