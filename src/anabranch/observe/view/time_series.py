"""Bounded time series: when there are too many points, neighbours are merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Point = list[float | None]
_T = TypeVar("_T")

#: Columns of a step's point: unix seconds; step; loss (nats per token); tokens per second; seconds of the
#: iteration; its parts in seconds, means over the relays: compute, transfer, reduce, waiting; peers alive;
#: gradient norm; learning rate.
STEP_COLUMNS = (
    "time", "t", "loss", "tps", "seconds", "compute", "transfer", "reduce", "waiting", "alive", "norm",
    "learning",
)  # fmt: skip
#: Columns of a held-out evaluation: unix seconds, step, nats per token, bits per byte.
HELD_OUT_COLUMNS = ("time", "t", "loss", "bits")


@dataclass(frozen=True)
class ReadPosition:
    """Position of a reader in a `BoundedList`: the reader has its first `length` items as of change number
    `revision`; epoch: times that the list had been thinned then. The default is that of a reader without
    items."""

    epoch: int = -1
    length: int = 0
    revision: int = -1


class BoundedList(Generic[_T]):
    """List of at most `most` items, whose readers ask for what is new to them (`since`). thin(items): returns
    the items to keep once there are more; readers then get the whole list again."""

    def __init__(self, most: int, thin: Callable[[list[_T]], list[_T]]) -> None:
        self.items: list[_T] = []
        self._epoch = self._revision = 0
        self._most = most
        self._thin = thin

    def add(self, item: _T) -> None:
        self._revision += 1
        self.items.append(item)
        if len(self.items) > self._most:
            self.items = self._thin(self.items)
            self._epoch += 1

    def replace_last(self, item: _T) -> None:
        self._revision += 1
        self.items[-1] = item

    def end(self) -> ReadPosition:
        """Position of a reader that has read all items."""
        return ReadPosition(self._epoch, len(self.items), self._revision)

    def since(self, position: ReadPosition) -> tuple[int, list[_T]] | None:
        """News for a reader at `position`, an earlier result of `end`: (start, items that replace the
        reader's items from `start` on); None if there is none."""
        if position.revision == self._revision:
            return None
        start = max(0, position.length - 1) if position.epoch == self._epoch else 0
        return start, self.items[start:]


def halved(points: list[Point]) -> list[Point]:
    """About half as many points, each the merge of two neighbours: time and step of the later one, means of
    the rest; the last point stays as it is."""
    rest, last = points[:-1], points[-1:]
    return [_mean(rest[at : at + 2]) for at in range(0, len(rest), 2)] + last


def _mean(points: list[Point]) -> Point:
    mean = list(points[-1])
    for column in range(2, len(mean)):
        known = [value for point in points if (value := point[column]) is not None]
        mean[column] = sum(known) / len(known) if known else None
    return mean
