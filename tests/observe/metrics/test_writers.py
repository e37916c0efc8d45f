"""Figures for TensorBoard and Weights & Biases, and structured logs: what the event log says, no more."""

from __future__ import annotations

import io
import json
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.errors import UserError
from anabranch.observe import events as log
from anabranch.observe.console.event_console import JsonConsole
from anabranch.observe.event_log import EventLog
from anabranch.observe.metrics.writers import (
    EXPORTED,
    ExportThread,
    MetricExporter,
    MlflowWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
)
from support.run_events import begin, step

EVENTS: list[log.Event] = [
    *begin(),
    step(1),
    log.Evaluation(t=1, loss=4.5, bits_per_byte=1.5, tokens=8),
    log.Repair(t=2, index=1, stage=1, dead="b", replacement="a", reason="silent"),
    log.PeerRemoved(subject="b", stage=1, reason="Connection refused"),
    log.PeerRemoved(subject="x", stage=2, reason="left: stopped by its user"),
    step(2, loss=None),
]


class Notebook:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.written: dict[int, dict[str, float]] = {}
        self.closed = False

    def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
        assert time > 0
        self.written.setdefault(t, {}).update(metrics)

    def close(self) -> None:
        self.closed = True


def test_figures_are_those_of_the_log() -> None:
    notebook = Notebook()
    exporter = MetricExporter([notebook])
    for event in EVENTS:
        exporter.take(event)
    first, second = notebook.written[1], notebook.written[2]
    assert first["loss/training"] == pytest.approx(4.9) and first["loss/held_out"] == 4.5
    assert first["speed/tokens_per_second"] == 128 and first["swarm/peers"] == 6
    assert "loss/training" not in second  # it was not finite
    assert second["swarm/repaired_microbatches"] == second["swarm/crashed_peers"] == 1
    assert first.keys() | second.keys() == EXPORTED.keys()


def test_what_is_appended_is_written_until_the_end(tmp_path: Path) -> None:
    path, notebook = tmp_path / "events.jsonl", Notebook()
    thread = ExportThread(path, 0, MetricExporter([notebook]), print)
    with EventLog(path) as file:
        for event in EVENTS:
            file.write(event)
    thread.close()
    assert set(notebook.written) == {1, 2} and notebook.closed


def test_a_writer_that_fails_ends_no_run(tmp_path: Path) -> None:
    class Broken(Notebook):
        def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
            raise RuntimeError("the disk is full")

    said: list[str] = []
    path = tmp_path / "events.jsonl"
    with EventLog(path) as file:
        file.write(step(1))
    ExportThread(path, 0, MetricExporter([Broken()]), said.append).close()
    assert said == ["metrics are not written any more: RuntimeError: the disk is full"]


@pytest.mark.slow
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory.create(tmp_path / "run")
    with EventLog(directory.events) as file:
        for event in EVENTS:
            file.write(event)
    assert main(["report", str(directory.path), "--tensorboard", str(tmp_path / "board")]) == 0
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == EXPORTED.keys()
    (loss,) = board.Scalars("loss/training")
    assert (loss.step, loss.wall_time) == (1, 103.0) and loss.value == pytest.approx(4.9)
    assert [scalar.step for scalar in board.Scalars("swarm/peers")] == [1, 2]


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = WandbWriter("anabranch", "tiny", tmp_path)
    exporter = MetricExporter([writer])
    for event in EVENTS:
        exporter.take(event)
    exporter.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss/training" in written.read_bytes()


def test_mlflow_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    directory = run_with_events(tmp_path)
    for _ in range(2):  # the experiment is made once
        assert main(["report", str(directory.path), "--mlflow", "rivers"]) == 0
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("rivers").experiment_id])
    assert len(runs) == 2 and runs[0].info.status == "FINISHED" and runs[0].info.run_name == "run"
    assert set(runs[0].data.metrics) == EXPORTED.keys()
    [loss] = client.get_metric_history(runs[0].info.run_id, "loss/training")
    assert (loss.step, loss.timestamp) == (1, 103_000) and loss.value == pytest.approx(4.9)


def test_trackio_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    code = "import sys; from anabranch.cli.main import main; sys.exit(main(sys.argv[1:]))"
    directory = run_with_events(tmp_path)
    # In a process of its own: the package reads its folder's name when it is imported.
    command = [sys.executable, "-c", code, "report", str(directory.path), "--trackio", "rivers"]
    subprocess.run(command, check=True, capture_output=True)
    with closing(sqlite3.connect(tmp_path / "trackio" / "rivers.db")) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    figures: dict[str, float] = {}
    for _, text in rows:
        figures |= json.loads(text)
    assert {step for step, _ in rows} == {1, 2} and figures.keys() >= EXPORTED.keys()


def run_with_events(folder: Path) -> RunDirectory:
    directory = RunDirectory.create(folder / "run")
    with EventLog(directory.events) as file:
        for event in EVENTS:
            file.write(event)
    return directory


MAKERS = {
    "tensorboard": TensorBoardWriter,
    "wandb": lambda folder: WandbWriter("p", "n", folder),
    "mlflow": lambda _: MlflowWriter("p", "n"),
    "trackio": lambda _: TrackioWriter("p", "n"),
}


@pytest.mark.parametrize("module", MAKERS)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str
) -> None:
    for name in (module, "torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"--{module} needs .*pip install 'anabranch\[{module}\]'"):
        MAKERS[module](tmp_path)


def test_structured_logs_are_json_objects_a_line() -> None:
    stream = io.StringIO()
    console = JsonConsole(10, stream)
    for event in EVENTS:
        console.on_event(event)
    console.say("two\nlines")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["kind"] for line in lines[:-1]] == [type(event).__struct_config__.tag for event in EVENTS]
    assert lines[-1]["kind"] == "said" and lines[-1]["text"] == "two\nlines" and lines[-1]["time"] > 0
    assert console.last_evaluation is not None and console.steps == 10
