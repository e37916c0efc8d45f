"""Step line: one line of fixed columns per step, coloured on a terminal.

    step 9/40 | loss 4.2 | 2.41 b/B | 31,204 tok/s | grad 0.92 | peers 2|2 2 | eta 3:20 | split 1: 7+1  2: 4+4

`peers` is the number alive at stage 0, then at stages 1..S. A number turns red when a stage that had more
replicas is down to its last, or has none. `split` is the number of the step's microbatches per replica of
stages 1..S; in a round `islands` in its place has the inner steps of the slots.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import IO

from anabranch.observe.events import Step
from anabranch.observe.wording import duration, number

_RESET = "\033[0m"
#: Most replicas of a stage that `split` lists; of more it gives the least and the greatest number.
_LISTED = 8
_COLOURS = {"dim": "\033[2m", "bold": "\033[1m", "red": "\033[31m", "green": "\033[32m", "cyan": "\033[36m"}


def wants_colour(stream: IO[str], environment: Mapping[str, str] | None = None) -> bool:
    """True if colours and lines that are written anew suit a stream: it is a terminal, NO_COLOR is not set
    (no-color.org) and TERM is not "dumb". environment: variables (None: this process's)."""
    environment = os.environ if environment is None else environment
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


class StepLine:
    """Formatter of a run's step lines, with or without colour. It remembers the greatest number of peers of
    each stage, so that losses can be marked."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour
        self._most: list[int] = []

    def format(
        self, step: Step, steps: int, eta_s: float | None = None, shares: Sequence[Sequence[int]] = ()
    ) -> str:
        """Line of a step, without its newline. steps: of the whole run. eta_s: seconds until the run's end,
        None if unknown. shares: for each of stages 1..S the microbatches of its replicas; empty if
        unknown."""
        eta = "-" if eta_s is None else duration(eta_s)
        kind = "round" if step.inner_steps else "step"
        fields = [
            self._paint("cyan", f"{kind} {step.t:>{len(str(steps)) + 1}}/{steps}"),
            self._paint("bold", f"loss {number(step.loss, '6.3f', '     -')}"),
            f"{number(step.bits_per_byte, '5.3f', '    -')} b/B",
            f"{number(step.tokens / step.seconds if step.seconds > 0 else None, '>7,.0f', '      -')} tok/s",
            f"grad {number(step.grad_norm, '6.2f', '     -')}",
            f"peers {self._peers(step.alive)}",
            self._paint("dim", f"eta {eta:>8}"),
        ]
        if step.inner_steps:
            fields.append(_islands(step.inner_steps))
        elif any(len(stage) > 1 for stage in shares):
            fields.append(f"split {_split(shares)}")
        if step.verdict == "skip":
            fields.append(self._paint("red", "skipped"))
        return self._paint("dim", " | ").join(fields)

    def _peers(self, alive: Sequence[int]) -> str:
        self._most += [0] * (len(alive) - len(self._most))
        shown = []
        for stage, count in enumerate(alive):
            self._most[stage] = max(self._most[stage], count)
            lost = count < self._most[stage]
            colour = "red" if count == 0 or (lost and count == 1) else "dim" if lost else "green"
            shown.append(self._paint(colour, str(count)))
        return "|".join([*shown[:1], " ".join(shown[1:])])

    def _paint(self, colour: str, text: str) -> str:
        return f"{_COLOURS[colour]}{text}{_RESET}" if self._colour else text


def _islands(inner_steps: Sequence[int]) -> str:
    """Text for the inner steps of a round's slots: "islands 20+18+25, 1 late" (0 is a late slot); slots
    without a machine (-1) are left out."""
    late = sum(n == 0 for n in inner_steps)
    return f"islands {_numbers([n for n in inner_steps if n > 0])}" + (f", {late} late" if late else "")


def _split(shares: Sequence[Sequence[int]]) -> str:
    """Text for the split of microbatches among replicas, by stage from 1 on: "1: 7+1 2: 0-3x16" means 7 and 1
    at two replicas of stage 1, then 0 to 3 at each of sixteen of stage 2."""
    return "  ".join(f"{stage}: {_numbers(counts)}" for stage, counts in enumerate(shares, start=1))


def _numbers(counts: Sequence[int]) -> str:
    few = len(counts) <= _LISTED
    return "+".join(map(str, counts)) if few else f"{min(counts)}-{max(counts)}x{len(counts)}"

