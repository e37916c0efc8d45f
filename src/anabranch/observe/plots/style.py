"""Common style of all plots: colours, matplotlib settings, and saving with reproducible bytes.

Backgrounds are transparent and ink is of medium brightness, so that a plot suits light and dark pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

INK, GRID = "#7d8590", "#7d859040"
BLUE, ORANGE, GREEN, RED, PURPLE = "#3b8eea", "#e0812b", "#2fa35b", "#e5484d", "#a371f7"
PINK, TEAL, OCHRE = "#d4557f", "#1fa3a3", "#b08c1e"
#: Colours of stages, from stage 0 on; repeated for more.
STAGE_COLOURS = (
    ORANGE, BLUE, GREEN, PURPLE, PINK, TEAL, OCHRE, "#7fb8ff", "#86c440", "#c98b6b", "#e08fd0", "#5f7fa8",
    "#c7b84a",
)  # fmt: skip
STYLE: Any = {  # matplotlib checks the keys as they are set
    "font.size": 10,
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "text.parse_math": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "svg.hashsalt": "anabranch",  # the same data gives the same bytes
    "svg.fonttype": "path",
}


def stage_colour(stage: int) -> str:
    return STAGE_COLOURS[stage % len(STAGE_COLOURS)]


def save(figure: Figure, out: Path, **options: Any) -> None:
    """Write a figure to the file `out`, transparent by default. SVG and PNG have no date and no version, so
    that the same figure gives the same bytes. options: of matplotlib's `savefig`. Raises OSError if it cannot
    be written."""
    metadata = {".svg": {"Date": None}, ".png": {"Software": None}}.get(out.suffix.lower())
    figure.savefig(out, **{"dpi": 160, "transparent": True, "metadata": metadata, **options})
