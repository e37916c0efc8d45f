"""Recording of a run: timed patches of its state, bounded in number and size, for the page and for replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from anabranch.observe.events import Event, Unknown
from anabranch.observe.view.run_view import View
from anabranch.observe.view.time_series import HELD_OUT_COLUMNS, STEP_COLUMNS, BoundedList, ReadPosition
from anabranch.observe.view.tracked_state import Patch, merge

#: Version of the document that docs/reference/event-log.md describes.
DOCUMENT_VERSION = 1
#: Least seconds of run time between two frames.
FRAME_S = 0.25
#: Most frames and bytes of JSON of a recording; beyond, frames are merged.
FRAMES_MAX, BYTES_MAX = 2400, 12_000_000

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Patch] = msgspec.json.Decoder(Patch)


@dataclass
class Frame:
    """Changes of the state between the previous frame and `time` (unix s). number: that of its last change;
    merged frames leave gaps. patch: JSON."""

    number: int
    time: float
    patch: bytes
    """Patch as JSON, which takes a tenth of the memory of objects."""


class Recording:
    """Recording of a run's state over time: the present state (`view`), and frames, the timed changes of it.
    When there are too many or too large ones, neighbours are merged in pairs."""

    def __init__(self) -> None:
        self.view = View()
        self.frames: list[Frame] = []
        self._number = 0
        self._bytes = 0
        self._shown_until = 0.0

    def take(self, event: Event | Unknown) -> None:
        """Apply an event to the state. The frame in the making is ended first if it has lasted FRAME_S by the
        events' time."""
        if event.time - self._shown_until >= FRAME_S and self._shown_until:
            self.cut()
        self.view.take(event)
        self._shown_until = self._shown_until or self.view.time

    def cut(self) -> None:
        """End the frame in the making and append it to the frames; if the state has not changed since the
        last one, none is appended."""
        patch = self.view.state.take_patch()
        self._shown_until = self.view.time
        if not patch:
            return
        self._number += 1
        self.frames.append(Frame(self._number, self.view.time, _ENCODER.encode(patch)))
        self._bytes += len(self.frames[-1].patch)
        if len(self.frames) > FRAMES_MAX or self._bytes > BYTES_MAX:
            self._thin()

    def _thin(self) -> None:
        """Merge the frames in pairs, but for the latest tenth: a long recording is coarse in its past."""
        keep = len(self.frames) - len(self.frames) // 10
        old, new = self.frames[:keep], self.frames[keep:]
        thinned = []
        for at in range(0, len(old), 2):
            first, last = old[at], old[min(at + 1, len(old) - 1)]
            patch = first.patch
            if last is not first:
                patch = _ENCODER.encode(merge(_DECODER.decode(first.patch), _DECODER.decode(last.patch)))
            thinned.append(Frame(last.number, last.time, patch))
        self.frames = thinned + new
        self._bytes = sum(len(frame.patch) for frame in self.frames)

    # --- reading ---------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """The whole recording as a document for replay (docs/reference/event-log.md, "Recording"), without a
        frame in the making."""
        return self.since(Cursor())[0] | {
            "version": DOCUMENT_VERSION,
            "step_columns": STEP_COLUMNS,
            "held_out_columns": HELD_OUT_COLUMNS,
        }

    def since(self, cursor: Cursor) -> tuple[dict[str, Any], Cursor]:
        """(changes after a reader's position `cursor`, the reader's next position). The changes have the
        time, new frames, and those of LISTS that changed. Lists come as [start, items]: the items replace all
        list items from `start` on."""
        new: dict[str, Any] = {"time": self.view.time}
        recent = self.frames[-256:]
        if cursor.frame == 0 or (recent and recent[0].number > cursor.frame + 1):
            recent = self.frames
        new["frames"] = [[round(f.time, 3), msgspec.Raw(f.patch)] for f in recent if f.number > cursor.frame]
        lists: tuple[BoundedList[Any], ...] = (self.view.steps, self.view.evaluations, self.view.story)
        for name, items, position in zip(LISTS, lists, cursor.positions, strict=True):
            added = items.since(position)
            if added is not None:
                new[name] = added
        last = self.frames[-1].number if self.frames else cursor.frame
        return new, Cursor(last, tuple(items.end() for items in lists))


#: Names of the lists in a document, in the order of `Cursor.positions`.
LISTS = ("steps", "held_out", "story")


@dataclass(frozen=True)
class Cursor:
    """Position of a reader in a `Recording`: number of its last frame, and position in each of LISTS."""

    frame: int = 0
    positions: tuple[ReadPosition, ...] = (ReadPosition(), ReadPosition(), ReadPosition())
