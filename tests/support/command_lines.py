"""Command lines of the commands that may take over two seconds, on a finished run."""

from __future__ import annotations

from pathlib import Path

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


def filled_in(command: str, run: Path, folder: Path) -> list[str]:
    """Words of a command of `SHOWN`. run: directory of a finished run of four steps. folder: where a command
    may write."""
    (folder / "text").write_text("the quick brown fox")
    arguments = SHOWN[command][0]
    for name, value in (("RUN", run), ("TEXT", folder / "text"), ("OUT", folder / "out")):
        arguments = arguments.replace(name, str(value))
    return [command, *arguments.split()]
