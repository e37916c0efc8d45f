"""The step line keeps its width and its colours to terminals."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest

from anabranch.observe.console.step_line import StepLine, wants_colour
from anabranch.observe.events import Step
from anabranch.observe.wording import duration


def line_of(
    line: StepLine, eta_s: float = 200.0, shares: Sequence[Sequence[int]] = (), **changes: Any
) -> str:
    values = dict(
        t=120, loss=4.182, bits_per_byte=2.41, tokens=312044, seconds=10.0, grad_norm=0.92,
        alive=[2, 2, 2, 2], clip_factor=1.0, learning_rate=0.1, manifest_hash="",
    )  # fmt: skip
    return line.format(Step(**(values | changes)), 400, eta_s, shares)


PLAIN = StepLine(colour=False)


def test_one_line_with_everything() -> None:
    assert line_of(PLAIN) == (
        "step  120/400 | loss  4.182 | 2.410 b/B |  31,204 tok/s | grad   0.92 | peers 2|2 2 2 | eta     3:20"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"t": 1, "loss": 11.0},
        {"t": 400, "eta_s": 0.0},
        {"loss": None, "bits_per_byte": None, "grad_norm": None},
        {"tokens": 30, "grad_norm": 123.456},
        {"eta_s": 36000.0},
        {"alive": [1, 0, 2, 1]},
        {"seconds": 0.0},
    ],
)
def test_the_width_is_fixed(changes: dict[str, object]) -> None:
    assert len(line_of(PLAIN, **changes)) == len(line_of(PLAIN))


def test_how_microbatches_were_shared() -> None:
    assert line_of(PLAIN, shares=[[7, 1], [0, 4, 4]]) == line_of(PLAIN) + " | split 1: 7+1  2: 0+4+4"
    assert line_of(PLAIN, shares=[[0, 3, 1] * 4, [8]]).endswith("1: 0-3x12  2: 8")
    # With one peer at every stage nothing is shared.
    assert "split" not in line_of(PLAIN, shares=[[8], [8]])


def test_colour_adds_nothing_but_colour() -> None:
    coloured = line_of(StepLine(colour=True), verdict="skip")
    assert "\033[" in coloured
    assert re.sub(r"\033\[\d+m", "", coloured) == line_of(PLAIN, verdict="skip")


def test_a_stage_on_its_last_replica_turns_red() -> None:
    line = StepLine(colour=True)
    assert "\033[31m" not in line_of(line, alive=[1, 2, 1])
    assert "\033[31m1" in line_of(line, alive=[1, 1, 1])
    assert "\033[31m0" in line_of(line, alive=[1, 1, 0])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it() -> None:
    assert wants_colour(Terminal(), {"TERM": "xterm"})
    assert not wants_colour(Terminal(), {"NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {})


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3661, -5)] == ["0:00", "1:00", "1:01", "1:01:01", "0:00"]
