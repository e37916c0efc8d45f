"""The pictures: drawn from events alone, the same each time."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from anabranch.errors import UserError
from anabranch.observe.event_log import EventLog, read_events
from anabranch.observe.events import Evaluation, Event, FaultDelivered, Repair, RunStarted, Step
from anabranch.observe.plots.run_plots import (
    History,
    draw_loss,
    draw_throughput,
    plot_run,
    read_history,
    smooth,
)
from anabranch.observe.plots.style import STYLE

T0 = 1_700_000_000.0


def a_run(steps: int = 120, fault_at: float | None = 60.5) -> list[Event]:
    """A run of one second a step; a relay of stage 2 dies at `fault_at` and another takes its place."""
    events: list[Event] = [
        RunStarted(
            run="tiny", run_id="r", model="llama-tiny", parameters=654_000, microbatches=8,
            tokens_per_iteration=4096, steps=steps, numerics="n", initial_weights_hash="w",
            corpus_fingerprint="c", tokenizer_hash="k", stages=3, time=T0,
        ),
        Evaluation(t=0, loss=6.2, bits_per_byte=4.03, tokens=4096, time=T0),
    ]  # fmt: skip
    for t in range(1, steps + 1):
        hit = fault_at is not None and fault_at < t < fault_at + 20
        loss = 2.7 + 3.5 * math.exp(-t / 35) + 0.15 * math.sin(t * 12.9898)
        events.append(
            Step(
                t=t, loss=loss, tokens=4096, grad_norm=1.0, clip_factor=1.0, learning_rate=1e-3,
                seconds=(1.35 if hit else 1.0) + 0.1 * math.sin(t * 7.7), manifest_hash="m",
                alive=[2, 2, 1 if hit else 2, 2], time=T0 + t,
            )
        )  # fmt: skip
        if t % 40 == 0:
            held_out = 2.8 + 3.4 * math.exp(-t / 35)
            events.append(
                Evaluation(t=t, loss=held_out, bits_per_byte=held_out * 0.65, tokens=4096, time=T0 + t)
            )
    if fault_at is not None:
        events.append(FaultDelivered(fault="kill", phase="input_gradient", time=T0 + fault_at))
        events.append(
            Repair(t=61, index=3, stage=2, dead="a", replacement="b", reason="closed", time=T0 + 61)
        )
    return events


def written(events: list[Event], folder: Path) -> Path:
    with EventLog(folder / "events.jsonl") as log:
        for event in events:
            log.write(event)
    return folder


def texts(figure: Figure) -> str:
    found = []
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
        found += [text.get_text() for text in axes.texts]
        found += [child.get_ylabel() for child in axes.child_axes]
        legend = axes.get_legend()
        found += [text.get_text() for text in legend.get_texts()] if legend else []
    return "\n".join(found)


@pytest.mark.costly
@pytest.mark.slow
def test_four_files_that_are_pictures_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    run = written(a_run(), tmp_path / "run")
    paths = plot_run(run, tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "loss.svg", "throughput.png", "throughput.svg"]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        assert len(data) > 5000
    again = plot_run(run, tmp_path / "again")
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in again]


def test_what_the_pictures_say() -> None:
    history = read_history(a_run())
    loss = texts(draw_loss(history))
    for words in ("tiny: llama-tiny, 654k parameters", "loss (nats per token)", "bits per byte", "held out"):
        assert words in loss
    throughput = texts(draw_throughput(history))
    for words in ("tokens per second", "peers alive", "fault (1)", "repair (1)", "stage 3", "data nodes"):
        assert words in throughput


def test_a_fault_lies_between_the_steps_around_it() -> None:
    assert read_history(a_run(fault_at=60.25)).marks["fault"] == [60.25]
    assert read_history(a_run(fault_at=-5.0)).marks["fault"] == [1.0]
    assert read_history(a_run(fault_at=500.0)).marks["fault"] == [120.0]


def test_a_step_taken_again_counts_once() -> None:
    events = a_run(steps=10, fault_at=None)
    history = read_history([*events, *(e for e in events if isinstance(e, Step) and e.t > 7)])
    assert sorted(history.steps) == list(range(1, 11))


@pytest.mark.costly
def test_runs_with_little_in_them_can_be_drawn(tmp_path: Path) -> None:
    first = next(e for e in a_run() if isinstance(e, Step))
    bare = Step(
        t=1, loss=None, tokens=1, grad_norm=None, clip_factor=1.0, learning_rate=0.0, seconds=0.0,
        manifest_hash="", verdict="skip",
    )  # fmt: skip
    for number, events in enumerate(([first], [bare])):
        assert len(plot_run(written(events, tmp_path / str(number)), tmp_path / "out")) == 4


def test_without_steps_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"events\.jsonl cannot be read"):
        plot_run(tmp_path, tmp_path)
    with pytest.raises(UserError, match="holds no step yet"):
        plot_run(written(a_run()[:2], tmp_path), tmp_path)
    assert list(read_events(tmp_path / "events.jsonl"))


def test_bits_need_an_evaluation() -> None:
    assert History().bits_per_nat() is None
    assert read_history(a_run()).bits_per_nat() == pytest.approx(0.65)


def test_smoothing_keeps_constants_and_length() -> None:
    assert smooth([]) == []
    assert smooth([2.0] * 9) == pytest.approx([2.0] * 9)
    assert 0 < smooth([0.0, 1.0])[1] < 1


@pytest.mark.parametrize("steps", [1, 12, 40, 400])
def test_the_smoothed_line_does_not_trail_far_behind_a_falling_loss(steps: int) -> None:
    history = History()
    for t in range(1, steps + 1):
        history.steps[t] = Step(
            t=t, loss=7.0 - 5.0 * t / steps, tokens=1, grad_norm=1.0, clip_factor=1.0, learning_rate=1e-3,
            seconds=1.0, manifest_hash="",
        )  # fmt: skip
    raw, smoothed = ([float(y) for y in line.get_ydata()] for line in draw_loss(history).axes[0].lines[:2])
    assert max(abs(a - b) for a, b in zip(raw, smoothed, strict=True)) <= 5.0 / 12


def test_no_label_lies_on_another_or_leaves_the_picture() -> None:
    """Fourteen stages, many faults and a long name, at once."""
    events: list[Event] = [
        RunStarted(
            peer="d", run="a-run-with-a-long-name", run_id="r", model="llama-350m", parameters=350_000_000,
            microbatches=4, tokens_per_iteration=64, steps=60, numerics="", initial_weights_hash="",
            corpus_fingerprint="", tokenizer_hash="", stages=14,
        )
    ]  # fmt: skip
    for t in range(1, 61):
        events.append(
            Step(
                peer="d", time=float(t), t=t, loss=9.0 / t, tokens=64, grad_norm=1.0, clip_factor=1.0,
                learning_rate=0.1, seconds=0.0 if t == 30 else 0.5, manifest_hash="", alive=[2] * 15,
            )
        )  # fmt: skip
        events.append(FaultDelivered(peer="d", time=float(t), fault="kill", phase="x"))
        events.append(Repair(peer="d", t=t, index=0, stage=1, dead="a", replacement="", reason="x"))
    events.append(Evaluation(peer="d", time=60.0, t=60, loss=0.2, bits_per_byte=0.3, tokens=8))
    history = read_history(events)
    with matplotlib.rc_context(STYLE):
        for figure in (draw_loss(history), draw_throughput(history)):
            FigureCanvasAgg(figure).draw()
            titles = [text for text in figure.findobj(Text) if text.get_text().startswith("a-run")]
            boxes = [each.get_window_extent() for each in (*titles, *figure.findobj(Legend), *figure.axes)]
            assert titles and len(boxes) >= 3
            for number, box in enumerate(boxes):
                assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 + 1, "it leaves the picture"
                assert not any(_overlap(box, other) for other in boxes[number + 1 :])
        rates = draw_throughput(history).axes[0].lines[0].get_ydata()
        assert min(rates) > 0, "a step that nobody timed has no rate"


def _overlap(a: Bbox, b: Bbox) -> bool:
    """True if two boxes share more than a pixel's edge."""
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
