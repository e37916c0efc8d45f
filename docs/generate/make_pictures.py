"""Make the README's pictures from a real run: `make pictures RUN=runs/tiny`."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

from rich.console import Console as Terminal
from rich.text import Text

from anabranch.observe.console.event_console import Console
from anabranch.observe.event_log import read_events
from anabranch.observe.events import Event
from anabranch.observe.plots.run_plots import plot_run

IMAGES = Path(__file__).parents[1] / "images"
#: Lines shown of the beginning, around a peer's death, and of the end.
HEAD, AROUND, TAIL = 3, 4, 8


class _ColourStream(io.StringIO):
    """Looks like a terminal, so that the step line is coloured."""

    def isatty(self) -> bool:
        return True


def main(run_dir: Path, extra: list[str]) -> None:
    stream = _ColourStream()
    console = Console(stream=stream)
    for event in read_events(run_dir / "events.jsonl"):
        if isinstance(event, Event):
            console.on_event(event)
    lines = stream.getvalue().splitlines()
    shown = [*lines[:HEAD], "…"]
    death = next((number for number, line in enumerate(lines) if " is gone: " in line), None)
    if death is not None:
        shown += [*lines[death - AROUND : death + AROUND + 1], "…"]
    shown += [*lines[-TAIL:], *extra]
    terminal = Terminal(record=True, width=144, file=io.StringIO())
    terminal.print(Text("$ make train", style="bold"))
    for line in shown:
        terminal.print(Text.from_ansi(line))
    IMAGES.mkdir(exist_ok=True)
    picture = terminal.export_svg(title="anabranch train")
    # No fonts from elsewhere: the viewer's own monospace will do.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (IMAGES / "terminal.svg").write_text(picture.replace("Fira Code, monospace", "monospace"), "utf-8")
    for picture in plot_run(run_dir, run_dir / "plots"):
        if picture.suffix == ".png":
            shutil.copy(picture, IMAGES / picture.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
