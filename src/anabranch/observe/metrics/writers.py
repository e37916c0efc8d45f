"""Metrics of a run for TensorBoard, Weights & Biases, MLflow and Trackio, from its event log, live or later.

Not here: metrics for Prometheus (`prometheus.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from anabranch.errors import UserError, missing_package_named
from anabranch.observe import events as log
from anabranch.observe.event_log import EventTail
from anabranch.observe.metrics.prometheus import TOTALS
from anabranch.observe.view.run_view import View

#: Seconds between reads of the log.
POLL_S = 1.0
#: Metric -> unit and meaning; docs/reference/metrics.md lists them.
EXPORTED = {
    "loss/training": "nats per token",
    "loss/held_out": "nats per token, of the weights after that step",
    "loss/bits_per_byte": "held-out loss in bits per byte of text",
    "speed/tokens_per_second": "of that step",
    "speed/iteration_seconds": "since the previous step",
    "optimizer/gradient_norm": "before clipping",
    "optimizer/clip_factor": "1: not clipped",
    "optimizer/learning_rate": "of that step",
    "swarm/peers": "alive, data nodes included",
    "swarm/repaired_microbatches": "so far",
    "swarm/double_microbatches": "so far",
    "swarm/crashed_peers": "so far",
    "swarm/rollbacks": "so far",
}
#: Metrics under "swarm/" that are totals.
_TOTALS = ("repaired_microbatches", "double_microbatches", "crashed_peers", "rollbacks")


def _needs(name: str) -> AbstractContextManager[None]:
    """Context of the import of the package that --NAME needs; raises UserError if it is missing."""
    problem = f"--{name} needs the package {name}: pip install 'anabranch[{name}]'"
    return missing_package_named(UserError(problem))


class Writer(Protocol):
    """Destination of metrics, such as TensorBoard; `close` ends it. All values are finite."""

    def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
        """Write metrics of step t by name (EXPORTED). time: unix seconds. Steps come again after a
        rollback."""

    def close(self) -> None: ...


class TensorBoardWriter:
    """Writer of metrics to TensorBoard files in a folder, at the event's time. Raises UserError if the
    package is missing."""

    def __init__(self, folder: Path) -> None:
        with _needs("tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter
        self._writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, t, walltime=time)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Writer of metrics to a new run `name` in a Weights & Biases project, online or as WANDB_MODE says; its
    files are in `folder`. Raises UserError if the package is missing or the run cannot begin."""

    def __init__(self, project: str, name: str, folder: Path) -> None:
        with _needs("wandb"):
            import wandb
        try:
            self._run: Any = wandb.init(project=project, name=name, dir=str(folder))
        except Exception as error:  # its type depends on the version
            raise UserError(f"--wandb {project}: {error}") from None
        # Steps are an axis of their own: after a rollback they are taken again.
        self._run.define_metric("*", step_metric="step")

    def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": t, "time": time, **metrics})

    def close(self) -> None:
        self._run.finish()


class MlflowWriter:
    """Writer of metrics to a new run `name` in an MLflow experiment, which is created if missing, on the
    server or in the folder that MLFLOW_TRACKING_URI names. Raises UserError if the package is missing or the
    run cannot begin."""

    def __init__(self, experiment: str, name: str) -> None:
        with _needs("mlflow"):
            from mlflow import MlflowClient
        try:
            self._client: Any = MlflowClient()
            known = self._client.get_experiment_by_name(experiment)
            number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
            self._run_id: str = self._client.create_run(number, run_name=name).info.run_id
        except Exception as error:  # its type depends on the version
            raise UserError(f"--mlflow {experiment}: {error}") from None

    def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name, value, timestamp=int(time * 1000), step=t)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackioWriter:
    """Writer of metrics to the run `name`, new or not, in a Trackio project, whose files are on this machine
    (`trackio show`). Raises UserError if the package is missing or the run cannot begin."""

    def __init__(self, project: str, name: str) -> None:
        with _needs("trackio"):
            import trackio
        try:
            self._run: Any = trackio.init(project=project, name=name, resume="allow", embed=False)
        except Exception as error:  # its type depends on the version
            raise UserError(f"--trackio {project}: {error}") from None

    def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=t)

    def close(self) -> None:
        self._run.finish()


class MetricExporter:
    """Converter of a run's events into metrics (docs/reference/metrics.md), which it passes to all of its
    writers; `close` closes these."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = list(writers)
        self._view = View()

    def take(self, event: log.Event | log.Unknown) -> None:
        """Write the metrics of a step or evaluation event; other events only update running totals. Metrics
        without a value are left out."""
        self._view.take(event)
        if isinstance(event, log.Step):
            self._write(event.t, event.time, self._step_metrics(event))
        elif isinstance(event, log.Evaluation):
            held_out = {"loss/held_out": event.loss, "loss/bits_per_byte": event.bits_per_byte}
            self._write(event.t, event.time, held_out)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def _step_metrics(self, step: log.Step) -> dict[str, float | None]:
        totals = self._view.state.get("totals", "")
        return {
            "loss/training": step.loss,
            "speed/tokens_per_second": step.tokens / step.seconds if step.seconds > 0 else None,
            "speed/iteration_seconds": step.seconds or None,
            "optimizer/gradient_norm": step.grad_norm,
            "optimizer/clip_factor": step.clip_factor,
            "optimizer/learning_rate": step.learning_rate,
            "swarm/peers": float(sum(step.alive)),
            **{f"swarm/{name}": float(totals.get(TOTALS[name], 0)) for name in _TOTALS},
        }

    def _write(self, t: int, time: float, metrics: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        for writer in self._writers:
            writer.write(t, time, known)


class ExportThread:
    """Thread that passes the events appended to an event log after byte `position` to `exporter`, which
    writes metrics for other programs (TensorBoard, ...), from its creation until `close`. `close` waits until
    the last events are exported and `exporter` is closed. After an error the thread reports once through
    `say` and stops, without closing `exporter`; the run goes on."""

    def __init__(
        self, events: Path, position: int, exporter: MetricExporter, say: Callable[[str], None]
    ) -> None:
        self._tail, self._exporter, self._say = EventTail(events, position), exporter, say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anabranch metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            last = False
            while not last:
                last = self._ended.wait(POLL_S)
                while events := self._tail.read():
                    for event in events:
                        self._exporter.take(event)
            self._exporter.close()
        except Exception as error:  # any error of a foreign package; it must not end the run
            self._say(f"metrics are not written any more: {type(error).__name__}: {error}")
