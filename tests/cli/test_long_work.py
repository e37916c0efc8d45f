"""Commands that may take over two seconds show themselves, can be stopped and taken up again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import COMMANDS, INTERRUPTED, main
from anabranch.cli.simulate import run_all
from anabranch.config import load_run_file
from anabranch.observe.console.progress import Progress, Ticker
from anabranch.sim.metrics.trial_result import Outcome
from support.api_runs import small_settings, texts_in

ROOT = Path(__file__).resolve().parents[2]
#: command -> (arguments after its name, a line or bar that it shows). RUN is a finished run of four steps.
SHOWN: dict[str, tuple[str, str]] = {
    "check-model": ("RUN/run.toml", "computing one batch"),
    "data": ("RUN/run.toml", "tokenizing"),
    "evaluate": ("RUN --task TEXT", "scoring"),
    "expel": ("nobody RUN", "reading the log"),
    "export": ("RUN --to hf OUT", "loading the checkpoint"),
    "generate": ("RUN --tokens 4", "generating"),
    "ledger": ("RUN", "reading the log"),
    "plot": ("RUN --out OUT", "drawing"),
    "push": ("RUN file://OUT", "preparing the copy of step 4"),
    "report": ("RUN --html OUT", "reading the events"),
    "resume": ("RUN --local", "reading the log"),
    "route": (f"{ROOT / 'docs' / 'examples' / 'swarm.json'}", "routing"),
    "simtest": ("--seeds 0:1 --jobs 1", "drawing swarms"),
    "ticket": ("list RUN", "reading the log"),
    "top": ("RUN --once", "reading the events"),
    "trace": ("eight-homes", "drawing departures"),
    "train": ("--alone --steps 2 --run-dir OUT RUN/run.toml", "step 2"),
    "verify": ("RUN", "taking every step again"),
}
#: The other commands: how they show themselves, or why they need not.
OTHERS = {
    "init": "writes one file",
    "fleet": "writes one file",
    "service": "writes two files",
    "start": "a line for each step; on a terminal, one that moves between them (test_event_console.py)",
    "join": "a sentence for each event, and the time since then on a terminal (test_start_and_join.py)",
    "audit": "as join",
    "relay": "serves others until Ctrl+C, and tells whom",
    "watch": "serves a page that moves",
    "chaos": "a line for each fault, and the time since then on a terminal",
    "doctor": "a line for each check, and what is being checked (test_doctor.py)",
    "recover": "as expel: the log is read",
    "profile": "tests/observe/console/test_progress.py",
    "simulate": "tests/observe/console/test_progress.py",
    "plan": "tests/sim/planning: the first table within seconds, then better ones",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a real run of four steps."""
    root = tmp_path_factory.mktemp("finished")
    settings = small_settings(texts_in(root), stages=1, relays=1, sequence=16)
    shape = {"dim": 16, "blocks": 1, "heads": 2, "kv_heads": 2, "ffn": 24}
    settings |= {"checkpoint": {"every": 2}, "evaluation": {"every": 0}, "model": shape, "run.steps": 4}
    with anabranch.Run.create(settings, root / "run") as run:
        run.wait()
    return run.path


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


@pytest.mark.slow
@pytest.mark.parametrize("command", SHOWN)
def test_a_command_shows_what_it_does(
    command: str, finished: Path, labels: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, label = SHOWN[command]
    (tmp_path / "text").write_text("the quick brown fox")
    for name, value in (("RUN", finished), ("TEXT", tmp_path / "text"), ("OUT", tmp_path / "out")):
        arguments = arguments.replace(name, str(value))
    status = main([command, *arguments.split()])
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
